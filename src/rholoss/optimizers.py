"""Optimizers of models that are made later: the user gives a function that makes one."""

from __future__ import annotations

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
    made = given if isinstance(given, torch.optim.Optimizer) else given(parameters)
    if made is given or not isinstance(made, torch.optim.Optimizer):
        what = "is" if made is given else "returned"
        raise RholossError(
            f"`optimizer` {what} a {type(made).__name__}; give a function from parameters to a "
            "torch.optim.Optimizer, as in `lambda p: torch.optim.SGD(p, lr=0.1)`."
        )
    return made
