"""Runs under torchrun that are disturbed: ranks are killed at random moments."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 300  # seconds, for what should take ten: the machine may be busy


def torchrun(
    script: list[str], folder: Path, *, ranks: int = 2, restarts: int = 0
) -> subprocess.Popen:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with open(folder / "said.txt", "a") as said:
        return subprocess.Popen(
            [sys.executable, *command, *script],
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def workers_of(process: subprocess.Popen) -> dict[int, int]:
    """Process ids of the ranks that torchrun has started."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "status").read_text()
            if f"PPid:\t{process.pid}\n" in status:
                environment = (entry / "environ").read_bytes().decode(errors="replace")
                rank = re.search(r"(?:^|\0)RANK=(\d+)\0", environment)
                if rank:
                    found[int(rank.group(1))] = int(entry.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def scoring_workers(folder: Path) -> dict[int, int]:
    """Process ids of the scoring workers of a run in this folder, by their numbers."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve():
                environment = (entry / "environ").read_bytes().decode(errors="replace")
                number = re.search(r"(?:^|\0)RHOLOSS_WORKER=(\d+)\0", environment)
                if number:
                    found[int(number.group(1))] = int(entry.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def finish(process: subprocess.Popen, seconds: float, folder: Path) -> None:
    """Wait for the run to end well; nothing of it is left behind in any case."""
    try:
        process.wait(seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, (folder / "said.txt").read_text()[-6000:]


def kill_when(process: subprocess.Popen, rank: int, ready, seconds: float = PATIENCE) -> None:
    """Kill a rank as soon as `ready()` says so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if ready() and rank in (workers := workers_of(process)):
            os.kill(workers[rank], signal.SIGKILL)
            return
        time.sleep(0.02)
    raise AssertionError("the run ended, or nothing happened, before a rank could be killed")


def kill_at_random(
    process: subprocess.Popen, moments: random.Random, kills: int, pause: float
) -> None:
    """Kill random ranks, `pause` seconds apart on average. One that had ended may be among them."""
    killed = 0
    while killed < kills and process.poll() is None:
        time.sleep(moments.uniform(0.3, 1.7) * pause)
        if workers := workers_of(process):
            try:
                os.kill(moments.choice(list(workers.values())), signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                continue
