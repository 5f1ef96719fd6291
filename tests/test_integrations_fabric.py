"""Fabric: selection in a loop written by hand."""

import copy

import pytest
import torch
from fixtures_integrations import (
    LEARNING_RATE,
    Classifier,
    assert_same_weights,
    recorded,
    through_core,
    train_loader,
)
from torch.nn import functional as F

L = pytest.importorskip("lightning", reason="pip install 'rholoss[lightning]'")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_by_hand(precision):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    net = Classifier().net
    first = copy.deepcopy(net)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE))
    loader = fabric.setup_dataloaders(train_loader())
    select, seen = recorded()
    for _ in range(2):
        for batch in loader:
            with fabric.autocast():
                _, x, y = select(net, batch)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
    if precision == "32-true":
        chosen, _, net_core = through_core(first, seen.candidates)
        assert seen.chosen == chosen
        assert_same_weights(net_core, net)
    else:
        assert len(seen.chosen) == 8
        assert all(
            not torch.equal(p, q) for p, q in zip(first.parameters(), net.parameters(), strict=True)
        )
