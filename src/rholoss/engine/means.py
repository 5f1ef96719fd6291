"""The mean of a convolution's result, from its weights and from what it reads on average.

A convolution is linear: as soon as its weights move, so does the mean of its results, by as much as the mean
of its inputs tells. No pass is needed to know it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# How far one pass moves the mean of what is read. What a layer reads hangs on the means that layers before it
# had in that pass: means that follow at once correct what has been corrected already, and swing.
FOLLOWS = 0.15


def taps(conv: nn.Conv2d, image: Tensor) -> list[Tensor]:
    """How often each weight of a kernel reads each place of an image, down [height, H] and across [width, W].

    Shares of the results: what is read around the image is zero, and so is not there.
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
    """[in, height, width] of the kernel: what each weight is multiplied by, on average over places.

    `image` is the mean of the rows, [in, H, W].

    As products and sums, which are fused where this is compiled, and not as products of matrices.
    """
    lines = (image[:, :, None] * across).sum(3)
    return (lines[:, None] * down[:, :, None]).sum(2)


def follow(images: list[Tensor], by: list[list[Tensor]], means: Tensor) -> None:
    """Move the mean inputs of convolutions, laid flat, towards those of a pass; from NaN all the way."""
    read = [mean_input(image, *pair).flatten() for image, pair in zip(images, by, strict=True)]
    found = torch.cat(read)
    means.copy_(torch.where(means.isnan(), found, means.lerp(found, FOLLOWS)))


def mean_result(weight: Tensor, mean: Tensor) -> Tensor:
    """[out]: the mean result of a convolution with this mean input, without its bias; in groups or not."""
    mean = mean.unflatten(0, (-1, weight.shape[1]))
    return (weight.unflatten(0, (len(mean), -1)) * mean[:, None]).sum((2, 3, 4)).flatten()
