"""Slow checks of runs over ranks, outside CI: each kind of run is killed 20 times at random moments."""

import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks_il
from faults import ROOT, finish, kill_at_random, torchrun

import rholoss as rho

pytestmark = pytest.mark.full
KILLS = 20


def disturbed(script, folder, look, *, pause, seed):
    """Run again and again until ranks were killed 20 times; `look` at whatever a run left at its end."""
    moments, killed, ends = random.Random(seed), 0, 0
    while killed < KILLS or ends == 0:
        own = folder / str(ends)
        own.mkdir(exist_ok=True)
        process = torchrun(script, own, restarts=KILLS + 5)
        kill_at_random(process, moments, KILLS - killed, pause)
        finish(process, 300, own)
        look(own)
        ends += 1
        killed += (own / "said.txt").read_text().count("failed (exitcode: -9)")
    return killed, ends


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_killed_20_times_ends_as_an_undisturbed_run(tmp_path, kind):
    script = [str(ROOT / "examples" / "torchrun_loop.py"), "--out", "run", "--steps", "1500"]
    script += ["--fsdp", "--choice", "global"] if kind == "fsdp" else []
    (tmp_path / "whole").mkdir()
    start = time.perf_counter()
    finish(torchrun(script, tmp_path / "whole"), 300, tmp_path / "whole")
    seconds = time.perf_counter() - start
    expected = torch.load(tmp_path / "whole" / "run" / "state.pt", weights_only=True)
    logs = ["chosen.jsonl", "chosen.rank1.jsonl"]
    said = [(tmp_path / "whole" / "run" / name).read_text() for name in logs]

    def look(folder):
        found = torch.load(folder / "run" / "state.pt", weights_only=True)
        for key, value in expected["model"].items():
            assert torch.equal(value, found["model"][key]), key
        assert [(folder / "run" / name).read_text() for name in logs] == said

    killed, ends = disturbed(script, tmp_path, look, pause=0.6 * seconds, seed=1)
    print(
        f"{kind}: killed {killed} times, ended {ends} times; undisturbed it takes {seconds:.0f} s"
    )


def test_irreducible_losses_killed_20_times_are_those_of_one_process(tmp_path, monkeypatch):
    script = "-m rholoss il score --model ranks_il:small --data ranks_il:train --loss ranks_il:slow"
    script = [*script.split(), "--batch-size", "10", "--quiet", "--out", "il"]
    monkeypatch.setitem(os.environ, "KILLED_ONCE", "")
    expected = rho.score_irreducible(ranks_il.small, ranks_il.train, batch_size=10, progress=False)

    def look(folder):
        found = rho.Irreducible.load(folder / "il", ranks_il.train)
        assert torch.equal(found.values, expected.values)
        assert not (folder / "il" / "partial").exists()

    killed, ends = disturbed(script, tmp_path, look, pause=8.0, seed=2)
    print(f"irreducible losses: killed {killed} times, ended {ends} times")
