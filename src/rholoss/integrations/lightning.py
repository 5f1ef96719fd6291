"""Selection in Lightning: a callback that chooses rows after the batch was moved to the device.

    from rholoss.integrations.lightning import RhoCallback

    trainer = Trainer(callbacks=[RhoCallback(Selector("rho", irreducible=il, keep=0.1))])

Optimization stays automatic: accumulation, clipping and precision are the Trainer's. With Fabric, call
`select` yourself (docs/lightning.md).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from rholoss import data
from rholoss.errors import RholossError
from rholoss.selector import Selector
from rholoss.steplog import StepLog
from rholoss.watched import Watched

# After the transfer to the device, and before the precision block of `training_step`.
HOOK = "on_after_batch_transfer"
Hook = Callable[..., Any]
PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # the same framework under two names


class _Select:
    """Selects the training batches of a Lightning `Trainer`: pass it in `callbacks=[...]`.

    Args:
        selector: a `Selector`. Ids come from the train loader, whose data set is a `rholoss.WithIndex`.
        model: a function from the LightningModule to the module to score; needed if `forward` of the
            LightningModule does not return the logits. By default the LightningModule itself.
    """

    def __init__(
        self, selector: Selector, *, model: Callable[[Any], nn.Module] = lambda module: module
    ) -> None:
        if not isinstance(selector, Selector):
            raise RholossError(
                f"`selector` is a {type(selector).__name__}; pass a `rholoss.Selector`, for instance "
                'Selector("rho", irreducible=il, keep=0.1).'
            )
        self.selector, self.model = selector, model
        self._hooks = contextlib.ExitStack()  # closing it removes them
        self._pause = contextlib.ExitStack()
        self._selected = False  # since the last training step

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Call the selection after the owner's own hook, for the time of the fit."""
        if stage != "fit":
            return
        _check_supported(trainer)
        _own_log(self.selector, trainer.global_rank)

        def select(own: Hook, batch: Any, dataloader_idx: int) -> Any:
            batch = own(batch, dataloader_idx)
            return self._select(trainer, pl_module, batch) if trainer.training else batch

        self._hooks.enter_context(_around(_owner(trainer, pl_module), HOOK, select))
        self._hooks.enter_context(_around(trainer.precision_plugin, "convert_input", _keep_exact))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Read from the loader how many rows its last batch has, and what its irreducible losses cost."""
        loader = trainer.train_dataloader
        if isinstance(loader, Watched) and loader.undealt:
            raise RholossError(
                f"The train loader is a `select.watch(loader)`, which Lightning does not deal to its "
                f"{trainer.world_size} ranks: each would run over all rows. Pass the loader itself, without "
                "`select.watch`; or make it by DataLoader(dataset, batch_sampler=select.batch_sampler("
                "dataset, batch_size)), which deals by itself and can be watched."
            )
        self.selector.watch(loader)

    def _select(self, trainer: Any, pl_module: Any, batch: Any) -> Any:
        model = self.model(pl_module)
        if _is_lightnings(type(model), "forward"):
            raise RholossError(
                f"{type(model).__name__} has no `forward`, so it cannot be scored. Name the module that "
                "returns the logits: RhoCallback(selector, model=lambda module: module.net)."
            )
        if getattr(trainer.fit_loop, "_skip_backward", False):
            self._selected = True
            return self._spread(batch)
        with trainer.precision_plugin.forward_context():
            chosen = self.selector(model, batch)
        self._selected = True
        return self._known(chosen)

    def _spread(self, batch: Any) -> Any:
        """As many rows as a step has, evenly spaced and not selected.

        For the pass in which `StochasticWeightAveraging` updates BatchNorm's statistics: these must be
        those of the data, not of the rows that are worth a step.
        """
        select = self.selector
        rows = len(select.find_index(batch))
        k = min(rows, round(select.ledger.trained / select.ledger.steps))
        position = torch.arange(k, device="cpu") * rows // k
        return self._known(data.take(batch, position, rows, select.shared))

    def _known(self, batch: Any) -> Any:
        """The batch as `training_step` expects it: without ids."""
        found = self.selector.find_index is data.find_index
        return data.without_index(batch) if found else batch

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        """Raise if nothing was selected for a step: training on all rows would look like a result."""
        if not self._selected:
            raise RholossError(
                f"A training batch did not pass through `{HOOK}`, so nothing was selected from it. This "
                "happens where `training_step` takes a `dataloader_iter`; let it take the batch."
            )
        self._selected = False

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the ledger's clock while the model is validated."""
        self._pause.enter_context(self.selector.ledger.paused())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock again."""
        self._pause.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the hook away; the ledger and the log are complete then."""
        if stage == "fit":
            self._clear()
            self.selector.flush()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """A fit that failed leaves no hook behind: Lightning does not tear down then."""
        self._clear()

    def _clear(self) -> None:
        self._pause.close()
        self._hooks.close()

    def state_dict(self) -> dict[str, Any]:
        """Into Lightning's checkpoint."""
        return self.selector.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From Lightning's checkpoint."""
        self.selector.load_state_dict(state_dict)


