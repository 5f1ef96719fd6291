"""A model's weights on their way to the workers: parameters in bfloat16, buffers as they are."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rholoss import data, modes

PIECE = 1 << 20  # bytes of one message
ALIGNED = 16  # bytes can be read as another type only from a multiple of its size on


@dataclass(frozen=True)
class Snapshot:
    """The weights of one moment, as bytes on the host."""

    step: int  # optimizer steps that were done
    packed: Tensor
    copied: Any = None  # event of the device, if the copy may still be under way

    def bytes(self) -> memoryview:
        """Waits for the copy; not to be called where the device must not be waited for."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.packed.numpy().data

    def pieces(self) -> list[tuple[dict[str, Any], memoryview]]:
        """Messages, none so long that what is urgent would have to wait behind it."""
        whole = self.bytes()
        starts = range(0, max(len(whole), 1), PIECE)
        return [
            (
                {"kind": "weights", "step": self.step, "last": start == starts[-1]},
                whole[start : start + PIECE],
            )
            for start in starts
        ]


def layout(model: nn.Module) -> str:
    """A short text that differs where the bytes of one model would not fit another."""
    named = [*model.named_parameters(), *model.named_buffers()]
    listed = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    return f"{len(named)} tensors, {zlib.crc32(' '.join(listed).encode()):08x}"


def _places(model: nn.Module) -> list[tuple[Tensor, torch.dtype, slice]]:
    """Each tensor with the type that it travels in and its place among the bytes."""
    found: list[tuple[Tensor, torch.dtype, slice]] = []
    tensors = [
        (p, torch.bfloat16 if p.is_floating_point() else p.dtype) for p in model.parameters()
    ]
    start = 0
    for tensor, to in [*tensors, *((buffer, buffer.dtype) for buffer in model.buffers())]:
        stop = start + tensor.numel() * to.itemsize
        found.append((tensor.detach(), to, slice(start, stop)))
        start = -(-stop // ALIGNED) * ALIGNED
    return found


def num_bytes(model: nn.Module) -> int:
    """How much goes to each worker at a time."""
    places = _places(model)
    return places[-1][2].stop if places else 0


def pack(model: nn.Module, step: int) -> Snapshot:
    """Copy the weights. Does not wait for the device: `Snapshot.bytes` does, in a thread of its own."""
    device = data.device_of(model)
    packed = torch.empty(num_bytes(model), dtype=torch.uint8, device=device)
    for tensor, to, place in _places(model):
        packed[place].view(to).view(tensor.shape).copy_(tensor)
    if device.type != "cuda":
        return Snapshot(step, packed.cpu())
    host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))  # which need not be the one that is current
    return Snapshot(step, host, copied)


def unpack(model: nn.Module, body: bytearray) -> None:
    """Put weights in the place of the model's own."""
    if not body:
        return
    packed = torch.frombuffer(body, dtype=torch.uint8).to(data.device_of(model))
    with torch.no_grad():
        for tensor, to, place in _places(model):
            tensor.copy_(packed[place].view(to).view(tensor.shape))


def _moving(model: nn.Module) -> list[_BatchNorm]:
    found = [module for module in modes.submodules(model) if isinstance(module, _BatchNorm)]
    return [norm for norm in found if norm.track_running_stats and norm.momentum is not None]


class CandidateStatistics:
    """BatchNorm's statistics of the candidates, which workers see and trainers want.

    With `batch_norm='train'` scoring moves the running statistics of the model. A worker's layers get
    momentum 1, so that after a forward pass they hold what was seen; the trainer does the moving.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = _moving(model)
        self._momenta = [float(norm.momentum or 0.0) for norm in self._norms]

    def keep_only_last(self) -> None:
        """On a worker: from now on running statistics are those of the last forward pass."""
        for norm in self._norms:
            norm.momentum = 1.0

    def read(self) -> list[Tensor]:
        """What the last forward pass saw."""
        found = [(norm.running_mean, norm.running_var) for norm in self._norms]
        return [tensor.cpu() for pair in found for tensor in pair if tensor is not None]

    def move(self, seen: list[Tensor]) -> None:
        """On a trainer: move the running statistics as scoring here would have done."""
        with torch.no_grad():
            for norm, momentum, mean, variance in zip(
                self._norms, self._momenta, seen[::2], seen[1::2], strict=True
            ):
                for own, new in ((norm.running_mean, mean), (norm.running_var, variance)):
                    if own is not None and norm.training:  # not if it is frozen
                        own.lerp_(new.to(own, non_blocking=True), momentum)
                if norm.num_batches_tracked is not None and norm.training:
                    norm.num_batches_tracked += 1
