"""Runs checks on several processes. Ranks find each other through a file, so that no port is needed.

A check is a function without arguments; what it returns is saved for the test to look at.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rholoss.distributed import leave

PATIENCE = 100  # seconds for what takes none: ranks may start long after each other
CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """What every rank runs."""
    CHECKS[function.__name__] = function
    return function


def run(checks: dict[str, Callable[[], Any]]) -> None:
    """Join the other ranks, run the checks and save what they return."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'store{ranks}'}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    torch.save({name: check() for name, check in checks.items()}, folder / f"{ranks}-{rank}.pt")
    if rank == ranks - 1:
        time.sleep(0.5)  # the others wait
    at_the_end = time.monotonic()  # one clock for all processes of a machine
    leave()
    left = {"at the end": at_the_end, "left": time.monotonic(), "in a group": dist.is_initialized()}
    torch.save(left, folder / f"left-{ranks}-{rank}.pt")


def launch(script: str, ranks: int, folder: Path) -> dict[str, list[Any]]:
    """Run the checks of a script on so many processes; what they returned, by check and rank.

    Nothing is waited for forever.
    """
    strict = ["-W", "error", "-W", "ignore:Irreducible losses"]  # hardly better than guessing: toys
    command = [sys.executable, *strict, Path(__file__).with_name(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), folder], stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=3 * PATIENCE)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
    found = [torch.load(folder / f"{ranks}-{rank}.pt", weights_only=False) for rank in range(ranks)]
    left = [torch.load(folder / f"left-{ranks}-{rank}.pt") for rank in range(ranks)]
    return {**{name: [result[name] for result in found] for name in found[0]}, "left": left}
