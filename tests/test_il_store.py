"""The store: looked up by id, opened without reading, written so that a crash leaves the old one."""

import copy
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

from rholoss.errors import RholossError, StoreError, UnmeasuredLossError
from rholoss.il import files
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
    assert f"rholoss il score ... --out {tmp_path / 'il-2'}`" in str(error.value)


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
    mean = f"mean {losses.nanmean():.4f}"
    rows = "999 of 1,000 rows"
    assert repr(again) == f"Irreducible({rows}, integer ids, regression loss of M, {mean})"
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
    started = time.process_time()  # of this process alone: the machine may be busy
    opened = Irreducible.load(tmp_path / "il")
    assert opened.lookup([0, 999_999_999, 1_000_000_000])[:2].tolist() == [1.0, 0.0]
    assert time.process_time() - started < 0.5


def test_overwriting_replaces_the_store_and_leaves_no_litter(tmp_path):
    path = tmp_path / "il"
    Irreducible.from_losses([1.0, 2.0]).save(path)
    old = Irreducible.load(path)
    for name in ("loss-0123456789abcdef.f32", "meta-0123456789abcdef.tmp"):
        (path / name).write_bytes(b"left by a run that was killed")
        os.utime(path / name, (0, time.time() - 2 * files.LEFT_BEHIND))
    young = path / "loss-0123456789abcdee.f32"  # may be that of another process, at work
    young.write_bytes(b"")
    Irreducible.from_losses([3.0]).save(path)
    assert Irreducible.load(path).lookup([0]).tolist() == [3.0]
    assert young.exists()
    young.unlink()
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
files.LEFT_BEHIND = -1  # nobody else is at work
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
        timeout=300,
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


def test_of_two_that_save_at_once_one_is_there(tmp_path, monkeypatch):
    """The second saves when the first has written its files, and before that one is known by meta.json."""
    path, write = tmp_path / "il", files.write_file
    Irreducible.from_losses([0.0]).save(path)

    def between(name, writer):
        write(name, writer)
        if name.name.startswith("meta-") and not done:
            done.append(name)
            Irreducible.from_losses([2.0]).save(path)

    done = []
    monkeypatch.setattr(files, "write_file", between)
    Irreducible.from_losses([1.0]).save(path)
    assert done
    assert Irreducible.load(path).lookup([0]).tolist() == [1.0]


def test_a_loaded_table_is_copied_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "il"
    Irreducible.from_losses([1.0, 2.0]).save(path)
    monkeypatch.chdir(tmp_path)
    il = Irreducible.load("il")
    monkeypatch.chdir("/")
    assert copy.deepcopy(il).values.tolist() == [1.0, 2.0]
    il.save(path)  # under other file names
    assert copy.deepcopy(il).values.tolist() == [1.0, 2.0]
    il.values[0] = 7.0
    assert copy.deepcopy(il).values.tolist() == [7.0, 2.0]
    assert Irreducible.load(path).values.tolist() == [1.0, 2.0]
    il.values = torch.tensor([8.0, 9.0])
    assert pickle.loads(pickle.dumps(il)).values.tolist() == [8.0, 9.0]


def test_meta_holds_numbers_of_any_make_and_refuses_the_rest(tmp_path):
    Irreducible.from_losses([1.0], seconds=np.float32(3), note=np.arange(2)).save(tmp_path / "il")
    meta = Irreducible.load(tmp_path / "il").meta
    assert (meta["seconds"], meta["note"]) == (3.0, [0, 1])
    with pytest.raises(StoreError, match=r"cannot hold .*object.*Nothing was written"):
        Irreducible.from_losses([1.0], note=object()).save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_file_names_that_are_not_text_are_ids_too():
    key = os.fsdecode(b"caf\xe9.jpg")
    assert Irreducible.from_losses([1.0, 2.0], ids=[key, "b"]).lookup(["b", key]).tolist() == [2, 1]
