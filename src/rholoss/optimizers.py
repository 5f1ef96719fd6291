"""Optimizers of models that are made later: the user gives a function that makes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rholoss.errors import RholossError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def new_optimizer(
    make_optimizer: MakeOptimizer, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of these parameters."""
    given: Any = make_optimizer
    if isinstance(given, torch.optim.Optimizer):
        raise _no_function(f"is a {type(given).__name__}")
    if not callable(given):
        raise _no_function(f"is {given!r}")
    made = given(list(parameters))  # it may look through them twice, for two groups
    if not isinstance(made, torch.optim.Optimizer):
        raise _no_function(f"returned a {type(made).__name__}")
    check_step(made)
    return made


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise if its step needs a function that computes the loss again, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise RholossError(
            f"`optimizer` is a {type(optimizer).__name__}, whose step computes the loss several times by a "
            "closure, but a step here computes it once; use another, such as torch.optim.AdamW."
        )


def _no_function(seen: str) -> RholossError:
    return RholossError(
        f"`optimizer` {seen}; give a function from parameters to a torch.optim.Optimizer, as in "
        "`lambda p: torch.optim.SGD(p, lr=0.1)`."
    )
