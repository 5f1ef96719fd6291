"""Optimizers whose step can be captured in a CUDA graph, and their learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rholoss.errors import RholossError

Rate = float | Callable[[int], float]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, as in the paper; fused and capturable on a GPU.

    Args:
        parameters: of the model to train, all on one device. Its learning rate is 1e-3, in place of which
            `Trainer` uses its own `learning_rate`.
    """
    parameters = list(parameters)
    on_gpu = bool(parameters) and parameters[0].device.type == "cuda"
    rate: Any = torch.tensor(1e-3, device=parameters[0].device) if on_gpu else 1e-3
    return torch.optim.AdamW(parameters, lr=rate, fused=on_gpu, capturable=on_gpu)


def for_graphs(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Make the step of a new optimizer capturable in a CUDA graph, if it has such an option."""
    if device.type == "cuda" and not optimizer.state:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
    return optimizer


def one_rate(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """Give all groups of an optimizer the same learning rate: a tensor, returned, for a graph to set.

    Raises if the groups have different rates, because these would be lost.
    """
    rates = sorted({float(group.get("lr", 0)) for group in optimizer.param_groups})
    if len(rates) > 1:
        raise RholossError(
            f"`optimizer` has groups with the learning rates {', '.join(f'{r:g}' for r in rates)}, but the "
            "engine uses `learning_rate` for all of them; give the groups one rate. They may differ in "
            "other settings."
        )
    lr = torch.zeros((), device=device)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def rates(learning_rate: Rate, total_steps: int) -> Tensor:
    """The learning rate of each step, float64 [total_steps] on the CPU; raises if one is not valid."""
    rate = learning_rate if callable(learning_rate) else _constant(learning_rate)
    each = [float(rate(step)) for step in range(total_steps)]
    rate_T = torch.tensor(each, dtype=torch.float64, device="cpu")
    bad = (~rate_T.isfinite() | (rate_T < 0)).nonzero().flatten().tolist()
    if bad:
        raise RholossError(
            f"`learning_rate` is {float(rate_T[bad[0]]):g} at step {bad[0]} of `total_steps`={total_steps}, "
            "but a rate must be finite and at least 0; is it a function for another number of steps?"
        )
    return rate_T


def _constant(rate: Any) -> Callable[[int], float]:
    try:
        value = float(rate)
    except (TypeError, ValueError):
        raise RholossError(
            f"`learning_rate` is a {type(rate).__name__}; give a number, or a function from the step to one: "
            "`one_cycle(4e-3, total_steps)`, or for a list of rates `lambda step: rates[step]`."
        ) from None
    return lambda step: value
