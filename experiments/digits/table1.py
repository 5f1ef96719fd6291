"""Runs Table 1: fits the IL models once for each seed, then follows the chain under each setting."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import records
from experiments.digits.chain import (
    CANDIDATES,
    CHAIN,
    KEEP,
    Followed,
    IrreducibleModels,
    Setting,
    fit_irreducible_models,
    follow,
    overlap,
    spearman,
)
from experiments.digits.data import Points, points, split_digits, uniform_tenth
from experiments.digits.ensembles import accuracy
from rholoss import core
from rholoss.errors import RholossError
from rholoss.progress import Bar

NAME = "table1"
RUNS = records.RESULTS / NAME / "runs.jsonl"

# By name: what is reported beside the paper, and how far it depends on what the paper leaves open.
SETTINGS = {
    "A": Setting(),
    "A, IL rate / 100": Setting(il_rate=0.01),
    "A, repeats shuffled": Setting(repeats="shuffled"),
    "A, IL of lowest loss on D": Setting(il_keep="lowest"),
    "A, noisy holdout": Setting(noisy_holdout=True),
    "A, split by writer": Setting(split="writer"),
    "A, two hidden layers": Setting(hidden=2),
    "between": Setting(reading="between"),
    "between, IL rate / 100": Setting(reading="between", il_rate=0.01),
    "B": Setting(reading="B"),
    "B, IL rate / 100": Setting(reading="B", il_rate=0.01),
}
ON_CPU = ("A", "A, IL rate / 100")  # these share the fits: minutes


def load(setting: Setting, root: Any, device: torch.device) -> tuple[Points, Points, Points]:
    """Train (a tenth of the labels wrong), holdout and test points on the device."""
    train, holdout, test = split_digits(setting.split, root)
    held = uniform_tenth(holdout, seed=2023) if setting.noisy_holdout else points(holdout)
    parts = (uniform_tenth(train), held, points(test))
    return tuple(Points(p.x.to(device), p.y.to(device), p.corrupted) for p in parts)  # type: ignore[return-value]


def compare(followed: dict[str, Followed], corrupted: np.ndarray) -> dict[str, Any]:
    """Each approximation beside Approximation 0: by batch, and over the epoch."""
    k = core.num_selected(CANDIDATES, KEEP)
    reference = [score.numpy() for score in followed["0"].score]
    out: dict[str, Any] = {}
    for name, run in followed.items():
        pairs = list(zip(reference, (score.numpy() for score in run.score), strict=True))
        by_batch = [round(spearman(a, b), 4) for a, b in pairs]
        out[name] = {
            "spearman": round(float(np.mean(by_batch)), 4),
            "overlap": round(float(np.mean([overlap(a, b, k) for a, b in pairs])), 4),
            "corrupted": round(float(corrupted[torch.cat(run.acquired).numpy()].mean()), 4),
            "test_accuracy": round(run.test_accuracy, 4),
            "il_accuracy": round(run.il_accuracy, 4),
            "by_batch": by_batch,
        }
    return out


def fit_key(setting: Setting) -> tuple[Any, ...]:
    """Settings with the same key share their IL models."""
    names = ("hidden", "il_epochs", "il_keep", "split", "noisy_holdout")
    return tuple(getattr(setting, name) for name in names)


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """What a line of results is the result of; of a look at some points, of so many."""
    settings = (record[field.name] for field in fields(Setting))
    return (record["seed"], record.get("limit"), *settings)


def run(
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    out: Path = RUNS,
    root: Any = None,
    device: str | None = None,
    limit: int | None = None,
    seconds: float = math.inf,
    settings: dict[str, Setting] | None = None,
    again: bool = False,
) -> None:
    """Run the settings of these names for each seed, unless they have a line; append one for each.

    Without `again` what is committed counts as done, wherever new lines go. `limit` takes the first points
    of train and holdout set only, for a quick look. None begins after `seconds`.
    """
    if limit is not None and out == RUNS:
        raise RholossError(
            f"`limit` is {limit}, for a look; give another file than {out}, whose lines are of all points."
        )
    known, begun = settings or SETTINGS, time.perf_counter()
    done = {key_of(record) for record in records.read(*([] if again else [RUNS]), out)}
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    fitted: dict[tuple[Any, ...], Any] = {}
    wanted = [(seed, name) for seed in seeds for name in names]
    wanted = [(s, n) for s, n in wanted if (s, limit, *asdict(known[n]).values()) not in done]
    fits = {(seed, fit_key(known[name])): known[name].il_epochs for seed, name in wanted}
    # An epoch of the IL fit for the ensemble and for the small model, and each link of the chain.
    total = sum(2 * epochs for epochs in fits.values()) + len(wanted) * len(CHAIN)
    with Bar(total, "Table 1") as bar:
        for seed, name in wanted:
            if time.perf_counter() - begun > seconds:
                break
            setting = known[name]
            train, holdout, test = (_first(p, limit) for p in load(setting, root, where))
            key = (seed, fit_key(setting))
            if key not in fitted:  # kept for one seed at a time
                fitted = {key: _fit(holdout, train, test, setting, seed, bar)}
            il, scored = fitted[key]
            started, cpu, followed = time.perf_counter(), time.process_time(), {}
            for link in CHAIN:
                followed[link.name] = follow(link, setting, train, holdout, test, il, seed)
                bar.advance(note=f"seed {seed}, {name}, Approximation {link.name}")
            record = {
                "seed": seed,
                **asdict(setting),
                "limit": limit,
                "rows": len(train),
                "il_epochs_kept": il.epochs,
                **{label: round(value, 4) for label, value in scored.items()},
                "chain": compare(followed, train.corrupted),
                "seconds": round(time.perf_counter() - started, 1),
                "cpu_seconds": round(time.process_time() - cpu, 1),
                **records.about("experiments.digits"),
                "device": torch.cuda.get_device_name() if where.type == "cuda" else "cpu",
            }
            records.append(out, record)


def _fit(
    holdout: Points, train: Points, test: Points, setting: Setting, seed: int, bar: Bar
) -> tuple[IrreducibleModels, dict[str, float]]:
    """The irreducible-loss models, their accuracies, and what they cost."""
    started, cpu = time.perf_counter(), time.process_time()
    il = fit_irreducible_models(holdout, train, setting, seed, bar.advance)
    return il, {
        "il_accuracy": accuracy(il.ensemble, test.x, test.y),
        "small_il_accuracy": accuracy(il.small, test.x, test.y),
        "il_seconds": time.perf_counter() - started,
        "il_cpu_seconds": time.process_time() - cpu,
    }


def _first(data: Points, limit: int | None) -> Points:
    return Points(data.x[:limit], data.y[:limit], data.corrupted[:limit])
