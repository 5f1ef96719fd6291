"""A step as one CUDA graph: recorded once, replayed without the host."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator

from rholoss.engine.tuning import ALGORITHMS
from rholoss.errors import RholossError

WARM_UP = 3  # steps that run eagerly first: they compile, tune and make the optimizer's state


@contextlib.contextmanager
def says_what_to_reduce(what: str) -> Iterator[None]:
    """Make running out of memory an error that says what to do: in the first steps and in capture."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise RholossError(
            f"The GPU's memory does not hold this. Reduce {what}, use precision='bf16', or keep the data "
            f"on the host (`rholoss.engine.Streamed`). ({str(error).splitlines()[0]})"
        ) from error


def out_of_memory(error: RuntimeError) -> bool:
    """Whether memory is what was missing: torch's allocator has an error for it, the driver has words."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).split("\n")[0]


@contextlib.contextmanager
def tuned_convolutions(device: torch.device, algorithms: int = ALGORITHMS) -> Iterator[None]:
    """Let cuDNN try its algorithms, so many of them or, with 0, all: shapes never change here."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, algorithms
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


class Captured:
    """Runs a function of no arguments, whose tensors stay in place: eagerly at first, then as a graph.

    The first calls on a CUDA device run eagerly on a side stream, as capture asks for. They are real
    steps: nothing is run twice or put back. A function that cannot be captured runs on eagerly, on that
    stream, and the reason is told once: not again where one `beside` it, whose stream it shares, has told
    it. On the CPU it always runs eagerly.
    """

    def __init__(
        self,
        body: Callable[[], None],
        device: torch.device,
        generators: Sequence[Generator] = (),
        stream: torch.cuda.Stream | None = None,
        beside: Captured | None = None,
    ) -> None:
        self.body, self.device, self.generators = body, device, generators
        self._told: set[str] = set() if beside is None else beside._told
        # One stream for all, since autograd remembers on which one it met a parameter. High priority:
        # what a step puts on a side stream fills the gaps and does not hold it up.
        self.stream: torch.cuda.Stream | None = stream if beside is None else beside.stream
        if self.stream is None and device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = device.type != "cuda"
        self.why_eager = f"{device.type} has no CUDA graphs" if self.eager else ""
        self._calls = 0
        self._failed: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """One step."""
        if self.graph is not None:  # it has all its memory already
            self.graph.replay()
        elif self.stream is None:
            self.body()
        elif self.eager or self._calls < WARM_UP:
            self._calls += 1
            self._on_side_stream(self.body)
        else:
            self._capture()
            self()

    def _on_side_stream(self, body: Callable[[], None]) -> None:
        assert self.stream is not None
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            body()
        current.wait_stream(self.stream)

    def _record(self, graph: torch.cuda.CUDAGraph, body: Callable[[], Any]) -> None:
        for generator in self.generators:
            graph.register_generator_state(generator)
        # The stream is set here as well: a capture that fails leaves its own as the current one.
        with torch.cuda.stream(self.stream), torch.cuda.graph(graph, stream=self.stream):
            body()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            self._record(graph, self.body)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            torch.cuda.synchronize(self.device)
            self.eager, self.why_eager = True, str(error).splitlines()[0]
            self._failed = graph  # the allocator goes on asking it which streams are its own
            # Generators take themselves to be in that capture still, and would refuse to draw.
            self._record(torch.cuda.CUDAGraph(), lambda: torch.zeros(1, device=self.device))
            if self.why_eager not in self._told:
                self._told.add(self.why_eager)
                warnings.warn(
                    f"The step cannot be captured as a CUDA graph and runs eagerly: {self.why_eager}",
                    stacklevel=4,
                )
        else:
            self.graph = graph

    def forget(self) -> None:
        """Drop the graph: tensors that it reads have been replaced. The next calls make a new one."""
        self.graph, self._calls = None, 0
