"""Many small copies in few kernels."""

from __future__ import annotations

import torch
from torch import Tensor


class Copies:
    """Tensors that are copied together.

    `torch._foreach_copy_` makes one kernel of many copies only if all of them have the same types and
    memory order, and one kernel each otherwise; so they are sorted here, and laid flat where possible.
    """

    def __init__(self) -> None:
        self._groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, source: Tensor | None, target: Tensor) -> None:
        """A pair, if there is a source. Both must stay in place."""
        if source is None:
            return
        source, target = _flat(source.detach(), target.detach())
        together = source.ndim == 1 and source.is_contiguous() and target.is_contiguous()
        key = (source.dtype, target.dtype, together or len(self._groups))
        targets, sources = self._groups.setdefault(key, ([], []))
        targets.append(target)
        sources.append(source)

    def copy(self) -> None:
        """All of them."""
        for targets, sources in self._groups.values():
            torch._foreach_copy_(targets, sources)


def _flat(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as one dimension in the same order, where their memory allows it."""
    if source.is_contiguous() and target.is_contiguous():
        return source.view(-1), target.view(-1)
    if source.ndim == 4:
        source_last, target_last = source.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1)
        if source_last.is_contiguous() and target_last.is_contiguous():
            return source_last.reshape(-1), target_last.reshape(-1)
    return source, target
