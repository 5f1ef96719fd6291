"""Optimizers for the engine: in the form that a graph can hold, with one rate a step."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rholoss as rho
from rholoss.engine import Resident, Trainer
from rholoss.engine.optimizers import adamw, for_graphs
from rholoss.errors import RholossError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_an_optimizer_is_made_capturable_before_its_first_step_on_a_gpu():
    model = nn.Linear(3, 2)
    assert for_graphs(torch.optim.AdamW(model.parameters()), CUDA).param_groups[0]["capturable"]
    assert not for_graphs(adamw(model.parameters()), CPU).param_groups[0]["capturable"]
    assert "capturable" not in for_graphs(torch.optim.SGD(model.parameters()), CUDA).param_groups[0]
    used = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    used.step()  # its state is what it is
    assert not for_graphs(used, CUDA).param_groups[0]["capturable"]


def groups(rates):
    def make(parameters):
        both = zip(parameters, rates, (0.0, 0.1), strict=True)
        return torch.optim.SGD([{"params": [p], "lr": r, "weight_decay": w} for p, r, w in both])

    return make


def made(optimizer):
    data = Resident(torch.randn(40, 3), torch.randint(0, 2, (40,)), device="cpu")
    return Trainer(
        nn.Linear(3, 2), data, total_steps=5, method="uniform", candidates=8, keep=1.0,
        learning_rate=0.25, optimizer=optimizer,
    )  # fmt: skip


def test_groups_may_differ_in_all_but_their_rates():
    trainer = made(groups((0.1, 0.1)))
    trainer.train(5)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.0, 0.1]
    with pytest.raises(
        RholossError, match=r"groups with the learning rates 0\.01, 0\.1, but the engine"
    ):
        made(groups((0.1, 0.01)))


def by_decay(parameters):
    """As many write it: the parameters are looked through twice, for a group each."""
    decayed = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=0.1)


def test_a_function_may_look_through_the_parameters_twice():
    trainer = made(by_decay)
    bias = trainer.model.bias.detach().clone()
    trainer.train(5)
    assert not torch.equal(trainer.model.bias, bias)
    live = rho.LiveIrreducible(nn.Linear(3, 2), by_decay)
    assert [len(group["params"]) for group in live.optimizer.param_groups] == [1, 1]


def test_a_step_that_computes_the_loss_again_is_refused():
    says = "`optimizer` is a LBFGS, whose step computes the loss .* use another, such as"
    model, lbfgs = nn.Linear(3, 2), torch.optim.LBFGS
    rows = TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
    for given in (
        lambda: made(lbfgs),
        lambda: rho.LiveIrreducible(model, lbfgs),
        lambda: rho.LiveIrreducible(model, lbfgs(model.parameters())),
        lambda: rho.fit_irreducible(lambda: nn.Linear(3, 2), rows, folds=2, optimizer=lbfgs),
    ):
        with pytest.raises(RholossError, match=says):
            given()
