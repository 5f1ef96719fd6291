"""Hugging Face: the pieces by themselves, and what is refused before a run."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fixtures_integrations import (
    CANDIDATES,
    ROWS,
    TRAINED,
    WIDTH,
    Classifier,
    Rows,
    points,
    recorded,
)
from torch.utils.data import IterableDataset, TensorDataset

import rholoss as rho
from rholoss.errors import RholossError

transformers = pytest.importorskip("transformers", reason="pip install 'rholoss[hf]'")


datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")

from rholoss.integrations.huggingface import KeepIds, RhoMixin, RhoTrainer  # noqa: E402
from rholoss.integrations.padding import trimmed  # noqa: E402


def trainer_of(folder, select, dataset, **more):
    options = {"max_steps": more.pop("max_steps", 3), "report_to": [], "disable_tqdm": True}
    options |= {"use_cpu": True, "save_strategy": "no", "per_device_train_batch_size": TRAINED}
    drop = {"dataloader_drop_last": more.pop("drop_last", False)}
    arguments = transformers.TrainingArguments(str(folder), **options, **drop)
    model = None if "model_init" in more else more.pop("model", None) or Classifier()
    return RhoTrainer(model, arguments, train_dataset=dataset, selector=select, **more)


def test_padding_that_no_selected_row_needs_is_cut():
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0]])
    tokens = torch.arange(16).view(2, 8)
    classes = torch.tensor([1, 2])
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": classes}
    cut = trimmed(batch)
    assert cut["input_ids"].tolist() == [[1, 2, 3], [9, 10, 11]]
    assert cut["input_ids"].is_contiguous()  # models flatten labels of tokens with `view`
    assert cut["labels"] is classes
    assert trimmed(batch, multiple=4)["input_ids"].tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    counted = torch.full((2, 8), -100)
    counted[0, 5] = 7
    assert trimmed({**batch, "labels": counted})["labels"].shape == (2, 5)  # its column stays
    answers = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 3])}
    assert trimmed({**batch, **answers})["input_ids"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    many = torch.ones(2, 8, dtype=torch.long)  # multi-label targets that happen to be as wide
    assert trimmed({**batch, "labels": many})["labels"].shape == (2, 8)
    assert trimmed({"x": tokens}) == {"x": tokens}


def test_labels_and_ids_are_read_without_the_transform():
    (x, y), at_once = points(), []

    def transform(batch):
        at_once.append(len(batch["place"]))
        return {"x": x[batch["place"]], "labels": batch["label"]}

    columns = {
        "place": range(ROWS),
        "label": y.tolist(),
        "index": [f"r{row}" for row in range(ROWS)],
    }
    plain = datasets.Dataset.from_dict(columns)
    train = plain.with_transform(transform)
    il = rho.score_irreducible(Classifier(), train, batch_size=16, progress=False)
    assert max(at_once) <= 16  # not all images of a data set
    assert il.lookup(["r0", "r1"]).isfinite().all()
    il.compare(plain)


@pytest.mark.parametrize("shape", [(2, 8), (2, 8, 4), (2, 1, 8, 8)])
def test_padding_stays_where_something_else_may_belong_to_its_columns(shape):
    """Weights of tokens, boxes of LayoutLM, masks of pairs."""
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]])
    batch = {"input_ids": mask, "attention_mask": mask, "more": torch.zeros(shape)}
    assert trimmed(batch)["input_ids"].shape == (2, 8)
    assert trimmed({**batch, "more": torch.zeros(2, 3)})["input_ids"].shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [("cp_enabled", "context parallelism"), ("sp_enabled", "sequence parallelism")],
)
def test_parallelism_that_cuts_rows_is_refused(name, message):
    class Parent:
        def __init__(self):
            self.accelerator = SimpleNamespace(parallelism_config=SimpleNamespace(**{name: True}))
            self.args = SimpleNamespace()

    class Trainer(RhoMixin, Parent):
        pass

    with pytest.raises(RholossError, match=message):
        Trainer(selector=recorded()[0])


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        ("trainer", "is_fsdp_enabled", "scoring with sharded weights"),
        ("trainer", "is_deepspeed_enabled", "scoring with sharded weights"),
        ("args", "packing", "put several examples into one row"),
        ("args", "padding_free", "put several examples into one row"),
    ],
)
def test_what_was_not_tried_is_refused(owner, name, message):
    class Parent:
        def __init__(self):
            self.accelerator, self.args = SimpleNamespace(), SimpleNamespace()
            setattr(self if owner == "trainer" else self.args, name, True)

    class Trainer(RhoMixin, Parent):
        pass

    with pytest.raises(RholossError, match=message):
        Trainer(selector=recorded()[0])


def test_ids_are_put_beside_what_the_collator_made():
    made = KeepIds(lambda items: {"n": torch.tensor([len(items)])})([{"index": 3}, {"index": 4}])
    assert made["index"].tolist() == [3, 4]
    plain = KeepIds(lambda items: len(items))
    assert plain([{"x": 1}]) == 1


def stacked(items):
    """A collator of tuples, as users of torch data sets have it."""
    x, y = zip(*items, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(y)}


@pytest.mark.parametrize("wrap", [lambda pairs: pairs, rho.WithIndex], ids=["plain", "with ids"])
def test_collators_of_tuples_see_their_own_tuples(tmp_path, wrap):
    pairs = TensorDataset(*points())
    chosen = []
    for dataset, collator in [(Rows(), None), (wrap(pairs), stacked)]:
        select, seen = recorded()
        more = {"data_collator": collator, "eval_dataset": {"test": dataset}}
        trainer = trainer_of(tmp_path, select, dataset, **more)
        trainer.train()
        assert trainer.evaluate()["eval_test_loss"] > 0
        assert trainer.predict(dataset).predictions.shape[0] == ROWS
        chosen.append(seen.chosen)
    assert len(chosen[0]) == 3
    assert chosen[0] == chosen[1]


def test_ids_that_cannot_be_sent_to_other_processes_are_told_of():
    items = [{"x": torch.zeros(1), "index": "http://a"}]
    numbered = [{"x": torch.zeros(1), "index": 3}]
    collate = transformers.default_data_collator
    assert KeepIds(collate)(items)["index"] == ["http://a"]
    assert KeepIds(collate, sent=True)(numbered)["index"].tolist() == [3]
    with pytest.raises(
        RholossError, match=r"'http://a'.*accelerator_config=\{'dispatch_batches': Fa"
    ):
        KeepIds(collate, sent=True)(items)


class FrozenNorm(Classifier):
    """Fine-tuning with frozen BatchNorm, the usual way."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x, labels=None):
        return super().forward(self.norm(x), labels)


