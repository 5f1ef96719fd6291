"""The graph of a model as `torch.fx` traces it, and which of its layers can be folded and fused."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from rholoss.engine.fused import FusedConv
from rholoss.errors import RholossError
from rholoss.modes import scoring_mode


def traced(model: nn.Module) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """The graph of a scoring pass, and the modules by name. Raises `RholossError` if the model has none.

    It is traced in eval mode, because branches on `self.training` are decided once, while tracing.
    """
    try:
        with scoring_mode(model, batch_norm="eval", dropout=False):
            found = fx.symbolic_trace(model)
    except Exception as error:  # whatever the model's own code raises under tracing
        raise RholossError(
            f"`Folded` cannot trace {type(model).__name__} ({type(error).__name__}: {error}); leave "
            "`scoring` out, or write its forward without branches on values."
        ) from error
    modules = dict(found.named_modules())
    for node in found.graph.nodes:
        if node.op == "get_attr":
            raise RholossError(
                f"`Folded` does not know how to copy `{node.target}`, a tensor outside a layer; leave "
                "`scoring` out."
            )
        if node.op == "call_module":
            _check_layer(node.target, modules[node.target])
    return found.graph, modules


def _check_layer(name: str, layer: nn.Module) -> None:
    """Raise if a layer's weights are not plain parameters: computed weights would not be refreshed."""
    own = layer._parameters.keys() | layer._buffers.keys()
    tensors = [n for n in ("weight", "bias") if isinstance(getattr(layer, n, None), Tensor)]
    if not is_leaf(layer) or not own.issuperset(tensors):
        raise RholossError(
            f"`Folded` does not know how to copy `{name}`, a {type(layer).__name__} whose weights are not "
            "plain parameters of its own (parametrized, or inside of it); leave `scoring` out."
        )


def is_leaf(module: nn.Module) -> bool:
    """Whether the module has no other module inside."""
    return not any(True for _ in module.children())


def foldable(conv: nn.Module | None, norm: nn.BatchNorm2d, node: fx.Node) -> bool:
    """Whether a BatchNorm layer can be folded into what comes before it, a convolution at this node."""
    return (
        isinstance(conv, nn.Conv2d)
        and len(node.users) == 1
        and norm.running_var is not None
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
    )


def fuse_relus(graph: fx.Graph, rest: dict[str, nn.Module]) -> None:
    """Make one node of conv -> relu, and of conv + z -> relu, where the convolution is a folded one."""
    for node in list(graph.nodes):
        if not _is_relu(node, rest):
            continue
        before = node.args[0]
        conv, *z = _terms(before, rest)
        if not _is_free(conv, rest) or len(before.users) > 1:
            continue
        module = rest[str(conv.target)]
        assert isinstance(module, FusedConv)
        module.relu = True
        if z and _is_free(z[0], rest):
            object.__setattr__(rest[str(z[0].target)], "gives_bias_to", module)  # not a submodule
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_module(str(conv.target), (conv.args[0], *z)))
        for dead in dict.fromkeys([node, before, conv]):
            graph.erase_node(dead)


def _terms(node: Any, rest: dict[str, nn.Module]) -> list[Any]:
    """The two terms of a sum of tensors, with a folded convolution first; for other nodes the node."""
    is_sum = isinstance(node, fx.Node) and node.target in (operator.add, operator.iadd, torch.add)
    if not is_sum or node.kwargs or not all(isinstance(term, fx.Node) for term in node.args):
        return [node]
    return sorted(node.args, key=lambda term: not _is_free(term, rest))


def _is_free(node: Any, rest: dict[str, nn.Module]) -> bool:
    """Whether this is a folded convolution without a ReLU yet, whose result is read in one place only."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.users) != 1:
        return False
    module = rest.get(str(node.target))
    return isinstance(module, FusedConv) and not module.relu


def _is_relu(node: fx.Node, rest: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(rest.get(str(node.target)), nn.ReLU)
    if node.op == "call_function":
        return node.target in (F.relu, torch.relu)
    return node.op == "call_method" and node.target in ("relu", "relu_")
