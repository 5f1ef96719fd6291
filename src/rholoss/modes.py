"""What scoring changes temporarily and restores: modes, random state, buffers, autocast."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from rholoss.errors import RholossError

BATCH_NORM_MODES = ("train", "batch", "eval")
PRECISIONS = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def check_materialised(model: nn.Module, argument: str, *, parameters: bool = True) -> None:
    """Raise if a buffer (or, with `parameters`, a parameter) has no shape yet: that of a lazy layer."""
    named = [*model.named_buffers(), *(model.named_parameters() if parameters else ())]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise RholossError(
            f"`{argument}`: the {type(model).__name__} has lazy layers that have not seen any data, so that "
            f"'{lazy[0]}' has no shape yet. Call the model once on a batch before it is used here."
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without the wrappers of DistributedDataParallel and `torch.compile`."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # the wrapper of `torch.compile`
            model = model.get_submodule("_orig_mod")
        else:
            return model


def scored_module(model: nn.Module) -> nn.Module:
    """What to call for scoring: the model without DistributedDataParallel, which would broadcast buffers.

    A `torch.compile` inside DDP is kept. One around DDP is dropped, since it would call DDP again.
    """
    while True:
        inner = model.get_submodule("_orig_mod") if "_orig_mod" in model._modules else model
        if not isinstance(inner, DistributedDataParallel):
            return model
        model = inner.module


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that FSDP2 keeps for a backward pass, which scoring does not have.

    Otherwise the next step would use them although the optimizer has changed the shards since.
    """
    for module in _sharded(model):
        module.reshard()


def agreed_passes(model: nn.Module, passes: int, device: torch.device) -> int:
    """How many passes to make: with FSDP2, where ranks gather weights together, the most of any rank."""
    if not _sharded(model):
        return passes
    most = torch.tensor(passes, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def _sharded(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import; in use only if it is there
    if fsdp is None:
        return []
    return [module for module in submodules(model) if isinstance(module, fsdp.FSDPModule)]


def submodules(model: nn.Module) -> list[nn.Module]:
    """The model and all modules inside it; one that is in two places comes twice.

    Used in place of `model.modules()`, which takes ten times as long, because this runs at every step.
    """
    found = [model]
    for module in found:  # the list grows during the loop
        if module._modules:
            found += [child for child in module._modules.values() if child is not None]
            if len(found) > 1_000_000:  # a module that is inside itself
                return list(model.modules())
    return found


@contextlib.contextmanager
def scoring_mode(model: nn.Module, *, batch_norm: str, dropout: bool) -> Iterator[None]:
    """Eval mode, apart from BatchNorm as `batch_norm` says and dropout if asked for.

    'train': statistics of the candidates, running statistics move (the paper). 'batch': statistics of
    the candidates, running statistics kept. 'eval': running statistics. A BatchNorm layer that is
    frozen (in eval mode inside a model in train mode) stays frozen. Flags go through `__dict__`
    because `Module.__setattr__` costs more than all else that is done here.
    """
    found, scripted = [], []
    for module in submodules(model):
        # The wrapper of `torch.compile` has no flag of its own; TorchScript keeps its flag elsewhere.
        if "training" in module.__dict__:
            found.append(module)
        elif isinstance(module, torch.jit.ScriptModule):
            scripted.append((module, module.training, "BatchNorm" in module.original_name))
    modules = [module.__dict__ for module in found]
    normalises = [isinstance(module, _BatchNorm) for module in found]
    flags = [state["training"] for state in modules]
    tracked = []
    frozen_apart = model.training
    try:
        for state, is_norm, trains in zip(modules, normalises, flags, strict=True):
            trains = trains or not frozen_apart
            state["training"] = trains and (batch_norm != "eval" if is_norm else dropout)
            if is_norm and batch_norm == "batch" and state["training"]:
                tracked.append((state, state["track_running_stats"]))
                state["track_running_stats"] = False  # so that no buffer is passed to the kernel
        # Scripted BatchNorm cannot be kept from moving its statistics, so it always uses running ones.
        for module, trains, is_norm in scripted:
            module.training = dropout and not is_norm and (trains or not frozen_apart)
        yield
    finally:
        for state, trains in zip(modules, flags, strict=True):
            state["training"] = trains
        for module, trains, _ in scripted:
            module.training = trains
        # In reverse: of a module that came twice the first note has the original value.
        for state, tracks in reversed(tracked):
            state["track_running_stats"] = tracks


@contextlib.contextmanager
def kept_random_state(device: torch.device, seed: int | None) -> Iterator[None]:
    """Restore the random state afterwards; start from `seed` inside, if there is one."""
    state = torch.default_generator.get_state()
    cuda = None
    if device.type == "cuda":
        cuda = torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ]
    # While its seed does not change, the offset of a CUDA generator says it all, and is cheaper to save.
    cuda_state: Any = None
    if cuda is not None:
        cuda_state = cuda.get_offset() if seed is None else cuda.get_state()
    try:
        if seed is not None:
            for generator in (torch.default_generator, cuda):
                if generator is not None:
                    generator.manual_seed(seed)
        yield
    finally:
        torch.default_generator.set_state(state)
        if cuda is not None and seed is None:
            cuda.set_offset(cuda_state)
        elif cuda is not None:
            cuda.set_state(cuda_state)


class KeptBuffer:
    """A copy of a buffer, to see whether it changed (in place, or by being replaced) and to restore it."""

    def __init__(self, model: nn.Module, name: str) -> None:
        path, _, self.leaf = name.rpartition(".")
        # One `getattr` after the other, because TorchScript has no `get_submodule`.
        module = functools.reduce(getattr, filter(None, path.split(".")), model)
        self.name, self.owner = name, module._buffers
        self.buffer: Tensor = getattr(module, self.leaf)
        self.copy = self.buffer.clone()

    def moved(self) -> bool:
        """Whether it has changed. Waits for the device."""
        same = self.leaf in self.owner and self.owner[self.leaf] is self.buffer
        return not same or not torch.equal(self.buffer, self.copy)

    def restore(self) -> None:
        """Put it back as it was."""
        with torch.no_grad():
            self.buffer.copy_(self.copy)
        self.owner[self.leaf] = self.buffer


@contextlib.contextmanager
def kept_buffers(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Restore these buffers afterwards."""
    try:
        kept = [KeptBuffer(model, name) for name in names]
    except AttributeError as error:
        raise RholossError(
            f"The model is not the one of the first call, whose buffers were looked at ({error}). Make a "
            "selector (or a `Scorer`) for each model."
        ) from None
    try:
        yield
    finally:
        for buffer in kept:
            buffer.restore()


def own_autocast(
    device: torch.device, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    """An autocast block without a weight cache: weights cast here must not reach the training step.

    A cached cast made under no_grad has no gradient, and a later forward pass in the same outer
    autocast block would use it and lose the gradients of the weights (pytorch #65766).
    """
    around = torch.is_autocast_enabled(device.type)
    enabled = around if dtype is None else dtype != torch.float32
    if not enabled and not around:
        return contextlib.nullcontext()
    chosen = torch.get_autocast_dtype(device.type) if dtype in (None, torch.float32) else dtype
    return torch.autocast(device.type, dtype=chosen, enabled=enabled, cache_enabled=False)
