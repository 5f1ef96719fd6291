"""Tables made from keys, arrays and Parquet, compared with their data."""

import math
import pickle
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from rholoss.errors import RholossError, StoreError, UnmeasuredLossError
from rholoss.il import files, ids
from rholoss.il.partial import Partial
from rholoss.il.store import Irreducible
from rholoss.indexed import WithIndex

NAN, INF = math.nan, math.inf


def test_string_keys(tmp_path):
    losses = {f"image/{i}.png": i / 8 for i in range(500)}
    Irreducible.from_losses(losses).save(tmp_path / "il")
    il = Irreducible.load(tmp_path / "il")
    assert il.dense is None
    asked = ["image/7.png", "image/499.png", "image/0.png"]
    assert il.lookup(asked).tolist() == [7 / 8, 499 / 8, 0.0]
    assert il.lookup(np.array(asked)).tolist() == [7 / 8, 499 / 8, 0.0]
    assert il.lookup(["", "image/500.png"]).isnan().all()
    with pytest.raises(UnmeasuredLossError, match=r"1 of 2 ids .*'image/x.png' \(unknown\)"):
        il.check(["image/1.png", "image/x.png"])
    keys = np.fromfile(tmp_path / "il" / il.meta["files"]["keys"], "<u8")
    assert (keys[1:] > keys[:-1]).all()


def test_key_hash_is_stable():
    # stores on disk rely on it
    assert ids.key_hash("image/7.png") == 1459481335613325035


def test_hash_collisions_are_found_when_the_table_is_made(monkeypatch):
    monkeypatch.setattr(ids, "key_hash", lambda key: len(key))
    with pytest.raises(RholossError, match=r"The keys 'ab' and 'cd' .* have the same 64-bit hash"):
        Irreducible.from_losses({"a": 1.0, "ab": 2.0, "cd": 3.0})


@pytest.mark.parametrize("twice", [[3, 1, 3, 2], ["c", "a", "c", "b"]])
def test_duplicate_ids(twice):
    with pytest.raises(RholossError, match=r"`ids` holds 1 ids more than once, among them (3|'c')"):
        Irreducible.from_losses([1.0, 2.0, 3.0, 4.0], twice)


def test_losses_from_arrays_dicts_and_functions():
    data = TensorDataset(torch.zeros(4, 1), torch.tensor([0, 1, 0, 1]))
    expected = [0.0, 0.5, 1.0, 1.5]
    for losses in (
        np.array(expected),
        torch.tensor(expected, dtype=torch.float16),
        torch.tensor(expected, dtype=torch.bfloat16, requires_grad=True),
        expected,
        lambda ids: ids / 2,
        {3: 1.5, 0: 0.0, 2: 1.0, 1: 0.5},
    ):
        il = Irreducible.from_losses(losses, dataset=WithIndex(data))
        assert il.dense.dtype == torch.float32
        assert il.lookup(range(4)).tolist() == expected
        il.compare(data)
    keyed = Irreducible.from_losses(lambda keys: [len(k) for k in keys], ["a", "bbb"])
    assert keyed.lookup(["bbb", "a"]).tolist() == [3.0, 1.0]


@pytest.mark.parametrize("kind", ["series", "index", "arrow", "column", "numpy"])
def test_ids_from_the_columns_of_other_libraries(kind):
    pandas = pytest.importorskip("pandas")
    make = {
        "series": lambda ids: pandas.Series(ids, index=[9, 8]),
        "index": pandas.Index,
        "arrow": pytest.importorskip("pyarrow").array,
        "column": lambda ids: pytest.importorskip("datasets").Dataset.from_dict({"x": ids})["x"],
        "numpy": lambda ids: pytest.importorskip("numpy", "2.0").array(ids, "T"),
    }[kind]
    by_name = Irreducible.from_losses([0.25, 0.5], ids=make(["ä.jpg", "b.jpg"]))
    assert by_name.lookup(make(["b.jpg", "ä.jpg"])).tolist() == [0.5, 0.25]
    named = WithIndex(TensorDataset(torch.zeros(2)), ids=make(["b.jpg", "ä.jpg"]))
    assert by_name.lookup([index for index, _ in named]).tolist() == [0.5, 0.25]
    if kind != "numpy":
        by_row = Irreducible.from_losses([0.25, 0.5], ids=make([4, 0]))
        assert by_row.lookup(make([0, 4])).tolist() == [0.5, 0.25]


