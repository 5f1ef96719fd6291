"""Where irreducible losses come from while selecting: a table by id, a function, a live model.

A source has `on_host(ids)`, which looks up and checks ids that are still on the CPU, and
`losses(ids, batch, device)`, which does not wait for the device. The selector takes any of them; what
the loader joined to the batch comes first.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from rholoss.errors import RholossError, UnmeasuredLossError
from rholoss.losses import check_per_example

SAMPLED_ROWS = 1_000_000  # enough for a threshold; a table may have a billion rows
DIGEST_ROWS = 1024
DEVICE_SHARE = 0.1  # of the free device memory that a table may take


class Source:
    """Anything that gives irreducible losses for a batch of candidates; most methods have a default."""

    def on_host(self, ids: Any) -> Tensor | None:
        """Irreducible losses [B] of ids on the CPU; raises if one is not finite.

        None if they can only be had on the device.
        """
        return None

    def losses(self, ids: Any, batch: Any, device: torch.device) -> Tensor:
        """Irreducible losses [B] on the device; NaN where there is none. The batch has no ids."""
        raise NotImplementedError

    def check_target(self, target: nn.Module) -> None:
        """Raise if this source cannot serve the model that is trained; called before the first step."""

    def update(self, batch: Any, weight: Tensor | None = None) -> None:
        """Learn from the selected rows (and their importance weights): what a live model does."""

    def digest(self) -> str | None:
        """A short text that changes when the losses do; None if there is no cheap way to tell."""
        return None

    def own(self) -> Source:
        """What one run reads: the source itself, or a copy if runs change it."""
        return self

    def state_dict(self) -> dict[str, Any] | None:
        """What a resumed run needs; nothing for a table."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


class Table(Protocol):
    """Losses by id, as `rholoss.il.Irreducible` is."""

    @property
    def dense(self) -> Tensor | None:
        """All losses by integer id, if there is such a table on the host."""

    def lookup(self, ids: Any) -> Tensor:
        """Losses [B] on the CPU; NaN where there is none."""

    def check(self, ids: Any) -> None:
        """Raise if an id has no finite loss."""


class DenseTable:
    """A tensor of losses by integer id."""

    def __init__(self, values: Any) -> None:
        # Losses that were just measured may have a graph behind them.
        self.dense = torch.as_tensor(values, dtype=torch.float32, device="cpu").detach()
        if self.dense.ndim != 1:
            raise RholossError(
                f"`irreducible` must have one loss for each id, shape [N], but has shape "
                f"{tuple(self.dense.shape)}; average over all other dimensions."
            )

    def lookup(self, ids: Any) -> Tensor:
        """Losses [B]; NaN for an id that is not in the table."""
        if not isinstance(ids, Tensor) and any(isinstance(i, str) for i in ids):
            raise RholossError(
                f"`irreducible` is a table by integer id, but the ids are strings, {ids[0]!r} for "
                "instance; pass `Irreducible.from_losses(losses, ids=keys)`."
            )
        index = torch.as_tensor(ids, device="cpu").long()
        # The usual case, with one comparison: read as unsigned, a negative id is larger than any table.
        if len(index) and index.numpy().view(np.uint64).max() < len(self.dense):
            return self.dense.index_select(0, index)
        return _gather(self.dense, index)

    def check(self, ids: Any) -> None:
        """Raise if an id has no finite loss."""
        raise_unmeasured(ids, self.lookup(ids))


def raise_unmeasured(ids: Any, loss_B: Tensor) -> None:
    """Raise, naming some ids, if any of these irreducible losses is not finite."""
    bad = ~loss_B.isfinite()
    if not bad.any():
        return
    positions = bad.nonzero().flatten().tolist()
    named = ", ".join(
        str(ids[i].item() if isinstance(ids, Tensor) else ids[i]) for i in positions[:5]
    )
    raise UnmeasuredLossError(
        f"{len(positions)} of {len(loss_B)} candidates have no finite irreducible loss, for instance "
        f"ids {named}. Measure them with `rholoss il score`, or leave them out of the training set."
    )


def known_on_host(source: Source | None, ids: Any, carried: Tensor | None) -> Tensor | None:
    """Irreducible losses on the CPU, checked there, if the ids are still there; else None.

    `carried` is what the loader joined to the batch.
    """
    if carried is not None:
        if carried.device.type != "cpu":
            return None
        raise_unmeasured(ids, carried)
        return carried
    on_host = not isinstance(ids, Tensor) or ids.device.type == "cpu"
    return source.on_host(ids) if on_host and source is not None else None


def tell_other_labels(source: Source | None, ids: Any, labels: Any, stacklevel: int = 3) -> None:
    """Warn if labels have changed since the losses of these points were measured. Waits for the device."""
    find = getattr(getattr(source, "table", None), "other_labels", None)
    said = None if find is None or labels is None else find(ids, labels)
    if said is not None:
        warnings.warn(said, stacklevel=stacklevel)


def _gather(values: Tensor, ids: Tensor) -> Tensor:
    ids = ids.long()  # uint8 would be read as a mask
    inside = (ids >= 0) & (ids < len(values))
    if len(values) == 0:
        return torch.full(ids.shape, torch.nan, device=ids.device)
    return torch.where(inside, values[ids.clamp(0, len(values) - 1)], torch.nan)


