"""The mean of a convolution's result, from its weights and from what it reads on average.

A convolution is linear, so the mean of its result follows from its weights and the mean of its inputs. When
the weights move, the new mean can be computed at once; no pass is needed to measure it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rholoss.engine.fused import FusedConv
from rholoss.errors import RholossError

# The share by which one pass moves the mean of what a layer reads. What it reads depends on the means that
# earlier layers had in that pass. If all means followed at once, each would correct what the earlier ones
# have corrected already, and they would oscillate.
FOLLOWS = 0.15


def taps(conv: nn.Conv2d, image: Tensor) -> list[Tensor]:
    """How often each weight of a kernel reads each pixel: two tables, [height, H] and [width, W].

    Entries are shares of the results. The padding around an image is zero, so it is left out.
    """
    found = []
    for i, size in enumerate(image.shape[-2:]):
        kernel, stride, apart = conv.kernel_size[i], conv.stride[i], conv.dilation[i]
        around = conv.padding[i]
        assert isinstance(around, int)
        results = (size + 2 * around - apart * (kernel - 1) - 1) // stride + 1
        weight, result, place = (
            torch.arange(n, device=image.device) for n in (kernel, results, size)
        )
        read = apart * weight[:, None] + stride * result - around
        found.append((read[:, :, None] == place).float().mean(1))
    return found


def mean_input(image: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """What each weight of a kernel is multiplied by, on average over all places: [in, height, width].

    `image` is the mean image of a batch, [in, H, W]; `down` and `across` are from `taps`. Written as products
    and sums rather than as matrix products, because compiled code fuses those.
    """
    lines = (image[:, :, None] * across).sum(3)
    return (lines[:, None] * down[:, :, None]).sum(2)


def follow(images: list[Tensor], by: list[list[Tensor]], means: Tensor) -> None:
    """Move `means`, the flat mean inputs of all convolutions, towards those of a pass; NaN is replaced."""
    read = [mean_input(image, *pair).flatten() for image, pair in zip(images, by, strict=True)]
    found = torch.cat(read)
    means.copy_(torch.where(means.isnan(), found, means.lerp(found, FOLLOWS)))


def mean_result(weight: Tensor, mean: Tensor) -> Tensor:
    """The mean result [out] of a convolution, without its bias, from its mean input; also for groups."""
    mean = mean.unflatten(0, (-1, weight.shape[1]))
    return (weight.unflatten(0, (len(mean), -1)) * mean[:, None]).sum((2, 3, 4)).flatten()


class MeanInputs:
    """What the convolutions of a folded copy read, on average over the first `rows` rows of late passes.

    `pairs` are those of the copy. A convolution whose BatchNorm layer is frozen, in eval mode inside a
    `model` in train mode, is not followed: that layer keeps its means.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[FusedConv, nn.Conv2d, nn.BatchNorm2d]],
        model: nn.Module,
        rows: int,
        wrap: Callable[..., Any],
    ) -> None:
        self._read = {f: conv for f, conv, norm in pairs if norm.training or not model.training}
        if not self._read:
            raise RholossError(
                f"`means` is {rows}, but all BatchNorm layers that `Folded` found are frozen (in eval "
                "mode), so that their means are known; leave `means` out."
            )
        self._follow = wrap(follow)
        self._taps: list[list[Tensor]] = []  # made for images of the size that is seen first
        shapes = {fused: (conv.in_channels, *conv.kernel_size) for fused, conv, _ in pairs}
        sizes = [math.prod(shapes[fused]) for fused in self._read]
        where: dict[str, Any] = {"dtype": torch.float32, "device": pairs[0][1].weight.device}
        self.flat = torch.full((sum(sizes),), torch.nan, **where)  # of all that are followed
        own = dict(zip(self._read, self.flat.split(sizes), strict=True))
        # The mean of each convolution, a view of `flat`; NaN where it is not followed.
        self.places = [
            own[fused].view(shape) if fused in own else torch.full(shape, torch.nan, **where)
            for fused, shape in shapes.items()
        ]
        for fused in self._read:
            fused.rows = rows

    def note(self) -> None:
        """Move the means towards what the convolutions have just read."""
        images = [fused.read for fused in self._read if fused.read is not None]
        if not self._taps:
            convs = self._read.values()
            self._taps = [taps(conv, image) for conv, image in zip(convs, images, strict=True)]
        self._follow(images, self._taps, self.flat)
        for fused in self._read:
            fused.read = None  # frees its memory
