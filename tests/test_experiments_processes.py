"""Runs shared out among processes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures_bench import BASE, tiny, write_cifar10

from experiments import __main__ as command
from experiments import processes
from experiments.bench.cell import Cell, Group, Study
from experiments.models import MODELS
from experiments.studies import STUDIES


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
        def __init__(self, words):
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
    share, il = processes.share, made.root / "irreducible-loss-models"
    fitted, others = [], []

    def later(number, module, words):
        fitted.extend(sorted((path, path.stat().st_mtime_ns) for path in il.iterdir()))
        folder = Path(words[words.index("--claims") + 1])
        others.append(processes.claim(folder, Cell(seed=1, **BASE).key()))  # one is at it
        share(number, module, words)

    monkeypatch.setattr(processes, "share", later)
    command.main([*made.words, "--processes", "2", "--side-by-side", "1", "--limit", "600"])
    assert others == [True]
    assert len(made.started) == 2
    assert 590 < float(made.started[0][-1]) < 600  # what is left of the limit
    runs = [(line["method"], line["seed"]) for line in lines_below(made.out)]
    assert sorted(runs) == [("rho", 0), ("rho", 1), ("uniform", 0)]
    assert len(fitted) == 2  # losses and weights
    assert sorted((path, path.stat().st_mtime_ns) for path in il.iterdir()) == fitted


def test_what_is_there_is_not_shared_out_again(made):
    command.main(made.words)
    lines = lines_below(made.out)
    assert len(lines) == 4
    command.main([*made.words, "--processes", "2"])
    assert lines_below(made.out) == lines


def test_a_process_that_fails_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"2 of 2 processes failed; run the command again"):
        processes.share(2, "experiments", ["run", "--study", "none"])


def test_how_a_command_was_shared_out_is_no_part_of_it():
    given = (
        "python -m experiments run --limit 3.5 --seeds 0 --processes=4 --claims /x --side-by-side 2"
    )
    assert processes.unshared(given) == "python -m experiments run --seeds 0"
