"""Rows that were shared out among the ranks once must not be shared out a second time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rholoss.errors import RholossError

DEPTH = 10  # the most wrappers around a data set or a sampler
INNER = ("dataset", "batch_sampler", "sampler")


def check_dealt_once(own: Any, ranks: int) -> None:
    """Raise if accelerate shares out again what `own`, a data set or a sampler, has shared out already.

    Most rows would then never be seen. The batches themselves look right, so this examines the loader that
    accelerate says is being iterated over.
    """
    state = sys.modules.get("accelerate.state")  # if it was not imported it is not in use
    loader = None if state is None else state.GradientState().active_dataloader
    if ranks > 1 and loader is not None and _deals_again(loader, own):
        raise RholossError(
            f"The loader of a `{type(own).__name__}` was passed to `accelerator.prepare`, which deals to "
            f"{ranks} ranks what was dealt to them already, so that only 1 of {ranks} rows would be seen. "
            "Prepare the model and the optimizer, not this loader; `select` moves batches to the device."
        )


def _deals_again(loader: Any, own: Any) -> bool:
    for part in (loader.dataset, loader.batch_sampler):
        dealt = type(loader).__name__ == "DataLoaderDispatcher"  # one rank reads for all
        for inner in _within(part):
            dealt = dealt or getattr(inner, "num_processes", 1) > 1
            if inner is own:
                return dealt
    return False


def _within(part: Any) -> Iterator[Any]:
    """A data set or a sampler, and what it wraps, from outside to inside."""
    for _ in range(DEPTH):
        if part is None:
            return
        yield part
        part = next((getattr(part, name) for name in INNER if hasattr(part, name)), None)
