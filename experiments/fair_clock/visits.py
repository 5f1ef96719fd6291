"""The losses of every visit of a run, kept beside its line: what rules that read them are made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rholoss.engine import Plan
from rholoss.memory import Epoch, Situation


class Visits:
    """A plan that also keeps what it was shown: each row's loss when it was last trained on, by pass."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.last: list[np.ndarray] = []
        self.progress: list[float] = []

    def __call__(self, situation: Situation) -> Epoch:
        self.last.append(situation.last.numpy().astype(np.float16))
        self.progress.append(situation.progress)
        return self.plan(situation)

    def save(self, path: Path, wrong: np.ndarray) -> Path:
        """Losses [passes, rows], NaN where there is none yet; progress; which labels are wrong."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            np.savez_compressed(
                file, last=np.stack(self.last), progress=np.array(self.progress), wrong=wrong
            )
        return temporary.replace(path)
