"""How a captured step is laid out on a GPU, for speed."""

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
ALGORITHMS = 10  # of cuDNN, to try for a convolution: torch's default


@dataclass(frozen=True)
class Tuning:
    """Ways to run the same step that may be faster. None of them changes results beyond rounding.

    `FASTER` is the best of those that `benchmarks/bench_step.py` has compared so far. On the CPU only options
    about compiling have an effect.

    Args:
        scoring, training: options of inductor for these passes, for instance
            {"coordinate_descent_tuning": True}. With compile=True only.
        products: in which passes to compute convolutions of few channels, such as the first one, as matrix
            products: 'none', 'scoring' or 'all'.
        sums: in which passes to compute the statistics of BatchNorm from sums and sums of squares: 'none',
            'scoring' or 'all'.
        compiled_sort: compile the pick of the highest scores; up to 512 of them are then sorted by one
            kernel. With compile=True only.
        books_beside: note what a step did on a stream of its own, during the backward pass.
        side_priority: the priority of the stream that scores if scoring is overlapped. A lower number goes
            first; training has -1.
        algorithms: how many algorithms cuDNN tries for each convolution; 0: all. A process tries each
            convolution only once.
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
                f"`algorithms` is {self.algorithms!r}; give a whole number, or 0 to try all of them."
            )

    @contextlib.contextmanager
    def layers(self, model: nn.Module, *, scoring: bool) -> Iterator[None]:
        """A block in which the layers of a model that scores, or trains, compute in these ways."""
        wanted = PASSES[1:] if scoring else PASSES[2:]
        with as_products(model, self.products in wanted), as_sums(model, self.sums in wanted):
            yield


_COMBINED = {"combo_kernels": True}  # makes one kernel of many small ones, such as casts of weights
# 5 to 10 % less time a step with compile=True (ResNet-18, H200: benchmarks/results/step.md).
FASTER = Tuning(_COMBINED, _COMBINED, products="all")
