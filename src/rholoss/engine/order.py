"""Which rows come at which step: set by the host once per pass, and read on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rholoss.errors import RholossError


class Order:
    """The batches of one pass, `size` rows each, in a buffer that stays in place.

    Rows that do not fill a batch are left out. `left` is the number of batches that are still to come.
    """

    def __init__(self, num_rows: int, size: int, device: torch.device) -> None:
        self.size, self.left = size, 0
        self._rows = torch.zeros(num_rows // size, size, dtype=torch.long, device=device)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._dealt = self._rows.cpu()  # on the host, to read streamed data ahead

    @property
    def capacity(self) -> int:
        """The most batches of a pass."""
        return len(self._rows)

    def deal(self, rows: Tensor) -> None:
        """Start a pass over these row numbers (on the host), in this order."""
        self.left = len(rows) // self.size
        if self.left == 0:
            raise RholossError(
                f"Only {len(rows)} rows are left to train on, fewer than one batch of {self.size}; "
                "drop fewer, or make the batch smaller."
            )
        dealt = rows[: self.left * self.size].view(self.left, self.size)
        self._dealt = dealt
        self._rows[: self.left].copy_(dealt, non_blocking=True)
        self._place.zero_()

    def next(self) -> Tensor:
        """The row numbers [size] of the next batch, on the device. The host must count `left` down itself."""
        rows = self._rows.index_select(0, self._place)[0]
        self._place += 1
        return rows

    def coming(self) -> Tensor | None:
        """The row numbers of the next batch, on the host; None if the pass is over."""
        return self._dealt[len(self._dealt) - self.left] if self.left else None

    def state_dict(self) -> dict[str, Any]:
        """The pass, and how much of it is left."""
        rows, place = (t.to("cpu", copy=True) for t in (self._rows, self._place))
        return {"left": self.left, "rows": rows, "place": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the middle of a saved pass."""
        self.left = state["left"]
        self._rows.copy_(state["rows"])
        self._place.copy_(state["place"])
        self._dealt = state["rows"][: int(state["place"]) + self.left]
