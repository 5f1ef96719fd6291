"""What was dealt out to the ranks must not be dealt out a second time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rholoss.errors import RholossError

DEPTH = 10  # wrappers round a data set or a sampler
INNER = ("dataset", "batch_sampler", "sampler")


def check_dealt_once(own: Any, ranks: int) -> None:
    """Raise if accelerate deals out again what `own`, a data set or a sampler, dealt already.

    The rows that a second dealing leaves out would never be seen. Nothing is wrong in the batches
    themselves, so it is looked for in the loader that accelerate says is being iterated over.
    """
    state = sys.modules.get("accelerate.state")  # whoever has not imported it does not use it
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
    """A data set or a sampler, and what it is wrapped round."""
    for _ in range(DEPTH):
        if part is None:
            return
        yield part
        part = next((getattr(part, name) for name in INNER if hasattr(part, name)), None)
