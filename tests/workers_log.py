"""What the log of examples/workers_loop.py must hold, whoever scored, and whoever was killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import workers_loop

import rholoss as rho


def check_log(path: Path, steps: int, seed: int = 0) -> None:
    """Every step is there once, and chose a tenth of its own candidates, none of them twice."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    chosen = [line["index"] for line in lines if line["type"] == "step"]
    assert [line["step"] for line in lines if line["type"] == "step"] == list(range(steps))
    data: TensorDataset = workers_loop.problem()[0]
    select = rho.Selector("rho", irreducible=workers_loop.problem()[1], keep=0.1)
    sampler = select.batch_sampler(rho.WithIndex(data), 160, seed=seed)
    for step, rows in enumerate(chosen):
        assert len(set(rows)) == len(rows) == 16, step
        assert set(rows) <= set(sampler.at(step)), step
