"""The store: looked up by id, opened without reading, written so that a crash leaves the old one."""

import json
import math
import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from rholoss.data import WithIndex
from rholoss.errors import RholossError, StoreError, UnmeasuredLossError
from rholoss.il import files, ids
from rholoss.il.store import Irreducible

NAN, INF = math.nan, math.inf


@pytest.fixture
def il():
    return Irreducible.from_losses([0.5, NAN, 2.0, INF, -1.0])


def contents(path):
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.is_file()}


@pytest.mark.parametrize(
    "asked",
    [
        torch.tensor([4, 0, 2]),
        torch.tensor([4, 0, 2], dtype=torch.int32),
        np.array([4, 0, 2]),
        np.array([9, 2, 9, 0, 9, 4])[::-2],
        [4, 0, 2],
        (np.int64(4), 0, 2),
    ],
)
def test_lookup_takes_any_kind_of_integer_ids(il, asked):
    found = il.lookup(asked)
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    assert found.tolist() == [-1.0, 0.5, 2.0]
    assert il.lookup(range(4, -1, -2)).tolist() == [-1.0, 2.0, 0.5]


def test_lookup_of_read_only_and_empty_ids(il):
    asked = np.array([4, 0])
    asked.flags.writeable = False
    assert il.lookup(asked).tolist() == [-1.0, 0.5]
    assert il.lookup([]).shape == (0,)
    assert il.lookup(torch.empty(0, dtype=torch.long)).shape == (0,)


def test_unknown_and_unmeasured_ids_are_nan(il):
    found = il.lookup([1, -1, 5, 10**15, 0])
    assert found[:4].isnan().all()
    assert found[4] == 0.5
    assert il.lookup([-1, 0])[0].isnan()
    assert il.lookup([0, 5])[1].isnan()
    assert il.lookup(["a", "b"]).isnan().all()
    assert il.dense[0] == 0.5  # a look-up that misses changes nothing


@pytest.mark.parametrize(
    "asked", [[0.5], torch.tensor([1.0]), torch.tensor([[1]]), [True], 3, None]
)
def test_ids_that_are_no_ids(il, asked):
    with pytest.raises(RholossError, match="`ids` must be whole numbers or strings"):
        il.lookup(asked)


def test_check_passes_over_measured_ids(il):
    il.check(torch.tensor([0, 2, 4]))
    il.check([])


def test_check_names_ids_reasons_and_the_command(il):
    with pytest.raises(UnmeasuredLossError) as error:
        il.check(torch.tensor([0, 1, 2, 3, -1, 7]))
    text = str(error.value)
    assert text.startswith("4 of 6 ids have no usable irreducible loss: ")
    assert "1 (not measured); 3 (infinite); -1, 7 (unknown)" in text
    assert "`rholoss il score ...`" in text


def test_check_names_at_most_five_ids_and_the_store(tmp_path):
    Irreducible.from_losses([NAN] * 9 + [1.0]).save(tmp_path / "il")
    with pytest.raises(UnmeasuredLossError) as error:
        Irreducible.load(tmp_path / "il").check(range(10))
    assert "9 of 10 ids" in str(error.value)
    assert "0, 1, 2, 3, 4, ... (not measured)" in str(error.value)
    assert f"rholoss il score ... --out {tmp_path / 'il'}" in str(error.value)


def test_check_says_when_the_kind_of_id_differs(il):
    with pytest.raises(
        UnmeasuredLossError, match="stored ids are integers, those asked for are not"
    ):
        il.check(["0"])
    keyed = Irreducible.from_losses({"a": 1.0})
    with pytest.raises(
        UnmeasuredLossError, match="stored ids are strings, those asked for are not"
    ):
        keyed.check([0])


def test_round_trip_keeps_values_bit_for_bit_and_meta(tmp_path):
    losses = torch.randn(1000, dtype=torch.float64)
    losses[3] = NAN
    first = Irreducible.from_losses(losses, loss="regression", seconds=12.5, model={"class": "M"})
    first.save(tmp_path / "a" / "il")
    again = Irreducible.load(tmp_path / "a" / "il")
    assert again.dense.numpy().tobytes() == losses.float().numpy().tobytes()
    assert again.seconds == 12.5
    assert repr(again) == "Irreducible(1,000 rows, integer ids, regression loss of M)"
    meta = json.loads((tmp_path / "a" / "il" / "meta.json").read_text())
    assert meta == again.meta
    assert (meta["format"], meta["version"], meta["rows"], meta["measured"]) == (
        "rholoss-il",
        1,
        1000,
        999,
    )
    assert {
        "identity",
        "loss",
        "model",
        "split",
        "transform",
        "created",
        "rholoss",
        "torch",
    } <= set(meta)
    raw = np.fromfile(tmp_path / "a" / "il" / meta["files"]["loss"], "<f4")
    assert raw.tobytes() == again.dense.numpy().tobytes()


