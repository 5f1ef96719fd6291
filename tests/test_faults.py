"""A rank is killed in the middle of a run; torchrun starts it again, and it ends as an undisturbed one."""

import functools
import json
import re
import sys

import pytest
import torch
from faults import PATIENCE, ROOT, finish, kill_when, torchrun
from ranks_task import SHARDED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
STEPS = 300
LOOP = [str(ROOT / "examples" / "torchrun_loop.py"), "--out", "run", "--steps", str(STEPS)]
GATE = [str(ROOT / "tests" / "gate.py"), str(STEPS - 100)]  # so that a kill is one in the middle
OPTIONS = {"ddp": [], "fsdp": ["--fsdp", "--choice", "global"]}


def chosen(folder):
    """What each rank chose, step by step, as its log has it."""
    logs = [folder / "run" / name for name in ("chosen.jsonl", "chosen.rank1.jsonl")]
    lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    return [[line["index"] for line in log if line["type"] == "step"] for log in lines]


def weights(folder):
    return torch.load(folder / "run" / "state.pt", weights_only=True)["model"]


def starts(folder):
    """After which step each start of a rank went on, by rank."""
    return re.findall(r"rank (\d) goes on after step (\d+)", (folder / "said.txt").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run of a kind that nobody disturbs."""

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind)
        finish(torchrun([*LOOP, *OPTIONS[kind]], folder), PATIENCE, folder)
        assert [len(log) for log in chosen(folder)] == [STEPS, STEPS]
        assert starts(folder) == []
        return folder

    return run


def check_same(folder, expected):
    assert chosen(folder) == chosen(expected)
    for key, value in weights(expected).items():
        assert torch.equal(value, weights(folder)[key]), key


FSDP = pytest.mark.skipif(not SHARDED, reason="no FSDP2 on the CPU: torch is too old")


@pytest.mark.parametrize(("kind", "rank"), [("ddp", 1), pytest.param("fsdp", 0, marks=FSDP)])
def test_training_goes_on_after_a_rank_was_killed(tmp_path, undisturbed, kind, rank):
    process = torchrun([*GATE, *LOOP, *OPTIONS[kind]], tmp_path, restarts=2)
    try:
        kill_when(process, rank, (tmp_path / "run" / "state.pt").exists)
    finally:
        (tmp_path / "go").touch()
        finish(process, PATIENCE, tmp_path)
    check_same(tmp_path, undisturbed(kind))
    # Whichever rank torchrun saw end first, the killed one or the one that lost it, it started both again.
    again = starts(tmp_path)
    assert sorted(rank for rank, _ in again) == ["0", "1"]
    assert {10 <= int(step) < STEPS for _, step in again} == {True}


def test_no_state_is_saved_that_a_rank_has_not_come_to(tmp_path, undisturbed, monkeypatch):
    """A rank is killed before the first state is there, and again before the second is."""
    monkeypatch.setenv("DIES_SAVING", "1")
    (tmp_path / "go").touch()
    finish(torchrun([*GATE, *LOOP], tmp_path, restarts=2), PATIENCE, tmp_path)
    assert sorted(starts(tmp_path)) == [("0", "10"), ("1", "10")]  # at its second restart
    check_same(tmp_path, undisturbed("ddp"))
