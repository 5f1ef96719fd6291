"""Runs shared out among processes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures_bench import BASE, RECIPE, tiny, write_cifar10

from experiments import __main__ as command
from experiments import processes
from experiments.bench import irreducible
from experiments.bench import run as run_module
from experiments.bench.cell import Cell, Group, Study
from experiments.bench.preparation import Preparation, shared_by
from experiments.fair_clock import __main__ as fair_clock
from experiments.language import __main__ as language
from experiments.models import MODELS
from experiments.studies import STUDIES
from rholoss.errors import RholossError


def lines_below(folder):
    paths = sorted(folder.glob("*/runs.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_first_to_ask_has_the_run(tmp_path):
    assert processes.claim(tmp_path, "a|b=1/2")  # a name of any kind
    assert not processes.claim(tmp_path, "a|b=1/2")
    assert processes.claim(tmp_path, "a|b=1/3")
    with processes.claims() as folder:
        assert processes.claim(folder, "a|b=1/2")
    assert not folder.exists()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A study of four runs; processes are run here, one after the other."""
    monkeypatch.setitem(MODELS, "tiny", tiny)
    arms = {"uniform": Cell(**BASE), "rho": Cell(method="rho", il="tiny, clean holdout", **BASE)}
    monkeypatch.setitem(STUDIES, "made", Study("made", "Made up", [Group("g", arms)], seeds=2))
    started = []

    class InTurn:
        def __init__(self, words, **options):
            assert words[1:3] == ["-m", "experiments"]
            started.append(words[3:])
            command.main(words[3:])

        def wait(self):
            return 0

    monkeypatch.setattr(processes.subprocess, "Popen", InTurn)
    root, out = write_cifar10(tmp_path / "data"), tmp_path / "out"
    words = ["run", "--study", "made", "--data", str(root), "--out", str(out)]
    return SimpleNamespace(root=root, out=out, words=words, started=started)


def test_processes_share_the_runs_and_fit_nothing_twice(made, monkeypatch):
    share, fit, others, fits = processes.share, irreducible.fit, [], []

    def later(number, module, words):
        folder = Path(words[words.index("--claims") + 1])
        others.append(processes.claim(folder, Cell(seed=1, **BASE).key()))  # one is at it
        share(number, module, words)

    monkeypatch.setattr(processes, "share", later)
    monkeypatch.setattr(irreducible, "fit", lambda *a, **k: fits.append(a) or fit(*a, **k))
    command.main([*made.words, "--processes", "2", "--limit", "600"])
    assert others == [True]
    assert len(made.started) == 2
    runs = [(line["method"], line["seed"]) for line in lines_below(made.out)]
    assert sorted(runs) == [("rho", 0), ("rho", 1), ("uniform", 0)]
    assert len(fits) == 1


RHO = Cell(method="rho", il="small_cnn, noisy holdout")


def test_what_is_shared_goes_by_the_model_that_is_fitted():
    same = {
        shared_by(replace(RHO, **other))
        for other in (
            {"seed": 3}, {"labels": "noise 10 %"}, {"method": "svp"},
            {"il": "small_cnn of 4 epochs, noisy holdout"}, {"il": "small_cnn ladder, noisy holdout"},
        )
    }  # fmt: skip
    assert same == {shared_by(RHO)}
    for other in ({"dataset": "cifar100"}, {"part": "whole"}, {"il": "small_cnn, clean holdout"}):
        assert shared_by(replace(RHO, **other)) != shared_by(RHO)
    for source in ("live", "live in train mode"):
        assert shared_by(Cell(il=f"resnet18, {source}")) == shared_by(
            Cell(il="resnet18, clean holdout")
        )
    halves = (Cell(il=f"small_cnn, cross-fit{how}") for how in ("", " mixed up"))
    assert len({shared_by(cell) for cell in halves}) == 1
    assert shared_by(Cell()) is None


def test_one_process_prepares_and_the_others_go_on(tmp_path):
    """Both in this process: a lock belongs to the file that was opened."""
    asked = []

    class Bench:
        def prepare(self, cell):
            asked.append((cell.method, other(RHO), other(Cell())))

    cells = [RHO, Cell(), replace(RHO, method="svp"), replace(RHO, il="resnet18, clean holdout")]
    mine, other = (Preparation(Bench(), cells, tmp_path) for _ in range(2))
    assert mine(RHO)
    assert asked == [("rho", False, True), ("svp", False, True)]  # while it is made
    assert other(RHO)
    assert len(asked) == 2


def test_what_cannot_be_prepared_fails_in_the_runs(tmp_path):
    class Bench:
        def prepare(self, cell):
            raise RholossError("no such model")

    prepared = Preparation(Bench(), [RHO], tmp_path)
    with pytest.raises(RholossError, match="no such model"):
        prepared(RHO)
    assert prepared(RHO)  # a run may begin, and fail in its turn


