"""Batches of any structure: finding their ids, taking their rows."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss import data
from rholoss.errors import RholossError


class Example(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


# Finding ids in a batch.

IDS, INPUT = torch.tensor([4, 7, 9]), torch.zeros(3, 2)


@dataclass
class Record:
    index: torch.Tensor
    x: torch.Tensor
    scale: float = 2.0
    double: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.double = 2 * self.x


class Numbered(NamedTuple):
    x: torch.Tensor
    index: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        (IDS, INPUT),
        [IDS, INPUT],
        {"x": INPUT, "index": IDS},
        UserDict(x=INPUT, index=IDS),
        Record(IDS, INPUT),
        Numbered(INPUT, IDS),
        (data.Keyed(IDS, INPUT[:, 0]), INPUT),
        (IDS.int(), INPUT),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_ids_are_found(batch):
    assert data.find_index(batch).tolist() == [4, 7, 9]


@pytest.mark.parametrize("keys", [["a", "b"], ("a", "b"), [3, 5]])
def test_ids_in_lists_are_found(keys):
    assert data.find_index((keys, INPUT)) is keys


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        ((INPUT, IDS), r"a tensor \(3, 2\) torch.float32 stands"),
        ((IDS.float(), INPUT), r"a tensor \(3,\) torch.float32 stands"),
        ((IDS > 5, INPUT), r"a tensor \(3,\) torch.bool stands"),
        ((IDS[:, None], INPUT), r"a tensor \(3, 1\) torch.int64 stands"),
        ({"x": INPUT}, "nothing stands"),
        (Example(INPUT, IDS), "nothing stands"),
        ([], "nothing stands"),
        (INPUT, "nothing stands"),
        (([INPUT], INPUT), "a list stands"),
    ],
)
def test_batches_without_ids_are_told(batch, seen):
    wanted = rf"No ids were found in the batch \({seen} in their place.*WithIndex"
    wanted += ".*stream, put a stable key.*pass `index=`"
    with pytest.raises(RholossError, match=wanted):
        data.find_index(batch)


def test_a_function_can_find_the_ids():
    batch = (INPUT, {"meta": IDS})
    select = rho.Selector("uniform", k=2, index=lambda batch: batch[1]["meta"])
    _, meta = select(nn.Identity(), batch)
    assert len(meta["meta"]) == 2


# Taking rows.

P = torch.tensor([2, 0])
X = torch.arange(6.0).reshape(3, 2)


def same(one, two):
    """Equal trees of the same types."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two)
    if isinstance(one, (dict, UserDict)):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((IDS, X), (IDS[P], X[P])),
        ([IDS, X], [IDS[P], X[P]]),
        ({"index": IDS, "in": {"x": X}}, {"index": IDS[P], "in": {"x": X[P]}}),
        (UserDict(x=X), UserDict(x=X[P])),
        (OrderedDict(b=X, a=IDS), OrderedDict(b=X[P], a=IDS[P])),
        (defaultdict(list, x=X), {"x": X[P]}),  # cannot be made from a dict alone
        (Numbered(X, IDS), Numbered(X[P], IDS[P])),
        ((IDS, [X, (X, {"y": IDS})]), (IDS[P], [X[P], (X[P], {"y": IDS[P]})])),
        ((IDS, ["a", "b", "c"]), (IDS[P], ["c", "a"])),
        ((("a", "b", "c"), X), (("c", "a"), X[P])),
        ({"x": X.numpy(), "t": ["a", "b", "c"]}, {"x": X.numpy()[[2, 0]], "t": ["c", "a"]}),
        ([("a", "b", "c"), ("d", "e", "f")], [("c", "a"), ("f", "d")]),  # pairs of texts
        ((IDS, None, 3, 0.5, "all"), (IDS[P], None, 3, 0.5, "all")),
        ((IDS, torch.tensor(5)), (IDS[P], torch.tensor(5))),
        ((IDS, np.float32(5), np.array(5)), (IDS[P], np.float32(5), np.array(5))),
    ],
)
def test_rows_are_taken_in_the_structure_of_the_batch(batch, expected):
    assert same(data.take(batch, P, 3), expected)


