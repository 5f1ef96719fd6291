"""The demo from end to end: irreducible losses, nine runs, the table and the page."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rholoss
from rholoss.demo import summary
from rholoss.demo.data import NOISE, Digits, Split, load
from rholoss.demo.train import (
    CANDIDATES,
    IL_SEED,
    KEEP,
    LEARNING_RATE,
    METHODS,
    irreducible_model,
    steps_per_epoch,
    train,
    wrong_by_epoch,
)
from rholoss.errors import RholossError
from rholoss.il.build import library_version
from rholoss.il.files import replacing
from rholoss.il.fit import fit_irreducible
from rholoss.il.store import Irreducible
from rholoss.indexed import WithIndex
from rholoss.progress import Bar

IL_EPOCHS, IL_BATCH, IL_PATIENCE = 20, 64, 3
THREADS = 1  # the matrices are small: more threads gain little, and lose much on a busy machine


@dataclass(frozen=True)
class Result:
    """What the demo found: a record for each run, its summary, the irreducible losses, the page."""

    records: list[dict[str, Any]]
    summary: summary.Summary
    irreducible: np.ndarray
    splits: dict[str, Split]
    page: Path | None


def run(
    epochs: int = 12,
    seeds: int = 3,
    out: str | os.PathLike[str] = "rholoss-demo",
    *,
    progress: bool = True,
    page: bool = True,
    fresh: bool = False,
    limit: int | None = None,
) -> Result:
    """Train a small network on digits with wrong labels: uniform, training loss and RHO-LOSS.

    Each finished run is a line of `out`/runs.jsonl. A second call with the same arguments does only
    what is missing; `fresh` starts again. Prints a table and writes `out`/report.html.

    Args:
        epochs: passes of the candidates; a tenth of them is trained on.
        seeds: number of repetitions, each with other weights and another order.
        out: a directory for the runs, the irreducible losses and the page.
        progress: show progress bars.
        page: write the page; needs `pip install 'rholoss[report]'`.
        fresh: do runs that are finished again.
        limit: use only the first rows of each split (for a quick look).
    """
    _check(epochs, seeds, limit)
    if page:
        from rholoss.report.demo import write
        from rholoss.report.page import check_extra

        check_extra()  # before the work, not after it
    with _folder(out) as folder:
        runs = folder / "runs.jsonl"
        if fresh:
            runs.unlink(missing_ok=True)
        splits = load(limit)
        wanted = [(method, seed) for seed in range(seeds) for method in METHODS]
        about = _settings(epochs, limit)
        with _threads(THREADS):
            il = _irreducible(splits, folder / "il", fresh, progress)
            _do_missing(wanted, runs, about, il, splits, progress)
        done = finished(runs, about)
        records = [done[key] for key in wanted]
        found = summary.summarise(records, il.seconds)
        losses = il.lookup(np.arange(len(splits["train"]))).numpy()
        result = Result(records, found, losses, splits, folder / "report.html" if page else None)
        if result.page is not None:
            write(result, result.page)
    summary.show(found)
    if result.page is not None:
        print(f"\nThe whole story, with pictures: {result.page}")
    return result


@contextmanager
def _folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        yield Path(out)
    except OSError as error:
        raise RholossError(
            f"`out` is {os.fspath(out)!r}, where the demo cannot write ({error}). Give another, or mend "
            "that: runs that are finished are kept."
        ) from error


def finished(runs: Path, settings: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs in the file that were made with these settings."""
    try:
        lines = runs.read_text().splitlines() if runs.exists() else []
        records = [json.loads(line) for line in lines]
        return {(r["method"], r["seed"]): r for r in records if r["settings"] == settings}
    except (ValueError, KeyError, TypeError):
        raise RholossError(
            f"{runs} holds lines that the demo did not write; pass --fresh to start again, or give "
            "another --out."
        ) from None


def _irreducible(splits: dict[str, Split], path: Path, fresh: bool, progress: bool) -> Irreducible:
    """Fit the irreducible losses, or take those that an earlier run of this version left."""
    data = WithIndex(Digits(splits["train"]))
    if not fresh and (path / "meta.json").exists():
        try:
            il = Irreducible.load(path, data)
            if il.meta["rholoss"] == library_version():
                return il
        except RholossError:
            pass  # of other data or cut off: made again
    return fit_irreducible(
        irreducible_model,
        Digits(splits["holdout"]),
        score=data,
        epochs=IL_EPOCHS,
        batch_size=IL_BATCH,
        patience=IL_PATIENCE,
        seed=IL_SEED,
        device="cpu",
        out=path,
        progress=progress,
    )


def _do_missing(
    wanted: list[tuple[str, int]],
    runs: Path,
    settings: dict[str, Any],
    il: Irreducible,
    splits: dict[str, Split],
    progress: bool,
) -> None:
    done = finished(runs, settings)
    missing = [key for key in wanted if key not in done]
    if len(missing) < len(wanted):
        again = "nothing is left to do" if not missing else f"{len(missing)} are left"
        print(
            f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {runs} already; {again}. "
            "Pass --fresh to start again.",
            file=sys.stderr,
        )
    data, test = Digits(splits["train"]), Digits(splits["test"])
    per_epoch, epochs = steps_per_epoch(len(data)), settings["epochs"]
    if missing:  # the first steps of a process pay for torch's own start; no method is charged
        log = runs.with_name("warm-up.jsonl")
        train("loss", 0, None, data, test, epochs=1, log=log, on_step=lambda _: None)
        log.unlink()
    with Bar(len(missing) * epochs * per_epoch, "training", progress) as bar:
        for method, seed in missing:
            log = runs.with_name("chosen") / f"{method}-{seed}.jsonl"

            def show(accuracy: float, name: str = f"{method}, seed {seed}") -> None:
                bar.advance(1, note=f"{name}, accuracy {100 * accuracy:.1f} %")

            record = train(method, seed, il, data, test, epochs=epochs, log=log, on_step=show)
            record["wrong_by_epoch"] = wrong_by_epoch(log, splits["train"].wrong, per_epoch)
            _append(runs, {"method": method, "seed": seed, "settings": settings, **record})


def _append(runs: Path, record: dict[str, Any]) -> None:
    """Add a line; the file is replaced as a whole, so that it is never half written."""
    stamped = {**record, "date": datetime.now(UTC).isoformat(timespec="seconds"), **machine()}
    before = runs.read_text() if runs.exists() else ""
    with replacing(runs) as temporary:
        temporary.write_text(before + json.dumps(stamped) + "\n")


def machine() -> dict[str, str]:
    """Versions and device, for the record."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": f"CPU ({platform.machine()}), {torch.get_num_threads()} thread of {os.cpu_count()}",
    }


def _settings(epochs: int, limit: int | None) -> dict[str, Any]:
    """What a finished run must agree with to be used again."""
    return {
        "rholoss": rholoss.__version__,
        "epochs": epochs,
        "limit": limit,
        "candidates": CANDIDATES,
        "keep": KEEP,
        "learning_rate": LEARNING_RATE,
        "noise": NOISE,
        "irreducible": [IL_EPOCHS, IL_BATCH, IL_PATIENCE, IL_SEED],
    }


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(epochs: int, seeds: int, limit: int | None) -> None:
    for name, value in (("epochs", epochs), ("seeds", seeds)):
        if value < 1:
            raise RholossError(f"`{name}` is {value}; give a whole number of at least 1.")
    if limit is not None and limit < CANDIDATES:
        raise RholossError(
            f"`limit` is {limit}; give at least {CANDIDATES}, one batch of candidates."
        )
