"""Optimizers in the form that a CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as in the paper, in the form that a graph can hold."""
    parameters = list(parameters)
    on_gpu = bool(parameters) and parameters[0].device.type == "cuda"
    rate: Any = torch.tensor(1e-3, device=parameters[0].device) if on_gpu else 1e-3
    return torch.optim.AdamW(parameters, lr=rate, fused=on_gpu, capturable=on_gpu)
