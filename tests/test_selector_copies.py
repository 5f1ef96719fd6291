"""A selector that was copied or pickled is one of its own: it goes by its own step and its own rung."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho

N = 120
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda given: pickle.loads(pickle.dumps(given))}


def make():
    torch.manual_seed(0)
    data = rho.WithIndex(TensorDataset(torch.randn(N, 4), torch.randint(0, 3, (N,))))
    return nn.Linear(4, 3), data


def chosen_in(select, model, data, passes):
    loader = DataLoader(data, batch_sampler=select.sampler)
    return [select(model, batch)[0].tolist() for _ in range(passes) for batch in loader]


@pytest.mark.parametrize("way", COPIES)
def test_the_batches_of_a_copy_go_by_its_own_step(way):
    model, data = make()
    schedule = rho.annealed(12, switch=0.25, drop=0.1)
    select = rho.Selector("rho", irreducible=torch.rand(N), keep=0.2, schedule=schedule)
    select.batch_sampler(data, 30)
    chosen_in(select, model, data, 1)
    other = COPIES[way](select)
    found = chosen_in(other, model, data, 2)
    assert (select.step, other.step) == (4, 12)
    assert found == chosen_in(select, model, data, 2)
    assert other.ledger.loaded == select.ledger.loaded == 3 * 30 + 9 * 6


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_climbs_a_ladder_of_its_own(way):
    model, data = make()
    ladder = rho.Ladder([torch.full((N,), loss) for loss in (9.0, 0.1)])
    select = rho.Selector("rho", irreducible=ladder, keep=0.2)
    other = COPIES[way](select)
    batch = next(iter(DataLoader(data, batch_size=N)))
    for _ in range(100):
        other(model, batch)
    assert (select.source.rung, other.source.rung) == (0, 1)
