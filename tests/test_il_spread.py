"""Irreducible losses over ranks: the same as one process measures, whoever is killed on the way."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import ranks_il as task
import torch
import torch.distributed as dist
from ranks_run import launch
from torch.utils.data import Subset

import rholoss as rho
from rholoss.errors import RholossError
from rholoss.il import spread
from rholoss.il.partial import Partial
from rholoss.il.parts import Parts

HERE = Path(__file__).parent


def alike(ours, theirs):
    """But for rounding, which on some processors depends on how many rows a batch has."""
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each check returned, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    return {**launch("ranks_il.py", 3, folder), "folder": folder}


@pytest.fixture
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", task.views())
def test_ranks_score_as_one_process_does(found, name):
    data = task.views()[name]
    one = rho.score_irreducible(task.network(), data, **{**task.SCORE, "ranks": False})
    for result in found["scored"]:
        mine = result[name]
        assert alike(mine["values"], one.values)
        assert (mine["labels"] is None) == (one.labels is None)
        if one.labels is not None:
            assert mine["labels"].tolist() == one.labels.tolist()
        for key in ("rows", "measured", "loss", "model", "split", "transform"):
            assert mine["meta"][key] == one.meta[key], key
        for key in ("rows", "labels"):
            assert mine["meta"]["identity"][key] == one.meta["identity"][key], key
    store = found["folder"] / name
    assert not (store / "partial").exists()
    rho.Irreducible.load(store, data)  # it is told by its labels or its content
    changed = task.Points(1000, seed=1, labelled="no labels" not in name)
    if name in ("rows", "no labels"):
        with pytest.raises(RholossError, match="was made for other"):
            rho.Irreducible.load(store, changed)


@pytest.mark.parametrize("name", task.fits())
def test_ranks_fit_as_one_process_does(found, name):
    one = rho.fit_irreducible(task.network, **task.fits()[name], **{**task.FIT, "ranks": False})
    for result in found["fitted"]:
        mine = result[name]
        assert torch.equal(mine["values"], one.values)
        assert mine["labels"].tolist() == one.labels.tolist()
        assert torch.equal(mine["weight"], one.weights(0)["0.weight"])
        assert mine["meta"]["split"] == one.meta["split"]
        assert mine["meta"]["seconds"] > 0
        assert set(mine["meta"]["model"]) == set(one.meta["model"])


def test_one_message_on_every_rank(found):
    expected = {
        "no out": "On each of the 3 ranks: `out` was not given|RholossError: `out` was not given",
        "other model": "The ranks differ in the model of the job: rank 0 has",
        "other data": "The ranks differ in the data of the job: rank 0 has",
        "broken": "On rank 2 of 3: RuntimeError: no memory left",
    }
    for name, pattern in expected.items():
        told = {result[name] for result in found["failures"]}
        assert len(told) == 1, name
        with pytest.raises(AssertionError, match=pattern):
            raise AssertionError(told.pop())


def test_ranks_wait_longer_for_each_other_than_their_process_group_would(found):
    """One fits for longer than the group waits while the other has nothing to do."""
    assert found["patient"] == [100, 100, 100]


class Watched:
    """Counts the rows that it is asked for and may break off."""

    def __init__(self, stop_after=None):
        self.rows, self.stop_after = 0, stop_after

    def __repr__(self):
        return "watched"

    def __call__(self, model, batch):
        self.rows += len(batch[1])
        if self.stop_after is not None and self.rows > self.stop_after:
            raise KeyboardInterrupt
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.usefixtures("alone")
def test_work_that_was_cut_off_goes_on_and_a_damaged_part_is_measured_again(tmp_path):
    data, model, out = task.Points(1000), task.network(), tmp_path / "il"
    options = {"batch_size": 20, "progress": False, "ranks": True}
    with pytest.raises(KeyboardInterrupt):
        rho.score_irreducible(model, data, loss=Watched(404), out=out, **options)
    names = sorted(path.name for path in (out / "partial").glob("*.part"))
    assert names == [f"rows-{i:06}.000000.part" for i in range(20)]
    damaged = out / "partial" / names[7]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    second = Watched()
    il = rho.score_irreducible(model, data, loss=second, out=out, **options)
    assert second.rows == 1000 - 400 + 20
    expected = rho.score_irreducible(model, data, batch_size=20, progress=False)  # not over ranks
    assert torch.equal(il.values, expected.values)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("jump", [-(10**8), 10**8])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, jump):
    """Work is cut off, the clock jumps by three years, and the files of before have times of their own."""
    data, model, out = task.Points(1000), task.network(), tmp_path / "il"
    options = {"batch_size": 20, "progress": False, "ranks": True}
    with pytest.raises(KeyboardInterrupt):
        rho.score_irreducible(model, data, loss=Watched(404), out=out, **options)
    real = {name: getattr(time, name) for name in ("time", "time_ns", "perf_counter")}
    for name, clock in real.items():  # also the one that should not jump: seconds are only noted
        by = jump * (10**9 if name == "time_ns" else 1)
        monkeypatch.setattr(time, name, lambda clock=clock, by=by: clock() + by)
    for path in out.rglob("*"):
        os.utime(path, (10**9 - jump, 10**9 - jump))
    second = Watched()
    il = rho.score_irreducible(model, data, loss=second, out=out, **options)
    assert second.rows == 1000 - 400
    expected = rho.score_irreducible(model, data, batch_size=20, progress=False)
    assert torch.equal(il.values, expected.values)
    assert not (out / "partial").exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_long_unit_is_kept_in_several_parts(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(spread, "PART_ROWS", 20)
    stream = rho.Stream(
        [0, 300],
        lambda start: ({"i": i, "x": torch.ones(1) * i} for i in range(start, start + 105)),
        key="i",
    )

    class Loss(Watched):
        def __call__(self, model, batch):
            self.rows += len(batch["x"])
            if self.stop_after is not None and self.rows > self.stop_after:
                raise KeyboardInterrupt
            return batch["x"][:, 0]

    options = {"batch_size": 10, "out": tmp_path / "il", "num_workers": workers, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        rho.score_irreducible(task.network(), stream, loss=Loss(75), **options)
    second = Loss()
    il = rho.score_irreducible(task.network(), stream, loss=second, **options)
    assert second.rows == 210 - (60 if workers == 0 else second.rows and 210 - second.rows)
    assert second.rows < 210
    ids = [*range(105), *range(300, 405)]
    assert il.lookup(ids).tolist() == [float(i) for i in ids]
    assert il.meta["measured"] == 210


class Table(task.Points):
    """As a Hugging Face data set that was shuffled: its column "index" says which rows these were."""

    column_names: ClassVar = ["x", "labels", "index"]

    def __getitem__(self, key):
        index = [f"k{7 * i % 100}" for i in range(len(self))]
        if isinstance(key, str):
            return {"x": self.x, "labels": self.y, "index": index}[key]
        return {"x": self.x[key], "labels": self.y[key], "index": index[key]}


def of_dicts(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("data", [Table(100), Subset(Table(100), range(20, 60))])
def test_rows_that_carry_their_number_are_known_by_it(tmp_path, data):
    options = {"batch_size": 16, "progress": False, "loss": of_dicts}
    one = rho.score_irreducible(task.network(), data, **options)
    over = rho.score_irreducible(
        task.network(), data, **options, ranks=True, out=tmp_path / "scored"
    )
    asked = [f"k{i}" for i in range(100)]
    assert alike(over.lookup(asked), one.lookup(asked))
    fit = {**options, "score": data, "epochs": 1}
    one = rho.fit_irreducible(task.network, Table(50), **fit)
    over = rho.fit_irreducible(task.network, Table(50), **fit, ranks=True, out=tmp_path / "fit")
    assert alike(over.lookup(asked), one.lookup(asked))


@pytest.mark.usefixtures("alone")
def test_two_rows_with_one_id_are_refused(tmp_path):
    data = rho.WithIndex(task.Points(4), ids=[0, 1, 1, 2])
    with pytest.raises(RholossError, match="1 rows of `dataset` have an id that another row has"):
        rho.score_irreducible(task.network(), data, ranks=True, out=tmp_path / "il", progress=False)


@pytest.mark.usefixtures("alone")
def test_losses_that_are_not_finite_are_told(tmp_path):
    def loss(model, batch):
        return torch.where(batch[1] == 0, torch.nan, 1.0)

    with pytest.warns(
        UserWarning, match=r"\d+ of 1000 points have no finite loss under the model\."
    ):
        il = rho.score_irreducible(
            task.network(), task.Points(1000), loss=loss, out=tmp_path / "il", **task.SCORE
        )
    assert il.meta["measured"] == int((task.Points(1000).y != 0).sum())


@pytest.mark.usefixtures("alone")
def test_parts_that_are_missing_at_the_end_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Parts, "claim", lambda self, unit: unit != "rows-000003")
    with pytest.raises(
        RholossError, match=r"A part of the work is not there.*the same command again"
    ):
        rho.score_irreducible(task.network(), task.Points(1000), out=tmp_path / "il", **task.SCORE)


def test_a_rank_that_joins_throws_nothing_away(tmp_path):
    """It may not see yet, on a shared file system, what the first one wrote."""
    first = Partial(tmp_path, {"work": 1}, 8)
    parts = Parts(first.path, "now")
    parts.open_claims()
    (first.path / "job.json").unlink()
    assert Partial(tmp_path, {"work": 1}, 8, joins=True).path == first.path
    assert parts.claim("rows-000000")


def test_a_block_goes_on_behind_what_is_kept():
    blocks = spread.Blocks(task.Points(1000), 10)
    rest = [ids.tolist() for ids, _, _ in blocks.read("rows-000003", 0)]
    assert rest == [list(range(30, 40))]
    assert list(blocks.read("rows-000003", 10)) == []


def test_blocks_do_not_depend_on_the_number_of_ranks_and_hold_whole_batches():
    for rows, batch_size, block in (
        (1000, 10, 10),
        (10**6, 320, 48 * 320),
        (10**9, 320, 819 * 320),
    ):
        blocks = spread.Blocks(range(rows), batch_size)
        assert blocks.block == block
        assert len(blocks.names) == -(-rows // block)


SCORE = "--model ranks_il:small --data ranks_il:train --loss ranks_il:deadly"
FIT = "--model ranks_il:network --score ranks_il:train --loss ranks_il:deadly_to_fit --folds 4 --epochs 2"


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize(
    ("work", "options"), [("score", SCORE), ("fit", FIT)], ids=["score", "fit"]
)
def test_torchrun_goes_on_after_a_rank_was_killed(tmp_path, work, options):
    """The command as users run it: two ranks, one of them is killed in the middle of its work."""
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 "
        f"--monitor-interval 0.1 -m rholoss il {work} {options} --batch-size 40 --quiet --out il"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "KILLED_ONCE": str(tmp_path / "killed"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert done.stdout.count("il: 1,000 irreducible losses") == 1  # one rank speaks
    found = rho.Irreducible.load(tmp_path / "il", task.train)
    given = {"batch_size": 40, "progress": False}
    if work == "score":
        one = rho.score_irreducible(task.small, task.train, **given)
    else:
        one = rho.fit_irreducible(task.network, task.train, folds=4, epochs=2, **given)
    assert torch.equal(found.values, one.values)
