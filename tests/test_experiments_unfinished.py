"""Runs that are cut off go on where they were, and end as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures_bench import BASE, RECIPE, tiny, write_cifar10

from experiments.bench.cell import Cell
from experiments.bench.run import Bench, done, run
from experiments.bench.training import Run
from experiments.bench.unfinished import terminable
from experiments.models import MODELS
from rholoss import progress
from rholoss.engine import Evaluator

SAME = ("eval", "il_eval", "test_loss", "per_class", "shares", "scored", "trained", "steps")
ASKED = (signal.SIGTERM, signal.SIGHUP)  # to end: the second as a terminal is closed
RHO = {"method": "rho", "il": "tiny, clean holdout"}
KINDS = [
    {},
    {"method": "loss"},
    {"method": "grad_norm_is"},
    {"method": "svp", "il": "tiny, clean holdout"},
    {**RHO, "labels": "noise 10 %", "looks": 2},
    {**RHO, "schedule": "annealed"},
    {**RHO, "il": "tiny, cross-fit", "batch_norm": "eval"},
    {**RHO, "il": "tiny, live"},
    {**RHO, "il": "tiny, live in train mode"},
]


def dropping(num_classes):
    """Draws from torch's own generator in every step."""
    return torch.nn.Sequential(tiny(num_classes)[:-1], torch.nn.Dropout(), torch.nn.Linear(16, 10))


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", tiny)
    monkeypatch.setitem(MODELS, "dropping", dropping)
    return write_cifar10(tmp_path / "data")


@pytest.fixture
def bench(root):
    """A new process would have a new one; data and irreducible losses it would find where they are."""
    return lambda **options: Bench(root, recipe=RECIPE, **options)


def result(out):
    (line,) = done(out).values()
    return {name: line[name] for name in SAME}


def cut_off(monkeypatch, step, times=1):
    """The trainer is interrupted when it has taken this step, as by Ctrl-C."""
    advance, left = Run.advance, [times]

    def interrupted(self, steps=1):
        if self.step == step and left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return advance(self, 1)

    monkeypatch.setattr(Run, "advance", interrupted)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: ", ".join(map(str, kind.values())))