def test_a_process_that_has_nothing_else_waits_for_another(made, monkeypatch):
    """The other is done when it was asked for the third time."""
    answers = iter([False, False, True])
    slept = []
    monkeypatch.setattr(run_module.time, "sleep", slept.append)
    cells = [("s", Cell(**BASE)), ("s", Cell(method="rho", il="tiny, clean holdout", **BASE))]
    finished = run_module.run(
        run_module.Bench(made.root, recipe=RECIPE), cells, made.out, side_by_side=1, progress=False,
        ready=lambda cell: cell.il == "none" or next(answers),
    )  # fmt: skip
    assert finished == 2
    assert slept == [run_module.AGAIN] * 2
    assert [line["method"] for line in lines_below(made.out)] == ["uniform", "rho"]


@pytest.mark.parametrize(
    ("more", "at_a_time"),
    [([], {6}), (["--processes", "2"], {1}), (["--processes", "2", "--side-by-side", "3"], {3})],
)
def test_runs_at_a_time(made, more, at_a_time):
    command.main([*made.words, *more])
    assert {line["side_by_side"] for line in lines_below(made.out)} == at_a_time


def test_what_is_there_is_not_shared_out_again(made):
    command.main(made.words)
    lines = lines_below(made.out)
    assert len(lines) == 4
    command.main([*made.words, "--processes", "2"])
    assert lines_below(made.out) == lines


Popen = subprocess.Popen  # that of tests which put another in its place
HOLDS = """
import pathlib, sys
from experiments.processes import UnderWay
with UnderWay(pathlib.Path(sys.argv[1])) as under_way:
    print(under_way.begin(sys.argv[2]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def another():
    """Another process that is at a run of some results until it is killed."""
    started = []

    def begin(results, name):
        words = [sys.executable, "-c", HOLDS, str(results), name]
        here = Path(__file__).parents[1]
        where = {"cwd": here, "env": {**os.environ, "PYTHONPATH": str(here / "src")}}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(Popen(words, **where, **pipes))
        return started[-1], started[-1].stdout.readline().strip() == "True"

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
def test_two_commands_on_the_same_results_make_no_run_twice(made, another, capsys, more):
    cells = [(cell, cell.key()) for cell in STUDIES["made"].cells()]
    (cell, key), (_, later) = cells[:2]
    process, has_it = another(made.out, key)
    assert has_it
    command.main([*made.words, *more])
    keys = [Cell.of(line).key() for line in lines_below(made.out)]
    assert sorted(keys) == sorted(other for _, other in cells[1:])
    told = f"made: cifar10, clean, {cell.method} ({cell.il}), seed {cell.seed}: left to another command"
    assert told in capsys.readouterr().err
    assert another(made.out, later)[1]  # what is through is nobody's any more
    process.kill()
    process.wait()
    command.main([*made.words, *more])
    assert key in {Cell.of(line).key() for line in lines_below(made.out)}
    assert len(lines_below(made.out)) == 4


def test_what_another_command_has_made_meanwhile_is_not_made_again(made, monkeypatch):
    """Its line came after this command had looked for lines, and before it asked for the run."""
    command.main(made.words)
    lines = lines_below(made.out)
    monkeypatch.setattr(run_module, "missing", lambda cells, *folders: list(cells))
    command.main(made.words)
    assert lines_below(made.out) == lines


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
def test_a_file_of_results_is_added_to_by_one_command_at_a_time(tmp_path, another):
    out = tmp_path / "runs.jsonl"
    process, has_it = another(out, processes.ALL)
    assert has_it
    race = ["final", "--n-b", "8", "--lr", "1e-3", "--out", str(out)]
    texts = ["fair", "--data", str(tmp_path), "--out", str(out)]
    for main, words in ((fair_clock.main, race), (language.main, texts)):
        with pytest.raises(SystemExit, match="another command is adding runs to it"):
            main(words)
    process.kill()
    process.wait()
    with processes.alone(out):
        assert not another(out, processes.ALL)[1]
    assert another(out, processes.ALL)[1]


def test_a_process_that_fails_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"2 of 2 processes failed; run the command again"):
        processes.share(2, "experiments", ["run", "--study", "none"])


def test_how_a_command_was_shared_out_is_no_part_of_it():
    given = (
        "python -m experiments run --limit 3.5 --seeds 0 --processes=4 --claims /x --side-by-side 2"
    )
    assert processes.unshared(given) == "python -m experiments run --seeds 0"


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_terminated_leaves_nobody_at_work(tmp_path, number):
    """They would go on, on a GPU that is paid for, beside whoever gives the command again."""
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\npathlib.Path(f'{os.getpid()}.pid').touch()\ntime.sleep(60)\n"
    )
    script = "from experiments import processes; processes.share(2, 'waits', [])"
    here = Path(__file__).parents[1]
    paths = os.pathsep.join([str(here), str(here / "src"), str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(number)
    assert parent.wait(30) != 0
    for path in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.stem), 0)
