"""The demo's handwritten digits: an excerpt of MNIST that is part of the package.

The file is an xz stream of six idx arrays, as MNIST's own files hold them: images and labels of the
training points, of the holdout points and of the test points. `tools/make_mnist_excerpt.py` makes it
from the official files; nothing of an image is changed or lost.
"""

from __future__ import annotations

import io
import lzma
import struct
from dataclasses import dataclass
from importlib import resources
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rholoss.errors import RholossError
from rholoss.noise import uniform_noise

NUM_CLASSES = 10
NOISE = 0.1  # share of training and holdout labels that the demo flips
NOISE_SEED = 2022
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's training file, the usual figures
PARTS = ("train", "holdout", "test")


@dataclass(frozen=True)
class Split:
    """Images [N, 28, 28] (uint8), true labels, labels as given, and where those are wrong."""

    images: np.ndarray
    true: np.ndarray
    given: np.ndarray
    wrong: np.ndarray

    def __len__(self) -> int:
        return len(self.images)


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """A split as tensors in memory: normalised pixels `x` [N, 784] and given labels `targets` [N]."""

    def __init__(self, split: Split) -> None:
        pixels = split.images.reshape(len(split), -1).astype(np.float32) / 255
        self.x = torch.from_numpy((pixels - PIXEL_MEAN) / PIXEL_STD)
        self.targets = torch.from_numpy(split.given.astype(np.int64))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.targets[row]


def load(limit: int | None = None) -> dict[str, Split]:
    """The splits "train", "holdout" and "test"; a tenth of the labels of the first two is wrong.

    `limit` keeps the first rows of each split only (for a quick look).
    """
    packed = resources.files("rholoss.demo").joinpath("mnist.xz").read_bytes()
    stream = io.BytesIO(lzma.decompress(packed))
    splits = {}
    for seed, name in enumerate(PARTS, start=NOISE_SEED):
        images, labels = read_idx(stream)[:limit], read_idx(stream)[:limit]
        share = 0.0 if name == "test" else NOISE
        given, wrong = uniform_noise(labels, NUM_CLASSES, share, seed=seed)
        splits[name] = Split(images, labels, given, wrong)
    return splits


def read_idx(stream: BinaryIO) -> np.ndarray:
    """The next idx array of unsigned bytes: two zeros, type 8, dimensions, sizes, then the values."""
    head = stream.read(4)
    if len(head) < 4 or head[:3] != b"\x00\x00\x08" or not head[3]:
        raise RholossError(
            f"The file starts with {head!r}, so it is no idx file of bytes; give MNIST's own files, "
            "for instance train-images-idx3-ubyte.gz."
        )
    shape = struct.unpack(f">{head[3]}I", stream.read(4 * head[3]))
    size = int(np.prod(shape))
    values = stream.read(size)
    if len(values) < size:
        raise RholossError(
            f"The idx file should hold {size} values {shape} but ends after {len(values)}; it was cut "
            "off, so download it again."
        )
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def write_idx(stream: BinaryIO, values: np.ndarray) -> None:
    """Append an array of bytes in the idx format, which `read_idx` reads."""
    stream.write(
        b"\x00\x00\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    )
    stream.write(np.ascontiguousarray(values, dtype=np.uint8).tobytes())
