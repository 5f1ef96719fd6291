"""A step as one CUDA graph: recorded once, then replayed without work on the host."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator

from rholoss.engine.tuning import ALGORITHMS
from rholoss.errors import RholossError

WARM_UP = 3  # first steps that run eagerly: they compile, tune, and make the optimizer's state


@contextlib.contextmanager
def says_what_to_reduce(what: str) -> Iterator[None]:
    """A block in which running out of the GPU's memory raises an error that advises to reduce `what`."""
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
    """Whether the device ran out of memory. Torch's allocator has an error for that, the driver has none."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).split("\n")[0]


@contextlib.contextmanager
def tuned_convolutions(device: torch.device, algorithms: int = ALGORITHMS) -> Iterator[None]:
    """A block in which cuDNN tries this many algorithms for each convolution and keeps the fastest; 0: all.

    It pays because shapes never change here.
    """
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
    """Runs a function without arguments: the first calls eagerly, later ones as a CUDA graph.

    The first calls run on a side stream, as capture requires. They are real steps: nothing is run twice or
    undone. A function that cannot be captured goes on running eagerly on that stream, with one warning. On
    the CPU it always runs eagerly.

    Args:
        body: the function. All tensors that it reads and writes must stay in place.
        device: where it runs.
        generators: the CUDA generators that it draws from.
        stream: the side stream to use; by default a new one.
        beside: another `Captured` whose stream to share. What that one has warned of is not repeated.
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
        # One stream for all, because autograd remembers on which one it first met a parameter. High
        # priority, so that work on other streams only fills the gaps that a step leaves.
        self.stream: torch.cuda.Stream | None = stream if beside is None else beside.stream
        if self.stream is None and device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = device.type != "cuda"
        self.why_eager = f"{device.type} has no CUDA graphs" if self.eager else ""
        self._calls = 0
        self._failed: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the function once."""
        if self.graph is not None:
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
        # Set the stream here as well, since a capture that fails leaves its own as the current one.
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
            self._failed = graph  # kept, because the allocator still asks for it
            # The generators believe that the capture goes on and would refuse to draw: end it by another.
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
        """Drop the graph, for tensors that it reads have been replaced. The next calls make a new one."""
        self.graph, self._calls = None, 0
