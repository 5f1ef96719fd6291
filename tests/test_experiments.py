"""What the experiments stand on: models and official files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.datasets import cifar10, cifar10n
from experiments.models import ResNet18, SmallCNN


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_models_are_the_papers():
    assert num_parameters(SmallCNN()) == 537_610
    assert num_parameters(SmallCNN(100)) == 560_740
    assert num_parameters(ResNet18()) == 11_173_962
    x = torch.randn(2, 3, 32, 32)
    assert SmallCNN()(x).shape == ResNet18()(x).shape == (2, 10)


@pytest.fixture
def tree(tmp_path):
    """CIFAR-10's binary version, four images a file."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records = rng.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)
    (tmp_path / "cifar-n").mkdir()
    np.savez(
        tmp_path / "cifar-n" / "CIFAR-10_human.npz",
        worse_label=np.arange(20)[::-1],
        random_label1=np.arange(20),
    )
    return tmp_path


def test_the_official_files_are_read(tree):
    train, test = cifar10(tree)
    assert train.images.shape == (20, 3, 32, 32)
    assert test.labels.shape == (4,)
    raw = np.fromfile(tree / "cifar-10-batches-bin" / "data_batch_2.bin", np.uint8)
    assert train.labels[4] == raw[0]
    assert train.images[4, 1, 0, 5] == raw[1 + 1024 + 5]  # the green plane follows the red one
    assert cifar10n("worse", tree)[0] == 19
    assert cifar10n("random1", tree)[0] == 0


def test_human_labels_are_read_as_they_are_published(tmp_path):
    path = tmp_path / "cifar-n" / "CIFAR-10_human.pt"
    path.parent.mkdir()
    torch.save({"worse_label": np.arange(20)[::-1].copy(), "random_label1": np.arange(20)}, path)
    assert cifar10n("worse", tmp_path).tolist() == list(range(19, -1, -1))
    assert cifar10n("random1", tmp_path).dtype == np.int64
    torch.save({"worse_label": Path("anything")}, path)  # no arrays: nothing of it is made
    with pytest.raises(
        ValueError, match=r"human.pt is not the file that was published; get it again"
    ):
        cifar10n("worse", tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", b"<html>", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"get it again from https.* md5 96644db5574813cae"):
            cifar10n("worse", tmp_path)


def test_missing_and_broken_files_are_told(tree, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10_human\.pt, md5 96644db5574813cae939af"):
        cifar10n("worse", tmp_path / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"CIFAR-10 was expected at .* Get it from https://www.cs.tor"
    ):
        cifar10(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"`kind` is 'best', but .* has worse, random1"):
        cifar10n("best", tree)
    path = tree / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(b"\x63" + path.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"test_batch.bin has the label 99, .* get it again from"):
        cifar10(tree)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a multiple of 3073: it was cut off"):
        cifar10(tree)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"CIFAR-10 was expected at .*test_batch\.bin\. .*c32a1d4ab5d03f12"
    ):
        cifar10(tree)
