"""Loaders of the official files, on tiny trees of their layout."""

import numpy as np
import pytest
from fixtures_clothing import save, write_clothing1m

from experiments.datasets import cifar100, cifar100n, cinic10, cinic10_files, clothing1m
from experiments.datasets.folders import pixels


def test_cifar100_takes_the_fine_label(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    records = np.zeros((4, 3074), np.uint8)
    records[:, 0], records[:, 1] = 7, [99, 3, 5, 0]  # coarse, fine
    records[2, 2 + 1024 + 5] = 200  # green, fifth pixel
    records.tofile(folder / "train.bin")
    records[:2].tofile(folder / "test.bin")
    train, test = cifar100(tmp_path)
    assert train.labels.tolist() == [99, 3, 5, 0]
    assert train.images.shape == (4, 3, 32, 32)
    assert train.images[2, 1, 0, 5] == 200
    assert len(test.labels) == 2
    (folder / "test.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"CIFAR-100 was expected at .*test\.bin\. Get it"):
        cifar100(tmp_path)


def test_cifar100n_is_read_by_its_full_name(tmp_path):
    (tmp_path / "cifar-n").mkdir()
    np.savez(
        tmp_path / "cifar-n" / "CIFAR-100_human.npz",
        clean_label=np.arange(5),
        noisy_label=np.arange(5)[::-1],
        noisy_coarse_label=np.zeros(5),
    )
    assert cifar100n(tmp_path).tolist() == [4, 3, 2, 1, 0]


def test_missing_data_names_the_archive_and_its_checksum(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"md5 03b5dce0191.*cifar-100-binary/\{train, test\}"
    ):
        cifar100(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"CINIC-10/\{train,valid,test\}/<class>/\*\.png"):
        cinic10("train", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"CINIC-10\.tar\.gz, md5 6ee4d0c996905fe93221"):
        cinic10("train", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"noisy_label_kv\.txt and clean_label"):
        clothing1m(tmp_path)


@pytest.fixture
def cinic(tmp_path):
    for part in ("train", "valid", "test"):
        for number in range(10):
            for image in range(2):
                save(tmp_path / "CINIC-10" / part / f"class{number}" / f"{image}.png", 10 * number)
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_cinic_is_read_in_the_order_of_its_names(cinic, num_workers):
    images, labels = cinic10("valid", cinic, num_workers=num_workers)
    assert images.shape == (20, 3, 32, 32)
    assert images.dtype == np.uint8
    assert labels.tolist() == [number for number in range(10) for _ in range(2)]
    assert (images[:, 0, 0, 0] == 10 * labels).all()


def test_cinic_with_a_class_missing_is_told(cinic):
    for path in (cinic / "CINIC-10" / "train" / "class3").iterdir():
        path.unlink()
    (cinic / "CINIC-10" / "train" / "class3").rmdir()
    with pytest.raises(ValueError, match="has 9 folders, not the 10 classes"):
        cinic10_files("train", cinic)


@pytest.fixture
def clothing(tmp_path):
    lists = {
        "noisy_train": ["images/0/n0.jpg", "images/0/n1.jpg", "images/1/both.jpg"],
        "clean_train": ["images/1/both.jpg", "images/1/c0.jpg"],
        "clean_val": ["images/1/v0.jpg"],
        "clean_test": ["images/2/t0.jpg", "images/2/t1.jpg"],
    }
    noisy = {"images/0/n0.jpg": 1, "images/0/n1.jpg": 2, "images/1/both.jpg": 3}
    clean = {"images/1/both.jpg": 13, "images/1/c0.jpg": 5, "images/1/v0.jpg": 6}
    clean |= {"images/2/t0.jpg": 7, "images/2/t1.jpg": 8}
    return write_clothing1m(tmp_path, noisy, clean, lists)


def test_clothing1m_as_the_authors_put_it_together(clothing):
    train, holdout, test = clothing1m(clothing)
    # clean train, clean val, noisy train; the file that has both labels takes the noisy one
    assert train.targets.tolist() == [3, 5, 6, 1, 2, 3]
    assert test.targets.tolist() == [7, 8]
    assert set(holdout) <= set(range(len(train)))
    assert len(set(holdout)) == len(holdout)
    x, y = train[1]
    assert x.shape == (3, 224, 224)
    assert y == 5
    assert abs(float(x[0, 0, 0]) - (95 / 255 - 0.485) / 0.229) < 0.02  # JPEG is not exact


def test_a_list_may_end_without_a_new_line(clothing):
    for path in (clothing / "clothing1m").glob("*.txt"):
        path.write_text(path.read_text().rstrip("\n"))
    train, _, test = clothing1m(clothing)
    assert train.targets.tolist() == [3, 5, 6, 1, 2, 3]
    assert test.targets.tolist() == [7, 8]


def test_clothing1m_takes_another_transform(clothing):
    train, _, _ = clothing1m(clothing, transform=pixels)
    assert train[0][0].shape == (3, 300, 260)
