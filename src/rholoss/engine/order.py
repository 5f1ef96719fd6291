"""Which rows come at which step: dealt by the host once an epoch, read on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rholoss.errors import RholossError


class Order:
    """Batches of `size` rows each, in a buffer that stays in place. What is left over is dropped."""

    def __init__(self, num_rows: int, size: int, device: torch.device) -> None:
        self.size, self.left = size, 0
        self._rows = torch.zeros(num_rows // size, size, dtype=torch.long, device=device)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._dealt = self._rows.cpu()  # on the host, for whoever reads ahead

    @property
    def capacity(self) -> int:
        """The most batches that can be dealt at once."""
        return len(self._rows)

    def deal(self, rows: Tensor) -> None:
        """Start an epoch over these rows, in this order."""
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
        """The rows of the next batch, [size]. The host counts along by `left -= 1`."""
        rows = self._rows.index_select(0, self._place)[0]
        self._place += 1
        return rows

    def coming(self) -> Tensor | None:
        """The rows of the next batch, on the host; None where the epoch is over."""
        return self._dealt[len(self._dealt) - self.left] if self.left else None

    def state_dict(self) -> dict[str, Any]:
        """What is left of the epoch."""
        rows, place = (t.to("cpu", copy=True) for t in (self._rows, self._place))
        return {"left": self.left, "rows": rows, "place": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the epoch."""
        self.left = state["left"]
        self._rows.copy_(state["rows"])
        self._place.copy_(state["place"])
        self._dealt = state["rows"][: int(state["place"]) + self.left]
