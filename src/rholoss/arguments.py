"""What can be said of a selector's arguments before it sees a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rholoss.core import Method
from rholoss.errors import RholossError
from rholoss.ladder import Ladder
from rholoss.schedules import Schedule
from rholoss.sources import Source, TableSource

FLUSH_STEPS = 100  # errors on a device are told at most so many steps late


def check_arguments(
    method: Method,
    source: Source | None,
    schedule: Schedule,
    keep: float | None,
    k: int | None,
    flush_every: int,
) -> None:
    """Raise where a selector cannot be made of these."""
    if (keep is None) == (k is None):
        raise RholossError(f"Pass `keep` (a share) or `k` (a number); got keep={keep} and k={k}.")
    if keep is not None and not 0 < keep <= 1:
        raise RholossError(f"`keep` must be in (0, 1], but is {keep}; the paper has 0.1.")
    if k is not None and k < 1:
        raise RholossError(f"`k` must be at least 1, but is {k}.")
    if not 1 <= flush_every <= FLUSH_STEPS:
        raise RholossError(f"`flush_every` must be in 1..{FLUSH_STEPS}, but is {flush_every}.")
    if isinstance(source, Ladder) and not {"loss", "irreducible_loss"} <= method.needs:
        raise RholossError(
            f"A `Ladder` compares losses with irreducible losses, but the method {method.name!r} does not "
            "need both; pass the last of its rungs."
        )
    if schedule.drop and not isinstance(source, TableSource):
        raise RholossError(
            f"A schedule with `drop`={schedule.drop} needs a table of irreducible losses; pass "
            "`irreducible=` what `fit_irreducible` returned, or drop=0."
        )


def check_rows(rows: int, k: int | None) -> None:
    """Raise where so many cannot be selected from a candidate batch of `rows`."""
    if rows == 0:
        raise RholossError("The candidate batch is empty; check the data set and the sampler.")
    if k is not None and k > rows:
        raise RholossError(
            f"`k`={k} is larger than the candidate batch of {rows}. Make the loader's batch "
            "larger, pass drop_last=True to it if this is the last batch, or use `keep`."
        )


def check_state(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise unless a saved state has everything in common with the selector that it should have."""
    for name, value in own.items():
        if saved.get(name) != value:
            raise RholossError(
                f"The saved state has {name} {saved.get(name)!r}, but this selector has "
                f"{value!r}; make the selector as it was when the state was saved."
            )
