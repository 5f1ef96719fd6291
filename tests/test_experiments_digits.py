"""Digits from their official files, how they are split, and the patterns of noise on them."""

import gzip
import lzma
import struct

import numpy as np
import pytest
import torch

from experiments.bench.problems import DATASETS, Problems, label_set
from experiments.datasets import digits as files
from experiments.datasets.digits import Digits, ambiguous_mnist, mnist, mnist_writers, qmnist
from experiments.digits import data
from experiments.digits.data import points, split_ambiguous, split_digits, uniform_tenth
from rholoss.demo.data import write_idx
from rholoss.errors import RholossError

NUM = 40


def write_bytes(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb") as file:
        write_idx(file, values)


def write_table(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = b"\x00\x00\x0c\x02" + struct.pack(">2I", *columns.shape)
    path.write_bytes(gzip.compress(head + columns.astype(">i4").tobytes()))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """MNIST, QMNIST and AmbiguousMNIST, a few digits each; a pixel tells the row."""
    monkeypatch.setattr(files, "NUM_QMNIST_TEST", 4)
    rows = np.arange(NUM)
    images = np.zeros((NUM, 28, 28), np.uint8)
    images[:, 0, 0] = rows
    labels = (rows % 10).astype(np.uint8)
    table = np.zeros((NUM, 8), np.int64)
    table[:, 0], table[:, 2] = labels, 100 + rows // 4  # ten writers of four digits
    raw = tmp_path / "MNIST" / "raw"
    for part, num in (("train", NUM), ("t10k", 10)):
        write_bytes(raw / f"{part}-images-idx3-ubyte.gz", images[:num])
        write_bytes(raw / f"{part}-labels-idx1-ubyte.gz", labels[:num])
    write_table(raw / "qmnist-train-labels-idx2-int.gz", table)
    for part in ("train", "test"):
        write_bytes(tmp_path / "QMNIST" / "raw" / f"qmnist-{part}-images-idx3-ubyte.gz", images)
        write_table(tmp_path / "QMNIST" / "raw" / f"qmnist-{part}-labels-idx2-int.gz", table)
    ambiguous = tmp_path / "AmbiguousMNIST"
    ambiguous.mkdir()
    torch.save(
        torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 28, 28) / 6, ambiguous / "amnist_samples.pt"
    )
    torch.save(torch.tensor([[n, n + 1, n] for n in range(6)]), ambiguous / "amnist_labels.pt")
    return tmp_path


def test_the_official_files_are_read(tree):
    train, test = mnist(tree)
    assert train.images.shape == (NUM, 28, 28)
    assert train.images[7, 0, 0] == 7
    assert train.labels.dtype == np.int64
    assert test.labels.tolist() == list(range(10))
    assert mnist_writers(tree).tolist() == [100 + row // 4 for row in range(NUM)]
    train, holdout = qmnist(tree)
    assert len(train.labels) == NUM
    assert holdout.images[:, 0, 0].tolist() == list(
        range(4, NUM)
    )  # without MNIST's own test digits
    assert holdout.labels[0] == 4


def test_unpacked_files_are_read_too(tree):
    for path in (tree / "MNIST" / "raw").iterdir():
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert mnist(tree)[0].images[9, 0, 0] == 9


def test_each_ambiguous_image_comes_with_each_of_its_labels(tree):
    images, labels = ambiguous_mnist(tree)
    assert labels.tolist()[:6] == [0, 1, 0, 1, 2, 1]
    assert images.shape == (18, 28, 28)
    np.testing.assert_allclose(images[:, 3, 3], np.repeat(np.arange(6) / 6, 3), rtol=1e-6)
    train, holdout, test = split_ambiguous(tree)
    assert len(holdout.labels) == NUM
    assert len(test.labels) == 10
    added = train.images / 255 - images
    assert added.std() == pytest.approx(0.05 * 0.3081, rel=0.05)
    assert not np.array_equal(train.images[0], train.images[1])  # the same image, shaken twice


def test_missing_and_broken_files_are_told(tree, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"MNIST was expected at .* Get it from https.*md5 f68b3"
    ):
        mnist(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"AmbiguousMNIST was expected at .*md5 4f78650"):
        ambiguous_mnist(tmp_path / "elsewhere")
    path = tree / "MNIST" / "raw" / "qmnist-train-labels-idx2-int.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with pytest.raises(RholossError, match=r"is no whole idx table of integers .* get it again"):
        mnist_writers(tree)
    torch.save(torch.zeros(6), tree / "AmbiguousMNIST" / "amnist_labels.pt")
    with pytest.raises(RholossError, match=r"and labels \(6,\), not .* get both files again"):
        ambiguous_mnist(tree)


def rows_of(part):
    return set(part.images[:, 0, 0].tolist())


def test_halves_share_no_digit_and_by_writer_no_writer(tree):
    for split in ("id", "writer"):
        train, holdout, _ = split_digits(split, tree)
        assert not rows_of(train) & rows_of(holdout)
        assert len(rows_of(train) | rows_of(holdout)) == NUM
        writers = [{row // 4 for row in rows_of(part)} for part in (train, holdout)]
        assert bool(writers[0] & writers[1]) == (split == "id")
    assert rows_of(split_digits("qmnist", tree)[1]) == set(range(4, NUM))
    with pytest.raises(RholossError, match="`split` is 'odd'; choose one of id, writer, qmnist"):
        split_digits("odd", tree)


def test_pixels_are_normalised_once(tree):
    train, _, _ = split_digits("id", tree)
    found = points(train)
    assert found.x.shape == (len(train.labels), 784)
    torch.testing.assert_close(
        found.x[:, 0], (torch.tensor(train.images[:, 0, 0]) / 255 - 0.1307) / 0.3081
    )
    grey = points(Digits(train.images.astype(np.float32) / 255, train.labels))
    torch.testing.assert_close(grey.x, found.x)
    assert not found.corrupted.any()


def test_a_tenth_of_the_labels_is_wrong():
    digits = Digits(np.zeros((500, 28, 28), np.uint8), np.arange(500) % 10)
    noisy = uniform_tenth(digits)
    assert noisy.corrupted.sum() == 50
    assert np.array_equal(noisy.corrupted, noisy.y.numpy() != digits.labels)


def test_the_bench_has_the_digits(tree):
    for name in ("mnist", "mnist-writer", "qmnist", "ambiguous-mnist"):
        assert name in DATASETS
        problem = Problems(tree).get(name, "clean", "half")
        x, _ = problem.train.batch(torch.arange(2))
        assert x.shape == (2, 1, 28, 28)
        assert problem.num_classes == 10
        assert problem.holdout is not None
    problem = Problems(tree).get("mnist", "clean", "half")
    x, y = problem.train.batch(torch.arange(3))
    train, _, _ = split_digits("id", tree)
    torch.testing.assert_close(x.flatten(1), points(train).x[:3])
    assert y.tolist() == train.labels[:3].tolist()


def test_structured_noise_takes_the_first_of_the_file_or_any(tree):
    arrays = DATASETS["mnist"](tree)
    old = arrays.train.labels
    first, any_half = (
        label_set(name, "mnist", arrays) for name in ("structured 50 % first", "structured 50 %")
    )
    threes = np.flatnonzero(old == 3)
    assert (first.labels[threes] == 5).tolist() == [True, True, False, False]
    assert (any_half.labels[threes] == 5).sum() == 2
    assert first.corrupted.sum() == any_half.corrupted.sum() == 6  # of 3, 9 and 4
    assert not np.array_equal(first.corrupted, any_half.corrupted)


@pytest.fixture(scope="module")
def real_table(data_dir):
    path = data_dir / "mnist" / "qmnist-train-labels-idx2-int.gz"
    if not path.exists():
        path = data_dir / "MNIST" / "raw" / path.name
    if not path.exists():
        pytest.skip(f"no QMNIST label table below {data_dir}; set RHOLOSS_DATA")
    raw = gzip.decompress(path.read_bytes())
    return np.frombuffer(raw, ">i4", offset=12).reshape(-1, 8), path.parent


def test_in_the_real_file_even_and_odd_rows_are_by_different_people(real_table):
    """Why digits are not halved by even and odd ids, as the authors halve CIFAR."""
    table, folder = real_table
    series, writer = table[:, 1], table[:, 2]
    assert (series[1::2] == 0).all()  # clerks
    assert (series[0::2] == 4).mean() > 0.95  # students
    halves = np.unique(writer, return_inverse=True)[1] % 2
    assert 0.45 < halves.mean() < 0.55
    by_writer = [(series[halves == half] == 4).mean() for half in (0, 1)]
    assert abs(by_writer[0] - by_writer[1]) < 0.02
    packed = folder / "train-labels-idx1-ubyte.xz"
    if packed.exists():  # the table's digits are MNIST's, row by row
        labels = np.frombuffer(lzma.decompress(packed.read_bytes()), np.uint8, offset=8)
        assert np.array_equal(table[:, 0], labels)


def test_the_seed_of_the_noise_is_its_own():
    digits = Digits(np.zeros((100, 28, 28), np.uint8), np.arange(100) % 10)
    assert torch.equal(uniform_tenth(digits).y, uniform_tenth(digits).y)
    assert not torch.equal(
        uniform_tenth(digits).y, uniform_tenth(digits, seed=data.NOISE_SEED + 1).y
    )
