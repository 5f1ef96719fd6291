"""Data sets that come as folders of images: CINIC-10 and Clothing-1M, decoded by workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from experiments.datasets.cifar import Images
from experiments.datasets.files import data_dir, need
from rholoss.progress import Bar

CINIC_MEAN, CINIC_STD = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CINIC_HOME = (
    "https://datashare.ed.ac.uk/handle/10283/3192 (CINIC-10.tar.gz, md5 "
    "6ee4d0c996905fe93221de577967a372), laid out as "
    "CINIC-10/{train,valid,test}/<class>/*.png with 90,000 images of 10 classes in each part"
)
CLOTHING_HOME = (
    "https://github.com/Cysu/noisy_label (on request), laid out as clothing1m/images/... beside "
    "{noisy_train,clean_train,clean_val,clean_test}_key_list.txt (the first three of 1,000,000, 47,570 and "
    "14,313 lines; we know of no checksums), noisy_label_kv.txt and clean_label_kv.txt"
)
CLOTHING_CLASSES = 14
CLOTHING_HOLDOUT = 100_000


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images of a list of files, opened when they are asked for; `transform` takes a PIL image."""

    def __init__(
        self, paths: list[Path], targets: Any, transform: Callable[[Any], Tensor] | None = None
    ) -> None:
        self.paths, self.targets = paths, np.asarray(targets, np.int64)
        self.transform = transform or pixels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(self.paths[row]) as image:
            return self.transform(image.convert("RGB")), int(self.targets[row])


def pixels(image: Any) -> Tensor:
    """[3, H, W] uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def resized(image: Any) -> Tensor:
    """As for ImageNet: shorter side to 256, centre crop of 224, normalised; [3, 224, 224] float."""
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)))
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    x = pixels(image.crop((left, top, left + 224, top + 224))).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (x - mean) / std


def flipped(image: Any) -> Tensor:
    """The same, turned over from left to right half of the time."""
    x = resized(image)
    return x.flip(2) if float(torch.rand(())) < 0.5 else x


def cinic10_files(part: str, root: str | os.PathLike[str] | None = None) -> ImageFiles:
    """'train', 'valid' or 'test'; classes are numbered in the order of their names."""
    folder = need(data_dir(root) / "CINIC-10" / part, "CINIC-10", CINIC_HOME)
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(classes) != 10:
        raise ValueError(
            f"{folder} has {len(classes)} folders, not the 10 classes of CINIC-10; unpack it again."
        )
    paths = [(path, number) for number, name in enumerate(classes)
             for path in sorted((folder / name).glob("*.png"))]  # fmt: skip
    return ImageFiles([path for path, _ in paths], [number for _, number in paths])


def cinic10(
    part: str, root: str | os.PathLike[str] | None = None, num_workers: int | None = None
) -> Images:
    """A part as arrays: it fits in memory (90,000 x 3 kB), and only decoding takes time."""
    files = cinic10_files(part, root)
    workers = min(8, os.cpu_count() or 1) if num_workers is None else num_workers
    loader = DataLoader(files, batch_size=1000, num_workers=workers)
    found = []
    with Bar(len(loader), f"reading CINIC-10 {part}") as bar:
        for images, _ in loader:
            found.append(images.numpy())
            bar.advance()
    return Images(np.concatenate(found), files.targets)


def clothing1m(
    root: str | os.PathLike[str] | None = None, transform: Callable[[Any], Tensor] = resized
) -> tuple[ImageFiles, np.ndarray, ImageFiles]:
    """Train as the authors' "dirty_train", the rows of it that are the holdout, and the clean test set.

    Train is the clean training and validation images and all noisy ones; a file that has both labels
    takes the noisy one. The holdout is 100,000 of these same rows, which stay in the training set.
    """
    folder = need(data_dir(root) / "clothing1m", "Clothing-1M", CLOTHING_HOME)
    clean, noisy = (_labels(folder / f"{kind}_label_kv.txt") for kind in ("clean", "noisy"))
    both = {**clean, **noisy}
    keys = [key for name in ("clean_train", "clean_val", "noisy_train")
            for key in _lines(folder / f"{name}_key_list.txt")]  # fmt: skip
    test = _lines(folder / "clean_test_key_list.txt")
    num = min(CLOTHING_HOLDOUT, len(keys))
    holdout = np.random.default_rng(0).choice(len(keys), num, replace=False)
    return (
        ImageFiles([folder / key for key in keys], [both[key] for key in keys], transform),
        np.sort(holdout),
        ImageFiles([folder / key for key in test], [clean[key] for key in test], transform),
    )


def _lines(path: Path) -> list[str]:
    text = need(path, "Clothing-1M", CLOTHING_HOME).read_text()
    return [line for line in text.split("\n") if line]  # the last may end with the file


def _labels(path: Path) -> dict[str, int]:
    """'images/0/00/a.jpg 3' a line."""
    return {key: int(label) for key, label in (line.rsplit(" ", 1) for line in _lines(path))}
