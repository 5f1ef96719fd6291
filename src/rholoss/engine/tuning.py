"""How a captured step is laid out on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rholoss.engine.fused import as_products
from rholoss.engine.sums import as_sums
from rholoss.errors import RholossError

PASSES = ("none", "scoring", "all")
ALGORITHMS = 10  # what torch tries of cuDNN's unless told otherwise


@dataclass(frozen=True)
class Tuning:
    """Ways to run the same step that may be faster: none changes what is computed beyond rounding.

    `FASTER`, below, is the best so far of those that `benchmarks/bench_step.py` has rows for. On the CPU only
    what concerns compiling has an effect.

    Args:
        scoring, training: inductor's options for these passes, e.g. {"coordinate_descent_tuning": True}.
        products: have convolutions of few channels, as that of the pixels, done as matrix products: 'none',
            in 'scoring', or in 'all' passes.
        sums: have the statistics of BatchNorm taken from sums and sums of squares, likewise.
        compiled_sort: compile the pick of the highest scores; up to 512 of them are sorted by one kernel.
        books_beside: note what a step did on a stream of its own, beside the backward pass.
        side_priority: of the stream that scores when scoring is overlapped; training has -1, lower is
            sooner.
        algorithms: how many of its algorithms cuDNN tries for a convolution; 0: all. What a process has tried
            it does not try again.
    """

    scoring: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    products: str = "none"
    sums: str = "none"
    compiled_sort: bool = False
    books_beside: bool = False
    side_priority: int = 0
    algorithms: int = ALGORITHMS

    def __post_init__(self) -> None:
        for name in ("products", "sums"):
            passes = getattr(self, name)
            if passes not in PASSES:
                raise RholossError(f"`{name}` is {passes!r}; choose one of {', '.join(PASSES)}.")
        if not isinstance(self.algorithms, int) or self.algorithms < 0:
            raise RholossError(
                f"`algorithms` is {self.algorithms!r}; give a whole number, or 0 to have all of them tried."
            )

    @contextlib.contextmanager
    def layers(self, model: nn.Module, *, scoring: bool) -> Iterator[None]:
        """Have the layers of a model that scores, or trains, compute in these ways inside."""
        wanted = PASSES[1:] if scoring else PASSES[2:]
        with as_products(model, self.products in wanted), as_sums(model, self.sums in wanted):
            yield


_COMBINED = {"combo_kernels": True}  # many small kernels, such as the casts of weights, become one
# 5 to 10 % less time a step with compile=True (ResNet-18, H200: benchmarks/results/step.md).
FASTER = Tuning(_COMBINED, _COMBINED, products="all")
