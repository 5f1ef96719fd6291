"""What cheaper scoring is held against exact scoring on: data, models and irreducible losses."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from experiments.datasets import CIFAR_MEAN, CIFAR_STD, cifar10
from experiments.models import ResNet18, SmallCNN
from rholoss.demo.data import load
from rholoss.engine import CropFlip, Resident, fit_resident
from rholoss.noise import uniform_noise


@dataclass(frozen=True)
class Setup:
    """Data, models and irreducible losses of one bench."""

    name: str
    train: Resident
    test: Resident
    irreducible: Any
    model: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    candidates: int
    k: int
    precision: str | None
    compile: bool


def cifar(arguments: argparse.Namespace) -> Setup:
    (images, labels), (test_images, test_labels) = cifar10(arguments.data)
    precision = "bf16" if arguments.bf16 else None
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    pixels: dict[str, Any] = {"mean": CIFAR_MEAN, "std": CIFAR_STD, "dtype": dtype}
    given, _ = uniform_noise(labels, 10, arguments.noise, seed=2022)
    data = Resident(images, given, augment=CropFlip(), **pixels)
    il = fit_resident(SmallCNN, data, folds=2, precision=precision)
    return Setup(
        "CIFAR-10, ResNet-18", data, Resident(test_images, test_labels, **pixels), il, ResNet18,
        lambda: SmallCNN().to(memory_format=torch.channels_last), arguments.candidates, arguments.k,
        precision, arguments.compile,
    )  # fmt: skip


def digits(arguments: argparse.Namespace) -> Setup:
    """The demo's digits, whose labels are wrong by a tenth, and networks for a CPU."""
    splits = load()

    def model(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * width, 10),
        )  # fmt: skip

    def resident(part: str, **more: Any) -> Resident:
        split = splits[part]
        images = torch.from_numpy(split.images.copy())[:, None]
        return Resident(images, split.given.astype("int64"), mean=(0.13,), std=(0.31,), **more)

    data = resident("train", augment=CropFlip(pad=2, flip=False))
    il = fit_resident(lambda: model(8), data, folds=2, epochs=2)
    return Setup(
        "digits, small CNN", data, resident("test"), il, lambda: model(24), lambda: model(8),
        arguments.candidates, arguments.k, None, arguments.compile,
    )  # fmt: skip