def test_sparse_ids_leave_nan_between():
    il = Irreducible.from_losses([1.0, 2.0], [5, 2])
    assert len(il) == 6
    assert il.lookup([2, 5]).tolist() == [2.0, 1.0]
    assert il.lookup([0, 1, 3, 4]).isnan().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], [1]), "`losses` has 2 entries for 1 ids"),
        (([],), "`losses` has 0 entries for 0 ids"),
        (([1.0], [-1]), r"`ids` has negative numbers \(-1\)"),
        (([1.0, 2.0], [0, 2**40]), "go up to 1,099,511,627,776 for only 2 points.*as strings"),
        ((torch.zeros(2, 2),), r"`losses` must be one number for each id.*\(2, 2\)"),
        ((["a", "b"],), "`losses` must be one number for each id"),
        (([[1.0], [1.0, 2.0]],), "`losses` must be one number for each id"),
        ((lambda ids: ids,), "`losses` is a function of ids, but there are no ids"),
        (({2**63: 1.0},), r"whole numbers or strings, .*\(numbers below 2\*\*63\)"),
        (({0: 1.0}, [5]), "`losses` is a dict, which has its ids"),
    ],
)
def test_losses_that_cannot_be_used(arguments, message):
    with pytest.raises(RholossError, match=message):
        Irreducible.from_losses(*arguments)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"rows": 7}, "`rows` is what a table says of itself"),
        ({"version": "v2"}, "`version` is what a table says of itself"),
        ({"model": "resnet18"}, "`model` is 'resnet18'; give a dict"),
        ({"seconds": math.nan}, "`seconds` is nan; give a number"),
    ],
)
def test_meta_that_would_spoil_the_store_is_refused(meta, message):
    with pytest.raises(RholossError, match=message):
        Irreducible.from_losses([1.0, 2.0], **meta)


def test_losses_for_a_data_set_of_another_length():
    data = TensorDataset(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(RholossError, match=r"3 entries for 4 ids; give one loss for each id"):
        Irreducible.from_losses([1.0, 2.0, 3.0], dataset=data)
    with pytest.raises(RholossError, match="`labels` was given without `dataset`"):
        Irreducible.from_losses([1.0], labels=[1])


def test_load_compares_with_the_data_set_and_has_ways_out(tmp_path):
    y = torch.tensor([0, 1, 2, 1])
    data = TensorDataset(torch.zeros(4, 1), y)
    Irreducible.from_losses([1.0] * 4, dataset=WithIndex(data)).save(tmp_path / "il")
    Irreducible.load(tmp_path / "il", data)
    Irreducible.load(tmp_path / "il", WithIndex(data), labels=[0, 1, 2, 1])
    y[2] = 0
    with pytest.raises(
        RholossError, match=rf"The store {tmp_path / 'il'} was made for other labels"
    ):
        Irreducible.load(tmp_path / "il", data)
    assert len(Irreducible.load(tmp_path / "il", data, check="size")) == 4
    fewer = TensorDataset(torch.zeros(3, 1), y[:3])
    with pytest.raises(RholossError, match="of 4 rows, but this one has 3"):
        Irreducible.load(tmp_path / "il", fewer, check="size")
    assert len(Irreducible.load(tmp_path / "il", fewer, check="none")) == 4
    with pytest.raises(RholossError, match="`check` is 'all'; choose one of full, size, none"):
        Irreducible.load(tmp_path / "il", data, check="all")
    with pytest.raises(RholossError, match="`labels` was given without `dataset`"):
        Irreducible.load(tmp_path / "il", labels=[1])


def test_load_finds_points_that_were_not_measured(tmp_path):
    data = TensorDataset(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long))
    Irreducible.from_losses([1.0, NAN, INF], dataset=data).save(tmp_path / "il")
    with pytest.raises(UnmeasuredLossError, match=r"1 \(not measured\); 2 \(infinite\)"):
        Irreducible.load(tmp_path / "il", data)


def test_parquet_there_and_back(tmp_path):
    pytest.importorskip("pyarrow")
    Irreducible.from_losses([0.25, NAN, 0.75]).to_parquet(tmp_path / "il.parquet")
    again = Irreducible.from_parquet(tmp_path / "il.parquet", seconds=3.0)
    assert again.lookup([0, 2]).tolist() == [0.25, 0.75]
    assert again.lookup([1]).isnan().all()
    assert again.seconds == 3.0
    keyed = Irreducible.from_losses({"a": 1.0, "b": 2.0})
    with pytest.raises(RholossError, match="hashes of its string keys only; pass the keys"):
        keyed.to_parquet(tmp_path / "keyed.parquet")
    keyed.to_parquet(tmp_path / "keyed.parquet", ids=["a", "b", "c"])
    assert Irreducible.from_parquet(tmp_path / "keyed.parquet").lookup(["b", "a"]).tolist() == [
        2.0,
        1.0,
    ]
    assert len(list(tmp_path.iterdir())) == 2


def test_parquet_of_others(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"uid": [4, 0], "nll": [0.5, None], "name": ["a", "b"]})
    parquet.write_table(table, tmp_path / "theirs.parquet")
    il = Irreducible.from_parquet(tmp_path / "theirs.parquet", id_column="uid", loss_column="nll")
    assert il.lookup([4]).tolist() == [0.5]
    assert il.lookup([0]).isnan().all()
    with pytest.raises(
        StoreError, match=r"has no column 'index', but uid, nll, name\. Pass `id_column="
    ):
        Irreducible.from_parquet(tmp_path / "theirs.parquet")
    with pytest.raises(StoreError, match=r"column 'name' of .* holds no numbers, but string"):
        Irreducible.from_parquet(tmp_path / "theirs.parquet", id_column="uid", loss_column="name")
    (tmp_path / "bad.parquet").write_bytes(b"PAR0")
    with pytest.raises(StoreError, match="cannot be read as Parquet"):
        Irreducible.from_parquet(tmp_path / "bad.parquet")


