"""The official files of the paper's data sets, as arrays or, where they are large, file by file."""

from experiments.datasets.cifar import (
    CIFAR_MEAN,
    CIFAR_STD,
    Images,
    cifar10,
    cifar10n,
    cifar100,
    cifar100n,
)
from experiments.datasets.files import data_dir
from experiments.datasets.folders import (
    CINIC_MEAN,
    CINIC_STD,
    ImageFiles,
    cinic10,
    cinic10_files,
    clothing1m,
)

__all__ = [
    "CIFAR_MEAN",
    "CIFAR_STD",
    "CINIC_MEAN",
    "CINIC_STD",
    "ImageFiles",
    "Images",
    "cifar10",
    "cifar10n",
    "cifar100",
    "cifar100n",
    "cinic10",
    "cinic10_files",
    "clothing1m",
    "data_dir",
]
