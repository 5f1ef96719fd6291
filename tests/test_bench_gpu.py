"""What is run on a GPU, without one: what `make bench-gpu` asks of the benches, and where lines go."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from benchmarks import bench_agreement, bench_step

from experiments import records

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
    assert "PYTHONPATH=src" in (ROOT / "benchmarks" / "gpu.sh").read_text()
