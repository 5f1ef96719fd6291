"""Which ranks train and which only score, and what becomes of a scoring rank that dies.

The last ranks score. They take no part in torch.distributed: the trainers find a world that is smaller
by them. torchrun ends a whole run when one of its processes fails, so that a scoring rank only watches
a child of its own, which is the same script again and does the work.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rholoss.errors import RholossError

WORLD, NUMBER = "RHOLOSS_WORLD_SIZE", "RHOLOSS_WORKER"


@dataclass(frozen=True)
class Role:
    """What one rank does: trains (number is None), or is the scoring worker of this number."""

    trainer: int  # its own number, or that of the trainer it works for
    trainers: int
    workers: int  # of all trainers
    number: int | None = None

    @property
    def workers_each(self) -> int:
        """Scoring workers of one trainer."""
        return self.workers // self.trainers


def role_of(workers: int, environment: Mapping[str, str]) -> Role:
    """The role of a rank, from what torchrun put into its environment."""
    ranks = int(environment.get(WORLD, environment.get("WORLD_SIZE", 1)))
    trainers = ranks - workers
    if workers < 0 or trainers < 1 or workers % trainers:
        fitting = [str(n) for n in range(ranks) if n % (ranks - n) == 0]
        raise RholossError(
            f"`workers` is {workers} of {ranks} ranks, which leaves {trainers} to train; each trainer "
            f"needs equally many workers. With {ranks} ranks `workers` can be {', '.join(fitting)}; "
            "start more with `torchrun --nproc-per-node N`."
        )
    if NUMBER in environment:
        return Role(int(environment["RANK"]), trainers, workers, int(environment[NUMBER]))
    rank = int(environment.get("RANK", 0))
    if rank < trainers:
        return Role(rank, trainers, workers)
    return Role((rank - trainers) % trainers, trainers, workers, rank - trainers)


def environment_of(role: Role, environment: Mapping[str, str]) -> dict[str, str]:
    """What changes in the environment, so that all that reads it sees the trainers alone.

    A worker looks like its trainer, whose part of the data it scores, but keeps its own device.
    """
    if not role.workers:
        return {}
    ranks, rank = int(environment["WORLD_SIZE"]), int(environment["RANK"])
    local, on_node = int(environment.get("LOCAL_RANK", rank)), "LOCAL_WORLD_SIZE"
    trains_here = min(int(environment.get(on_node, ranks)), max(role.trainers - (rank - local), 1))
    changed = {
        WORLD: environment.get(WORLD, str(ranks)),
        "RANK": str(role.trainer),
        "WORLD_SIZE": str(role.trainers),
        on_node: str(trains_here),
    }
    return changed if role.number is None else {**changed, NUMBER: str(role.number)}


def watch_child(role: Role, environment: Mapping[str, str], restarts: int) -> int:
    """Run this script again as the scoring worker, and wait for it; how often it died.

    A worker that dies is started again `restarts` times. Its trainer goes on in any case.
    """
    died = 0
    while True:
        child = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=dict(environment))

        def end(number: int, frame: Any, child: Any = child) -> None:
            child.kill()
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, end)  # torchrun's way to end a rank
        code = child.wait()
        if code == 0:
            return died
        died += 1
        again = died <= restarts
        print(
            f"rholoss: scoring worker {role.number} died (exit code {code}); "
            + ("it is started again" if again else "the run goes on without it"),
            file=sys.stderr,
            flush=True,
        )
        if not again:
            return died
