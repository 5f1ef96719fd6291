"""Lists with an entry for each example, lists of fields, and ids that come once."""

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

import rholoss as rho
from rholoss import data
from rholoss.errors import RholossError

ROWS = 6


def ragged(lengths=(1, 2, 3, 6, 5, 4)):
    return [torch.full((n,), row) for row, n in enumerate(lengths)]


def boxes():
    return tuple(
        {"boxes": torch.full((row + 1, 4), row), "image": torch.tensor(row)} for row in range(ROWS)
    )


def take(batch, **options):
    return data.take(batch, torch.tensor([4, 1]), ROWS, **options)


@pytest.mark.parametrize("kind", [list, tuple])
def test_ragged_tensors_are_rows(kind):
    index, found = take((torch.arange(ROWS), kind(ragged())))
    assert index.tolist() == [4, 1]
    assert type(found) is kind
    assert [t.tolist() for t in found] == [[4] * 5, [1] * 2]


def test_a_dict_for_each_example_is_a_row():
    found = take({"index": torch.arange(ROWS), "target": boxes()})["target"]
    assert type(found) is tuple
    assert [f["image"].item() for f in found] == [4, 1]
    assert [tuple(f["boxes"].shape) for f in found] == [(5, 4), (2, 4)]


def test_numbers_as_tensors_are_rows():
    """What `tuple(zip(*batch))` makes of labels."""
    labels = tuple(torch.tensor(10 + row) for row in range(ROWS))
    assert [t.item() for t in take((torch.arange(ROWS), labels))[1]] == [14, 11]


@pytest.mark.parametrize("rows", [2, 3])
def test_a_few_fields_of_a_small_batch_stay_fields(rows):
    """As many fields as rows: all have rows, or belong to all."""
    index, x = torch.arange(rows), torch.arange(rows * 2).view(rows, 2)
    batch = (index, [x, {"a": x, "scale": 2.0}], (x, None, 0.5)[:rows])
    found = data.take(batch, torch.tensor([1]), rows)
    assert found[0].tolist() == [1]
    assert found[1][0].tolist() == found[1][1]["a"].tolist() == [[2, 3]]
    assert found[2][0].tolist() == [[2, 3]]
    assert found[2][1] is None


def test_where_nothing_tells_them_apart_it_is_fields():
    fields = [torch.arange(ROWS) + 10 * field for field in range(ROWS)]
    found = take((torch.arange(ROWS), fields))[1]
    assert [t.tolist() for t in found] == [[10 * f + 4, 10 * f + 1] for f in range(ROWS)]


def test_shared_names_a_whole_part():
    table = [torch.zeros(3), torch.zeros(7)]
    with pytest.raises(RholossError, match=r"batch\[1\]\[0\] is \(3,\).*with an entry for each"):
        take((torch.arange(ROWS), table))
    for names in (("batch[1]",), ("batch[1][0]", "batch[1][1]")):
        assert take((torch.arange(ROWS), table), shared=names)[1][1] is table[1]
    with pytest.raises(RholossError, match=r"batch\['tables'\]\[0\] is"):
        take({"index": torch.arange(ROWS), "tables": table}, shared=["batch['table']"])
    rows = ragged()
    for names in (["batch[1]"], [f"batch[1][{row}]" for row in range(ROWS)]):
        found = take((torch.arange(ROWS), rows), shared=names)[1]
        assert len(found) == ROWS
        assert found[3] is rows[3]


@pytest.mark.parametrize("chunk", [None, 4])
def test_rows_are_selected_from_what_cannot_be_stacked(chunk):
    items = [
        (torch.full((row % 5 + 1,), float(row)), {"boxes": torch.zeros(row % 3, 4)})
        for row in range(20)
    ]

    def loss(model, batch):
        assert len(batch[0]) == len(batch[1])
        return torch.stack([x.mean() for x in batch[0]])

    loader = DataLoader(
        rho.WithIndex(items), batch_size=10, collate_fn=lambda b: tuple(zip(*b, strict=True))
    )
    select = rho.Selector("loss", keep=0.2, loss=loss, chunk=chunk)
    for step, batch in enumerate(loader):
        index, x, target = select(nn.Linear(1, 1), batch)
        assert list(index) == [10 * step + 9, 10 * step + 8]
        assert [len(part) for part in x] == [row % 5 + 1 for row in index]
        assert [len(t["boxes"]) for t in target] == [row % 3 for row in index]


# Ids come once.


def test_items_that_carry_ids_keep_them():
    inner = TensorDataset(torch.arange(10) * 10)
    part = Subset(rho.WithIndex(inner), [7, 3, 5])
    for view in (rho.WithIndex(part), rho.WithIndex(rho.WithIndex(part))):
        assert [view[i] for i in range(3)] == [(i, torch.tensor(10 * i)) for i in (7, 3, 5)]
        assert view.__getitems__([1]) == [(3, torch.tensor(30))]
    first, _ = random_split(rho.WithIndex(rho.WithIndex(inner, ids=list("abcdefghij"))), [4, 6])
    assert all(key == "abcdefghij"[int(x) // 10] for key, x in rho.WithIndex(first))
    assert rho.WithIndex(part, ids=["u", "v", "w"])[1] == ("v", torch.tensor(30))


def test_ids_that_would_collide_or_come_twice_are_refused():
    parts = [rho.WithIndex(TensorDataset(torch.zeros(3))) for _ in range(2)]
    with pytest.raises(RholossError, match=r"join them first: `rholoss.WithIndex\(ConcatDataset"):
        rho.WithIndex(ConcatDataset(parts))
    assert rho.WithIndex(ConcatDataset([part.dataset for part in parts]))[4][0] == 4
    joined = rho.WithIrreducible(parts[0], rho.Irreducible.from_losses([0.1, 0.2, 0.3]))
    with pytest.raises(RholossError, match="carry their ids already; pass it to the loader"):
        rho.WithIndex(Subset(joined, [0, 1]))