class TableSource(Source):
    """A table of losses by id; goes to the device once if it is dense and fits there."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._on_device: Tensor | None = None
        self._asked: torch.device | None = None  # the device for which `_on_device` was decided
        self._limits: dict[float, float] = {}  # share of the points -> the loss above which it lies

    def on_host(self, ids: Any) -> Tensor | None:
        """Look the losses up, and raise if one is not finite."""
        loss_B = self.table.lookup(ids)
        if not math.isfinite(loss_B.sum().item()):  # cheaper than to look at each of them
            self.table.check(ids)  # knows what to say
        return loss_B

    def losses(self, ids: Any, batch: Any, device: torch.device) -> Tensor:
        """Look the losses up where the ids are; nothing is copied from the device."""
        if device.type == "cpu":
            return self.table.lookup(ids)
        if self._asked != device:  # once: asking for free memory is slow
            self._asked = device
            dense = self.table.dense if self._fits(device) else None
            self._on_device = None if dense is None else dense.to(device)
        if self._on_device is not None and isinstance(ids, Tensor):
            return _gather(self._on_device, ids.to(device, non_blocking=True))
        if isinstance(ids, Tensor) and ids.device.type != "cpu":
            raise RholossError(
                "The irreducible losses do not fit the device and the ids are there already. Join them "
                "in the loader: `rholoss.WithIrreducible(dataset, irreducible)`."
            )
        return self.table.lookup(ids).to(device, non_blocking=True)

    @property
    def values(self) -> Tensor | None:
        """All losses, by id or in the order of keys; None if the table does not tell them."""
        return getattr(self.table, "values", self.table.dense)

    def digest(self) -> str | None:
        """Number of rows and a checksum of up to 1,024 of them, evenly spaced."""
        values = self.values
        if values is None or not len(values):
            return None
        some = values[:: max(1, len(values) // DIGEST_ROWS)].contiguous().numpy()
        return f"{len(values):,} losses with checksum {zlib.crc32(some.tobytes()):08x}"

    def _fits(self, device: torch.device) -> bool:
        dense = self.table.dense
        if dense is None:
            return False
        if device.type != "cuda":
            return True
        return dense.numel() * 4 <= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]

    def threshold(self, drop: float) -> float:
        """The loss above which the share `drop` of the measured points lies; found once."""
        if drop in self._limits:
            return self._limits[drop]
        if self.values is None:
            raise RholossError(
                f"A schedule with `drop`={drop} needs all irreducible losses, but this table tells only "
                "those that it is asked for. Pass what `fit_irreducible` returned, or drop=0."
            )
        stride = max(1, len(self.values) // SAMPLED_ROWS)
        values = self.values[::stride].numpy()
        self._limits[drop] = float(np.quantile(values[np.isfinite(values)], 1 - drop))
        return self._limits[drop]


def limit_of(source: Source | None, drop: float) -> float:
    """The irreducible loss above which the share `drop` of the data lies; 0.0 if nothing is dropped."""
    if not drop:
        return 0.0
    assert isinstance(source, TableSource)  # checked when the selector was made
    return source.threshold(drop)


class FunctionSource(Source):
    """Losses from a function of the ids."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def losses(self, ids: Any, batch: Any, device: torch.device) -> Tensor:
        """Call the function; what it returns on the CPU is checked there."""
        loss_B = torch.as_tensor(self.function(ids), dtype=torch.float32).detach()
        check_per_example(loss_B, len(ids), argument="irreducible")
        if loss_B.device.type == "cpu":
            raise_unmeasured(ids, loss_B)
        return loss_B.to(device, non_blocking=device.type != "cpu")


def as_source(irreducible: Any) -> Source | None:
    """A source from what the user passed as `irreducible`."""
    if irreducible is None:
        return None
    if isinstance(irreducible, Source):
        return irreducible.own()
    if hasattr(irreducible, "lookup"):
        return TableSource(irreducible)
    if isinstance(irreducible, (Tensor, np.ndarray, list)):
        return TableSource(DenseTable(irreducible))
    if callable(irreducible) and not isinstance(irreducible, nn.Module):
        return FunctionSource(irreducible)
    raise RholossError(
        f"`irreducible` is a {type(irreducible).__name__}; pass what `fit_irreducible` or "
        "`Irreducible.load` returns, a tensor of losses by id, a function from ids to losses, or a "
        "`LiveIrreducible`."
    )


def as_table(irreducible: Any) -> Table:
    """A table of losses by id from what the user passed as `irreducible`."""
    source = as_source(irreducible)
    if isinstance(irreducible, Source) or not isinstance(source, TableSource):
        raise RholossError(
            f"`irreducible` is a {type(irreducible).__name__}; losses are looked up by id here: pass what "
            "`fit_irreducible` or `Irreducible.load` returns, or a tensor of losses by id."
        )
    return source.table


def irreducible_seconds(loader: Any) -> float:
    """Seconds that the irreducible losses cost which a data set (or its loader) joins to its items.

    0.0 if there are none, or if it is not known.
    """
    dataset = getattr(loader, "dataset", None) if hasattr(loader, "batch_sampler") else loader
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    losses = getattr(dataset, "irreducible", None)  # of `WithIrreducible`, or of a `Stream`
    return float(getattr(losses, "seconds", 0.0))
