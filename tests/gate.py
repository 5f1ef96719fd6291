"""Runs an example that a test disturbs: `gate.py STEPS example.py ...`, in place of the example.

After so many optimizer steps it goes on at a step a second until there is a file `go`: however busy the
machine is, it does not end before the test has done what it has to do in the middle of the run. With
DIES_SAVING a rank kills itself while the others go on to save the state: at the first time in its first
life, at the second time in its second.
"""

import itertools
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

import rholoss as rho

PAUSE = 1.0  # seconds


def gate(after: int) -> Callable[..., None]:
    """Called after each optimizer step."""
    steps = itertools.count(1)

    def passing(*_: Any) -> None:
        end = time.monotonic() + PAUSE * (next(steps) > after)
        while time.monotonic() < end and not Path("go").exists():
            time.sleep(0.02)

    return passing


def dying(save: Callable[[rho.Selector], Any]) -> Callable[[rho.Selector], Any]:
    """`Selector.state_dict` of a rank that is killed before it has begun."""
    life, times = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1, itertools.count(1)

    def state_dict(select: rho.Selector) -> Any:
        if next(times) == life <= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(select)

    return state_dict


if __name__ == "__main__":
    register_optimizer_step_post_hook(gate(int(sys.argv[1])))
    if os.environ["RANK"] == os.environ.get("DIES_SAVING"):
        rho.Selector.state_dict = dying(rho.Selector.state_dict)
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
