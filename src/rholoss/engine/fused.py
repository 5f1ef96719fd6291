"""A convolution, its bias, a residual sum and a ReLU in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 8  # elements: what tensor cores want a row to be a multiple of


class FusedConv(nn.Module):
    """A convolution with a bias, to which `z` may be added, and a ReLU if asked for.

    If `z` is itself such a convolution that nobody else reads, its bias is added by this one: a bias
    alone would cost a pass over its result. A convolution of few channels, as that of the pixels, is slow
    in cuDNN and is done as a matrix product here.

    `weight` is set by whoever makes it: [out, height, width, in] for cuDNN, with the channels next to each
    other; [out, columns] for a matrix product.
    """

    weight: Tensor
    bias: Tensor
    gives_bias_to: FusedConv | None = None

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        assert not isinstance(conv.padding, str)
        self.relu, self.groups = False, conv.groups
        self.stride, self.padding, self.dilation = conv.stride, conv.padding, conv.dilation
        out, inside, *self.kernel = conv.weight.shape
        self.inside = inside
        few = inside < ALIGNED and self.groups == 1 and set(self.dilation) == {1}
        one = inside * self.kernel[0] * self.kernel[1]
        self.columns = one + -one % ALIGNED if few else 0
        self.shape = (out, self.columns) if few else (out, *self.kernel, inside)
        self.patches: Callable[..., Tensor] = patches

    def place(self, flat: Tensor) -> Tensor:
        """Where in a flat buffer the weights of the convolution go, [out, in, height, width]."""
        whole = flat.view(self.shape)
        if self.columns:
            shape = (*self.kernel, self.inside)
            whole = whole[:, : math.prod(shape)].unflatten(1, shape)
        return whole.permute(0, 3, 1, 2)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The result, channels last."""
        if self.columns:
            return self._product(x, z)
        how = (self.stride, self.padding, self.dilation, self.groups)
        weight = self.weight.permute(0, 3, 1, 2)
        if x.is_cuda and self.relu and z is not None:
            return torch.cudnn_convolution_add_relu(x, weight, z, 1.0, self.bias, *how)
        if x.is_cuda and self.relu:
            return torch.cudnn_convolution_relu(x, weight, self.bias, *how)
        return self._finish(F.conv2d(x, weight, self._own_bias(), *how), z)

    def _product(self, x: Tensor, z: Tensor | None) -> Tensor:
        height, width = (
            (size + 2 * padding - kernel) // stride + 1
            for size, padding, kernel, stride in zip(
                x.shape[2:], self.padding, self.kernel, self.stride, strict=True
            )
        )
        rows = self.patches(x, self.kernel, self.stride, self.padding, self.columns)
        if self.relu and z is None:
            out = torch._addmm_activation(self.bias, rows, self.weight.t())
        else:
            out = F.linear(rows, self.weight, self._own_bias())
        out = out.view(len(x), height, width, -1).permute(0, 3, 1, 2)
        return out if self.relu and z is None else self._finish(out, z)

    def _own_bias(self) -> Tensor | None:
        return None if self.gives_bias_to else self.bias

    def _finish(self, out: Tensor, z: Tensor | None) -> Tensor:
        out = out if z is None else out + z
        return F.relu(out) if self.relu else out


def patches(
    x: Tensor, kernel: list[int], stride: tuple[int, ...], padding: tuple[int, ...], columns: int
) -> Tensor:
    """The pixels under the kernel at each place, [B * height * width, columns], filled up with zeros."""
    (down, across), (top, left) = stride, padding
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, top, top))
    windows = x.unfold(1, kernel[0], down).unfold(2, kernel[1], across)  # [B, h, w, C, kernel]
    rows = windows.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(0, 2)
    return F.pad(rows, (0, columns - rows.shape[1]))