def test_a_folder_of_parquet_files(tmp_path):
    # as Spark writes them
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part, keys in enumerate([["a", "b"], ["c", "d"]]):
        table = pyarrow.table({"uid": keys, "nll": [part + 0.25, part + 0.5]})
        parquet.write_table(table, tmp_path / f"part-0000{part}.snappy.parquet")
    (tmp_path / "_SUCCESS").touch()
    il = Irreducible.from_parquet(tmp_path, id_column="uid", loss_column="nll")
    assert il.lookup(["d", "a"]).tolist() == [1.5, 0.25]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RholossError, match=r"pip install 'rholoss\[parquet\]'"):
        Irreducible.from_losses([1.0]).to_parquet(tmp_path / "il.parquet")


def test_pickling_a_stored_table_sends_its_name_only(tmp_path):
    Irreducible.from_losses(torch.rand(100_000)).save(tmp_path / "il")
    il = Irreducible.load(tmp_path / "il")
    sent = pickle.dumps(il)
    assert len(sent) < 5000
    assert torch.equal(pickle.loads(sent).dense, il.dense)
    data = TensorDataset(torch.zeros(100_000, 1))
    for il_ in (Irreducible.load(tmp_path / "il", data, check="none"), il):
        assert pickle.loads(pickle.dumps(il_)).trusted == il_.trusted
    in_memory = Irreducible.from_losses({"a": 1.5})
    assert pickle.loads(pickle.dumps(in_memory)).lookup(["a"]).tolist() == [1.5]


def test_a_table_that_was_saved_under_another_name_of_its_place_can_be_sent(tmp_path):
    (tmp_path / "il").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "il")
    Irreducible.from_losses([1.0, 2.0]).save(tmp_path / "il")
    il = Irreducible.load(tmp_path / "link")
    il.save(tmp_path / "il")
    assert pickle.loads(pickle.dumps(il)).lookup([1]).tolist() == [2.0]


def test_where_nothing_can_be_written_or_read_there_is_a_way_out(tmp_path):
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "il"
    way_out = "See that you may write there and that no other process works in it"
    with pytest.raises(StoreError, match=f"could not be written to .*: .*{way_out} or give anoth"):
        Irreducible.from_losses([1.0]).save(inside)
    with pytest.raises(StoreError, match=f"could not be kept in .*: .*{way_out} and run the same"):
        Partial(inside, {}, 1)
    (tmp_path / "il" / "meta.json").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"meta\.json cannot be read: .* See that you may read"):
        Irreducible.load(tmp_path / "il")


def test_weights_that_were_not_kept():
    with pytest.raises(StoreError, match="no weights of member 0: 0 models were kept"):
        Irreducible.from_losses([1.0]).weights()


def test_a_parquet_file_that_cannot_be_written_is_told(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(StoreError, match=r"x.parquet could not be written: .*No such file"):
        Irreducible.from_losses([1.0]).to_parquet(tmp_path / "no" / "x.parquet")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK"])
def test_weights_that_were_replaced_are_told(tmp_path, content):
    made = Irreducible.from_losses([1.0, 2.0])
    made._weights = [{"w": torch.ones(2)}]
    made.save(tmp_path / "il")
    (tmp_path / "il" / Irreducible.load(tmp_path / "il").meta["files"]["weights"]).write_bytes(
        content
    )
    il = Irreducible.load(tmp_path / "il")  # the losses are there
    assert il.lookup([1]).tolist() == [2.0]
    with pytest.raises(StoreError, match=r"cannot be read as weights .*Copy the store again"):
        il.weights()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK"])
def test_fitted_weights_that_cannot_be_read_are_fitted_again(tmp_path, content):
    partial = Partial(tmp_path, {"work": "fit"}, 4)
    partial.keep_fitted("model", {"state": {"w": torch.ones(2)}})
    assert partial.fitted("model") is not None
    (partial.path / "model.pt").write_bytes(content)
    assert partial.fitted("model") is None


def test_a_store_that_is_replaced_while_it_is_opened_is_the_new_one(tmp_path, monkeypatch):
    path, read = tmp_path / "il", files.read_meta
    Irreducible.from_losses([1.0, 2.0]).save(path)

    def replaced_after(asked):
        meta = read(asked)
        monkeypatch.setattr(files, "read_meta", read)
        Irreducible.from_losses([3.0, 4.0]).save(path)
        return meta

    monkeypatch.setattr(files, "read_meta", replaced_after)
    assert Irreducible.load(path).dense.tolist() == [3.0, 4.0]
