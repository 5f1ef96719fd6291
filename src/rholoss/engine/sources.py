"""Irreducible losses as a step reads them: a table by id on the device, or a live model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rholoss.arguments import tell_other_loss
from rholoss.core import Method
from rholoss.engine.optimizers import for_graphs
from rholoss.engine.resident import Resident
from rholoss.engine.streamed import Streamed
from rholoss.errors import RholossError
from rholoss.il.live import LiveIrreducible
from rholoss.sources import Source, Table, TableSource, raise_unmeasured, tell_other_labels


def checked_table(
    method: Method, source: Source | None, data: Resident | Streamed, drop: float, loss: str
) -> Tensor | None:
    """`irreducible_table`, with a warning if the losses were measured otherwise than they are used."""
    table = irreducible_table(method, source, data.ids, drop)
    if table is not None:
        tell_other_loss(method, source, loss, stacklevel=5)
        tell_other_labels(source, data.ids, data.targets, stacklevel=5)
    return table


def irreducible_table(
    method: Method, source: Source | None, ids: Tensor, drop: float
) -> Tensor | None:
    """A table by id of the irreducible losses, on the device; None if nothing reads one.

    Every row of the data is checked here, so that no step has to. `drop` is that of the schedule.
    """
    if "irreducible_loss" not in method.needs and not drop:
        return None
    if not isinstance(source, TableSource):
        if isinstance(source, LiveIrreducible) and not drop:
            return None
        who = f"The method {method.name!r}" if not drop else f"A schedule with `drop`={drop}"
        raise RholossError(
            f"{who} needs irreducible losses; pass `irreducible=` what "
            "`fit_irreducible` returned (or a `LiveIrreducible`, if the schedule drops nothing)."
        )
    return by_id(source.table, ids)


def by_id(table: Table, ids: Tensor) -> Tensor:
    """The losses of these ids as a tensor indexed by id, on their device; NaN for ids in between."""
    loss_N = table.lookup(ids.cpu())
    raise_unmeasured(ids.cpu(), loss_N)
    whole = torch.full((int(ids.max()) + 1,), torch.nan, dtype=torch.float32, device="cpu")
    whole[ids.cpu()] = loss_N
    return whole.to(ids.device)


def live_source(
    source: Source | None, overlap: bool | str, target: nn.Module, device: torch.device
) -> LiveIrreducible | None:
    """The source if it is a live model, prepared for capture; None if it is not."""
    if not isinstance(source, LiveIrreducible):
        return None
    if overlap:
        raise RholossError(
            f"`overlap`={overlap!r} cannot be combined with a `LiveIrreducible`: its model would learn from "
            "a choice that is not trained on yet. Pass overlap=False."
        )
    source.check_target(target)
    for_graphs(source.optimizer, device)
    return source
