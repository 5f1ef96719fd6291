"""What a selector says at its first call: repeated ids, one row for BatchNorm, losses that nobody reads."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, WeightedRandomSampler

import rholoss as rho
from rholoss.errors import RholossError

ROWS = 129
X = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
TRAIN = rho.WithIndex(TensorDataset(X, (X[:, 0] > 0).long()))


def network(norm=True):
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 2)
    )


def run(select, loader, model=None):
    """What is said over two epochs, and at which step."""
    model, told = model or network(), []
    for _ in range(2):
        for batch in loader:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                select(model, batch)
            told += [(select.step - 1, str(warning.message)) for warning in found]
            assert all(warning.filename == __file__ for warning in found)
    return told


ONE_ROW = "Of a batch of 9 candidates one row is selected (`keep`=0.1), and the model has BatchNorm"


@pytest.mark.parametrize("known", ["sampler", "watched", ""])
def test_one_row_for_batch_norm_is_told_once(known):
    """129 rows in batches of 40 leave 9, of which one is a tenth."""
    select = rho.Selector("loss", keep=0.1)
    loader = DataLoader(TRAIN, batch_size=40)
    if known == "watched":
        loader = select.watch(loader)
    if known == "sampler":
        loader = DataLoader(TRAIN, batch_sampler=select.batch_sampler(TRAIN, 40))
    [(step, said)] = run(select, loader)
    assert step == (0 if known else 3)  # at once, where the last batch is known
    assert said.startswith(ONE_ROW)
    assert "Pass drop_last=True to the loader or to `select.batch_sampler`" in said


def test_one_row_without_batch_norm_is_nothing_to_speak_of():
    loader = DataLoader(TRAIN, batch_size=40)
    for model in (network(norm=False), network().eval()):
        assert run(rho.Selector("loss", keep=0.1), loader, model) == []
    assert (
        run(rho.Selector("loss", keep=0.1), DataLoader(TRAIN, batch_size=40, drop_last=True)) == []
    )
    assert run(rho.Selector("loss", keep=0.3), loader) == []
    assert run(rho.Selector("loss", k=1), loader) == []  # as was asked for


def test_candidates_that_come_twice_are_told_once():
    sampler = WeightedRandomSampler(
        torch.ones(ROWS), 120, generator=torch.Generator().manual_seed(0)
    )
    loader = DataLoader(TRAIN, batch_size=60, sampler=sampler)
    [(step, said)] = run(rho.Selector("loss", keep=0.1), loader)
    assert step == 0
    assert "of 60 candidates have an id that another one has too" in said
    assert "if these numbers are not ids but a feature, wrap the data set" in said
    assert "weight the loss or stratify" in said
    assert run(rho.Selector("uniform", keep=0.1), loader) == []  # takes what it is given


def test_ids_that_collide_are_told():
    loader = DataLoader(ConcatDataset([TRAIN, TRAIN]), batch_size=2 * ROWS)
    [(_, said)] = run(rho.Selector("loss", keep=0.1), loader)
    assert said.startswith(
        "129 of 258 candidates have an id that another one has too, 0 for instance"
    )
    assert "`rholoss.WithIndex(ConcatDataset([a, b]))`" in said
    keys = rho.WithIndex(TensorDataset(X), ids=["a", "b", "a"] * 43)
    select = rho.Selector("loss", keep=0.1, loss=lambda model, x: model(x)[:, 0])
    [(_, said)] = run(select, DataLoader(keys, batch_size=ROWS))
    assert "'a' for instance" in said


def test_losses_that_a_method_does_not_read_are_noted():
    il = rho.Irreducible.from_losses(torch.rand(ROWS), seconds=30.0)
    said = "loss reads no irreducible losses"
    for method, options, noted in [
        ("loss", {}, True),
        ("rho", {}, False),
        ("loss", {"schedule": rho.annealed(10)}, False),
    ]:
        select = rho.Selector(method, irreducible=il, keep=0.1, **options)
        assert (said in str(select.ledger)) == noted
        assert select.ledger.il_seconds == (0 if noted else il.seconds)
    assert said not in str(rho.Selector("loss", keep=0.1).ledger)


def test_an_empty_batch_is_an_error_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RholossError, match="The candidate batch is empty"):
            rho.Selector("loss", keep=0.1)(network(), [torch.arange(0), X[:0], torch.arange(0)])
