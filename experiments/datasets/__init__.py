"""The official files of the paper's data sets, as arrays."""

from experiments.datasets.cifar import CIFAR_MEAN, CIFAR_STD, cifar10, cifar10n
from experiments.datasets.files import data_dir

__all__ = ["CIFAR_MEAN", "CIFAR_STD", "cifar10", "cifar10n", "data_dir"]
