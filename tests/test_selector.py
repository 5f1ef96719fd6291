import dataclasses
import warnings
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss import core, picks
from rholoss.core import Method
from rholoss.errors import RholossError, TooFewFiniteScoresError, UnmeasuredLossError
from rholoss.selector import Selector

IDS = torch.arange(6)


class Logits(nn.Module):
    """Puts out what it is given, so that losses are known by hand."""

    def forward(self, x):
        return x


class Odd(nn.Module):
    """A loss that is not finite wherever the first logit says so."""

    def forward(self, x):
        return torch.where(x[:, :1] > 50, torch.nan, x)


def worked(fixture_a, ids=IDS):
    return ids, fixture_a.logits, fixture_a.labels


# What comes back.

Named = namedtuple("Named", ["index", "x", "y"])


@dataclasses.dataclass
class Record:
    index: Any
    x: Any
    y: Any
    note: str = "kept"


def by_field(model, batch):
    return F.cross_entropy(model(batch.x), batch.y, reduction="none")


def nested(model, batch):
    return F.cross_entropy(model(batch["in"]["x"][0]), batch["y"], reduction="none")


@pytest.mark.parametrize(
    ("make", "read", "loss"),
    [
        (lambda i, x, y: (i, x, y), lambda b: b, "classification"),
        (lambda i, x, y: [i, x, y], lambda b: b, "classification"),
        (
            lambda i, x, y: {"index": i, "x": x, "labels": y},
            lambda b: (b["index"], b["x"], b["labels"]),
            "classification",
        ),
        (Named, lambda b: b, by_field),
        (Record, lambda b: (b.index, b.x, b.y), by_field),
        (
            lambda i, x, y: {"index": i, "in": {"x": (x, None)}, "y": y, "scale": 2.0},
            lambda b: (b["index"], b["in"]["x"][0], b["y"]),
            nested,
        ),
        (
            lambda i, x, y: ([f"file{n}" for n in i.tolist()], x, y),
            lambda b: (torch.tensor([int(n[4:]) for n in b[0]]), b[1], b[2]),
            "classification",
        ),
    ],
    ids=["tuple", "list", "dict", "named tuple", "dataclass", "nested", "string ids"],
)
def test_any_structure_comes_back_as_it_was_with_the_chosen_rows(fixture_a, make, read, loss):
    select = Selector("loss", k=2, loss=loss)
    batch = make(*worked(fixture_a, IDS + 40))
    chosen = select(Logits(), batch)
    assert type(chosen) is type(batch)
    index, x, y = read(chosen)
    assert index.tolist() == [43, 42]
    assert torch.equal(x, fixture_a.logits[[3, 2]])
    assert torch.equal(y, fixture_a.labels[[3, 2]])
    assert read(batch)[1] is fixture_a.logits  # the candidates themselves are as they were


def test_ids_may_be_found_by_a_function_which_gets_the_batch_as_it_is(fixture_a):
    """The batch then has no place for ids, so that nothing is taken out of it."""
    seen = []

    def loss(model, batch):
        seen.append([tuple(part.shape) for part in batch])
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    live = rho.LiveIrreducible(nn.Linear(3, 3), loss=loss)
    select = Selector("rho", irreducible=live, k=2, loss=loss, index=lambda batch: batch[2])
    x, _, ids = select(Logits(), (fixture_a.logits, fixture_a.labels, IDS))
    assert seen == [[(6, 3), (6,), (6,)]] * 2 + [[(2, 3), (2,), (2,)]]
    assert select.selection.index.tolist() == ids.tolist()
    assert torch.equal(x, fixture_a.logits[ids])


def test_tensors_go_to_the_models_device(fixture_a):
    moved = []

    class Elsewhere(torch.Tensor):
        def to(self, device, **options):
            moved.append(device)
            return self.as_subclass(torch.Tensor)

    ids, x, y = worked(fixture_a)
    _, x, y = Selector("loss", k=2)(nn.Linear(3, 3), (ids, x.as_subclass(Elsewhere), y))
    assert moved == [torch.device("cpu")]
    assert type(x) is torch.Tensor


def test_the_last_batch_follows(toy):
    select, model = Selector("loss", keep=0.1), toy.model().eval()
    sizes = [len(select(model, (torch.arange(n), toy.x[:n], toy.y[:n]))[0]) for n in (320, 40, 4)]
    assert sizes == [32, 4, 1]


def test_irreducible_losses_may_be_joined_in_the_loader(toy):
    table, data = Selector("rho", irreducible=toy.il, keep=0.1), TensorDataset(toy.x, toy.y)
    joined = Selector("rho", keep=0.1)
    indexed = rho.WithIndex(data)
    loaders = [
        DataLoader(d, batch_size=320)
        for d in (indexed, rho.WithIrreducible(indexed, table.source.table))
    ]
    models = toy.model(), toy.model()
    for ours, theirs in zip(*loaders, strict=True):
        a, b = table(models[0], ours), joined(models[1], theirs)
        assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))


