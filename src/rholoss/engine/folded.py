"""Scoring with BatchNorm folded into the convolutions.

With `batch_norm='eval'` a BatchNorm layer is a scale and a shift of each channel. Multiplied into the weights
of the convolution before it, and with the ReLU and the residual sum done by cuDNN while a convolution
writes its result, a scoring pass is little more than its convolutions. Weights are folded anew each step.

Running statistics are a mean over about the last ten passes. While weights move fast they belong to a model
that no longer exists, and the scores tell as much about that as about the points. What the last passes added
to them can be worked out from how they moved, and is given more weight in separate statistics
(`Folded(momentum=0.8)`).

Both are statistics of the rows that were trained on, and these differ from the candidates, because they were
selected. The paper scores with statistics of the candidates: a pass over a few of them measures these
(`Folded(rows=32)`). It is mostly the means that are wrong. A mean follows from the weights and from what the
convolution reads on average, which hardly changes: it is taken from earlier candidates
(`Folded(momentum=0.8, means=64)`).
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rholoss.engine.cheaper import Cheaper, Measured
from rholoss.engine.copies import Copies
from rholoss.engine.fused import FusedConv, patches
from rholoss.engine.means import MeanInputs, mean_result
from rholoss.engine.recent import RecentStatistics
from rholoss.engine.replica import Replica
from rholoss.engine.resident import Examples
from rholoss.engine.traced import foldable, fuse_relus, is_leaf, traced
from rholoss.errors import RholossError
from rholoss.losses import output_of
from rholoss.modes import own_autocast, submodules

if TYPE_CHECKING:
    from rholoss.engine.step import DeviceStep

RECENT = 0.8  # a momentum for statistics of little more than the last pass


def fold(
    weights: list[Tensor],
    norm: Tensor,
    giver: Tensor,
    low: list[Tensor],
    bias: Tensor,
    inputs: list[Tensor],
) -> None:
    """Write weights and biases that contain the scale and shift of BatchNorm into `low` and `bias`.

    Weights come as lists: compiled, that is a single pass over them. `norm` has six rows by channel, as
    unpacked below. `giver` is the channel whose bias each channel adds to its own, -1 for none. `inputs` are
    what the convolutions read on average, NaN if unknown; empty without `means`.
    """
    weight, shift, of_conv, mean, variance, eps = norm
    if inputs:
        pairs = zip(weights, inputs, strict=True)
        found = of_conv + torch.cat([mean_result(*pair) for pair in pairs])
        mean = torch.where(found.isnan(), mean, found)
    scale = weight * torch.rsqrt(variance + eps)
    parts = [part[:, None, None, None] for part in scale.split([len(w) for w in weights])]
    torch._foreach_copy_(low, torch._foreach_mul(weights, parts))
    own = (shift + (of_conv - mean) * scale).to(bias.dtype)
    bias.copy_(own + torch.where(giver < 0, 0, own.index_select(0, giver.clamp(min=0))))


class FoldedCopy:
    """A copy of a model for scoring with BatchNorm folded in; refreshed from the model before each pass.

    `momentum` and `means` are those of `Folded`; `wrap` compiles a part, if that is wanted. Raises if the
    model cannot be traced or folded.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        momentum: float | None = None,
        means: int | None = None,
        wrap: Callable[..., Any] = lambda part: part,
    ) -> None:
        graph, modules = traced(model)
        self.dtype, self._wrap, self._fold = dtype, wrap, wrap(fold)
        self._weights, self._statistics = Copies(), Copies()
        self.pairs: list[tuple[FusedConv, nn.Conv2d, nn.BatchNorm2d]] = []
        rest = {name: copy.deepcopy(module) for name, module in modules.items() if is_leaf(module)}
        self._fold_norms(graph, modules, rest)
        if not self.pairs:
            raise RholossError(
                f"`Folded` found no BatchNorm2d after a Conv2d in {type(model).__name__}; leave `scoring` "
                "out."
            )
        fuse_relus(graph, rest)
        graph.lint()
        self.model = fx.GraphModule(rest, graph).eval()
        self._connect(modules, rest, momentum)
        self._inputs = None if means is None else MeanInputs(self.pairs, model, means, wrap)
        self._places = [] if self._inputs is None else self._inputs.places

    def _fold_norms(
        self, graph: fx.Graph, modules: dict[str, nn.Module], rest: dict[str, nn.Module]
    ) -> None:
        called = collections.Counter(n.target for n in graph.nodes if n.op == "call_module")
        for node in list(graph.nodes):
            conv_node = node.args[0] if node.op == "call_module" and node.args else None
            norm = modules.get(str(node.target))
            if not isinstance(norm, nn.BatchNorm2d) or not isinstance(conv_node, fx.Node):
                continue
            conv = modules.get(str(conv_node.target)) if conv_node.op == "call_module" else None
            if not foldable(conv, norm, conv_node) or called[conv_node.target] > 1:
                continue
            assert isinstance(conv, nn.Conv2d)
            fused = FusedConv(conv, self._wrap(patches))
            self.pairs.append((fused, conv, norm))
            rest[str(conv_node.target)] = fused
            node.replace_all_uses_with(conv_node)
            graph.erase_node(node)

    def _connect(
        self,
        modules: dict[str, nn.Module],
        rest: dict[str, nn.Module],
        momentum: float | None,
    ) -> None:
        """Set up what is copied where. All biases lie in one tensor by channel, and so do all BatchNorms."""
        device = self.pairs[0][1].weight.device
        convs = [fused for fused, _, _ in self.pairs]
        outs = [fused.shape[0] for fused in convs]
        self._bias = torch.zeros(sum(outs), device=device, dtype=self.dtype)
        self._norm = torch.zeros(6, sum(outs), dtype=torch.float32, device=device)  # see `fold`
        self._norm[0] = 1.0  # for layers without weights
        self._giver = torch.full((sum(outs),), -1, device=device)
        self._recent: RecentStatistics | None = None
        if momentum is not None:
            norms, copies = [norm for _, _, norm in self.pairs], self._statistics
            self._recent = RecentStatistics(norms, self._norm[3:5], momentum, copies, self._wrap)
        channels = dict(zip(convs, torch.arange(sum(outs)).split(outs), strict=True))
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        parts = zip(self.pairs, self._bias.split(outs), self._norm.split(outs, dim=1), strict=True)
        for (fused, conv, norm), bias, rows in parts:
            fused.weight = torch.zeros(fused.shape, device=device, dtype=self.dtype)
            fused.bias = bias
            self._sources.append(conv.weight.detach())
            self._targets.append(fused.place())
            if fused.gives_bias_to is not None:
                self._giver[channels[fused.gives_bias_to]] = channels[fused].to(device)
            self._weights.add(norm.weight, rows[0])
            self._weights.add(norm.bias, rows[1])
            self._weights.add(conv.bias, rows[2])
            if self._recent is None:
                self._statistics.add(norm.running_mean, rows[3])
                self._statistics.add(norm.running_var, rows[4])
            rows[5] = norm.eps
        for name, layer in rest.items():
            if isinstance(layer, FusedConv):
                continue
            is_norm = isinstance(layer, _BatchNorm)
            layer.to(torch.float32 if is_norm else self.dtype).requires_grad_(False)
            for own, parameter in zip(layer.parameters(), modules[name].parameters(), strict=True):
                self._weights.add(parameter, own)
            for buffer, original in zip(layer.buffers(), modules[name].buffers(), strict=True):
                self._statistics.add(original, buffer)

    def note_inputs(self) -> None:
        """Update the mean inputs by what the convolutions have just read."""
        if self._inputs is not None:
            self._inputs.note()

    def refresh_statistics(self) -> None:
        """Copy the model's running statistics, or move its own by what the last passes added to these."""
        self._statistics.copy()
        if self._recent is not None:
            self._recent.move()

    def own_state(self) -> dict[str, Tensor]:
        """The tensors that cannot be worked out from the model again."""
        state = {} if self._inputs is None else {"inputs": self._inputs.flat}
        return state if self._recent is None else {**self._recent.state(), **state}

    def refresh_weights(self) -> None:
        """Copy the model's weights, and fold BatchNorm into them."""
        self._weights.copy()
        with torch.no_grad():
            into = (self._targets, self._bias)
            self._fold(self._sources, self._norm, self._giver, *into, self._places)

    def move_statistics(self) -> None:
        """Do nothing: scoring in eval mode moves no statistics."""


