"""The plain loop under Accelerate: as `core` chooses; mixed precision, accumulation, saved state."""

import copy

import pytest
import torch
from fixtures_integrations import (
    KEEP,
    LEARNING_RATE,
    TRAINED,
    Classifier,
    assert_same_weights,
    points,
    recorded,
    through_core,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho

accelerate = pytest.importorskip("accelerate", reason="pip install 'rholoss[hf]'")


def loop(select, accumulate=1, epochs=2, **options):
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, **options
    )
    net = Classifier().net
    first = copy.deepcopy(net)
    loader = DataLoader(
        rho.WithIndex(TensorDataset(*points())), round(TRAINED / KEEP), shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE), loader
    )
    for _ in range(epochs):
        for candidates in loader:
            with accelerator.accumulate(model):
                _, x, y = select(model, candidates)
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return first, net


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_chooses_and_learns_as_core_does(accumulate):
    select, seen = recorded()
    first, net = loop(select, accumulate)
    chosen, _, by_core = through_core(first, seen.candidates, accumulate=accumulate)
    assert seen.chosen == chosen
    assert_same_weights(net, by_core)


def test_no_gradient_is_lost_in_mixed_precision():
    select, seen = recorded()
    first, net = loop(select, mixed_precision="bf16")
    assert len(seen.chosen) == 8
    pairs = zip(first.parameters(), net.parameters(), strict=True)
    assert all(not torch.equal(before, after) for before, after in pairs)


def test_the_selector_is_saved_with_the_rest(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    select, _ = recorded()
    accelerator.register_for_checkpointing(select)
    loop(select, epochs=1)
    accelerator.save_state(tmp_path / "state")
    again, _ = recorded()
    accelerator._custom_objects = []
    accelerator.register_for_checkpointing(again)
    accelerator.load_state(tmp_path / "state")
    assert again.step == select.step == 4
    assert again.ledger.trained == select.ledger.trained


@pytest.fixture(autouse=True)
def _alone():
    """One precision for each test: accelerate keeps it for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