def test_the_table_is_mapped_and_writes_to_it_stay_private(tmp_path):
    Irreducible.from_losses([1.0, 2.0]).save(tmp_path / "il")
    opened = Irreducible.load(tmp_path / "il")
    before = contents(tmp_path / "il")
    opened.dense[0] = 9.0
    assert contents(tmp_path / "il") == before
    assert Irreducible.load(tmp_path / "il").lookup([0]).tolist() == [1.0]


def test_a_billion_rows_open_at_once(tmp_path):
    Irreducible.from_losses([1.0]).save(tmp_path / "il")
    meta = json.loads((tmp_path / "il" / "meta.json").read_text())
    meta["rows"] = 1_000_000_000
    (tmp_path / "il" / "meta.json").write_text(json.dumps(meta))
    os.truncate(tmp_path / "il" / meta["files"]["loss"], 4 * meta["rows"])  # sparse
    started = time.perf_counter()
    opened = Irreducible.load(tmp_path / "il")
    assert opened.lookup([0, 999_999_999, 1_000_000_000])[:2].tolist() == [1.0, 0.0]
    assert time.perf_counter() - started < 0.5


def test_overwriting_replaces_the_store_and_leaves_no_litter(tmp_path):
    path = tmp_path / "il"
    Irreducible.from_losses([1.0, 2.0]).save(path)
    old = Irreducible.load(path)
    (path / "loss-0123456789abcdef.f32").write_bytes(b"left by a run that was killed")
    (path / "meta-0123456789abcdef.tmp").write_bytes(b"{")
    Irreducible.from_losses([3.0]).save(path)
    assert Irreducible.load(path).lookup([0]).tolist() == [3.0]
    assert sorted(name[:4] for name in contents(path)) == ["loss", "meta"]
    assert old.lookup([0, 1]).tolist() == [1.0, 2.0]  # who had it open still has it
    old.save(path)
    assert Irreducible.load(path).lookup([0, 1]).tolist() == [1.0, 2.0]


def test_saving_what_was_loaded_onto_itself(tmp_path):
    path = tmp_path / "il"
    Irreducible.from_losses({"a": 1.0, "b": 2.0}).save(path)
    Irreducible.load(path).save(path)
    assert Irreducible.load(path).lookup(["b", "a"]).tolist() == [2.0, 1.0]