# The choice (checks 6, 7 and 8).


@pytest.mark.parametrize(
    ("method", "expected"),
    [("rho", [3, 4]), ("loss", [3, 2]), ("negative_il", [4, 0]), ("grad_norm", [2, 3])],
)
def test_the_worked_example(fixture_a, method, expected):
    select = Selector(method, irreducible=fixture_a.il, k=2)
    assert select(Logits(), worked(fixture_a))[0].tolist() == expected
    scores = {"rho": fixture_a.rho, "loss": fixture_a.loss, "negative_il": -fixture_a.il}
    expected_score = scores.get(method, fixture_a.grad_norm)[expected]
    torch.testing.assert_close(select.selection.score, expected_score, atol=1e-5, rtol=0)
    assert select.selection.position.tolist() == expected


def test_shift_and_scale_of_irreducible_losses(fixture_a):
    def choice(method, il, k=3, x=fixture_a.logits):
        select = Selector(method, irreducible=il, k=k)
        return select(Logits(), (IDS, x, fixture_a.labels))[0].tolist()

    assert choice("rho", fixture_a.il + 5) == choice("rho", fixture_a.il)
    assert choice("rho", torch.zeros(6)) == choice("loss", None)
    same = torch.zeros(6, 3)
    assert choice("rho", fixture_a.il, x=same) == choice("negative_il", fixture_a.il)
    assert sorted(choice("rho", fixture_a.il, k=6)) == IDS.tolist()


def test_negative_scores_are_chosen_too(fixture_a):
    select = Selector("rho", irreducible=fixture_a.il + 100, keep=0.5)
    assert len(select(Logits(), worked(fixture_a))[0]) == 3
    assert (select.selection.score < 0).all()


BROKEN = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("given", ["table", "joined", "function"])
@pytest.mark.parametrize("method", ["rho", "negative_il"])
def test_an_irreducible_loss_that_is_not_finite(fixture_a, method, value, at_once, given):
    il = torch.cat([fixture_a.il, fixture_a.il])
    il[8] = value
    source = {"table": il, "joined": None, "function": lambda ids: il[ids]}[given]
    select = Selector(method, irreducible=source, k=2)

    def call(ids):
        ids_, x, y = worked(fixture_a, ids)
        batch = {"index": ids_, "x": x, "labels": y}
        if given == "joined":
            batch["irreducible_loss"] = il[ids]
        return select(Logits(), batch)

    if not at_once:
        call(IDS)
    step = select.step
    with pytest.raises(UnmeasuredLossError, match=r"ids 8\b.*`rholoss il score"):
        call(IDS + 6)
    assert select.step == step
    assert select.ledger.steps == step
    call(IDS)  # the next batch may be fine


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, -1]])
def test_an_unknown_id(fixture_a, ids):
    select = Selector("rho", irreducible=fixture_a.il, k=2)
    with pytest.raises(UnmeasuredLossError, match=rf"1 of 6 candidates .* ids {ids[-1]}\."):
        select(Logits(), worked(fixture_a, torch.tensor(ids)))


def test_a_live_model_whose_loss_is_not_finite(fixture_a):
    model = nn.Sequential(Odd(), nn.Linear(3, 3))
    select = Selector("rho", irreducible=rho.LiveIrreducible(model), k=2)
    x = fixture_a.logits.clone()
    x[4, 0] = 100
    message = r"1 candidates had no finite irreducible loss, for instance id 4; none of them was"
    with pytest.raises(UnmeasuredLossError, match=message):
        select(Logits(), (IDS, x, fixture_a.labels))
    assert model[1].weight.grad is None  # it did not learn from them either


# Training losses that are not finite.


@pytest.mark.parametrize("method", ["loss", "grad_norm", "grad_norm_is", "rho", "entropy"])
def test_losses_that_are_not_finite_are_never_chosen_and_counted(fixture_a, method):
    select = Selector(method, irreducible=fixture_a.il, k=4, draws=2)
    x = fixture_a.logits.clone()
    x[1, 0], x[3, 0] = 100, 100
    for _ in range(5):
        index, _, _ = select(Odd(), (IDS, x, fixture_a.labels))
        select.reduce(torch.zeros(4))
        assert not set(index.tolist()) & {1, 3}
    assert select.guard.not_finite == 10


def test_too_few_finite_losses(fixture_a):
    select = Selector("loss", k=5)
    x = fixture_a.logits.clone()
    select(Odd(), (IDS, x, fixture_a.labels))
    x[1:3, 0] = 100
    message = (
        r"At 1 step\(s\) fewer candidates had a finite score than are selected: the training loss"
    )
    with pytest.raises(TooFewFiniteScoresError, match=message):
        select(Odd(), (IDS, x, fixture_a.labels))
    assert select.step == 1


