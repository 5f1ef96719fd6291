"""What is run on a GPU, without one: what `make bench-gpu` asks of the benches, and where lines go."""

import gc
import json
import os
import shlex
import shutil
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
from benchmarks import bench_agreement, bench_step
from benchmarks.problems import Setup
from fixtures_gpu import pretended_gpu  # noqa: F401
from fixtures_images import IL, IMAGES, Y
from fixtures_race import tiny_race
from torch import nn

from experiments import records
from experiments.fair_clock import race as racing
from experiments.fair_clock.arms import Cell
from rholoss.engine import Resident, Trainer

ROOT = Path(__file__).parents[1]
FAKE = '#!/bin/sh\nprintf "%s\\n" "$(printf "\'%s\' " "$@")" >> "$0.calls"\n'


def asked(tmp_path, parts="", **more):
    """The words of each call of Python, in their order."""
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    said = {"PYTHON": str(python), **({"PARTS": parts} if parts else {}), **more}
    command = ["bash", ROOT / "benchmarks" / "gpu.sh", "data"]
    subprocess.run(command, env={**os.environ, **said}, cwd=tmp_path, check=True)
    return [shlex.split(line) for line in Path(f"{python}.calls").read_text().splitlines()]


def test_all_rows_and_options_are_known(tmp_path):
    calls = asked(tmp_path, RESULTS=str(tmp_path / "results"))
    steps = [words for words in calls if words[0] == "benchmarks/bench_step.py"]
    names = [bench_step.row(n) for words in steps for n in words[words.index("--rows") + 1 :]]
    assert len(names) > 20
    runs = [bench_agreement.parsed(words[2:]) for words in calls if words[0] == "-m"]
    assert [run.mode for run in runs] == ["scores", "train", "train", "scores", "train"]
    # What is held against exact scoring beside training is timed, too: else it cannot reach a target.
    options = {
        (run.k, run.candidates, name) for run in runs for name in run.options if "ahead" in name
    }
    assert {f"rho {k} of {candidates}, {name}" for k, candidates, name in options} <= {*names}
    assert calls[-1] == ["benchmarks/pages.py"]
    assert len(calls) == len(steps) + len(runs) + 1


@pytest.mark.parametrize("folder", ["", "kept"])
def test_lines_go_where_they_are_asked_for_beside_those_that_are_committed(tmp_path, folder):
    committed = ROOT / "benchmarks" / "results"
    results = tmp_path / folder if folder else committed
    for _ in range(2):
        more = {"RESULTS": folder} if folder else {}  # from where the command was given
        step, scores = asked(tmp_path, "algorithms scores", **more)[-2:]
        assert Path(step[step.index("--out") + 1]) == results / "step.jsonl"
        run = bench_agreement.parsed(scores[2:])
        assert run.out == results / "agreement.jsonl"
        assert Path(run.data) == tmp_path / "data"
    if folder:
        there = list(records.read(results / "agreement.jsonl"))
        assert there == list(records.read(committed / "agreement.jsonl"))
        with (results / "step.jsonl").open("a") as file:
            file.write(json.dumps({"row": "new"}) + "\n")
        asked(tmp_path, "pages", RESULTS=folder)
        assert list(records.read(results / "step.jsonl"))[-1] == {"row": "new"}  # is kept


def test_a_part_that_there_is_not_is_told(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        asked(tmp_path, "step scoring")
    assert not (tmp_path / "python.calls").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_machine_with_a_gpu_need_not_have_the_package_installed():
    """Its own Python runs what is in the clone."""
    said = subprocess.run(
        ["make", "-n", "test-gpu", "BIN=there"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "PYTHONPATH=src there/python -m pytest" in said
    # and needs nothing that other tests import
    given = {word for word in said.split() if word.startswith("tests/") and word.endswith(".py")}
    files = (ROOT / "tests").rglob("test_*.py")
    assert given == {
        str(path.relative_to(ROOT)) for path in files if f"mark.{'gpu'}" in path.read_text()
    }
    assert "PYTHONPATH=src" in (ROOT / "benchmarks" / "gpu.sh").read_text()


class Asks(nn.Module):
    """Asks the device for a number in the middle of the step, which a graph cannot."""

    def __init__(self, num_classes=10, inputs=48):
        super().__init__()
        self.inner = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(inputs, num_classes))

    def forward(self, x):
        return self.inner(x) * (1.5 if x.sum().item() > 0 else 1.0)


@pytest.fixture
def there(request, monkeypatch):
    request.getfixturevalue("pretended_gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")


@pytest.mark.filterwarnings("ignore:The step cannot be captured")
def test_a_step_that_is_not_captured_has_no_row(there, tmp_path, monkeypatch, capsys):
    out = tmp_path / "step.jsonl"
    monkeypatch.setattr(bench_step, "ROWS", 640)
    monkeypatch.setattr(bench_step, "ResNet18", Asks)
    monkeypatch.setattr(
        bench_step,
        "Trainer",
        lambda *given, **options: Trainer(*given, **options | {"compile": False}),
    )
    words = ["bench_step.py", "--steps", "4", "--out", str(out), "--rows", "uniform 32"]
    monkeypatch.setattr("sys.argv", words)
    bench_step.main()
    assert (
        "failed: RholossError: The step is not captured: operation not" in capsys.readouterr().out
    )
    assert not out.exists()


@pytest.mark.filterwarnings("ignore:The step cannot be captured")
@pytest.mark.parametrize("asks", [True, False])
def test_a_run_that_is_not_captured_is_not_compared(there, tmp_path, monkeypatch, capsys, asks):
    def make():
        model = Asks(4, inputs=3)
        return model if asks else model.inner

    data = Resident(IMAGES, Y, device="cuda:0", mean=(0.5,) * 3, std=(0.25,) * 3)
    made = Setup("", data, data, IL, make, make, 32, 8, None, False)
    monkeypatch.setattr(bench_agreement, "cifar", lambda arguments: made)
    out = tmp_path / "agreement.jsonl"
    words = ["train", "--steps", "8", "--options", "uniform", "--out", str(out)]
    bench_agreement.main(words)
    told = "uniform failed: RholossError: The step is not captured" in capsys.readouterr().out
    assert (told, out.exists()) == (asks, not asks)


@pytest.mark.parametrize("option", ["exact", "overlapped, ahead"])
def test_a_run_that_was_looked_at_is_gone_at_once(monkeypatch, option):
    """Its graphs would keep their memory, and go in the middle of another's capture."""
    data, made, make = Resident(IMAGES, Y, device="cpu"), [], bench_agreement.trainer

    def noted(*given, **options):
        run = make(*given, **options)
        made.append(weakref.ref(run))
        return run

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(IMAGES[0].numel(), 4))

    monkeypatch.setattr(bench_agreement, "trainer", noted)
    setup = Setup("", data, data, IL, model, model, 32, 8, None, False)
    gc.disable()
    try:
        assert len(bench_agreement.compare_scores(setup, option, 20, [10], seed=0)) == 1
        assert made[0]() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The step cannot be captured")
def test_steps_that_are_not_captured_are_not_raced(there, tmp_path, monkeypatch, capsys):
    race = tiny_race(tmp_path, monkeypatch)
    race.times = {}
    monkeypatch.setattr(racing, "ResNet18", Asks)
    cell = Cell("clean", "uniform", 8, 1e-3, 0)
    race.measure_times([cell], steps=20)
    assert race.failed[cell].startswith("Steps of uniform 8 of 8 are not captured (operation not")
    assert race.times == {}
    assert "RholossError" in capsys.readouterr().err