KILLED = """
import os, resource, signal, sys
import numpy as np
from pathlib import Path
from rholoss.il import files
from rholoss.il.store import Irreducible

path = Path(sys.argv[1])
old, new = np.full(5000, 1.0), np.full(7000, 2.0)

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(3)
    return os.waitpid(child, 0)[1]

def killed_at(function, nth):
    def work():
        calls, real = [0], getattr(os, function)
        def instead(*args):
            calls[0] += 1
            if calls[0] == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)
        setattr(os, function, instead)
        Irreducible.from_losses(new).save(path)
    return in_child(work)

def holds():
    return Irreducible.load(path).values.numpy()

for function, nth in [("fsync", 1), ("fsync", 2), ("replace", 1), ("fsync", 3), ("unlink", 1)]:
    Irreducible.from_losses(old).save(path)
    assert len(list(path.iterdir())) == 2, list(path.iterdir())  # and what was left is gone
    status = killed_at(function, nth)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (function, nth, status)
    committed = (function, nth) in [("fsync", 3), ("unlink", 1)]
    expected = new if committed else old
    assert holds().tobytes() == expected.astype("<f4").tobytes(), (function, nth)
    print("killed at", function, nth, "->", "new" if committed else "old")

Irreducible.from_losses(old).save(path)

def on_a_full_disk():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    Irreducible.from_losses(new).save(path)

assert os.waitstatus_to_exitcode(in_child(on_a_full_disk)) == 3
assert holds().tobytes() == old.astype("<f4").tobytes()
assert len(list(path.iterdir())) == 2, list(path.iterdir())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_kill_at_any_moment_and_a_full_disk_leave_the_old_store(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "il")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("killed at") == 5
    assert "StoreError The store could not be written to" in result.stdout
    assert "File too large" in result.stdout
    assert "What was there before is unchanged" in result.stdout


def test_no_space_left_is_told_and_cleaned_up(tmp_path, monkeypatch):
    path = tmp_path / "il"
    Irreducible.from_losses([1.0]).save(path)
    before = contents(path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(
        StoreError, match=r"No space left on device\. What was there before is unchanged"
    ):
        Irreducible.from_losses([2.0]).save(path)
    assert contents(path) == before


def broken_store(tmp_path, change):
    path = tmp_path / "il"
    Irreducible.from_losses([1.0, 2.0, 3.0]).save(path)
    meta = json.loads((path / "meta.json").read_text())
    change(path, meta)
    return path


def rewrite(**changes):
    def change(path, meta):
        (path / "meta.json").write_text(json.dumps({**meta, **changes}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, m: os.truncate(p / m["files"]["loss"], 8), r"has 8 bytes, but 3 rows need 12"),
        (lambda p, m: os.truncate(p / m["files"]["loss"], 16), r"has 16 bytes, but 3 rows need 12"),
        (lambda p, m: os.unlink(p / m["files"]["loss"]), r"is missing, though meta.json names it"),
        (lambda p, m: (p / "meta.json").write_text('{"form'), r"cannot be read as JSON"),
        (lambda p, m: (p / "meta.json").write_bytes(b"\xff\xfe"), r"cannot be read as JSON"),
        (lambda p, m: (p / "meta.json").write_text("[]"), r"is not a store of irreducible losses"),
        (rewrite(format="other"), r"its meta.json has no format 'rholoss-il'"),
        (rewrite(version=2), r"format version 2, but this rholoss reads version 1"),
        (rewrite(rows="3"), r"is incomplete: `rows` is '3'"),
        (rewrite(rows=0), r"is incomplete: `rows` is 0"),
        (rewrite(files={"loss": "../secret"}), r"is incomplete"),
        (rewrite(files={}), r"is incomplete"),
    ],
)
def test_broken_stores_are_refused_and_left_as_they_are(tmp_path, change, message):
    path = broken_store(tmp_path, change)
    before = contents(path)
    with pytest.raises(StoreError, match=message):
        Irreducible.load(path)
    assert contents(path) == before
    if not message.startswith(("has", "is missing")):  # meta.json itself: nobody writes over that
        with pytest.raises(StoreError, match=message):
            Irreducible.from_losses([9.0]).save(path)
        assert contents(path) == before


def test_places_that_are_no_store(tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        Irreducible.load(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"is not a store.*no meta\.json"):
        Irreducible.load(tmp_path / "file")
    with pytest.raises(StoreError, match="is a file; give the name of a directory"):
        Irreducible.from_losses([1.0]).save(tmp_path / "file")
    with pytest.raises(StoreError, match=r"holds other files \(file\) and no store"):
        Irreducible.from_losses([1.0]).save(tmp_path)
    (tmp_path / "cut" / "partial").mkdir(parents=True)
    with pytest.raises(
        StoreError, match=r"cut off before it was complete\. Run the same command again"
    ):
        Irreducible.load(tmp_path / "cut")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "file"]


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
    ],
)
def test_losses_that_cannot_be_used(arguments, message):
    with pytest.raises(RholossError, match=message):
        Irreducible.from_losses(*arguments)


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
    table = pyarrow.table({"uid": [4, 0], "nll": [0.5, None]})
    parquet.write_table(table, tmp_path / "theirs.parquet")
    il = Irreducible.from_parquet(tmp_path / "theirs.parquet", id_column="uid", loss_column="nll")
    assert il.lookup([4]).tolist() == [0.5]
    assert il.lookup([0]).isnan().all()
    with pytest.raises(StoreError, match=r"has no column 'index', but uid, nll\. Pass `id_column="):
        Irreducible.from_parquet(tmp_path / "theirs.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR0")
    with pytest.raises(StoreError, match="cannot be read as Parquet"):
        Irreducible.from_parquet(tmp_path / "bad.parquet")


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
    in_memory = Irreducible.from_losses({"a": 1.5})
    assert pickle.loads(pickle.dumps(in_memory)).lookup(["a"]).tolist() == [1.5]


def test_weights_that_were_not_kept():
    with pytest.raises(StoreError, match="no weights of member 0: 0 models were kept"):
        Irreducible.from_losses([1.0]).weights()
