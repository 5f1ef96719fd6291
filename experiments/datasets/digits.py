"""Handwritten digits: MNIST, QMNIST and AmbiguousMNIST, from their official files."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from experiments.datasets.files import data_dir, need
from rholoss.demo.data import read_idx
from rholoss.errors import RholossError

HOME = "https://github.com/facebookresearch/qmnist (MNIST's files and QMNIST's)"
HOME_AMBIGUOUS = (
    "https://github.com/BlackHC/ddu_dirty_mnist/releases (data-v1.0.0: amnist_samples.pt, md5 "
    "4f7865093b1d28e34019847fab917722, and amnist_labels.pt, md5 3bfc055a9f91a76d8d493e8b898c3c95)"
)
MD5 = {  # as torchvision has them; those of QMNIST's labels were checked
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    "qmnist-train-images-idx3-ubyte.gz": "ed72d4157d28c017586c42bc6afe6370",
    "qmnist-train-labels-idx2-int.gz": "0058f8dd561b90ffdd0f734c6a30e5e4",
    "qmnist-test-images-idx3-ubyte.gz": "1394631089c404de565df7b7aeaf9412",
    "qmnist-test-labels-idx2-int.gz": "5b5b05890a5e13444e108efe57b788aa",
}
NUM_QMNIST_TEST = 10_000  # QMNIST's test file starts with MNIST's own test digits
NUM_AMBIGUOUS_TRAIN = 60_000
WRITER = 2  # column of QMNIST's label table


class Digits(NamedTuple):
    """Images [N, 28, 28] (uint8, or float32 in 0..1) and labels [N] int64."""

    images: np.ndarray
    labels: np.ndarray


def mnist(root: str | os.PathLike[str] | None = None) -> tuple[Digits, Digits]:
    """Train (60,000) and test (10,000)."""
    folder = data_dir(root) / "MNIST" / "raw"
    train, test = (
        Digits(
            _bytes(folder, f"{part}-images-idx3-ubyte", "MNIST"),
            _bytes(folder, f"{part}-labels-idx1-ubyte", "MNIST").astype(np.int64),
        )
        for part in ("train", "t10k")
    )
    return train, test


def qmnist(root: str | os.PathLike[str] | None = None) -> tuple[Digits, Digits]:
    """Train (60,000, MNIST's own) and the 50,000 further digits that the paper uses as the holdout set."""
    folder = data_dir(root) / "QMNIST" / "raw"
    parts = [
        Digits(
            _bytes(folder, f"qmnist-{part}-images-idx3-ubyte", "QMNIST"),
            _table(folder, f"qmnist-{part}-labels-idx2-int")[:, 0].astype(np.int64),
        )
        for part in ("train", "test")
    ]
    return parts[0], Digits(*(array[NUM_QMNIST_TEST:] for array in parts[1]))


def mnist_writers(root: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Who wrote each of MNIST's 60,000 training digits: QMNIST's table has its rows in the same order."""
    folder = data_dir(root) / "MNIST" / "raw"
    return _table(folder, "qmnist-train-labels-idx2-int")[:, WRITER].astype(np.int64)


def ambiguous_mnist(root: str | os.PathLike[str] | None = None) -> Digits:
    """The 60,000 training rows of AmbiguousMNIST: each image once for each of its plausible labels."""
    import torch

    folder = data_dir(root) / "AmbiguousMNIST"
    images, labels = (
        torch.load(need(folder / name, "AmbiguousMNIST", HOME_AMBIGUOUS), weights_only=True)
        for name in ("amnist_samples.pt", "amnist_labels.pt")
    )
    if labels.ndim != 2 or len(images) != len(labels) or images[0].numel() != 28 * 28:
        raise RholossError(
            f"{folder} holds images {tuple(images.shape)} and labels {tuple(labels.shape)}, not "
            f"[N, 1, 28, 28] and [N, labels of each]; get both files again from {HOME_AMBIGUOUS}."
        )
    repeated = images.view(-1, 28, 28).repeat_interleave(labels.shape[1], 0)
    rows = slice(NUM_AMBIGUOUS_TRAIN)
    return Digits(repeated[rows].float().numpy(), labels.reshape(-1)[rows].long().numpy())


def _open(folder: Path, name: str, what: str) -> BinaryIO:
    """The file, packed as it is downloaded or unpacked."""
    plain = folder / name
    if plain.exists():
        return plain.open("rb")
    packed = f"{name}.gz"
    origin = f"{HOME}: {packed}, md5 {MD5[packed]}"
    return gzip.open(need(folder / packed, what, origin), "rb")  # type: ignore[return-value]


def _bytes(folder: Path, name: str, what: str) -> np.ndarray:
    with _open(folder, name, what) as file:
        return read_idx(file).copy()  # of its own, and so writable


def _table(folder: Path, name: str) -> np.ndarray:
    """QMNIST's labels: an idx table of big-endian integers, eight for each digit."""
    with _open(folder, name, "QMNIST's label table") as file:
        raw = file.read()
    head, shape = raw[:4], struct.unpack(">2I", raw[4:12])
    if head != b"\x00\x00\x0c\x02" or len(raw) != 12 + 4 * shape[0] * shape[1]:
        raise RholossError(
            f"{folder / name} is no whole idx table of integers (it starts with {head!r} and has "
            f"{len(raw)} bytes); get it again from {HOME}."
        )
    return np.frombuffer(raw, ">i4", offset=12).reshape(shape)
