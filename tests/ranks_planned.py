"""What each rank does in the test of plans on many processes."""

from __future__ import annotations

from typing import Any

import torch
from ranks_run import CHECKS, check, run

import rholoss as rho
from rholoss.engine import Epoch
from rholoss.memory import Situation

ROWS, PASSES = 100, 4


def high(situation: Situation) -> Epoch:
    """All rows, or the half whose last loss is highest once all were seen."""
    if not situation.seen.all():
        return Epoch(torch.arange(ROWS))
    return Epoch(situation.last.argsort(stable=True)[ROWS // 2 :])


def passes() -> tuple[list[list[int]], dict[str, Any]]:
    """Rows of each pass, and what is remembered at the end; a loss depends on row and visit."""
    rows, visited = rho.Planned(range(ROWS), high, passes=PASSES + 1), []
    for number in range(PASSES):
        visited.append(list(rows))
        index = torch.tensor(visited[-1])
        rows.remember(index, (index * (7 + number) % ROWS).float())
    next(iter(rows))  # what each rank knows is put together when a pass begins
    return visited, rows.memory.state_dict()


@check
def planned() -> Any:
    return passes()


if __name__ == "__main__":
    run(CHECKS)
