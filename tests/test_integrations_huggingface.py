"""Selection in the Hugging Face Trainer: as `core` chooses, and what could go wrong on the way."""

import copy
import inspect
import time

import pytest
import torch
from fixtures_integrations import (
    CANDIDATES,
    KEEP,
    LEARNING_RATE,
    ROWS,
    TRAINED,
    Classifier,
    Rows,
    assert_same_weights,
    irreducible,
    recorded,
    through_core,
)
from torch.nn import functional as F

import rholoss as rho
from rholoss.errors import RholossError

transformers = pytest.importorskip("transformers", reason="pip install 'rholoss[hf]'")
datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")

from rholoss.integrations.huggingface import RhoMixin, RhoTrainer  # noqa: E402


def arguments(folder, **options):
    known = inspect.signature(transformers.TrainingArguments).parameters
    quiet = {"disable_tqdm": True, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    plain = {"per_device_train_batch_size": TRAINED, "max_grad_norm": 0.0, "logging_steps": 1}
    options = {**quiet, **plain, "num_train_epochs": 2, **options}
    assert set(options) <= set(known)
    return transformers.TrainingArguments(str(folder), **options)


def trainer_of(folder, model, select, dataset=None, cls=RhoTrainer, more=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return cls(
        model,
        arguments(folder, **options),
        train_dataset=Rows() if dataset is None else dataset,
        optimizers=(optimizer, constant),
        selector=select,
        **(more or {}),
    )


def losses_of(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    ("method", "accumulate"), [("rho", 1), ("rho", 2), ("rho", 3), ("loss", 1)]
)
def test_it_chooses_and_learns_as_core_does(tmp_path, method, accumulate):
    select, seen = recorded(method)
    model = Classifier()
    first = copy.deepcopy(model.net)
    trainer = trainer_of(tmp_path, model, select, gradient_accumulation_steps=accumulate)
    result = trainer.train()
    assert [len(index) for index in seen.candidates] == [CANDIDATES] * 8
    per_epoch = ROWS // CANDIDATES
    if accumulate == 1:
        chosen, losses, net = through_core(first, seen.candidates, method)
    else:
        chosen, losses, net = [], [], first
        for epoch in (seen.candidates[:per_epoch], seen.candidates[per_epoch:]):
            parts = through_core(net, epoch, method, accumulate, start=len(chosen))
            chosen, losses, net = chosen + parts[0], losses + parts[1], parts[2]
    assert seen.chosen == chosen
    assert losses_of(trainer) == pytest.approx(losses, abs=6e-5)  # older versions round to 4 digits
    assert_same_weights(net, model.net)
    assert result.global_step == len(losses)
    assert sorted(torch.cat(seen.candidates[:per_epoch]).tolist()) == list(range(ROWS))


def test_nothing_of_the_trainer_is_left_changed(tmp_path):
    dataset, select = Rows(), recorded()[0]
    trainer = trainer_of(tmp_path, Classifier(), select, dataset)
    collator = trainer.data_collator
    trainer.train()
    assert trainer.train_dataset is dataset
    assert trainer.data_collator is collator
    assert trainer.args.per_device_train_batch_size == TRAINED
    assert "index" not in trainer._signature_columns
    assert not any(name in vars(RhoMixin) for name in ("_inner_training_loop", "training_step"))


def test_throughput_counts_the_rows_that_are_trained_on(tmp_path):
    select, _ = recorded()
    metrics = trainer_of(tmp_path, Classifier(), select).train().metrics
    rate = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert rate == pytest.approx(select.ledger.trained, rel=0.05)
    rate = metrics["train_candidates_per_second"] * metrics["train_runtime"]
    assert rate == pytest.approx(select.ledger.candidates, rel=0.05)
    assert select.ledger.loading_seconds > 0


class Counting(Classifier):
    """A model that gets the number of items, as Hugging Face models do."""

    seen = ()

    def forward(self, x, labels=None, **kwargs):
        self.seen = [*self.seen, kwargs.get("num_items_in_batch")]
        return super().forward(x, labels)


def test_num_items_in_batch_counts_the_selected_rows(tmp_path):
    select, _ = recorded()
    model = Counting()
    trainer_of(tmp_path, model, select, gradient_accumulation_steps=2).train()
    told = [int(n) for n in model.seen if n is not None]
    assert told == [2 * TRAINED] * 8


def test_ids_never_reach_the_model_in_evaluation_and_prediction(tmp_path):
    select, _ = recorded()
    with_column = datasets.Dataset.from_dict(
        {"x": Rows().x.tolist(), "labels": Rows().y.tolist(), "index": list(range(ROWS))}
    )
    model = Classifier()  # its forward takes x and labels, no more
    trainer = trainer_of(
        tmp_path,
        model,
        select,
        with_column,
        more={"eval_dataset": with_column},
        eval_strategy="steps",
        eval_steps=3,
        remove_unused_columns=False,
    )
    trainer.train()
    assert sum("eval_loss" in line for line in trainer.state.log_history) >= 2
    predicted = trainer.predict(rho.WithIndex(Rows())).predictions
    assert predicted.shape[0] == ROWS
    assert select.ledger.steps == 8


def test_evaluation_in_between_changes_no_choice_and_no_clock(tmp_path):
    plain, seen_plain = recorded()
    trainer_of(tmp_path, Classifier(), plain, num_train_epochs=1).train()
    select, seen = recorded()
    options = {"eval_strategy": "steps", "eval_steps": 1, "num_train_epochs": 1}
    slow = Slow()
    more = {"eval_dataset": slow}
    trainer = trainer_of(tmp_path, Classifier(), select, more=more, **options)
    started = time.perf_counter()
    trainer.train()
    assert seen.chosen == seen_plain.chosen
    assert slow.slept > 0.3
    assert select.ledger.seconds < time.perf_counter() - started - slow.slept


class Slow(Rows):
    """Takes its time; only for evaluation."""

    slept = 0.0

    def __getitem__(self, row):
        time.sleep(0.001)
        self.slept += 0.001
        return super().__getitem__(row)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_makes_the_same_choices(tmp_path, accumulate):
    options = {"gradient_accumulation_steps": accumulate, "num_train_epochs": 3}
    whole, seen_whole = recorded(log=tmp_path / "whole.jsonl")
    model = Classifier(dropout=0.3)
    trainer_of(tmp_path / "a", model, whole, **options).train()
    first, seen_first = recorded(log=tmp_path / "log.jsonl")
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    trainer_of(tmp_path / "b", Classifier(dropout=0.3), first, **{**options, **saving}).train()
    resumed, seen = recorded(log=tmp_path / "log.jsonl")
    last = Classifier(dropout=0.3)
    trainer = trainer_of(tmp_path / "b", last, resumed, **options)
    metrics = trainer.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3")).metrics
    done = 3 * accumulate
    assert seen.chosen == seen_whole.chosen[done:]
    assert seen_first.chosen[:done] == seen_whole.chosen[:done]
    assert_same_weights(model, last)
    assert resumed.ledger.steps == whole.ledger.steps == 12
    assert (tmp_path / "log.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    rows = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert rows == pytest.approx((12 - done) * TRAINED, rel=0.05)  # of this call alone


def test_a_checkpoint_without_selection_is_refused(tmp_path):
    select, _ = recorded()
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(tmp_path, Classifier(), select, **saving)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "rholoss_selector.pt").unlink()
    again = trainer_of(tmp_path, Classifier(), recorded()[0])
    with pytest.raises(RholossError, match=r"checkpoint-2 has no rholoss_selector\.pt"):
        again.train(resume_from_checkpoint=str(checkpoint))


class OutOfMemory(Classifier):
    """Raises as a GPU does when more rows than it can hold are trained on."""

    def __init__(self, most, after):
        super().__init__()
        self.most, self.after, self.calls = most, after, 0

    def forward(self, x, labels=None):
        if self.training:
            self.calls += 1
            if len(x) > self.most and self.calls > self.after:
                raise RuntimeError("CUDA out of memory.")
        return super().forward(x, labels)


def test_auto_find_batch_size_starts_over_with_smaller_batches(tmp_path):
    select, seen = recorded(log=tmp_path / "log.jsonl")
    model = OutOfMemory(most=5, after=2)
    trainer = trainer_of(tmp_path, model, select, auto_find_batch_size=True, num_train_epochs=1)
    trainer.train()
    smaller = trainer._train_batch_size
    assert smaller < TRAINED
    tried, last = seen.chosen[:3], seen.chosen[3:]  # two steps and the one that failed
    assert [len(rows) for rows in tried] == [TRAINED] * 3
    assert {len(rows) for rows in last} <= {smaller, *range(1, smaller)}
    assert select.ledger.steps == select.step == len(last)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) == len(last)


def test_string_ids_and_any_collator(tmp_path):
    names = [f"row-{i}" for i in range(ROWS)]
    dataset = datasets.Dataset.from_dict(
        {"x": Rows().x.tolist(), "labels": Rows().y.tolist(), "index": names}
    )
    dataset = dataset.with_format("torch", columns=["x", "labels"], output_all_columns=True)
    il = rho.Irreducible.from_losses(irreducible().tolist(), ids=names)
    chosen = []
    select = rho.Selector(
        "rho", irreducible=il, keep=KEEP, on_scores=[lambda step, stats, c: chosen.append(c.index)]
    )

    def strict(items):  # keeps only what it knows, and fails on anything else
        assert {tuple(sorted(item)) for item in items} == {("labels", "x")}
        return {name: torch.stack([item[name] for item in items]) for name in ("x", "labels")}

    more = {"data_collator": strict, "eval_dataset": dataset}
    trainer = trainer_of(
        tmp_path, Classifier(), select, dataset, more=more, remove_unused_columns=False
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(dataset).predictions.shape[0] == ROWS
    assert trainer.data_collator is strict
    assert len(chosen) == 8
    assert all(name in names for rows in chosen for name in rows)


def test_joined_irreducible_losses_are_used(tmp_path):
    names = [f"row-{i}" for i in range(ROWS)]
    il = rho.Irreducible.from_losses(irreducible().tolist(), ids=names)
    joined = rho.WithIrreducible(rho.WithIndex(Rows(), ids=names), il)
    seen = []
    select = rho.Selector("rho", keep=KEEP, on_scores=[lambda step, stats, c: seen.append(stats)])
    trainer_of(tmp_path, Classifier(), select, joined, num_train_epochs=1).train()
    rows = [int(name.split("-")[1]) for name in seen[0].index]
    assert torch.equal(seen[0].irreducible_loss, irreducible()[rows])


def test_the_last_batch_gives_its_share(tmp_path):
    select, seen = recorded()
    trainer_of(
        tmp_path,
        Classifier(),
        select,
        torch.utils.data.Subset(Rows(), range(40)),
        num_train_epochs=1,
    ).train()
    assert [(len(c), len(b)) for c, b in zip(seen.candidates, seen.chosen, strict=True)] == [
        (24, 6),
        (16, 4),
    ]


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ({"k": 6}, "has `k`=6, but the Trainer trains on `per_device_train_batch_size` rows"),
        (None, "`selector` is a NoneType; pass a `rholoss.Selector`"),
    ],
)
def test_selectors_that_cannot_be_used(tmp_path, selector, message):
    select = selector and rho.Selector("uniform", **selector)
    with pytest.raises(RholossError, match=message):
        trainer_of(tmp_path, Classifier(), select)