@contextlib.contextmanager
def _around(owner: Any, name: str, function: Hook) -> Iterator[None]:
    """Replace a method of the owner for a while by `function(own, ...)`, where `own` is the method."""
    own, before = getattr(owner, name), vars(owner).get(name)

    # `wraps` also tells Lightning that nobody has overridden the hook; it would warn otherwise.
    @functools.wraps(own)
    def hook(*args: Any) -> Any:
        return function(own, *args)

    vars(owner)[name] = hook
    try:
        yield
    finally:
        vars(owner).pop(name)
        if before is not None:
            vars(owner)[name] = before


def _keep_exact(own: Hook, batch: Any) -> Any:
    """Irreducible losses that came with the batch are not rounded with it ('bf16-true' and the like)."""
    exact, batch = data.carried_irreducible(batch), own(batch)
    if exact is None:
        return batch
    if isinstance(batch, MutableMapping):
        batch[data.IRREDUCIBLE] = exact
        return batch
    return type(batch)([batch[0]._replace(irreducible_loss=exact), *batch[1:]])


def _owner(trainer: Any, pl_module: Any) -> Any:
    """Whose hook Lightning calls: the data module's if it has one of its own, else the module's."""
    module = trainer.datamodule
    if module is None:
        return pl_module
    own = HOOK in vars(module) or not _is_lightnings(type(module), HOOK)
    return module if own else pl_module


def _is_lightnings(cls: type, name: str) -> bool:
    """Whether the method is the framework's own, overridden by nobody."""
    owner = next(parent for parent in cls.__mro__ if name in vars(parent))
    return owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _check_supported(trainer: Any) -> None:
    name = type(trainer.strategy).__name__
    if name in ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"):
        raise RholossError(
            f"The Trainer uses {name}: scoring with sharded weights through Lightning has not been tried. "
            "Use one device or DDP, or call `select` yourself in a Fabric loop."
        )


def _own_log(selector: Selector, rank: int) -> None:
    """Give each rank a log of its own: before Lightning starts the others, a selector has no rank yet."""
    path = selector.log.path
    if path is not None and rank and not path.stem.endswith(f".rank{rank}"):
        selector.log = StepLog(selector.ranks.own_path(path))


def _callback_of(package: str) -> Any:
    try:
        return importlib.import_module(package).Callback
    except ImportError:
        return None


def __getattr__(name: str) -> Any:
    if name != "RhoCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The one that the user's code has imported, before one that is merely installed.
    names = sorted(PACKAGES, key=lambda package: package not in sys.modules)
    callback = next(filter(None, map(_callback_of, names)), None)
    if callback is None:
        raise RholossError("`RhoCallback` needs Lightning: pip install 'rholoss[lightning]'.")
    about = {"__doc__": _Select.__doc__, "__module__": __name__}
    globals()[name] = type(name, (_Select, callback), about)
    return globals()[name]
