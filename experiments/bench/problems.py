"""What a cell is trained on and judged by: a data set, its labels with noise, split and resident."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.datasets import (
    CIFAR_MEAN,
    CIFAR_STD,
    CINIC_MEAN,
    CINIC_STD,
    Images,
    cifar10,
    cifar10n,
    cifar100,
    cifar100n,
    cinic10,
)
from experiments.datasets.digits import Digits
from experiments.digits.data import split_ambiguous, split_digits
from rholoss.demo.data import PIXEL_MEAN, PIXEL_STD
from rholoss.engine import CropFlip, Resident
from rholoss.errors import RholossError
from rholoss.noise import NoisyLabels, structured_noise, uniform_noise

NOISE_SEED, RELEVANCE_SEED = 2022, 2022
CROP_FLIP = CropFlip()
RELEVANT_CLASSES, RARE_SHARE = 20, 0.06
HUMAN = {  # of CIFAR-10N and CIFAR-100N
    "cifar10": ("aggre", "worse", "random1", "random2", "random3"),
    "cifar100": ("human",),
}


@dataclass(frozen=True)
class Arrays:
    """A data set as it is on disk. Rows of `train` are the ids; `holdout` [N] says which are held out."""

    train: Images
    holdout: np.ndarray
    test: Images
    num_classes: int
    mean: tuple[float, ...] = CIFAR_MEAN
    std: tuple[float, ...] = CIFAR_STD
    augment: CropFlip | None = CROP_FLIP
    low_relevance: np.ndarray | None = None  # [N], of a class that is rare on purpose


@dataclass(frozen=True)
class Problem:
    """Resident data of a cell. Masks are by id, [N].

    `clean` is `train` with its labels before noise; the holdout comes with clean labels and with labels
    as noisy as those of `train`.
    """

    train: Resident
    clean: Resident
    holdout: Resident | None
    noisy_holdout: Resident | None
    test: Resident
    num_classes: int
    targets: Tensor  # the labels that are trained on, by id, on the host
    corrupted: Tensor | None
    low_relevance: Tensor | None


def _odd(num: int) -> np.ndarray:
    """Odd rows are the holdout, as in the authors' code."""
    return np.arange(num) % 2 == 1


def _cifar(load: Callable[[Any], tuple[Images, Images]], num_classes: int, root: Any) -> Arrays:
    train, test = load(root)
    return Arrays(train, _odd(len(train.labels)), test, num_classes)


def relevance(arrays: Arrays) -> Arrays:
    """CIFAR-100 Relevance: 20 classes whole, of each other class 6 % of the images; test set alike.

    80 % of the data then comes from 20 % of the classes.
    """
    rng = np.random.default_rng(RELEVANCE_SEED)
    whole = rng.permutation(arrays.num_classes)[:RELEVANT_CLASSES]

    def thinned(images: Images) -> np.ndarray:
        kept = np.isin(images.labels, whole)
        for number in np.setdiff1d(np.arange(arrays.num_classes), whole):
            rows = np.flatnonzero(images.labels == number)
            kept[rng.permutation(rows)[: round(RARE_SHARE * len(rows))]] = True
        return kept

    train, test = thinned(arrays.train), thinned(arrays.test)
    kept = Images(arrays.train.images[train], arrays.train.labels[train])
    return Arrays(
        kept,
        _odd(len(kept.labels)),
        Images(arrays.test.images[test], arrays.test.labels[test]),
        arrays.num_classes,
        low_relevance=~np.isin(kept.labels, whole),
    )


def _cinic(root: Any) -> Arrays:
    """Its own split: train, and valid as the holdout."""
    train, valid, test = (cinic10(part, root) for part in ("train", "valid", "test"))
    both = Images(*(np.concatenate([a, b]) for a, b in zip(train, valid, strict=True)))
    holdout = np.arange(len(both.labels)) >= len(train.labels)
    return Arrays(both, holdout, test, 10, CINIC_MEAN, CINIC_STD)


def _digits(parts: Sequence[Digits]) -> Arrays:
    """Train, holdout and test digits, each image as one plane of pixels."""
    train, holdout, test = (Images(part.images[:, None], part.labels) for part in parts)
    both = Images(*(np.concatenate(pair) for pair in zip(train, holdout, strict=True)))
    held = np.arange(len(both.labels)) >= len(train.labels)
    return Arrays(both, held, test, 10, (PIXEL_MEAN,), (PIXEL_STD,), augment=None)


