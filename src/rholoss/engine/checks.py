"""Checks of a trainer's arguments, one by one and together."""

from __future__ import annotations

import numbers
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rholoss.arguments import check_is_schedule
from rholoss.core import Method
from rholoss.engine.resident import Resident, check_classes
from rholoss.engine.streamed import Streamed
from rholoss.errors import RholossError
from rholoss.ladder import Ladder
from rholoss.losses import Task
from rholoss.memory import check_plan
from rholoss.schedules import Schedule
from rholoss.scoring import Scorer

AHEAD = "ahead"  # a value of `overlap`


def check_overlap(overlap: Any) -> None:
    """Raise if `overlap` is none of its three values."""
    if not isinstance(overlap, bool) and overlap != AHEAD:
        raise RholossError(
            f"`overlap` is {overlap!r}; give True, False, or {AHEAD!r} to score with extrapolated weights."
        )


def check_run(
    model: Any, data: Any, total_steps: Any, candidates: Any, seed: Any, plan: Any
) -> tuple[int, ...]:
    """Raise if one of these has the wrong type or value.

    Returns `total_steps`, `candidates` and `seed` as plain ints, since numpy's would get into saved states.
    """
    if not isinstance(model, nn.Module):
        raise RholossError(
            f"`model` is a {type(model).__name__}; pass the torch.nn.Module itself that is trained."
        )
    check_data(data)
    whole = {"total_steps": total_steps, "candidates": candidates, "seed": seed}
    for name, value in whole.items():
        if not isinstance(value, numbers.Integral):
            raise RholossError(
                f"`{name}` must be a whole number, but is {value!r}; round it, or pass an int."
            )
    if plan is not None:
        check_plan(plan)
    if total_steps < 1:
        raise RholossError(
            f"`total_steps` must be at least 1, but is {total_steps}; pass the number of steps of the run."
        )
    return tuple(int(value) for value in whole.values())


def check_data(data: Any, name: str = "data") -> None:
    """Raise if this is not a data set of the engine."""
    if not isinstance(data, (Resident, Streamed)):
        raise RholossError(
            f"`{name}` is a {type(data).__name__}; make a `Resident(inputs, targets)` of it, or a "
            "`Streamed` one where it does not fit the device. For a loader there is `Selector`."
        )


def check_sizes(keep: float, candidates: int, rows: int) -> None:
    """Raise if `keep` is no share, or if there are fewer rows than candidates."""
    if not isinstance(keep, numbers.Real) or not 0 < keep <= 1 or not 1 <= candidates <= rows:
        raise RholossError(
            f"`keep` must be in (0, 1] and `candidates` in 1..{rows}, the rows of the data, "
            f"but are {keep} and {candidates}; the defaults are 0.1 and 320."
        )


def check_scorer(scorer: Scorer, loss: Any, precision: str | None, targets: Tensor) -> None:
    """Raise for a loss that is no task, for labels that are not its, and for float16."""
    if not isinstance(scorer.loss, Task):
        raise RholossError(f"`loss` must be a task's name for the engine, but is {loss!r}.")
    check_classes(targets, scorer.loss.name)
    if scorer.dtype == torch.float16:
        raise RholossError(
            f"`precision` is {precision!r}, in which small gradients become 0 unless the loss is scaled, "
            "and the engine does not scale it; use 'bf16'. (`Selector` scores in 'fp16', too.)"
        )


def check_compared(method: Method, source: Any, catch_up: bool, scoring: Any) -> None:
    """Raise if `catch_up` or a `Ladder` needs losses that the method or `scoring` does not measure."""
    both = method.needs == {"loss", "irreducible_loss"}
    for name, given in (("catch_up", catch_up), ("Ladder", isinstance(source, Ladder))):
        if given and not both:
            raise RholossError(
                f"`{name}` compares losses with irreducible losses, but the method {method.name!r} does not "
                "read both; leave it out, or use the method 'rho'."
            )
        if given and not getattr(scoring, "mean_of_all", True):
            raise RholossError(
                f"`{name}` compares the target's mean loss over all candidates with their mean irreducible "
                f"loss, but with `{type(scoring).__name__}` another mean is measured; score by `Folded`, "
                "`Reuse` or `Shortlist`, or leave `scoring` out."
            )


def check_schedule(schedule: Schedule, total_steps: int) -> None:
    """Raise if this is no schedule, and warn if it is made for a longer run."""
    check_is_schedule(schedule)
    if total_steps < schedule.stop < float("inf"):
        warnings.warn(
            f"The schedule stops scoring at step {schedule.stop}, but `total_steps` is {total_steps}, so "
            "that all steps score; make it for as many steps as the run has, as in "
            f"`rholoss.annealed({total_steps})`.",
            stacklevel=4,
        )
