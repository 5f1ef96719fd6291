"""Remembered losses: what training saw of each row, and only that."""

import pytest
import torch

from rholoss.errors import RholossError
from rholoss.memory import Memory, Situation


def situation(memory, **others):
    values = {"progress": 0.5, "irreducible": None, "generator": torch.Generator().manual_seed(0)}
    kept = {"seen": memory.seen, "recent": memory.recent}
    return Situation(**kept, **{**values, **others})


def test_the_last_losses_of_each_row_are_kept_and_no_more():
    memory = Memory(3, torch.device("cpu"), depth=2)
    for loss in (4.0, 1.0, 3.0):
        memory.record(torch.tensor([0]), torch.tensor([loss]))
    memory.record(torch.tensor([2]), torch.tensor([5.0]))
    now = situation(memory)
    assert memory.seen.tolist() == [3, 0, 1]
    assert now.last[[0, 2]].tolist() == [3.0, 5.0]
    assert now.last[1].isnan()
    assert now.lowest.tolist() == [
        1.0,
        -torch.inf,
        -torch.inf,
    ]  # the latter were not seen twice yet


def test_gradients_are_not_kept():
    memory = Memory(2, torch.device("cpu"))
    memory.record(torch.tensor([1]), torch.ones(1, requires_grad=True) * 2)
    assert not memory.recent.requires_grad


def test_it_goes_on_from_a_saved_state():
    one, other = Memory(2, torch.device("cpu")), Memory(2, torch.device("cpu"))
    one.record(torch.tensor([1]), torch.tensor([2.0]))
    one.notes["bound"] = 0.5
    other.load_state_dict(one.state_dict())
    for memory in (one, other):
        memory.record(torch.tensor([1]), torch.tensor([3.0]))
    assert situation(other).last[1] == 3.0
    assert torch.equal(one.recent.nan_to_num(), other.recent.nan_to_num())
    assert torch.equal(one.seen, other.seen)
    assert other.notes == {"bound": 0.5}


def test_a_memory_of_nothing_is_refused():
    with pytest.raises(RholossError, match="`depth` must be at least 1, but is 0"):
        Memory(2, torch.device("cpu"), depth=0)
