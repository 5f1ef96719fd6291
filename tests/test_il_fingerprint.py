"""Identity: which changes of a data set are noticed, and which views of it count as the same."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from rholoss.errors import IdentityMismatchError, RholossError
from rholoss.il.fingerprint import identify
from rholoss.il.hashing import content_hash, label_codes
from rholoss.il.store import Irreducible
from rholoss.il.views import labels_of
from rholoss.indexed import WithIndex


class Labelled(Dataset):
    """Items are random at each fetch, as an augmented data set's; the labels are known."""

    def __init__(self, targets, name="targets"):
        setattr(self, name, targets)
        self.rows = len(targets)

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        return torch.randn(2), row


class Items(Dataset):
    """No labels to be had from outside."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


def measured(dataset, **options):
    return Irreducible.from_losses(torch.rand(len(dataset)), dataset=dataset, **options)


LABELS = [3, 1, 2, 2, 0, 1, 7, 7, 5, 4]


def test_same_data_in_other_guises_matches():
    il = measured(WithIndex(Labelled(LABELS)))
    for targets in (LABELS, tuple(LABELS), np.array(LABELS, np.uint8), torch.tensor(LABELS)):
        for name in ("targets", "labels"):
            data = Labelled(targets, name)
            for view in (
                data,
                WithIndex(data),
                Subset(data, range(10)),
                WithIndex(WithIndex(data)),
            ):
                il.compare(view)
                assert identify(view).digest == identify(Labelled(LABELS)).digest


def test_labels_follow_rows_through_nested_views():
    data = Labelled(LABELS)
    view = Subset(WithIndex(Subset(data, [9, 8, 7, 6])), [3, 0])
    assert labels_of(view) == [7, 4]
    assert identify(view).codes.tolist() == [7, 4]
    assert identify(view).ids.tolist() == [6, 9]
    tensors = TensorDataset(torch.zeros(10, 2), torch.tensor(LABELS))
    assert labels_of(Subset(tensors, [6, 0])).tolist() == [7, 3]


def test_a_view_with_labels_of_its_own_goes_first():
    class Relabelled(Subset):
        targets = (9, 9)

    assert labels_of(WithIndex(Relabelled(Labelled(LABELS), [0, 1]))) == (9, 9)


def test_columns_of_a_hugging_face_data_set_are_labels():
    class Columns(Items):
        def __init__(self, items):
            super().__init__(items)
            self.column_names = ["text", "label"]

        def __getitem__(self, key):
            return LABELS if key == "label" else super().__getitem__(key)

    assert labels_of(Columns(["a"] * 10)) == LABELS


def test_smaller_and_shuffled_views_match_and_larger_ones_do_not():
    data = Labelled(LABELS)
    il = measured(WithIndex(Subset(data, [0, 2, 4, 6])))
    il.compare(Subset(data, [6, 2]))
    il.compare(WithIndex(Subset(data, [4, 0, 6, 2])))
    with pytest.raises(
        RholossError, match=r"6 of 10 ids .* 1, 3, 5, 7, 8, \.\.\. \(not measured\)"
    ):
        il.compare(data)


def test_a_changed_label_is_named():
    il = measured(Labelled(LABELS))
    changed = [*LABELS[:4], 6, *LABELS[5:]]
    with pytest.raises(IdentityMismatchError) as error:
        il.compare(WithIndex(Labelled(changed)))
    text = str(error.value)
    assert "1 of 10 differ (id 4 had 0, has 6)" in text
    assert "Labels were changed" in text
    assert "rholoss il fit" in text
    assert "check='size'" in text


def test_another_order_is_told_from_other_labels():
    il = measured(Labelled(LABELS))
    with pytest.raises(IdentityMismatchError, match="same in another order: rows were moved"):
        il.compare(Labelled(LABELS[::-1]))


@pytest.mark.parametrize("labels", [LABELS[:-1], [*LABELS, 1]])
def test_added_or_removed_rows(labels):
    il = measured(Labelled(LABELS))
    for check in ("full", "size"):
        with pytest.raises(IdentityMismatchError, match=rf"has {len(labels)}: .* check='none'"):
            il.compare(Labelled(labels), check=check)


def test_size_lets_changed_labels_pass():
    measured(Labelled(LABELS)).compare(Labelled(LABELS[::-1]), check="size")


def test_labels_argument_stands_in_for_the_attribute():
    items = Items([torch.randn(2) for _ in LABELS])
    il = measured(items, labels=np.array(LABELS))
    il.compare(WithIndex(items), labels=LABELS)
    il.compare(Labelled(LABELS))
    with pytest.raises(IdentityMismatchError, match="2 of 10 differ"):
        il.compare(items, labels=[LABELS[1], LABELS[0], *LABELS[2:]])
    with pytest.raises(IdentityMismatchError, match=r"no `targets` or `labels` to compare\. Pass"):
        il.compare(items)
    with pytest.raises(RholossError, match=r"`labels` has 3 entries, but the data set has 10 rows"):
        il.compare(items, labels=LABELS[:3])


@pytest.mark.parametrize(
    ("labels", "other"),
    [
        (["cat", "dog", "eel"], ["cat", "dog", "emu"]),
        ([0.1, 0.2, 0.3], [0.1, 0.2, 0.30001]),
        ([[0, 1], [1, 1], [1, 0]], [[0, 1], [1, 1], [0, 0]]),
        ([[1], [1, 2], []], [[1], [1, 2], [3]]),
        ([2**40, 1, 2], [2**40 + 1, 1, 2]),
        ([True, False, True], [True, False, False]),
    ],
)
def test_labels_of_any_kind(labels, other):
    il = measured(Labelled(labels))
    il.compare(WithIndex(Labelled(list(labels))))
    with pytest.raises(IdentityMismatchError, match=r"1 of 3 differ"):
        il.compare(Labelled(other))


def test_label_codes_do_not_depend_on_the_container():
    for labels in ([0.1, -0.0, 3.5], ["a", "b", "c"], [[0.5, 1.0], [0.25, 2.0], [3.0, 4.0]]):
        first, _ = label_codes(labels)
        assert (label_codes(np.array(labels))[0] == first).all()
        if not isinstance(labels[0], str):
            assert (label_codes(torch.tensor(labels))[0] == first).all()
            assert (label_codes(torch.tensor(labels).double())[0] == first).all()
        assert first.dtype == np.int32


def test_without_labels_the_content_of_strided_rows_is_compared():
    rows = [torch.full((3,), float(i)) for i in range(1000)]
    il = measured(WithIndex(Items(rows)))
    assert len(il.meta["identity"]["content"]) == 256
    il.compare(Items([row.clone() for row in rows]))
    il.compare(Subset(Items(rows), [500, 3, 2]))
    with pytest.raises(IdentityMismatchError, match=r"of 256 rows that were compared, 25\d differ"):
        il.compare(Items(rows[::-1]))
    with pytest.raises(IdentityMismatchError, match="of 1,000 rows, but this one has 999"):
        il.compare(Items(rows[:-1]))
    with pytest.raises(
        IdentityMismatchError, match="augments its items: then pass the view that was"
    ):
        il.compare(Items([row + 0.1 for row in rows]))


def test_comparing_leaves_random_state_alone():
    class Noisy(Items):
        def __getitem__(self, row):
            return torch.rand(2)

    before = torch.random.get_rng_state()
    identify(Noisy([0] * 20))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_string_keys_carry_identity_themselves():
    data = Labelled(LABELS)
    keys = [f"row{i}" for i in range(10)]
    il = measured(WithIndex(data, ids=keys))
    moved = WithIndex(Labelled(LABELS[::-1]), ids=keys[::-1])
    il.compare(moved)
    il.compare(WithIndex(Subset(data, [3, 5]), ids=["row3", "row5"]))
    il.compare(WithIndex(Labelled(LABELS[:4]), ids=keys[:4]))  # rows may come and go
    with pytest.raises(IdentityMismatchError, match=r"ids 'row0', 'row1'|id row0 had 3"):
        il.compare(WithIndex(Labelled(LABELS[::-1]), ids=keys))


def test_an_empty_data_set():
    with pytest.raises(RholossError, match="The data set has no rows"):
        identify(Items([]))


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: int


@pytest.mark.parametrize(
    ("item", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (np.arange(3), np.arange(3) + 1),
        (np.array(["a", None], object), np.array(["b", None], object)),
        (Image.new("L", (4, 4), 3), Image.new("L", (4, 4), 4)),
        ({"x": 1, "y": "a"}, {"x": 1, "y": "b"}),
        ((1, 2.5, None), (1, 2.5, 0)),
        (["ab", "c"], ["a", "bc"]),
        (b"1", "1"),
        (Record(torch.zeros(1), 1), Record(torch.zeros(1), 2)),
        ([[1], 2], [[1, 2]]),
    ],
)
def test_content_hash_tells_items_apart(item, other):
    assert content_hash(item) != content_hash(other)


def test_content_hash_is_the_same_for_equal_items():
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert content_hash(np.int64(3)) == content_hash(3)
    assert content_hash(Image.new("L", (4, 4), 3)) == content_hash(Image.new("L", (4, 4), 3))
    assert content_hash(object()) == content_hash(object())  # no more is known of these
    # stores on disk rely on it: another value would make them look like those of other data
    assert content_hash((torch.arange(3), "x")) == "4520ce13e12f957a"
