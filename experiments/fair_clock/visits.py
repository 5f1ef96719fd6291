"""The losses of every visit of a run, kept beside its line: what rules that read them are made from.

    python -m experiments.fair_clock tune --visits DIR --arms "uniform, remembering" ...
    python -m experiments.fair_clock.visits DIR/*.npz

The second asks plans what they would have left out of the recorded runs, when, and whether rightly.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.records import replacing
from rholoss.engine import Plan, Remembered
from rholoss.memory import Epoch, Memory, Situation


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
        last, progress = np.stack(self.last), np.array(self.progress)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, last=last, progress=progress, wrong=wrong)
        return path


def replay(path: Path, plan: Plan) -> dict[str, Any] | None:
    """The first pass in which a plan would have left rows out, and which; None if in none.

    Of a run that trains on all rows in each pass. What would have come of it is not in the recording.
    """
    with np.load(path) as kept:
        last, progress, wrong = kept["last"], kept["progress"], torch.as_tensor(kept["wrong"])
    memory, generator = Memory(len(wrong), torch.device("cpu")), torch.Generator()
    for number, (losses, done) in enumerate(zip(last, progress, strict=True)):
        before = last[number - 1] if number else losses
        visited = torch.as_tensor(np.isfinite(losses) & (losses != before)).nonzero().flatten()
        memory.record(visited, torch.as_tensor(losses.astype(np.float32))[visited])
        seen, recent, notes = memory.seen, memory.recent, memory.notes
        rows = plan(Situation(float(done), seen, recent, None, generator, notes)).rows
        if len(rows) < len(wrong):
            out = torch.ones(len(wrong), dtype=torch.bool)
            out[rows] = False
            return {
                "pass": number,
                "progress": float(done),
                "told": memory.notes.get("wrong", memory.notes.get("hopeless", math.nan)),
                "left_out": float(out.float().mean()),
                "precision": float(wrong[out].float().mean()),
                "recall": float(out[wrong].float().mean()),
            }
    return None


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="recordings")
    parser.add_argument("--classes", type=int, default=10, help="from which chance is known")
    a = parser.parse_args(words)
    chance = math.log(a.classes)
    plans = {
        "Remembered()": Remembered(),
        f"Remembered(log({a.classes}))": Remembered(chance),
    }
    for path in a.files:
        print(path.stem)
        for name, plan in plans.items():
            found = replay(path, plan)
            told = "nothing" if found is None else (
                f"{found['left_out']:.1%} in pass {found['pass']} ({found['progress']:.0%} of the steps), "
                f"{found['told']:.1%} told; {found['precision']:.1%} of them wrong"
                + ("" if math.isnan(found["recall"]) else f", {found['recall']:.1%} of the wrong ones")
            )  # fmt: skip
            print(f"  {name}: {told}")


if __name__ == "__main__":
    main()
