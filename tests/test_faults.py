"""A rank is killed in the middle of a run; torchrun starts it again, and it ends as an undisturbed one."""

import json
import re
import sys

import pytest
import torch
from faults import ROOT, finish, kill_when, torchrun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
LOOP = [str(ROOT / "examples" / "torchrun_loop.py"), "--out", "run"]
STEPS = 300  # many, so that a kill after the tenth is one in the middle of the run


@pytest.mark.parametrize(
    ("options", "rank"), [([], 1), (["--fsdp", "--choice", "global"], 0)], ids=["ddp", "fsdp"]
)
def test_training_goes_on_after_a_rank_was_killed(tmp_path, options, rank):
    states, chosen = [], []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        process = torchrun([*LOOP, *options, "--steps", str(STEPS)], folder, restarts=2)
        if name == "killed":
            kill_when(process, rank, (folder / "run" / "state.pt").exists)
        finish(process, 100, folder)
        states.append(torch.load(folder / "run" / "state.pt", weights_only=True))
        logs = sorted((folder / "run").glob("chosen*.jsonl"))
        assert len(logs) == 2
        lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
        chosen.append([[line["index"] for line in log if line["type"] == "step"] for log in lines])
    assert [len(log) for log in chosen[0]] == [STEPS, STEPS]
    assert chosen[0] == chosen[1]
    for key, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][key]), key
    # Whichever rank torchrun saw end first, the killed one or the one that lost it, it started both again.
    said = (tmp_path / "killed" / "said.txt").read_text()
    again = re.findall(r"rank (\d) goes on after step (\d+)", said)
    assert sorted(rank for rank, _ in again) == ["0", "1"]
    assert {10 <= int(step) < STEPS for _, step in again} == {True}
    assert "goes on" not in (tmp_path / "whole" / "said.txt").read_text()
