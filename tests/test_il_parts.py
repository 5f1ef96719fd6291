"""Parts: claims, files that can be trusted, and one table from many of them."""

import os

import numpy as np
import pytest

from rholoss.errors import RholossError, StoreError
from rholoss.il import parts as parts_module
from rholoss.il.hashing import ABSENT
from rholoss.il.ids import hash_keys
from rholoss.il.parts import Merged, Parts, entries_of

WHOLE = {"keyed": False, "last": True, "seconds": 1.5}


@pytest.fixture
def parts(tmp_path):
    made = Parts(tmp_path, "first")
    made.open_claims()
    return made


def some(low, high):
    ids = np.arange(low, high)[::-1]
    return entries_of(ids, ids.astype(np.float32) / 10, ids.astype(np.int32) % 7)


def written(merged, rows, tmp_path, labels=True):
    found = {}
    for kind, write in merged.writers(rows, labels=labels).items():
        with open(tmp_path / kind, "wb") as file:
            write(file)
        found[kind] = np.fromfile(tmp_path / kind, parts_module.files.DTYPE[kind])
    return found


def test_a_unit_is_claimed_once_for_each_start(parts, tmp_path):
    assert parts.claim("rows-000000")
    assert not parts.claim("rows-000000")
    assert not Parts(tmp_path, "first").claim("rows-000000")
    again = Parts(tmp_path, "second")
    again.open_claims()
    assert again.claim("rows-000000")
    assert [path.name for path in tmp_path.glob("claims-*")] == ["claims-second"]


def test_what_is_complete_is_not_given_out_again(parts):
    parts.write("a", 0, some(0, 5), **WHOLE)
    parts.write("b", 0, some(5, 8), **{**WHOLE, "last": False})
    assert list(parts.unclaimed(["a", "b", "c"])) == [("b", 1, 3), ("c", 0, 0)]
    assert list(parts.unclaimed(["a", "b", "c"])) == []


@pytest.mark.parametrize("damage", ["cut off", "one bit", "empty", "gone", "header alone"])
def test_a_damaged_part_does_not_count(parts, tmp_path, damage):
    parts.write("a", 0, some(0, 5), **{**WHOLE, "last": False})
    parts.write("a", 1, some(5, 9), **WHOLE)
    assert parts.of("a")[1:] == (9, True)
    path = tmp_path / "a.000001.part"
    content = bytearray(path.read_bytes())
    if damage == "one bit":
        content[-1] ^= 1
    else:
        del content[{"cut off": -3, "empty": 0, "header alone": 36, "gone": 0}[damage] :]
    path.write_bytes(content)
    if damage == "gone":
        path.unlink()
    assert parts.of("a")[1:] == (5, False)
    parts.write("a", 1, some(5, 9), **WHOLE)
    assert parts.of("a")[1:] == (9, True)


def test_a_full_disk_is_told_and_leaves_no_part(parts, tmp_path, monkeypatch):
    def full(path, content):
        with open(path, "wb") as file:
            file.write(content[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts_module.Path, "write_bytes", full)
    with pytest.raises(StoreError, match=r"No space left on device\. Free some space and run the"):
        parts.write("a", 0, some(0, 5), **WHOLE)
    assert os.listdir(tmp_path) == ["claims-first"]


@pytest.mark.parametrize("range_", [3, 8, 2**22])
def test_parts_make_one_dense_table(parts, tmp_path, monkeypatch, range_):
    monkeypatch.setattr(parts_module, "RANGE", range_)
    parts.write("a", 0, some(4, 9), **WHOLE)
    parts.write("b", 0, some(0, 4), **WHOLE)
    parts.write("c", 0, some(7, 14), **WHOLE)  # two of them for the second time
    parts.write("d", 0, some(0, 0), **WHOLE)
    merged = Merged(path for unit in "abcd" for path in parts.of(unit)[0])
    assert merged.count() == (14, 14, 14)
    assert (merged.highest, merged.seconds, merged.keyed) == (13, 6.0, False)
    found = written(merged, 17, tmp_path)
    expected = [i / 10 for i in range(14)] + [np.nan] * 3
    np.testing.assert_array_equal(found["loss"], np.array(expected, np.float32))
    assert found["labels"].tolist() == [i % 7 for i in range(14)] + [ABSENT] * 3


@pytest.mark.parametrize("range_", [3, 2**22])
def test_parts_make_one_table_of_keys(parts, tmp_path, monkeypatch, range_):
    monkeypatch.setattr(parts_module, "RANGE", range_)
    keys = [f"point-{i}" for i in range(30)]
    for unit, own in {"a": keys[:12], "b": keys[10:30]}.items():  # two keys came twice
        losses = np.array([int(key[6:]) for key in own], np.float32)
        parts.write(unit, 0, entries_of(own, losses), **{**WHOLE, "keyed": True})
    merged = Merged(path for unit in "ab" for path in parts.of(unit)[0])
    assert merged.keyed
    assert merged.count() == (30, 30, 30)
    found = written(merged, 30, tmp_path, labels=False)
    assert set(found) == {"loss", "keys"}
    assert (np.diff(found["keys"].astype(object)) > 0).all()
    order = np.argsort(hash_keys(keys))
    assert found["loss"].tolist() == order.tolist()


def test_losses_that_are_not_finite_are_counted(parts):
    values = np.array([1, np.nan, np.inf], np.float32)
    parts.write("a", 0, entries_of(np.arange(3), values), **WHOLE)
    assert Merged(parts.of("a")[0]).count() == (3, 2, 1)


def test_two_keys_with_one_hash_are_refused(parts):
    entries = entries_of(["a", "b"], np.zeros(2, np.float32))
    entries["key"] = 5
    parts.write("a", 0, entries, **{**WHOLE, "keyed": True})
    with pytest.raises(RholossError, match="have the same 64-bit hash"):
        Merged(parts.of("a")[0]).count()


def test_ids_that_cannot_be_merged_are_refused(parts):
    with pytest.raises(RholossError, match=r"negative numbers \(-2\)"):
        entries_of(np.array([1, -2]), np.zeros(2, np.float32))
    parts.write("a", 0, some(0, 3), **WHOLE)
    parts.write("b", 0, entries_of(["x"], np.zeros(1)), **{**WHOLE, "keyed": True})
    with pytest.raises(RholossError, match="Some ids are whole numbers and some are strings"):
        Merged([*parts.of("a")[0], *parts.of("b")[0]])
    parts.write("c", 0, some(0, 0), **WHOLE)
    with pytest.raises(RholossError, match="no shard has a row"):
        Merged(parts.of("c")[0])
