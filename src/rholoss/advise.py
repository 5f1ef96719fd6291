"""Will selection pay on this machine? Arithmetic on what `rholoss.timing` measures.

A step with selection loads and scores k x n_b candidates and trains on n_b of them; a uniform step
loads and trains on n_b. Their ratio is how many times fewer steps selection must need to pay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rholoss.core import MONTE_CARLO
from rholoss.errors import RholossError
from rholoss.ledger import BACKWARD_FORWARDS
from rholoss.timing import Timings

PAPER_K = 10
DEAR, LAUNCH_BOUND = 0.4, 0.15  # cost of scoring a point over that of training on it
# How many times fewer steps than uniform RHO-LOSS needed in the paper (keep = 0.1), at best.
PAPER = {
    "CIFAR-100": 1.7,
    "CIFAR-10": 2.0,
    "SST-2": 2.0,
    "CINIC-10": 2.6,
    "CoLA": 11.3,
    "Clothing-1M": 15.0,
}


@dataclass(frozen=True)
class Cost:
    """One row of the break-even table; seconds a step."""

    k: int
    candidates: int
    scoring: float
    training: float
    loading: float
    step: float
    uniform_step: float
    ratio: float
    break_even: float  # times fewer steps than uniform; infinite if it can never pay


def relative_cost(needs: frozenset[str], keep: float, draws: int = 10) -> float:
    """Cost of a step relative to uniform, if a backward pass costs two forward passes.

    >>> round(relative_cost(frozenset({"loss", "irreducible_loss"}), keep=0.1), 2)
    4.33
    """
    forwards = 0 if not needs - {"irreducible_loss"} else draws if needs & MONTE_CARLO else 1
    return 1 + forwards / ((1 + BACKWARD_FORWARDS) * keep)


def live_cost(keep: float, size: float = 1.0) -> float:
    """`relative_cost` with a live irreducible-loss model of `size` times the target's cost."""
    return relative_cost(frozenset({"loss"}), keep) * (1 + size)


def step_seconds(compute: float, loading: float, workers: int = 0) -> float:
    """Time of a step: loading comes on top without workers, and runs beside the model with them."""
    return compute + loading if workers == 0 else max(compute, loading / workers)


def costs(
    timings: Timings, *, workers: int = 0, il_seconds: float = 0.0, steps: int | None = None
) -> list[Cost]:
    """The break-even table.

    Args:
        timings: what `measure` returned.
        workers: of the loader; they share the loading time evenly.
        il_seconds: cost of the irreducible losses, for this run's share.
        steps: how many steps uniform training takes; needed to spread `il_seconds`.
    """
    if il_seconds and not steps:
        raise RholossError(
            f"The irreducible losses cost {il_seconds:g} s, but the number of steps to spread them over "
            "is missing; pass `steps` (--steps), how many steps uniform training takes."
        )
    uniform = step_seconds(timings.training, timings.loading[1], workers)
    share = il_seconds / steps if steps else 0.0
    rows = []
    for k, scoring in timings.scoring.items():
        step = step_seconds(scoring + timings.training, timings.loading[k], workers)
        # steps / x * step + il_seconds = steps * uniform, solved for x
        break_even = step / (uniform - share) if share < uniform else math.inf
        rows.append(
            Cost(
                k,
                k * timings.batch,
                scoring,
                timings.training,
                timings.loading[k],
                step,
                uniform,
                step / uniform,
                break_even,
            )
        )
    return rows


def advice(timings: Timings, rows: Sequence[Cost], *, workers: int = 0) -> list[str]:
    """What follows from the table, in plain sentences."""
    if all(row.break_even == math.inf for row in rows):
        return [
            "The irreducible losses alone cost as much as the whole uniform run, so selection cannot "
            "pay here. Share them among several runs, or make them with a smaller model."
        ]
    said = [_about_k(rows)]
    said += [_beside_paper(row) for row in rows if row.k == PAPER_K]
    said += [_about_scoring(timings, rows[-1]), _about_loading(rows[-1], workers)]
    return [sentence for sentence in said if sentence]


def _about_k(rows: Sequence[Cost]) -> str:
    cheap = [row.k for row in rows if row.break_even < 2]
    if cheap:
        return f"k={max(cheap)} costs less than 2x a uniform step: start with keep={1 / max(cheap):.3g}."
    first = rows[0]
    if first.ratio < 2:
        return (
            f"k={first.k} costs {first.ratio:.2f}x a uniform step, but with the irreducible losses it must "
            f"need {first.break_even:.2f}x fewer steps. Share them among several runs (--il-runs), or make "
            "them with a smaller model."
        )
    return (
        f"No k costs less than 2x a uniform step: k={first.k} must already need {first.break_even:.2f}x "
        "fewer steps. Make scoring or loading cheaper first."
    )


def _beside_paper(row: Cost) -> str:
    above = [f"{name} ({x:g}x)" for name, x in PAPER.items() if x > row.break_even]
    below = [f"{name} ({x:g}x)" for name, x in PAPER.items() if x <= row.break_even]
    parts = [f"cleared that on {', '.join(above)}"] if above else []
    parts += [f"did not on {', '.join(below)}"] if below else []
    return (
        f"k={row.k}, the paper's choice, must need {row.break_even:.2f}x fewer steps. In the paper "
        f"RHO-LOSS {' and '.join(parts)}: large, noisy or redundant data is where it pays."
    )


def _about_scoring(timings: Timings, row: Cost) -> str:
    relative = (row.scoring / row.candidates) / (timings.training / timings.batch)
    said = f"Scoring a point costs {relative:.2f} of training on one (1/3 by rule of thumb)."
    if relative > DEAR:
        said += " Try a lower precision for it (--precision bf16)."
    elif relative < LAUNCH_BOUND:
        said += (
            " So little means that a training step of so few rows is bound by its launches rather than "
            "by arithmetic: with a larger or a compiled step the ratio rises."
        )
    return said


def _about_loading(row: Cost, workers: int) -> str:
    compute, wait = row.scoring + row.training, row.loading / max(workers, 1)
    hide = math.ceil(row.loading / compute)
    if wait > compute:
        return (
            f"Loading, not the model, is your bottleneck: {row.candidates} rows take "
            f"{wait * 1e3:.1f} ms to load, but {compute * 1e3:.1f} ms to score and train. Use {hide} or "
            "more workers, or keep the data decoded in memory."
        )
    if workers == 0 and row.loading > 0.1 * compute:
        return (
            f"Loading takes {row.loading / row.step:.0%} of a step at k={row.k}; a loader with "
            f"{hide} worker{'s' * (hide > 1)} hides it (see the table with --loader-workers {hide})."
        )
    return ""
