"""Data sets whose items carry their id, and their irreducible loss."""

import pickle
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import rholoss as rho
from rholoss import data, indexed
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
    assert indexed.ids_of_rows(outside).tolist() == [12, 4]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize("num_workers", [0, 4])
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
    assert indexed.ids_of_rows(Subset(view, [5, 1])).tolist() == [105, 101]


@pytest.mark.parametrize("keys", [KEYS, tuple(KEYS), np.array(KEYS), np.array(KEYS, dtype=object)])
def test_strings_are_ids_too(keys):
    view = rho.WithIndex(Squares(), keys)
    assert view[2][0] == "img-002"
    part = Subset(view, [5, 1])
    assert indexed.ids_of_rows(part) == ["img-005", "img-001"]
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
            RholossError, match=r"`dataset` is a \w+, which has no row numbers. Read it as"
        ):
            rho.WithIndex(stream)


def test_ids_must_be_one_for_each_row():
    with pytest.raises(RholossError, match="`ids` has 3 entries, but the data set has 24 rows"):
        rho.WithIndex(Squares(), ["a", "b", "c"])
    for unordered in ({"a", "b"}, (i for i in range(24)), 24):
        with pytest.raises(RholossError, match=r"`ids` is a \w+; give a list, an array"):
            rho.WithIndex(Squares(), unordered)


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


def test_joined_losses_may_be_a_tensor_and_no_model():
    indexed = rho.WithIndex(Squares())
    for losses in (torch.arange(24) / 8, np.arange(24) / 8, [i / 8 for i in range(24)]):
        joined = rho.WithIrreducible(indexed, losses)
        assert joined[5][0] == data.Keyed(5, 5 / 8)
    for wrong in (torch.nn.Linear(1, 1), 0.5, None, lambda ids: ids):
        with pytest.raises(RholossError, match=r"`irreducible` is a \w+; (pass|losses are looked)"):
            rho.WithIrreducible(indexed, wrong)


class Table(Dataset):
    """As a Hugging Face data set that was shuffled: rows that carry the number they had before."""

    def __init__(self):
        self.column_names, self.index = ["x", "index"], [2, 0, 1]

    def __len__(self):
        return 3

    def __getitem__(self, key):
        return self.index if key == "index" else {"x": 0.0, "index": self.index[key]}


def test_a_column_of_numbers_is_what_rows_are_known_by():
    assert indexed.ids_of_rows(Table()).tolist() == [2, 0, 1]
    assert indexed.ids_of_rows(Subset(Table(), [1, 2])).tolist() == [0, 1]


def test_a_data_set_that_grew_is_told():
    rows = [1, 2, 3]
    indexed = rho.WithIndex(rows)
    rows.append(4)
    with pytest.raises(RholossError, match="had 3 rows when `WithIndex` was made of it, and has 4"):
        len(indexed)


def test_streams_have_no_rows_to_number():
    with pytest.raises(RholossError, match="`dataset` is a generator, which has no rows"):
        indexed.ids_of_rows(iter_ for iter_ in ())
