"""Slow check of scoring workers, outside CI: 20 ranks of every kind are killed at random moments."""

import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import PATIENCE, ROOT, finish, scoring_workers, torchrun, workers_of
from workers_log import check_log

pytestmark = pytest.mark.full
KILLS, SEEDS, STEPS = 20, 6, 4000
LOOP = [str(ROOT / "examples" / "workers_loop.py"), "--out", "run", "--steps", str(STEPS)]


def result_of(folder):
    return json.loads((folder / "run" / "result.json").read_text())


def kill_one(process, folder, moments):
    """Kill a process of a random kind; which kind, or None if there was none of it."""
    kind = moments.choice(["scoring worker", "scoring worker", "trainer", "watcher of a worker"])
    if kind == "scoring worker":
        found = list(scoring_workers(folder).values())
    else:
        ranks = workers_of(process)
        found = [pid for rank, pid in ranks.items() if (rank == 0) == (kind == "trainer")]
    try:
        os.kill(moments.choice(found), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return None
    return kind


def wait_for_work(process, folder):
    """Until both workers are there again, and the trainer has saved something new."""
    saved, start = folder / "run" / "state.pt", time.time()
    while process.poll() is None:
        fresh = saved.exists() and saved.stat().st_mtime > start
        if fresh and len(scoring_workers(folder)) == 2:
            return
        time.sleep(0.1)


def chosen_by_workers(result):
    """Steps, of all starts of a run: each left a note in the ledger when its state was saved."""
    return sum(
        int(n) for note in result["notes"] for n in re.findall(r"workers chose (\d+) of", note)
    )


def test_runs_whose_ranks_are_killed_lose_no_candidate_and_end_as_good(tmp_path):
    undisturbed = []
    for seed in range(SEEDS):
        folder = tmp_path / f"undisturbed {seed}"
        folder.mkdir()
        finish(torchrun([*LOOP, "--seed", str(seed)], folder, ranks=1), PATIENCE, folder)
        undisturbed.append(result_of(folder)["accuracy"])
    mean, spread = statistics.mean(undisturbed), statistics.stdev(undisturbed)

    moments, killed, disturbed = random.Random(0), Counter(), []
    while killed.total() < KILLS:
        seed = len(disturbed)
        folder = tmp_path / f"disturbed {seed}"
        folder.mkdir()
        script = [*LOOP, "--seed", str(seed), "--workers", "2", "--restarts", "9", "--wait", "0.2"]
        script += ["--gather", str(PATIENCE / 2)]
        process = torchrun(script, folder, ranks=3, restarts=KILLS)
        while process.poll() is None and killed.total() < KILLS:
            wait_for_work(process, folder)
            time.sleep(moments.uniform(0, 4))
            kind = kill_one(process, folder, moments)
            killed.update([kind] if kind else [])
        finish(process, PATIENCE, folder)
        check_log(folder / "run" / "chosen.jsonl", STEPS, seed)
        disturbed.append(result_of(folder))
        end = time.monotonic() + PATIENCE
        while scoring_workers(folder) and time.monotonic() < end:
            time.sleep(0.1)
        assert scoring_workers(folder) == {}
    found = [result["accuracy"] for result in disturbed]
    print(
        f"scoring workers: killed {dict(killed)} in {len(found)} runs of {STEPS} steps, each of which "
        f"ended with every step in its log; accuracy {', '.join(f'{a:.4f}' for a in found)}; without "
        f"workers or kills {mean:.4f}, standard deviation {spread:.4f} over {SEEDS} seeds; steps chosen by "
        f"workers {[chosen_by_workers(r) for r in disturbed]}"
    )
    assert sum(map(chosen_by_workers, disturbed)) > STEPS / 4
    assert all(abs(accuracy - mean) <= 3 * spread for accuracy in found)