def test_layers_that_the_model_keeps_frozen_stay_so_after_an_evaluation(tmp_path):
    model = FrozenNorm().train()
    trainer = trainer_of(tmp_path, recorded()[0], Rows(), model=model, eval_dataset=Rows())
    trainer.evaluate()  # leaves the model in eval mode
    trainer.train()
    assert int(model.norm.num_batches_tracked) == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(WIDTH))


def test_shards_of_a_stream_come_in_another_order_in_each_epoch(tmp_path):
    def read(shard):
        return ({**Rows()[shard * 8 + row], "name": shard * 8 + row} for row in range(8))

    select, seen = recorded()
    stream = rho.Stream(range(ROWS // 8), read, key="name", shuffle=True)
    trainer_of(tmp_path, select, stream, max_steps=8).train()
    orders = [torch.cat(seen.candidates[at : at + 4]).tolist() for at in (0, 4)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(ROWS))


def test_items_and_joined_losses_stay_apart_from_their_ids():
    bare = [(5, torch.ones(2)), (6, torch.zeros(2))]
    batch = KeepIds(lambda items: {"x": torch.stack(items)}, "item")(bare)
    assert batch["index"].tolist() == [5, 6]
    assert batch["x"].tolist() == [[1, 1], [0, 0]]
    il = rho.Irreducible.from_losses([0.5, 0.25], ids=["a", "b"])
    pairs = TensorDataset(torch.ones(2, 3), torch.tensor([0, 1]))
    joined = rho.WithIrreducible(rho.WithIndex(pairs, ids=["a", "b"]), il)
    batch = KeepIds(stacked, "tuple")([joined[1], joined[0]])
    assert batch["index"] == ["b", "a"]
    assert batch["irreducible_loss"].tolist() == [0.25, 0.5]
    assert batch["labels"].tolist() == [1, 0]
    with pytest.raises(RholossError, match="returned a tuple, in which ids have no place"):
        KeepIds(tuple, "tuple")([joined[0]])


class Stream(IterableDataset):
    """Streams may know how many items they have."""

    def __init__(self, keys):
        self.keys = keys

    def __iter__(self):
        rows = Rows()
        for i in range(ROWS):
            yield {**rows[i], "index": i} if self.keys else rows[i]

    def __len__(self):
        return ROWS


def test_a_stream_that_knows_its_length_is_a_stream(tmp_path):
    select, seen = recorded()
    trainer_of(tmp_path, select, Stream(keys=True)).train()
    assert [index.tolist() for index in seen.candidates] == [
        list(range(start, start + CANDIDATES)) for start in (0, 24, 48)
    ]
    with pytest.raises(RholossError, match="put a stable key into each item"):
        trainer_of(tmp_path, recorded()[0], Stream(keys=False)).train()


def test_a_set_without_one_whole_batch_is_refused_where_others_are_left_out(tmp_path):
    few = torch.utils.data.Subset(Rows(), range(20))
    with pytest.raises(RholossError, match="20 rows, fewer than a batch of 24 candidates"):
        trainer_of(tmp_path, recorded()[0], few, drop_last=True).train()
    select, seen = recorded()
    trainer_of(tmp_path, select, few, max_steps=1).train()
    assert len(seen.chosen[0]) == 5


FRAMEWORK_FREE = """
import sys
import rholoss.integrations.huggingface, rholoss.integrations.lightning, rholoss.integrations.causal_lm
assert not {"transformers", "accelerate", "lightning", "pytorch_lightning", "datasets"} & set(sys.modules)
"""


def test_importing_the_integrations_imports_no_framework():
    subprocess.run([sys.executable, "-c", FRAMEWORK_FREE], check=True)


def test_it_says_which_extra_is_missing(monkeypatch):
    from rholoss.integrations import huggingface

    monkeypatch.delitem(vars(huggingface), "RhoTrainer", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RholossError, match=r"pip install 'rholoss\[hf\]'"):
        _ = huggingface.RhoTrainer


def test_rows_that_were_shuffled_since_they_were_measured_are_told(tmp_path):
    x, y = points()
    rows = datasets.Dataset.from_dict({"x": x.tolist(), "labels": y.tolist()}).with_format("torch")
    il = rho.Irreducible.from_losses(torch.rand(ROWS), dataset=rows)

    def train(dataset):
        select = rho.Selector("rho", irreducible=il, keep=TRAINED / CANDIDATES)
        trainer_of(tmp_path, select, dataset).train()

    with pytest.warns(UserWarning, match=r"of 24 points have another label .*a column 'index'"):
        train(rows.shuffle(seed=0))
    train(rows)
    train(rows.add_column("index", list(range(ROWS))).shuffle(seed=0))


def test_who_asks_for_the_loader_in_between_does_not_set_the_run_back(tmp_path):
    """Callbacks do, to look at the training set; only `auto_find_batch_size` starts over."""
    select, seen = recorded(log=tmp_path / "log.jsonl")

    class Asks(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            trainer.get_train_dataloader()

    trainer = trainer_of(tmp_path, select, Rows(), callbacks=[Asks()])
    trainer.train()
    assert select.step == select.ledger.steps == len(seen.chosen) == 3
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_losses_that_come_with_the_rows_cost_what_they_cost(tmp_path):
    il = rho.Irreducible.from_losses(torch.rand(ROWS), seconds=1000.0)
    select = rho.Selector("rho", keep=0.25)
    rows = rho.WithIrreducible(rho.WithIndex(Rows()), il)
    trainer_of(tmp_path, select, rows, max_steps=1).train()
    assert select.ledger.il_seconds == 1000.0


class Counting(Classifier):
    """Has a buffer that moves whenever it is called, by a name of its own."""

    def __init__(self, name):
        super().__init__()
        self.register_buffer(name, torch.zeros(()))

    def forward(self, x, labels=None):
        next(self.buffers()).add_(1)
        return super().forward(x, labels)


def test_a_new_model_begins_with_a_new_selection(tmp_path):
    """Each trial of a search has a model of its own; a schedule that had ended would not score for it."""
    models = [Counting("first"), Counting("second"), Counting("third")]
    given = iter(models)
    options = {"schedule": rho.annealed(4, switch=0.5, drop=0.1), "log": tmp_path / "log.jsonl"}
    select, seen = recorded(**options)
    trainer = trainer_of(tmp_path, select, Rows(), model_init=lambda: next(given), max_steps=4)
    trainer.train(), trainer.train()
    assert seen.chosen[4:] == seen.chosen[:4]
    assert select.step == select.ledger.steps == 4
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4
    assert [int(next(model.buffers())) for model in models] == [0, 4, 4]  # the first was for a look
