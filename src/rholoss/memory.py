"""What training itself tells about each row: its last losses, kept on the device.

A training step computes the loss of each of its rows anyway. Remembering them costs no scoring pass, and
until a row has been memorised they tell what a holdout model would: has it been learnt, can it be learnt?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from rholoss.errors import RholossError


class Memory:
    """The last losses of each row in training, and how often it was trained on.

    Args:
        size: the number of rows; ids are 0 to `size` - 1.
        device: where it is kept.
        depth: how many losses of each row to keep.

    Attributes:
        recent: the losses [size, depth], in no order; NaN if there are not so many yet.
        seen: how often each row was trained on, [size].
        notes: what a plan notes for its next passes.
    """

    def __init__(self, size: int, device: torch.device, depth: int = 4) -> None:
        if depth < 1:
            raise RholossError(
                f"`depth` must be at least 1, but is {depth}: so many losses of each row are remembered."
            )
        # A ring for each id.
        self.recent = torch.full((size, depth), torch.nan, dtype=torch.float32, device=device)
        self.seen = torch.zeros(size, dtype=torch.long, device=device)
        self.notes: dict[str, float] = {}  # a plan's own

    def record(self, index: Tensor, loss_k: Tensor) -> None:
        """Note the losses of rows that are trained on. Runs inside a captured step.

        Args:
            index: ids [k] of the rows.
            loss_k: their losses [k].
        """
        seen, loss_k = self.seen.index_select(0, index), loss_k.detach().float()
        self.recent[index, seen % self.recent.shape[1]] = loss_k
        self.seen[index] = seen + 1

    def move(self, device: torch.device) -> None:
        """Move it to another device."""
        self.recent, self.seen = self.recent.to(device), self.seen.to(device)

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered, copied to the CPU."""
        kept = {"recent": self.recent, "seen": self.seen}
        copied = {name: value.detach().cpu().clone() for name, value in kept.items()}
        # Plain: `torch.load` reads none of numpy's numbers, and `np.log(10)` is one.
        notes = {k: v.item() if isinstance(v, np.generic) else v for k, v in self.notes.items()}
        return {**copied, "notes": notes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.recent.copy_(state["recent"])
        self.seen.copy_(state["seen"])
        self.notes = dict(state.get("notes", {}))


@dataclass(frozen=True)
class Epoch:
    """What a plan decides for one pass.

    Args:
        rows: the numbers of the rows to train on, int64, in any order (not a mask).
        weight: the weight of each row in the loss, [N] for all N rows of the data; None: 1 for each.
    """

    rows: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Situation:
    """What a plan may look at when a pass begins. Tensors are on the CPU, with one entry for each row.

    Attributes:
        progress: the share of all steps that are done.
        seen: how often each row was trained on, [N].
        recent: its last losses, [N, depth] in no order; NaN if there are not so many yet.
        irreducible: its irreducible loss [N], None if there are none.
        generator: the randomness of this pass.
        notes: a dict that the plan may write to for its next passes; it is saved with the run.
    """

    progress: float
    seen: Tensor
    recent: Tensor
    irreducible: Tensor | None
    generator: Generator
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def last(self) -> Tensor:
        """Each row's loss when it was last trained on, [N]; NaN if it never was."""
        place = (self.seen - 1).clamp(min=0) % self.recent.shape[1]
        return self.recent.gather(1, place[:, None])[:, 0]

    @property
    def lowest(self) -> Tensor:
        """The lowest of each row's last losses, [N]; minus infinity if there are fewer than `depth`."""
        return self.recent.nan_to_num(nan=-torch.inf).amin(1)

    def random(self) -> Tensor:
        """Draw a random number in [0, 1) for each row, [N]."""
        size, generator = len(self.seen), self.generator
        return torch.rand(size, generator=generator, dtype=torch.float32, device="cpu")


Plan = Callable[[Situation], Epoch]


def check_plan(plan: Any) -> None:
    """Raise if this is not a function: a name, for instance, or a class that makes a plan."""
    if not callable(plan) or isinstance(plan, type):
        raise RholossError(
            f"`plan` is {plan!r}; pass an instance, for example InfoBatch(), or a function from a "
            "`Situation` to an `Epoch`."
        )


def check_epoch(epoch: Epoch, num: int) -> None:
    """Raise if a plan returned no valid rows: a mask, for one, would be read as rows 0 and 1."""
    rows = getattr(epoch, "rows", None)
    if not isinstance(rows, Tensor) or rows.dtype != torch.long or rows.ndim != 1:
        raise RholossError(
            f"A plan must return `Epoch(rows)`, row numbers as a tensor of int64, but returned {epoch}; "
            "of a mask take `mask.nonzero().flatten()`."
        )
    if len(rows) > num or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num):
        raise RholossError(
            f"A plan returned {len(rows)} rows from {int(rows.min())} to {int(rows.max())}; there are {num}, "
            f"0..{num - 1}, and a pass has at most as many."
        )
    if epoch.weight is not None and epoch.weight.shape != (num,):
        raise RholossError(
            f"`weight` of a plan's `Epoch` has shape {tuple(epoch.weight.shape)}, but needs one for each of "
            f"all {num} rows, in their order, those that are left out included."
        )