class Folded(Cheaper):
    """Score all candidates with BatchNorm folded into the convolutions, which is faster.

    For models that `torch.fx` can trace. With `batch_norm='eval'` and no arguments the scores are those of
    that mode, up to rounding.

    Args:
        momentum: keep separate statistics for scoring, which each training pass moves by this share, in
            (0, 1]. The model's running statistics (usual momentum 0.1) lag behind the weights. None uses
            these. Needs `batch_norm='eval'`.
        rows: forward this many of the candidates first, to measure the statistics of each layer on them; all
            are then scored with these. Needs `batch_norm='train'` or `'batch'`; not with the others.
        means: compute the means of BatchNorm from the present weights and from what the convolutions read, on
            average, for this many of the last candidates. They are close to the means that the candidates
            themselves would have, at little cost. Needs `batch_norm='eval'`.
    """

    def __init__(
        self, momentum: float | None = None, *, rows: int | None = None, means: int | None = None
    ) -> None:
        if momentum is not None and not 0 < momentum <= 1:
            raise RholossError(
                f"`momentum` must be in (0, 1], or None for the model's own, but is {momentum}."
            )
        if rows is not None and (rows < 1 or momentum is not None):
            raise RholossError(
                f"`rows` is {rows} and `momentum` {momentum}: statistics come from at least one candidate "
                "(`rows`), or from earlier batches (`momentum`); give one of the two."
            )
        if means is not None and (means < 1 or rows is not None):
            raise RholossError(
                f"`means` is {means} and `rows` {rows}: give one of the two, at least 1. `means` candidates "
                "give the means, `rows` candidates are forwarded first to measure all statistics."
            )
        self.momentum, self.rows, self.means = momentum, rows, means
        self.copy: FoldedCopy | None = None
        self.reader: Replica | None = None  # with `rows`: measures the statistics of candidates

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that it was made with."""
        return {"momentum": self.momentum, "rows": self.rows, "means": self.means}

    def attach(self, step: DeviceStep) -> None:
        """Trace the model, and make the folded copy."""
        mode = step.scorer.batch_norm
        if self.rows is None and mode != "eval":
            raise RholossError(
                f"`Folded()` needs batch_norm='eval', but it is {mode!r}: statistics of the candidates "
                "cannot be folded before they are known. `Folded(rows=32)` finds them first."
            )
        if self.rows is not None and mode == "eval":
            raise RholossError(
                f"`Folded(rows={self.rows})` scores with statistics of the candidates, but batch_norm is "
                "'eval'; leave `rows` out, or take batch_norm='train'."
            )
        if step.draws > 1 or step.scorer.dropout:
            raise RholossError(
                "`Folded` scores in eval mode, without dropout; leave `scoring` out for Monte-Carlo passes."
            )
        if self.rows is not None:
            self.reader = Replica(step.copied, step.low)
            for module in submodules(self.reader.model):
                if isinstance(module, _BatchNorm):
                    module.momentum = 1.0  # so that a pass leaves the statistics of its rows
        model = step.copied if self.reader is None else self.reader.model
        wrap = functools.partial(step.wrap, **step.tuning.scoring)  # joins many small kernels
        self.copy = FoldedCopy(model, step.low, self.momentum, self.means, wrap)

    def passes(self, candidates: int, k: int) -> tuple[int, int]:
        """All candidates, and `rows` of them twice."""
        return candidates, candidates + min(self.rows or 0, candidates)

    def replica(self, step: DeviceStep) -> Any:
        """What scores beside training if scoring is overlapped."""
        assert self.copy is not None
        return self.copy if self.reader is None else _Read(self.copy.model, self.reader)

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """Measure all candidates by the folded copy."""
        assert self.copy is not None
        alone = model is not self.copy.model  # not overlapped, so it must be refreshed here
        if self.reader is not None:
            self._read(step, self.reader, candidates, generator, alone)
        if alone or self.reader is not None:
            self.copy.refresh_statistics()
            self.copy.refresh_weights()
        x = candidates.x.to(self.copy.dtype)
        with torch.no_grad():
            with own_autocast(x.device, step.dtype):
                output = output_of(self.copy.model(x))
            self.copy.note_inputs()
            return step.quantities(output, candidates.y), None

    def _read(
        self,
        step: DeviceStep,
        reader: Replica,
        candidates: Examples,
        generator: Generator,
        alone: bool,
    ) -> None:
        """Measure the statistics of the first `rows` candidates in the reader's BatchNorm layers."""
        if alone:
            reader.refresh_statistics()  # frozen layers keep these
            reader.refresh_weights()
        x, y = candidates.x[: self.rows], candidates.y[: self.rows]
        step.measure(reader.model, x, y, generator, batch_norm="train")
        if alone and step.scorer.batch_norm == "train":
            reader.move_statistics()

    def moved(self) -> list[Tensor]:
        """What the convolutions read on average, with `means`."""
        return [self.copy.own_state()["inputs"]] if self.copy is not None and self.means else []

    def state_dict(self) -> dict[str, Any] | None:
        """Its own statistics and mean inputs, if it has any."""
        state = self.copy.own_state() if self.copy is not None else {}
        return {name: tensor.cpu().clone() for name, tensor in state.items()} or None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved ones."""
        assert self.copy is not None
        for name, tensor in self.copy.own_state().items():
            tensor.copy_(state[name])


class _Read:
    """A folded copy with `rows`, as overlapped scoring sees it: what is refreshed before is the reader."""

    def __init__(self, model: nn.Module, reader: Replica) -> None:
        self.model, self.refresh_weights = model, reader.refresh_weights
        self.move_statistics = reader.move_statistics
        self.refresh_statistics = reader.refresh_statistics
