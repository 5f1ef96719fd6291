"""Models and data, wrapped for what the library asks of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from rholoss.engine import Resident


class OwnPrecision(nn.Module):
    """A model that chooses its precision itself, whatever is asked for outside."""

    def __init__(self, inner: nn.Module, low: bool) -> None:
        super().__init__()
        self.inner, self.low = inner, low

    def forward(self, x: Tensor) -> Tensor:
        if not self.low:
            return self.inner(x)
        # No cache: weights that were cast under `no_grad` must not be used by a pass that needs gradients.
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return self.inner(x).float()


class Unaugmented(Dataset[tuple[Tensor, Tensor]]):
    """Resident data as an ordinary data set: rows one by one, in float32 on the host."""

    def __init__(self, data: Resident) -> None:
        rows = torch.arange(len(data), device=data.device)
        self.x = torch.cat([data.batch(part)[0].float().cpu() for part in rows.split(5000)])
        self.targets = data.targets.cpu()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.targets[row]


@functools.cache
def _compiled_call() -> Callable[[nn.Module, Tensor], Tensor]:
    """One compilation of "call the model" for all evaluators of the process."""
    return torch.compile(lambda model, x: model(x), dynamic=False)


class Compiled(nn.Module):
    """The model, called through the shared compilation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return _compiled_call()(self.inner, x)
