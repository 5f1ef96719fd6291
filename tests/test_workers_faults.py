"""Scoring workers and their trainer are killed in the middle of a run, which loses no candidate."""

import json
import os
import signal
import sys
import time

import pytest
from faults import PATIENCE, ROOT, finish, kill_when, scoring_workers, torchrun
from workers_log import check_log

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
STEPS = 1000
LOOP = [str(ROOT / "examples" / "workers_loop.py"), "--out", "run", "--steps", str(STEPS)]
LOOP += ["--workers", "2", "--gather", str(PATIENCE / 2)]
GATE = [str(ROOT / "tests" / "gate.py"), str(STEPS - 100)]  # nothing ends before the kills


def said_by(folder):
    return (folder / "said.txt").read_text()


def until(happened, process):
    end = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_a_run_survives_its_workers_and_restarts_with_its_trainer(tmp_path):
    process = torchrun([*GATE, *LOOP], tmp_path, ranks=3, restarts=1)
    try:
        until(lambda: len(scoring_workers(tmp_path)) == 2, process)
        until((tmp_path / "run" / "state.pt").exists, process)
        os.kill(scoring_workers(tmp_path)[0], signal.SIGKILL)
        until(lambda: "scoring worker 0 is gone" in said_by(tmp_path), process)
        assert "; 1 left" in said_by(tmp_path)
        os.kill(scoring_workers(tmp_path)[1], signal.SIGKILL)
        until(lambda: "none is left, this trainer scores itself" in said_by(tmp_path), process)
        assert "attempt" not in said_by(tmp_path)  # torchrun has noticed nothing so far
        kill_when(process, 0, lambda: True)  # the trainer: all start again
    finally:
        (tmp_path / "go").touch()
        finish(process, PATIENCE, tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["by_workers"] > 0  # of those that came with the second start
    assert result["stale_max"] <= 2 * 4 + 2 * 2
    check_log(tmp_path / "run" / "chosen.jsonl", STEPS)
    end = time.monotonic() + PATIENCE
    while scoring_workers(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert scoring_workers(tmp_path) == {}
