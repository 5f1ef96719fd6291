"""Selection in the Hugging Face `Trainer`: a mixin over its public seams, none of its loop.

    from rholoss.integrations.huggingface import RhoTrainer

    select = Selector("rho", irreducible=il, keep=0.1)
    trainer = RhoTrainer(model, args, train_dataset=train, selector=select)

`per_device_train_batch_size` stays what is trained on (n_b); the loader brings n_b / keep candidates.
A trainer of another kind is made the same way: `class RhoSFTTrainer(RhoMixin, SFTTrainer)`.

The mixin itself imports nothing of the framework; `RhoTrainer` is made when it is asked for.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from rholoss import data
from rholoss.errors import RholossError
from rholoss.il.files import replacing
from rholoss.indexed import Indexed, WithIndex
from rholoss.integrations.padding import trimmed
from rholoss.selector import Selector
from rholoss.streams import Stream

STATE_NAME = "rholoss_selector.pt"  # beside optimizer.pt in each checkpoint
CARRIED = (data.INDEX, data.IRREDUCIBLE)  # columns that are ours and never reach the model


class RhoMixin:
    """Selects the training batches of a `transformers.Trainer` from larger candidate batches.

    Args:
        args, kwargs: the arguments of the `Trainer`.
        selector: a `Selector` with `keep`. Ids are the rows of `train_dataset`, or its column "index" if
            it has one.
        trim: cut columns that are padding in every selected row. Off under `torch_compile`, for which
            shapes should not change.
    """

    args: Any  # these are the Trainer's
    accelerator: Any
    model: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    _train_batch_size: int
    _signature_columns: list[str] | None

    def __init__(self, *args: Any, selector: Selector, trim: bool = True, **kwargs: Any) -> None:
        if not isinstance(selector, Selector):
            raise RholossError(
                f"`selector` is a {type(selector).__name__}; pass a `rholoss.Selector`, for instance "
                'Selector("rho", irreducible=il, keep=0.1).'
            )
        if selector.k is not None:
            raise RholossError(
                f"The selector has `k`={selector.k}, but the Trainer trains on "
                "`per_device_train_batch_size` rows; pass `keep`, their share of the candidates."
            )
        super().__init__(*args, **kwargs)
        self.selector = selector
        self._trim = trim and not getattr(self.args, "torch_compile", False)
        # The selector's state as given; only if needed, as it is large with a live irreducible-loss model.
        self._made: dict[str, Any] | None = None
        if getattr(self, "model_init", None):
            self._made = copy.deepcopy(selector.state_dict())
        self._start: dict[str, Any] | None = None  # of the selector, as `train` was called
        self._tried: int | None = None  # batch size, since then
        _check_supported(self)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.train`; the ledger and the log of the selector are complete when it returns.

        With `model_init` each call begins with a new model (those of a search do), and so with the selector
        as it was given.
        """
        if self._made is not None and not resume_from_checkpoint and self.selector.step:
            self.selector.load_state_dict(copy.deepcopy(self._made))
        self._start, self._tried = copy.deepcopy(self.selector.state_dict()), None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._start = None
            self.selector.flush()

    def get_train_dataloader(self) -> Any:
        """The training loader, with candidate batches whose rows carry their ids."""
        tried, self._tried = self._tried, self._train_batch_size
        if self._start is not None and tried not in (None, self._train_batch_size):
            # `auto_find_batch_size` starts over with smaller batches.
            self.selector.load_state_dict(copy.deepcopy(self._start))
        with self._candidates(), _dealt_once(self.accelerator, self.train_dataset):
            loader = super().get_train_dataloader()  # type: ignore[misc]
        self.selector.watch(loader)  # the ledger learns what irreducible losses in it cost
        return loader

    @contextlib.contextmanager
    def _candidates(self) -> Iterator[None]:
        """Exchange what the Trainer builds its loader from, until the loader is built."""
        trained, keep = self._train_batch_size, self.selector.keep
        collator, dataset = self.data_collator, self.train_dataset
        indexed = with_ids(dataset)
        candidates = _num_candidates(trained, keep)
        _check_size(dataset, trained, candidates if self.args.dataloader_drop_last else 0)
        self._set_signature_columns_if_needed()  # type: ignore[attr-defined]
        columns, arguments = self._signature_columns, self.args
        per_device = arguments.per_device_train_batch_size
        self._train_batch_size = candidates
        # A sampler that groups by length reads it here.
        arguments.per_device_train_batch_size = _num_candidates(per_device, keep)
        self._signature_columns = None if columns is None else [*columns, *CARRIED]
        sent = _is_sent(self.accelerator, indexed)
        self.data_collator = KeepIds(collator, _ids_in_front(indexed), sent)
        self.train_dataset = indexed
        try:
            yield
        finally:
            self._train_batch_size = trained
            arguments.per_device_train_batch_size = per_device
            self._signature_columns, self.data_collator = columns, collator
            self.train_dataset = dataset

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> Any:
        """Select while the batches are drawn, so that whatever is counted counts the selected rows."""
        watched = iter(self.selector.watch(epoch_iterator))
        return super().get_batch_samples(map(self._select, watched), *args)  # type: ignore[misc]

    def _select(self, candidates: Any) -> Any:
        if not (isinstance(candidates, Mapping) and data.INDEX in candidates):
            raise RholossError(_NO_IDS)
        # An evaluation leaves eval mode, and the Trainer goes back only after this. `train` of the model
        # itself, since a model may keep some layers frozen in it, which the scorer must see.
        self.model.train()
        # The backbone of a language model is called by itself, outside the Trainer's own autocast.
        with self.accelerator.autocast():
            batch = self.selector(self.model, candidates)
        if self.selector.selection is not None and self.selector.selection.weight is not None:
            raise RholossError(
                f"The method {self.selector.method.name!r} samples by importance, and the Trainer's loss "
                "would not use its weights. Use a method without them, or a loop of your own, where "
                "`select.reduce(loss_B)` applies them (examples/accelerate_loop.py)."
            )
        batch = data.without_index(batch)
        multiple = getattr(self.data_collator, "pad_to_multiple_of", None) or 1
        return trimmed(batch, multiple) if self._trim else batch

    def get_eval_dataloader(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The evaluation loader. As in training, a column of ids is kept from the collator."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        with self._ids_beside(dataset):
            return super().get_eval_dataloader(eval_dataset, *args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """The test loader; a column of ids is kept from the collator."""
        with self._ids_beside(test_dataset):
            return super().get_test_dataloader(test_dataset, *args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _ids_beside(self, dataset: Any) -> Iterator[None]:
        collator = self.data_collator
        sent = _is_sent(self.accelerator, dataset)
        self.data_collator = KeepIds(collator, _ids_in_front(dataset), sent)
        try:
            yield
        finally:
            self.data_collator = collator

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.prediction_step`, without the ids in the inputs."""
        inputs = data.without_index(inputs)
        return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluate`; its time is not part of the ledger's."""
        with self.selector.ledger.paused():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """`Trainer.log`, with throughput in rows that were trained on; candidates have their own entry."""
        seconds = logs.get("train_runtime")
        if seconds and "train_samples_per_second" in logs and self._start is not None:
            ledger, before = self.selector.ledger, self._start["ledger"]
            for name, count in [("samples", "trained"), ("candidates", "candidates")]:
                rows = (getattr(ledger, count) - before[count]) * self.args.world_size
                logs[f"train_{name}_per_second"] = round(rows / seconds, 3)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        # A rank that is killed now comes back to this step: its log has to be complete so far.
        self.selector.flush()
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            path = Path(output_dir, STATE_NAME)
            with replacing(path) as temporary:
                torch.save(self.selector.state_dict(), temporary)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        path = Path(checkpoint, STATE_NAME)
        if not path.exists():
            raise RholossError(
                f"The checkpoint {checkpoint} has no {STATE_NAME}, so it was saved by a trainer without "
                "selection, or with save_only_model=True. Start from its weights, without "
                "`resume_from_checkpoint`."
            )
        self.selector.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        if self._start is not None:  # throughput counts what this call of `train` did
            self._start["ledger"] = self.selector.ledger.state_dict()


def _num_candidates(trained: int, keep: float) -> int:
    return max(trained, int(trained / keep + 0.5))


_NO_IDS = (
    "The training batch has no 'index', so what was measured for a row cannot be found. If the data set is "
    "a stream, put a stable key into each item: dataset.map(lambda row: {'index': row['url']}). If "
    "`get_train_dataloader` was overridden, let it collate with `KeepIds(collator)`."
)

_NOT_SENT = (
    "The items of the stream have strings as ids ({!r}), and one process reads it and sends the others "
    "their parts, which works for numbers alone. Let each process read for itself: TrainingArguments("
    "accelerator_config={{'dispatch_batches': False}}), with an order that is the same on all (a seed for "
    "`shuffle`). Or use whole numbers as ids, or a `rholoss.Stream`."
)


def _check_supported(trainer: Any) -> None:
    """Refuse what would choose wrongly, with a reason."""
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for name, what in [("cp_enabled", "context"), ("sp_enabled", "sequence")]:
        if parallel is not None and getattr(parallel, name, False):
            raise RholossError(
                f"The Trainer uses {what} parallelism, which cuts each row over the devices, so no device "
                "could score a whole row. Use data parallelism, or a plain Trainer."
            )
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        if getattr(trainer, name, False):
            raise RholossError(
                f"The Trainer has {name}=True: scoring with sharded weights through the Trainer has not "
                "been tried. Use data parallelism, or a loop of your own."
            )
    if getattr(trainer.args, "packing", False) or getattr(trainer.args, "padding_free", False):
        raise RholossError(
            "`packing` and `padding_free` put several examples into one row, so rows cannot be chosen any "
            "more. Switch them off, or choose examples before they are packed."
        )


def _check_size(dataset: Any, trained: int, whole: int) -> None:
    """At least one batch to train on; `whole` candidates where a smaller batch is left out."""
    rows = len(dataset) if hasattr(dataset, "__len__") else None
    if rows is not None and rows < trained:
        raise RholossError(
            f"The training set has {rows} rows, fewer than the {trained} of "
            "`per_device_train_batch_size`, so there is nothing to choose. Make that smaller; it is the "
            "number of rows trained on, of per_device_train_batch_size / keep candidates."
        )
    if rows is not None and rows < whole:
        raise RholossError(
            f"The training set has {rows} rows, fewer than a batch of {whole} candidates "
            "(per_device_train_batch_size / keep), and dataloader_drop_last=True leaves smaller batches "
            "out, so there is no step. Make the batch smaller, or let the last one stay."
        )


@contextlib.contextmanager
def _dealt_once(accelerator: Any, dataset: Any) -> Iterator[None]:
    """Let accelerate only move the batches of a `Stream`, which shares shards out among ranks by itself."""
    if accelerator.num_processes == 1 or not isinstance(dataset, Stream):
        yield
        return
    prepare = importlib.import_module("accelerate.data_loader").prepare_data_loader

    def prepared(loader: Any, *_: Any, **__: Any) -> Any:
        own = {"put_on_device": accelerator.device_placement, "dispatch_batches": False}
        return prepare(loader, accelerator.device, num_processes=1, process_index=0, **own)

    accelerator.prepare_data_loader = prepared
    try:
        yield
    finally:
        del accelerator.prepare_data_loader


def _is_sent(accelerator: Any, dataset: Any) -> bool:
    """Whether accelerate lets one process read for all and send the others their parts, as for streams."""
    streamed = isinstance(dataset, IterableDataset) and not isinstance(dataset, Stream)
    return accelerator.num_processes > 1 and streamed and accelerator.dispatch_batches is not False


def with_ids(dataset: Any) -> Any:
    """The data set if its items carry an "index" already, else with row numbers."""
    if dataset is None or isinstance(dataset, Indexed):
        return dataset
    names = getattr(dataset, "column_names", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        if names is not None and data.INDEX not in names:
            raise RholossError(
                f"`train_dataset` is a {type(dataset).__name__} with columns {', '.join(names)}: a stream, "
                "which has no row numbers. Put a stable key into each item, dataset.map(lambda row: "
                "{'index': row['url']}), and fit the irreducible losses by the same keys."
            )
        return dataset
    if names is None and len(dataset):
        first = dataset[0]
        names = list(first) if isinstance(first, Mapping) else []
    return dataset if data.INDEX in (names or ()) else WithIndex(dataset)


def _ids_in_front(dataset: Any) -> str | None:
    """Whether items have their id in front of a 'tuple' or of another 'item'; None if they are mappings."""
    if not isinstance(dataset, Indexed) or not len(dataset):
        return None
    own = dataset.dataset[0]
    if isinstance(own, Mapping):
        return None
    return "tuple" if isinstance(own, tuple) and not hasattr(own, "_fields") else "item"


class KeepIds:
    """A collator that hands the inner one its own columns only, and adds the ids to what that makes.

    Args:
        behind: None where items are mappings with an "index". Where they begin with their id, as those
            of `WithIndex` do: whether the data set's own items are a 'tuple' or any other 'item'.
        sent: whether batches are sent to other processes, which takes tensors alone.
    """

    def __init__(
        self, collator: Callable[[list[Any]], Any], behind: str | None = None, sent: bool = False
    ) -> None:
        self.collator, self.behind, self.sent = collator, behind, sent

    def __getattr__(self, name: str) -> Any:
        # `pad_to_multiple_of`, `tokenizer` and the like of the collator inside.
        if name.startswith("__") or name in ("collator", "behind", "sent"):
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __call__(self, items: list[Any]) -> Any:
        """Collate; the ids come back as a tensor, or as a list if they are strings."""
        if self.behind is not None:
            carried = [data.attach({}, item[0]) for item in items]
            inner = [item[1:] if self.behind == "tuple" else item[1] for item in items]
        elif items and isinstance(items[0], Mapping) and data.INDEX in items[0]:
            carried = items
            inner = [{k: v for k, v in item.items() if k not in CARRIED} for item in items]
        else:
            return self.collator(items)
        columns = {name: [item[name] for item in carried] for name in CARRIED if name in carried[0]}
        batch = self.collator(inner)
        if not isinstance(batch, MutableMapping):
            raise RholossError(
                f"The collator returned a {type(batch).__name__}, in which ids have no place; let it "
                "return a dict of the model's arguments, as the Trainer's own collators do."
            )
        for name, values in columns.items():
            whole = not isinstance(values[0], str)
            if self.sent and not whole:
                raise RholossError(_NOT_SENT.format(values[0]))
            batch[name] = torch.as_tensor(values) if whole else values
        return batch


def __getattr__(name: str) -> Any:
    if name != "RhoTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        trainer = importlib.import_module("transformers").Trainer
    except ImportError as error:
        raise RholossError(
            "`RhoTrainer` needs Hugging Face transformers and accelerate: pip install 'rholoss[hf]'."
        ) from error
    about = {
        "__doc__": "`transformers.Trainer` with selection; see `RhoMixin`.",
        "__module__": __name__,
    }
    globals()[name] = type(name, (RhoMixin, trainer), about)
    return globals()[name]