def test_rows_of_a_dataclass():
    found = data.take(Record(IDS, X, scale=3.0), P, 3)
    assert isinstance(found, Record)
    assert found.scale == 3.0
    assert torch.equal(found.index, IDS[P])
    assert torch.equal(found.double, 2 * X[P])


def test_a_mapping_of_a_library_comes_back_as_itself():
    class BatchEncoding(UserDict):
        """As Hugging Face's."""

        def __getattr__(self, name):
            if name == "data":
                raise AttributeError(name)
            return self.data[name]

    batch = BatchEncoding({"input_ids": X, "labels": IDS, "index": IDS})
    select = rho.Selector("uniform", k=2)
    found = select(nn.Identity(), batch)
    assert isinstance(found, BatchEncoding)
    assert torch.equal(found.labels, found["index"])
    assert len(found.input_ids) == 2


@pytest.mark.parametrize(
    ("batch", "path", "shape"),
    [
        ((IDS, torch.zeros(2, 3)), r"batch\[1\]", r"\(2, 3\)"),
        ({"index": IDS, "in": {"mask": torch.ones(5)}}, r"batch\['in'\]\['mask'\]", r"\(5,\)"),
        (Record(IDS, X[:2]), r"batch\.x", r"\(2, 2\)"),
        ((IDS, ["a", "b"]), r"batch\[1\]", "list"),
        ((IDS, np.zeros(4)), r"batch\[1\]", r"\(4,\)"),
        ((IDS, {1, 2, 3}), r"batch\[1\]", "set"),
    ],
)
def test_what_has_no_rows_is_told(batch, path, shape):
    wanted = rf"{path} is {shape}, which has no row for each of the 3 examples.*`shared=\(.*{path}"
    with pytest.raises(RholossError, match=wanted):
        data.take(batch, P, 3)
    data.take(batch, P, 3, strict=False)  # passed on as it is


def test_what_is_shared_is_passed_on():
    batch = {"index": IDS, "anchors": torch.zeros(3, 9), "mask": torch.ones(5)}
    found = data.take(batch, P, 3, shared=("batch['anchors']", "batch['mask']"))
    assert found["anchors"] is batch["anchors"]
    assert found["mask"] is batch["mask"]
    assert len(found["index"]) == 2


# The rest.


def test_the_model_gets_the_batch_as_its_own_code_knows_it():
    assert torch.equal(data.without_index((IDS, X)), X)
    assert same(data.without_index([IDS, X, IDS]), (X, IDS))
    joined = {"index": IDS, "irreducible_loss": X[:, 0], "x": X}
    assert same(data.without_index(joined), {"x": X})
    assert same(data.without_irreducible(UserDict(joined)), UserDict(index=IDS, x=X))
    assert same(data.without_irreducible([data.Keyed(IDS, X[:, 0]), X]), [IDS, X])
    record = Record(IDS, X)
    assert data.without_index(record) is record  # a loss of one's own knows its fields


def test_only_tensors_move():
    names = ["a", "b", "c"]
    found = data.to_device({"x": X, "names": names}, torch.device("meta"))
    assert found["x"].is_meta
    assert found["names"] is names


def test_the_device_of_a_model():
    assert data.device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert data.device_of(nn.BatchNorm1d(1, affine=False)) == torch.device("cpu")  # buffers alone
    assert data.device_of(nn.Identity()) == torch.device("cpu")


def test_an_empty_batch_is_told():
    empty = next(iter(DataLoader(rho.WithIndex(TensorDataset(X)), batch_size=3)))
    empty = [leaf[:0] for leaf in empty]
    with pytest.raises(RholossError, match="candidate batch is empty"):
        rho.Selector("uniform", keep=0.5)(nn.Identity(), empty)


@pytest.mark.gpu
def test_a_gpu_takes_rows_without_waiting(no_waiting):
    batch = {"x": torch.rand(320, 8), "index": torch.arange(320)}
    there = data.to_device(batch, torch.device("cuda"))
    position = torch.arange(7)  # on the host, as chunks have it
    with no_waiting():
        found = data.take(there, position, 320)
        taken = data.take(there, there["index"][:7], 320)
    assert torch.equal(found["x"].cpu(), batch["x"][:7])
    assert torch.equal(taken["x"].cpu(), batch["x"][:7])
    back = data.to_device(there, torch.device("cpu"))  # waited for
    assert torch.equal(back["x"], batch["x"])
