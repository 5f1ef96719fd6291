"""Many small copies between tensors, done in few kernels."""

from __future__ import annotations

import torch
from torch import Tensor


class Copies:
    """Pairs of tensors, the first of each to be copied into the second, all together.

    `torch._foreach_copy_` does many copies in one kernel only if all of them have the same types and memory
    order; otherwise each takes its own. So pairs are grouped here, and viewed as flat where possible.
    """

    def __init__(self) -> None:
        self._groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, source: Tensor | None, target: Tensor) -> None:
        """Add a pair, unless the source is None. Both tensors must stay in place from now on."""
        if source is None:
            return
        source, target = _flat(source.detach(), target.detach())
        together = source.ndim == 1 and source.is_contiguous() and target.is_contiguous()
        key = (source.dtype, target.dtype, together or len(self._groups))
        targets, sources = self._groups.setdefault(key, ([], []))
        targets.append(target)
        sources.append(source)

    def copy(self) -> None:
        """Copy each source into its target."""
        for targets, sources in self._groups.values():
            torch._foreach_copy_(targets, sources)


def _flat(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as one-dimensional views in the same order, if their memory layout allows that."""
    if source.is_contiguous() and target.is_contiguous():
        return source.view(-1), target.view(-1)
    if source.ndim == 4:
        source_last, target_last = source.permute(0, 2, 3, 1), target.permute(0, 2, 3, 1)
        if source_last.is_contiguous() and target_last.is_contiguous():
            return source_last.reshape(-1), target_last.reshape(-1)
    return source, target