@pytest.mark.parametrize(
    "step", [7, 10]
)  # in the middle of an epoch; at its end, evaluation unread
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(
    bench, tmp_path, monkeypatch, kind, step
):
    cells = [("s", Cell(**BASE, **kind))]
    run(bench(), cells, tmp_path / "whole", progress=False)
    cut_off(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        run(bench(), cells, tmp_path / "cut", progress=False)
    assert not done(tmp_path / "cut")
    torch.manual_seed(99)  # another process is elsewhere in its random numbers
    assert bench().steps_left(cells[0][1]) == 15 - step
    assert run(bench(), cells, tmp_path / "cut", progress=False) == 1
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
    lines = [*done(tmp_path / "whole").values(), *done(tmp_path / "cut").values()]
    assert [line["resumed"] for line in lines] == [0, 1]
    assert not list(bench().unfinished.folder.iterdir())  # nothing is left to go on with


def test_dropout_goes_on_too(bench, tmp_path, monkeypatch):
    cells = [("s", Cell(**{**BASE, "model": "dropping"}))]
    run(bench(), cells, tmp_path / "whole", progress=False)
    cut_off(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        run(bench(), cells, tmp_path / "cut", progress=False)
    torch.manual_seed(99)
    run(bench(), cells, tmp_path / "cut", progress=False)
    assert result(tmp_path / "cut") == result(tmp_path / "whole")


def test_all_runs_that_are_under_way_are_put_aside(bench, tmp_path, monkeypatch, capsys):
    cells = [("s", Cell(seed=seed, **BASE)) for seed in range(3)]
    run(bench(), cells, tmp_path / "whole", progress=False)
    cut_off(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        run(bench(), cells, tmp_path / "cut", side_by_side=2, progress=False)
    assert "2 run(s) under way were put aside" in capsys.readouterr().err
    assert [bench().unfinished.step(cell) for _, cell in cells] == [7, 7, 0]
    assert run(bench(), cells, tmp_path / "cut", progress=False) == 3
    told = capsys.readouterr().err
    assert told.count("goes on at step 7") == 2
    found, expected = done(tmp_path / "cut"), done(tmp_path / "whole")
    for key, line in expected.items():
        assert {n: line[n] for n in SAME} == {n: found[key][n] for n in SAME}


@pytest.mark.parametrize("part", ["begin", "read"])
@pytest.mark.parametrize("call", [4, 5])  # the second of the model, and of its live one
def test_an_interrupted_evaluation_is_made_again(bench, tmp_path, monkeypatch, part, call):
    cells = [("s", Cell(method="rho", il="tiny, live", **BASE))]
    run(bench(), cells, tmp_path / "whole", progress=False)
    made, calls = getattr(Evaluator, part), []

    def interrupted(self):
        calls.append(self)
        if len(calls) == call:
            raise KeyboardInterrupt
        return made(self)

    monkeypatch.setattr(Evaluator, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(bench(), cells, tmp_path / "cut", progress=False)
    run(bench(), cells, tmp_path / "cut", progress=False)
    assert result(tmp_path / "cut") == result(tmp_path / "whole")


def test_a_state_is_of_one_precision(bench, tmp_path, monkeypatch):
    cells = [("s", Cell(**BASE))]
    cut_off(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        run(bench(), cells, tmp_path, progress=False)
    assert bench(precision="bf16").unfinished.step(cells[0][1]) == 0
    assert bench().unfinished.step(cells[0][1]) == 7
    assert bench().unfinished.step(replace(cells[0][1], seed=1)) == 0


@pytest.mark.parametrize("spoil", [b"", b"PK\x03\x04 cut short", "a bit", "all", "other losses"])
def test_a_state_that_does_not_fit_is_told_and_the_run_begins_anew(
    bench, tmp_path, monkeypatch, capsys, spoil
):
    cell = Cell(method="rho", il="tiny, clean holdout", **BASE)
    run(bench(), [("s", cell)], tmp_path / "whole", progress=False)
    cut_off(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        run(bench(), [("s", cell)], tmp_path / "cut", progress=False)
    path = bench().unfinished.path(cell)
    if isinstance(spoil, bytes):
        path.write_bytes(spoil)
    elif spoil == "a bit":  # of a weight
        state = path.read_bytes()
        with zipfile.ZipFile(path) as file:
            largest = max(file.infolist(), key=lambda entry: entry.file_size)
        place = state.index(b"FB", largest.header_offset) + 512  # the padding, and the weights
        path.write_bytes(state[:place] + bytes([state[place] ^ 1]) + state[place + 1 :])
    elif spoil == "all":
        torch.save([1], path)
    else:
        state = torch.load(path, weights_only=True)
        state["trainer"]["made"]["irreducible losses"] = "others"
        torch.save(state, path)
    assert run(bench(), [("s", cell)], tmp_path / "cut", progress=False) == 1
    assert "begins anew" in capsys.readouterr().err
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
    (line,) = done(tmp_path / "cut").values()
    assert line["resumed"] == 0


def test_states_are_kept_from_time_to_time_and_a_full_disk_stops_no_run(
    bench, tmp_path, monkeypatch, capsys
):
    saved, save = [], torch.save

    def full(state, path):
        saved.append(state["trainer"]["step"])
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    made = bench()
    made.unfinished.every = 0.0
    run(made, [("s", Cell(**BASE))], tmp_path, progress=False)
    assert saved == [5, 10]  # after each turn; not after the last, which has its line
    assert "could not be kept: [Errno 28] No space left" in capsys.readouterr().err
    assert not list(made.unfinished.folder.iterdir())


def test_a_run_of_hours_says_where_it_stands(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    monkeypatch.setattr(
        progress, "LINE_SHARE", 0.0
    )  # the first run may be slow, and the second not
    run(bench(), [("s", Cell(seed=seed, **BASE)) for seed in range(2)], tmp_path, side_by_side=1)
    told = capsys.readouterr().err
    assert "runs: 17 %, uniform, seed 0: 1 of 3 epochs, " in told
    assert "runs: 50 %, 0:0" in told  # between two runs
    assert "runs: 83 %, uniform, seed 1: 2 of 3 epochs, " in told


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
@pytest.mark.parametrize("number", [*ASKED, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_is_gone_on_with(bench, root, tmp_path, number):
    cell = Cell(seed=1, **BASE)
    script = Path(__file__).with_name("fixtures_bench.py")
    where = os.pathsep.join(map(str, (script.parents[1], script.parent)))
    process = subprocess.Popen(
        [sys.executable, str(script), str(root), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": where, "OMP_NUM_THREADS": "1"},  # as here
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while bench().unfinished.step(cell) == 0 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    if number in ASKED:
        process.send_signal(number)  # whoever asks twice does not spoil it
    _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert ("put aside" in told) == (number != signal.SIGKILL)
    step = bench().unfinished.step(cell)
    assert step > 0
    cells = [("kill", cell)]
    run(bench(), cells, tmp_path / "out", progress=False)
    run(bench(), cells, tmp_path / "whole", progress=False)
    found = done(tmp_path / "out")[cell.key()]
    assert found["resumed"] == 1
    assert {name: found[name] for name in SAME} == result(tmp_path / "whole")


@pytest.mark.parametrize("number", ASKED)
def test_who_is_terminated_is_interrupted_once(number):
    before = signal.getsignal(number)
    with terminable():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        for again in ASKED:
            signal.raise_signal(again)  # while what is under way is put aside
    assert signal.getsignal(number) is before


def test_a_background_job_of_a_script_can_be_terminated():
    """A shell without job control has it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminable(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_a_closed_terminal_is_no_matter_to_who_was_told_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with terminable():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_whatever_ends_the_command_what_is_under_way_is_put_aside(bench, tmp_path, monkeypatch):
    def gone(*args, **options):
        raise BrokenPipeError  # of stderr: `2>&1 | head`

    monkeypatch.setattr(progress.Bar, "advance", gone)
    with pytest.raises(BrokenPipeError):
        run(bench(), [("s", Cell(**BASE))], tmp_path, progress=False)
    assert bench().unfinished.step(Cell(**BASE)) == 5
