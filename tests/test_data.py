import pickle
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import rholoss as rho
from rholoss import data
from rholoss.errors import RholossError, UnmeasuredLossError

ROWS = 24
KEYS = [f"img-{i:03}" for i in range(ROWS)]


class Squares(Dataset):
    """Items that tell their own row: x = row, y = row squared."""

    targets = tuple(i * i for i in range(ROWS))

    def __init__(self, kind="tuple"):
        self.kind = kind

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        x, y = torch.tensor(float(row)), int(row) ** 2
        if self.kind == "dict":
            return {"x": x, "y": y}
        return {"tuple": (x, y), "tensor": x, "named": Example(x, torch.tensor(y))}[self.kind]


class Example(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Losses:
    """What a table of irreducible losses does, in three lines: the loss of a key is a function of it."""

    asked: list = field(default_factory=list)

    def lookup(self, ids):
        self.asked.append(len(ids))
        return torch.tensor([loss_of(i) for i in ids])


def loss_of(i):
    number = int(i.removeprefix("img-")) if isinstance(i, str) else i
    return number / 100 + 0.5


# WithIndex.


def test_items_carry_their_row():
    assert rho.WithIndex(Squares())[3] == (3, torch.tensor(3.0), 9)
    assert rho.WithIndex(Squares("tensor"))[3] == (3, torch.tensor(3.0))
    item = rho.WithIndex(Squares("dict"))[3]
    assert item == {"x": torch.tensor(3.0), "y": 9, "index": 3}
    index, example = rho.WithIndex(Squares("named"))[3]
    assert (index, type(example)) == (3, Example)


def test_nested_subsets_keep_the_ids_of_the_data_inside():
    even = Subset(Squares(), range(0, ROWS, 2))
    third = rho.WithIndex(Subset(even, [9, 0, 3]))
    assert [third[i][0] for i in range(3)] == [18, 0, 6]
    assert all(type(third[i][0]) is int for i in range(3))
    assert [int(x) for _, x, _ in third] == [18, 0, 6]
    # A subset of what is wrapped already carries the same ids.
    outside = Subset(rho.WithIndex(Subset(Squares(), torch.tensor([4, 8, 12]))), [2, 0])
    assert [outside[i][0] for i in range(2)] == [12, 4]
    assert data.ids_of_rows(outside).tolist() == [12, 4]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_ids_stay_with_their_points_whatever_the_loader_does(num_workers, kind):
    """Check 10: a shuffled subset, workers, two epochs; the data tell their own id."""
    even = rho.WithIndex(Subset(Squares(kind), list(range(0, ROWS, 2))))
    joined = rho.WithIrreducible(even, Losses())
    loader = DataLoader(joined, batch_size=5, shuffle=True, num_workers=num_workers)
    for _ in range(2):
        seen = []
        for batch in loader:
            index, loss_B = data.find_index(batch), data.carried_irreducible(batch)
            x, y = (batch["x"], batch["y"]) if kind == "dict" else batch[1:]
            assert index.dtype == torch.int64
            assert torch.equal(x, index.float())
            assert torch.equal(y, index * index)
            torch.testing.assert_close(loss_B.float(), index / 100 + 0.5)
            seen += index.tolist()
        assert sorted(seen) == list(range(0, ROWS, 2))


@pytest.mark.parametrize(
    "ids",
    [
        torch.arange(100, 100 + ROWS),
        np.arange(100, 100 + ROWS, dtype=np.int32),
        range(100, 100 + ROWS),
        tuple(range(100, 100 + ROWS)),
        list(np.arange(100, 100 + ROWS)),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_whole_numbers_of_any_kind_are_ids(ids):
    view = rho.WithIndex(Squares(), ids)
    assert view[2][0] == 102
    assert type(view[2][0]) is int
    assert data.ids_of_rows(Subset(view, [5, 1])).tolist() == [105, 101]


@pytest.mark.parametrize("keys", [KEYS, tuple(KEYS), np.array(KEYS), np.array(KEYS, dtype=object)])
def test_strings_are_ids_too(keys):
    view = rho.WithIndex(Squares(), keys)
    assert view[2][0] == "img-002"
    part = Subset(view, [5, 1])
    assert data.ids_of_rows(part) == ["img-005", "img-001"]
    assert list(data.find_index(next(iter(DataLoader(part, batch_size=2))))) == [
        "img-005",
        "img-001",
    ]


def test_a_number_among_strings_stays_a_number():
    view = rho.WithIndex(Squares(), [0, *KEYS[1:]])
    assert (view[0][0], view[1][0]) == (0, "img-001")


def test_it_can_be_pickled_for_workers_and_forwards_what_the_data_set_has():
    view = rho.WithIndex(Squares())
    joined = rho.WithIrreducible(view, Losses())
    for made in (view, joined):
        again = pickle.loads(pickle.dumps(made))
        assert again[4][1:] == made[4][1:]
        assert len(again) == ROWS
        assert again.targets == Squares.targets
        assert not hasattr(again, "classes")
        with pytest.raises(AttributeError):
            _ = again.__array__


def test_a_whole_batch_is_fetched_at_once_where_the_data_set_can():
    class Columns(Squares):
        def __getitems__(self, rows):
            self.fetched = rows
            return [self[row] for row in rows]

    columns, losses = Columns("dict"), Losses()
    joined = rho.WithIrreducible(rho.WithIndex(Subset(columns, range(9, 19))), losses)
    batch = next(iter(DataLoader(joined, batch_size=6)))
    assert columns.fetched == [9, 10, 11, 12, 13, 14]
    assert losses.asked == [6]  # one look-up for the batch
    assert batch["index"].tolist() == columns.fetched


def test_data_sets_without_rows_are_told():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    for stream in (Stream(), iter([1, 2])):
        with pytest.raises(
            RholossError, match=r"`dataset` is a \w+, which has no row numbers. Put a"
        ):
            rho.WithIndex(stream)


def test_ids_must_be_one_for_each_row():
    with pytest.raises(RholossError, match="`ids` has 3 entries, but the data set has 24 rows"):
        rho.WithIndex(Squares(), ["a", "b", "c"])


def test_items_with_an_index_of_their_own_are_told():
    class Indexed(Squares):
        def __getitem__(self, row):
            return {"index": row, "x": 0.0}

    with pytest.raises(RholossError, match=r"have a key 'index' already; rename that column"):
        rho.WithIndex(Indexed())[0]


# WithIrreducible.


@pytest.mark.parametrize("kind", ["tuple", "dict"])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["row numbers", "string keys"])
def test_joined_losses_are_used_and_taken_out_again(kind, keys):
    joined = rho.WithIrreducible(rho.WithIndex(Squares(kind), keys), Losses())
    select = rho.Selector("negative_il", k=3)
    batch = next(iter(DataLoader(joined, batch_size=8)))
    chosen = select(nn.Identity(), batch)
    if kind == "dict":
        assert sorted(chosen) == ["index", "x", "y"]
        chosen = [chosen["index"], chosen["x"], chosen["y"]]
    index, x, y = chosen
    assert list(index) == ([0, 1, 2] if keys is None else KEYS[:3])  # the lowest losses
    assert x.tolist() == [0, 1, 2]
    assert y.tolist() == [0, 1, 4]


def test_a_joined_loss_that_is_not_measured_is_an_error():
    class Gap(Losses):
        def lookup(self, ids):
            return super().lookup(ids).where(torch.tensor([i != "img-004" for i in ids]), torch.nan)

    joined = rho.WithIrreducible(rho.WithIndex(Squares(), KEYS), Gap())
    batch = next(iter(DataLoader(joined, batch_size=8)))
    with pytest.raises(UnmeasuredLossError, match=r"1 of 8 candidates .* ids img-004"):
        rho.Selector("negative_il", k=3)(nn.Identity(), batch)


@pytest.mark.parametrize("dataset", [Squares(), Subset(rho.WithIndex(Squares()), [1])])
def test_losses_are_joined_to_data_with_ids_only(dataset):
    with pytest.raises(
        RholossError, match=r"whose rows have no ids; pass `rholoss.WithIndex\(data"
    ):
        rho.WithIrreducible(dataset, Losses())


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
    wanted = rf"No ids were found in the batch \({seen} in their place.*WithIndex.*pass `index=`"
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
def test_a_gpu_takes_rows_without_waiting():
    batch = {"x": torch.rand(320, 8), "index": torch.arange(320)}
    there = data.to_device(batch, torch.device("cuda"))
    position = torch.arange(7)  # on the host, as chunks have it
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = data.take(there, position, 320)
        taken = data.take(there, there["index"][:7], 320)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found["x"].cpu(), batch["x"][:7])
    assert torch.equal(taken["x"].cpu(), batch["x"][:7])
    back = data.to_device(there, torch.device("cpu"))  # waited for
    assert torch.equal(back["x"], batch["x"])
