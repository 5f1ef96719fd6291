"""A convolution, its bias, a residual sum and a ReLU in one kernel."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 8  # elements: what tensor cores want a row to be a multiple of


class FusedConv(nn.Module):
    """A convolution with a bias, an optional sum with `z`, and an optional ReLU.

    If `z` is the result of another such convolution, and nothing else reads that, then this one adds the
    other's bias as well: adding it alone would take a pass over the result. A convolution of few channels,
    such as the first one, is slow in cuDNN and is done as a matrix product here.

    The caller sets `weight` and `bias`. `weight` is [out, height, width, in] for cuDNN, so channels are
    adjacent; for a matrix product it is [out, columns]. `patches` is the function below, perhaps compiled.
    """

    weight: Tensor
    bias: Tensor
    gives_bias_to: FusedConv | None = None
    rows = 0  # of how many rows of its input the mean is kept, for `Folded(means=...)`
    read: Tensor | None = None  # that mean; whole inputs of all layers would take too much memory

    def __init__(self, conv: nn.Conv2d, patches: Callable[..., Tensor]) -> None:
        super().__init__()
        assert not isinstance(conv.padding, str)
        self.relu, self.groups = False, conv.groups
        self.stride, self.padding, self.dilation = conv.stride, conv.padding, conv.dilation
        out, inside, *self.kernel = conv.weight.shape
        self.inside = inside
        self.columns = columns_of(conv)
        self.shape = (out, self.columns) if self.columns else (out, *self.kernel, inside)
        self.patches = patches

    def place(self) -> Tensor:
        """The part of `weight` for the weights of the convolution, as a view [out, in, height, width]."""
        whole = self.weight
        if self.columns:
            shape = (*self.kernel, self.inside)
            whole = whole[:, : math.prod(shape)].unflatten(1, shape)
        return whole.permute(0, 3, 1, 2)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The result, channels last."""
        if self.rows:
            # In the order of memory: `mean` writes its result channel by channel, and would read so, too.
            images_BHWC = x[: self.rows].permute(0, 2, 3, 1)
            self.read = images_BHWC.mean(0, dtype=torch.float32).permute(2, 0, 1)
        x = x.to(self.weight.dtype)  # as autocast does, which does not know the fused kernels
        if self.columns:
            return self._product(x, z)
        how = (self.stride, self.padding, self.dilation, self.groups)
        weight = self.weight.permute(0, 3, 1, 2)
        if x.is_cuda and self.relu and z is None:
            return torch.cudnn_convolution_relu(x, weight, self.bias, *how)
        # cuDNN does not check the shape of `z`. One that broadcasts, or is broadcast to, is left to torch.
        if x.is_cuda and self.relu and z is not None and z.shape == self._shape(x):
            return torch.cudnn_convolution_add_relu(x, weight, z.to(x.dtype), 1.0, self.bias, *how)
        return self._finish(F.conv2d(x, weight, self._own_bias(), *how), z)

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the result for these inputs."""
        parts = zip(x.shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True)
        sizes = (
            (n + 2 * around - apart * (k - 1) - 1) // s + 1 for n, around, apart, k, s in parts
        )
        return len(x), self.shape[0], *sizes

    def _product(self, x: Tensor, z: Tensor | None) -> Tensor:
        rows = self.patches(x, self.kernel, self.stride, self.padding, self.columns)
        if self.relu and z is None:
            out = torch._addmm_activation(self.bias, rows, self.weight.t())
        else:
            out = F.linear(rows, self.weight, self._own_bias())
        out = images(out, x, self.kernel, self.stride, self.padding)
        return out if self.relu and z is None else self._finish(out, z)

    def _own_bias(self) -> Tensor | None:
        return None if self.gives_bias_to else self.bias

    def _finish(self, out: Tensor, z: Tensor | None) -> Tensor:
        out = out if z is None else out + z
        return F.relu(out) if self.relu else out


class ProductConv(nn.Conv2d):
    """A `Conv2d` of few channels, done as a matrix product; `as_products` turns layers into it."""

    def forward(self, x: Tensor) -> Tensor:
        """The result, channels last."""
        if x.ndim != 4 or x.shape[1] != self.in_channels or isinstance(self.padding, str):
            return super().forward(x)  # which can do it, or raises the usual error
        kernel, columns = list(self.kernel_size), columns_of(self)
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        weight = F.pad(weight, (0, columns - weight.shape[1]))
        out = F.linear(patches(x, kernel, self.stride, self.padding, columns), weight, self.bias)
        return images(out, x, kernel, self.stride, self.padding)


def as_products(model: nn.Module, wanted: bool = True) -> contextlib.AbstractContextManager[None]:
    """A block in which a model's convolutions of few channels are matrix products, if `wanted`."""
    convs = [m for m in model.modules() if type(m) is nn.Conv2d and columns_of(m)] if wanted else []
    return as_class(convs, ProductConv)


@contextlib.contextmanager
def as_class(layers: Sequence[nn.Module], other: type[nn.Module]) -> Iterator[None]:
    """A block in which layers have another class, a subclass of their own."""
    classes = [layer.__class__ for layer in layers]
    for layer in layers:
        layer.__class__ = other
    try:
        yield
    finally:
        for layer, usual in zip(layers, classes, strict=True):
            layer.__class__ = usual


def columns_of(conv: nn.Conv2d) -> int:
    """The columns of the matrix product for a convolution of few channels; 0 for other convolutions."""
    plain = conv.groups == 1 and set(conv.dilation) == {1} and conv.padding_mode == "zeros"
    if conv.in_channels >= ALIGNED or not plain or isinstance(conv.padding, str):
        return 0
    one = conv.in_channels * math.prod(conv.kernel_size)
    return one + -one % ALIGNED


def images(
    rows: Tensor, x: Tensor, kernel: list[int], stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """The rows of a matrix product back as images [B, C, height, width], channels last."""
    height, width = (
        (size + 2 * around - k) // step + 1
        for size, around, k, step in zip(x.shape[2:], padding, kernel, stride, strict=True)
    )
    return rows.view(len(x), height, width, -1).permute(0, 3, 1, 2)


def patches(
    x: Tensor, kernel: list[int], stride: tuple[int, ...], padding: tuple[int, ...], columns: int
) -> Tensor:
    """The pixels under the kernel at each place: [B * height * width, columns], padded with zeros."""
    (down, across), (top, left) = stride, padding
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, top, top))
    windows = x.unfold(1, kernel[0], down).unfold(2, kernel[1], across)  # [B, h, w, C, kernel]
    rows = windows.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(0, 2)
    return F.pad(rows, (0, columns - rows.shape[1]))