def test_one_finite_score_is_enough_where_points_may_be_drawn_twice(fixture_a):
    select = Selector("grad_norm_is", k=3)
    x = fixture_a.logits.clone()
    x[1:, 0] = 100
    assert select(Odd(), (IDS, x, fixture_a.labels))[0].tolist() == [0, 0, 0]


# Importance weights.


def test_reduce_applies_the_weights(fixture_a):
    select = Selector("grad_norm_is", k=4, seed=3)
    index, x, y = select(Logits(), worked(fixture_a))
    torch.testing.assert_close(select.weights, fixture_a.weight[index], atol=1e-3, rtol=1e-4)
    loss_B = F.cross_entropy(x, y, reduction="none")
    expected = (fixture_a.weight[index] * loss_B).mean()
    torch.testing.assert_close(select.reduce(loss_B), expected, atol=1e-3, rtol=1e-4)


def test_reduce_is_the_mean_where_there_are_no_weights(fixture_a):
    select = Selector("loss", k=2)
    assert select.weights is None
    select(Logits(), worked(fixture_a))
    assert select.weights is None
    assert select.reduce(torch.tensor([1.0, 3.0])) == 2.0
    with pytest.raises(
        RholossError, match=r"shape \[k\], but got shape \(\); use reduction='none'"
    ):
        select.reduce(torch.tensor(1.0))


@pytest.mark.parametrize("read", ["reduce", "weights", None])
def test_forgetting_the_weights_is_told_once(fixture_a, read):
    select = Selector("grad_norm_is", k=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            select(Logits(), worked(fixture_a))
            if read == "reduce":
                select.reduce(torch.zeros(2))
            elif read == "weights":
                _ = select.weights
    assert len(told) == (read is None)
    if told:
        assert "samples by importance, but its weights were not used" in str(told[0].message)
        assert "select.reduce(loss_B)" in str(told[0].message)
        assert told[0].filename == __file__
    assert select.step == 4


# Looking on.


def test_taps_may_look(fixture_a):
    seen = []
    select = Selector(
        "rho",
        irreducible=fixture_a.il,
        k=2,
        on_scores=[lambda step, stats, chosen: seen.append((step, stats, chosen))],
    )
    for _ in range(2):
        select(Logits(), worked(fixture_a))
    assert [step for step, _, _ in seen] == [0, 1]
    _, stats, chosen = seen[1]
    torch.testing.assert_close(
        stats.loss - stats.irreducible_loss, fixture_a.rho, atol=1e-5, rtol=0
    )
    assert chosen.index.tolist() == [3, 4]
    assert chosen is select.selection


# Methods of one's own.


def test_a_score_of_the_wrong_shape_is_told(fixture_a):
    flat = Method(
        "flat", lambda stats: stats.loss.mean().expand(3), picks.top_k, frozenset({"loss"})
    )
    message = r"`method.score` must return one number for each of the 6 examples, shape \(6,\), but"
    with pytest.raises(RholossError, match=message):
        Selector(flat, k=2)(Logits(), worked(fixture_a))


def test_irreducible_losses_of_the_wrong_shape_are_told(fixture_a):
    ids, x, y = worked(fixture_a)
    batch = {"index": ids, "x": x, "labels": y, "irreducible_loss": fixture_a.il[:, None]}
    with pytest.raises(RholossError, match=r"`irreducible` must return one number .* \(6, 1\)"):
        Selector("rho", k=2)(Logits(), batch)


def test_dropout_draws_anew_at_each_step(toy):
    model, batch = toy.model(), toy.batch(0)
    stats = []
    select = Selector(
        "loss", keep=0.1, dropout=True, batch_norm="eval", on_scores=[lambda *a: stats.append(a[1])]
    )
    for _ in range(2):
        select(model, batch)
    assert not torch.equal(stats[0].loss, stats[1].loss)
    again = Selector("loss", keep=0.1, dropout=True, batch_norm="eval")
    again.step = 1
    again(model, batch)
    assert torch.equal(again.selection.index, select.selection.index)
    assert core.step_generator(0, 1).initial_seed() != core.step_generator(0, 0).initial_seed()


def test_arrays_and_lists_are_cut_too(fixture_a):
    ids, x, y = worked(fixture_a)
    batch = {
        "index": ids,
        "in": {"x": (x, None)},
        "y": y,
        "row": np.arange(6),
        "name": list("abcdef"),
    }
    chosen = Selector("loss", k=2, loss=nested)(Logits(), batch)
    assert chosen["row"].tolist() == [3, 2]
    assert chosen["name"] == ["d", "c"]