def test_importance_sampling_is_refused(tmp_path):
    select, _ = recorded("grad_norm_is")
    with pytest.raises(RholossError, match="the Trainer's loss would not use its weights"):
        trainer_of(tmp_path, Classifier(), select).train()


def test_a_training_set_smaller_than_the_batch_is_refused(tmp_path):
    few = torch.utils.data.Subset(Rows(), range(5))
    with pytest.raises(RholossError, match=r"has 5 rows, fewer than the 6 of"):
        trainer_of(tmp_path, Classifier(), recorded()[0], few).train()


def stream(**columns):
    rows = [
        {"x": x, "labels": y, **{k: v(i) for k, v in columns.items()}}
        for i, (x, y) in enumerate(zip(Rows().x.tolist(), Rows().y.tolist(), strict=True))
    ]
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


def test_streams_need_keys_and_work_with_them(tmp_path):
    steps = {"max_steps": 3}
    nameless = trainer_of(tmp_path, Classifier(), recorded()[0], stream(), **steps)
    with pytest.raises(RholossError, match="put a stable key into each item"):
        nameless.train()
    known = stream()
    known = known.cast(
        datasets.Features(
            x=datasets.List(datasets.Value("float32")), labels=datasets.Value("int64")
        )
    )
    with pytest.raises(RholossError, match="with columns x, labels: a stream"):
        trainer_of(tmp_path, Classifier(), recorded()[0], known, **steps).train()
    select, seen = recorded()
    trainer_of(tmp_path, Classifier(), select, stream(index=int), **steps).train()
    assert [index.tolist() for index in seen.candidates] == [
        list(range(start, start + CANDIDATES)) for start in (0, 24, 48)
    ]