DATASETS: dict[str, Callable[[Any], Arrays]] = {
    "cifar10": lambda root: _cifar(cifar10, 10, root),
    "cifar100": lambda root: _cifar(cifar100, 100, root),
    "cifar100-relevance": lambda root: relevance(_cifar(cifar100, 100, root)),
    "cinic10": _cinic,
    "mnist": lambda root: _digits(split_digits("id", root)),
    "mnist-writer": lambda root: _digits(split_digits("writer", root)),
    "qmnist": lambda root: _digits(split_digits("qmnist", root)),
    "ambiguous-mnist": lambda root: _digits(split_ambiguous(root)),
}


def label_set(name: str, dataset: str, arrays: Arrays, root: Any = None) -> NoisyLabels:
    """Labels of all rows by their name, and which are wrong.

    'clean'; 'noise 10 %' (other labels only); 'noise 10 % any' (the authors': the old label may be drawn
    again, so fewer are wrong, and only those count as corrupted); 'structured 50 %', at random, or
    'structured 50 % first', the first of the file as in the authors' code; or the name of a
    human label set of CIFAR-10N or CIFAR-100N.
    """
    old, num_classes = arrays.train.labels, arrays.num_classes
    if name == "clean":
        return NoisyLabels(old, np.zeros(len(old), bool))
    if found := re.fullmatch(r"structured (\d+) %( first)?", name):
        choose = "first" if found[2] else "random"
        return structured_noise(old, p=int(found[1]) / 100, choose=choose, seed=NOISE_SEED)
    if found := re.fullmatch(r"noise (\d+) %( any)?", name):
        mode, p = "any" if found[2] else "other", int(found[1]) / 100
        new, _ = uniform_noise(old, num_classes, p, seed=NOISE_SEED, mode=mode)
    elif name in HUMAN.get(dataset, ()):
        new = cifar10n(name, root) if dataset == "cifar10" else cifar100n(root)
        if len(new) != len(old) or new.min() < 0 or new.max() >= num_classes:
            raise RholossError(
                f"The human labels {name!r} are {len(new)}, from {new.min()} to {new.max()}, but {dataset} "
                f"has {len(old)} training images of {num_classes} classes: the files are not of one data set."
            )
    else:
        human = "; ".join(
            f"for {data} {', '.join(map(repr, kinds))}" for data, kinds in HUMAN.items()
        )
        raise RholossError(
            f"`labels` is {name!r}, which {dataset} does not have; use 'clean', 'noise 10 %', 'noise 10 % "
            f"any', 'structured 50 %', 'structured 50 % first', or human labels: {human}."
        )
    return NoisyLabels(new, new != old)


class Problems:
    """Problems of one data directory, each made once; images on the device are shared."""

    def __init__(self, root: Any = None, dtype: torch.dtype = torch.float32) -> None:
        self.root, self.dtype = root, dtype
        # With its number: a live model compares its device with the data's, and cuda is not cuda:0.
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else None
        self.arrays = functools.cache(self._arrays)
        self._parts = functools.cache(self._make_parts)
        self.get = functools.cache(self._make)

    def _arrays(self, dataset: str) -> Arrays:
        if dataset not in DATASETS:
            raise RholossError(f"`dataset` is {dataset!r}; known are {', '.join(DATASETS)}.")
        return DATASETS[dataset](self.root)

    def _make_parts(self, dataset: str, part: str) -> tuple[Resident, Resident | None, Resident]:
        """Train, holdout and test on the device, with clean labels."""
        arrays = self.arrays(dataset)
        common = {
            "mean": arrays.mean,
            "std": arrays.std,
            "dtype": self.dtype,
            "device": self.device,
        }
        if part not in ("half", "whole"):
            raise RholossError(f"`part` is {part!r}; use 'half' or 'whole'.")
        ids = np.arange(len(arrays.train.labels))
        held = arrays.holdout if part == "half" else np.zeros(len(ids), bool)

        def resident(rows: np.ndarray) -> Resident:
            images, labels = arrays.train.images[rows], arrays.train.labels[rows]
            return Resident(images, labels, ids=ids[rows], augment=arrays.augment, **common)

        test = Resident(arrays.test.images, arrays.test.labels, **common)
        return resident(~held), resident(held) if held.any() else None, test

    def _make(self, dataset: str, labels: str, part: str) -> Problem:
        arrays = self.arrays(dataset)
        clean, holdout, test = self._parts(dataset, part)
        new, wrong = label_set(labels, dataset, arrays, self.root)
        targets = torch.as_tensor(new)

        def relabelled(data: Resident) -> Resident:
            return data.with_targets(targets[data.ids.cpu()])

        return Problem(
            relabelled(clean),
            clean,
            holdout,
            None if holdout is None else relabelled(holdout),
            test,
            arrays.num_classes,
            targets,
            torch.as_tensor(wrong) if labels != "clean" else None,
            None if arrays.low_relevance is None else torch.as_tensor(arrays.low_relevance),
        )