class OwnLoader(transformers.Trainer):
    """A trainer whose loader has a collator of its own, which knows nothing of ids."""

    def get_train_dataloader(self):
        def collate(items):
            return {name: torch.stack([item[name] for item in items]) for name in ("x", "labels")}

        loader = torch.utils.data.DataLoader(
            self.train_dataset, self._train_batch_size, collate_fn=collate
        )
        return self.accelerator.prepare(loader)


class RhoOwnLoader(RhoMixin, OwnLoader):
    pass


def test_a_collator_that_drops_ids_is_found_at_the_first_batch(tmp_path):
    trainer = trainer_of(tmp_path, Classifier(), recorded()[0], cls=RhoOwnLoader)
    with pytest.raises(RholossError, match=r"let it collate with `KeepIds\(collator\)`"):
        trainer.train()


class NoLogits(Classifier):
    def forward(self, x, labels=None):
        return {"loss": super().forward(x, labels).get("loss"), "logits": None}


def test_a_model_without_logits_needs_a_loss_of_its_own(tmp_path):
    with pytest.raises(RholossError, match=r"returned a dict without `logits`\. Pass `loss=`"):
        trainer_of(tmp_path, NoLogits(), recorded()[0]).train()
    reduced = recorded(loss=lambda model, batch: model(**batch)["loss"])[0]
    with pytest.raises(RholossError, match="It was reduced: use reduction='none'"):
        trainer_of(tmp_path, NoLogits(), reduced).train()


def test_a_loss_of_the_trainers_own_is_trained_on(tmp_path):
    select, seen = recorded()
    rows = []

    def doubled(outputs, labels, num_items_in_batch=None):
        rows.append(int(num_items_in_batch))
        return 2 * F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    model = Classifier()
    more = {"compute_loss_func": doubled}
    trainer = trainer_of(tmp_path, model, select, more=more)
    trainer.train()
    assert rows == [TRAINED] * 8
    first_chosen, first_loss, _ = through_core(Classifier().net, seen.candidates[:1])
    assert seen.chosen[:1] == first_chosen
    assert losses_of(trainer)[0] == pytest.approx(2 * first_loss[0], abs=6e-5)
