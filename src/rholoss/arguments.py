"""Checks of a selector's arguments and of its first candidates, and the warnings that it gives."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rholoss.core import Method
from rholoss.errors import RholossError
from rholoss.ladder import Ladder
from rholoss.losses import TASKS
from rholoss.naming import code_hash, named
from rholoss.schedules import Schedule
from rholoss.sources import Source, TableSource, tell_other_labels

FLUSH_STEPS = 100  # errors on a GPU are raised at most this many steps late


def check_arguments(
    method: Method,
    source: Source | None,
    schedule: Schedule,
    keep: float | None,
    k: int | None,
    flush_every: int,
    loss: Any,
    seed: int,
) -> None:
    """Raise if a selector cannot be made from these arguments."""
    check_is_schedule(schedule)
    if (keep is None) == (k is None):
        raise RholossError(f"Pass `keep` (a share) or `k` (a number); got keep={keep} and k={k}.")
    if keep is not None and (not isinstance(keep, numbers.Real) or not 0 < keep <= 1):
        raise RholossError(f"`keep` must be in (0, 1], but is {keep!r}; the paper has 0.1.")
    if k is not None and (not isinstance(k, numbers.Integral) or k < 1):
        raise RholossError(
            f"`k` must be a whole number of at least 1, but is {k!r}; or pass `keep`, a share."
        )
    if not isinstance(seed, numbers.Integral):
        raise RholossError(f"`seed` must be a whole number, but is {seed!r}; the default is 0.")
    if not isinstance(flush_every, numbers.Integral) or not 1 <= flush_every <= FLUSH_STEPS:
        raise RholossError(
            f"`flush_every` must be in 1..{FLUSH_STEPS}, but is {flush_every!r}: it counts steps between "
            "two writes of the log."
        )
    if isinstance(source, Ladder) and not {"loss", "irreducible_loss"} <= method.needs:
        raise RholossError(
            f"A `Ladder` compares losses with irreducible losses, but the method {method.name!r} does not "
            "need both; pass the last of its rungs."
        )
    if schedule.drop and (not isinstance(source, TableSource) or source.values is None):
        raise RholossError(
            f"A schedule with `drop`={schedule.drop} needs a table of irreducible losses; pass "
            "`irreducible=` what `fit_irreducible` returned, or drop=0."
        )
    tell_other_loss(method, source, loss, stacklevel=4)


def check_is_schedule(schedule: Any) -> None:
    """Raise where it is a name, or a function that makes one."""
    if not isinstance(schedule, Schedule):
        raise RholossError(
            f"`schedule` is {schedule!r}; pass a schedule, for instance "
            "`rholoss.annealed(total_steps=10_000)`."
        )


def check_options(index: Any, shared: Any, on_scores: Any, auto_off: Any) -> None:
    """Raise if one of these has the wrong type, or a value without a meaning."""
    if index is not None and not callable(index):
        raise RholossError(
            f"`index` is {index!r}; pass a function from a batch to its ids, for instance "
            'lambda batch: batch["id"].'
        )
    if isinstance(shared, str):
        raise RholossError(f"`shared` is {shared!r}; pass a list of paths, shared=[{shared!r}].")
    if callable(on_scores) or not isinstance(on_scores, Iterable):
        raise RholossError(
            f"`on_scores` is {on_scores!r}; pass a list of functions (step, stats, chosen)."
        )
    if auto_off is not None and not (isinstance(auto_off, numbers.Real) and float(auto_off) > 0):
        raise RholossError(
            f"`auto_off` must be above 0, but is {auto_off!r}: scoring stops once selection has cost so many "
            "times everything else. Leave it out to score on."
        )


def tell_other_loss(method: Method, source: Source | None, loss: Any, stacklevel: int = 3) -> None:
    """Warn if the irreducible losses were measured with another loss function than candidates are.

    Silent where the two cannot be compared: losses made elsewhere have a name of the user's choice, and
    what a callable object does cannot be read from its code.
    """
    meta = getattr(getattr(source, "table", None), "meta", {})
    then, now = (meta.get("loss"), meta.get("loss_code")), (named(loss), code_hash(loss))
    if not all(name in TASKS or code is not None for name, code in (then, now)):
        return
    # A task is known by its name, a function by what it does: it may live in another module now.
    same = then[0] == now[0] if None in (then[1], now[1]) else then[1] == now[1]
    if not same and {"loss", "irreducible_loss"} <= method.needs:
        warnings.warn(
            f"The irreducible losses were measured with loss={then[0]!r}, but candidates are scored with "
            f"loss={now[0]!r}, so that the difference of the two says little. Pass the same `loss=` to both.",
            stacklevel=stacklevel,
        )


def check_source(method: Method, source: Source | None, carried: Tensor | None) -> None:
    """Raise if a method needs irreducible losses and neither a source nor the loader gives them."""
    if source is None and carried is None:
        raise RholossError(
            f"The method {method.name!r} needs irreducible losses; pass `irreducible=`, or join them in "
            "the loader with `rholoss.WithIrreducible(dataset, irreducible)`."
        )


def check_rows(rows: int, k: int | None) -> None:
    """Raise if a candidate batch of `rows` is empty, or has fewer than `k` rows."""
    if rows == 0:
        raise RholossError("The candidate batch is empty; check the data set and the sampler.")
    if k is not None and k > rows:
        raise RholossError(
            f"`k`={k} is larger than the candidate batch of {rows}. Make the loader's batch "
            "larger, pass drop_last=True to it if this is the last batch, or use `keep`."
        )


def check_first(
    method: Method, source: Source | None, model: nn.Module, ids: Any, labels: Tensor | None
) -> None:
    """Checks before the first selection; `labels` if irreducible losses are read. Waits for the device."""
    if method.needs:
        if source is not None:
            source.check_target(model)
        _warn_of_repeats(ids)
    tell_other_labels(source, ids, labels, stacklevel=5)


def _warn_of_repeats(ids: Any) -> None:
    """Warn if candidates have the same id."""
    keys = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    seen: set[Any] = set()
    again = [key for key in keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
    if again:
        warnings.warn(
            f"{len(again)} of {len(keys)} candidates have an id that another one has too, {again[0]!r} for "
            "instance. A selection takes the copies of a row together. If the sampler draws with "
            "replacement (WeightedRandomSampler), draw without, and weight the loss or stratify instead; "
            "if data sets with ids of their own were joined, write `rholoss.WithIndex(ConcatDataset([a, "
            "b]))`; if these numbers are not ids but a feature, wrap the data set: "
            "`rholoss.WithIndex(dataset)`.",
            stacklevel=5,
        )


def check_reducible(loss_k: Tensor) -> None:
    """Raise unless there is one loss for each selected row."""
    if loss_k.ndim != 1:
        raise RholossError(
            f"`select.reduce` takes one loss per selected row, shape [k], but got shape "
            f"{tuple(loss_k.shape)}; use reduction='none'."
        )


class Reminders:
    """What a selector warns of once: of a single row for BatchNorm, and of weights that nobody reads."""

    def __init__(self) -> None:
        self.unread = False  # whether the last step's importance weights were not read
        self._told: set[str] = set()

    def of_one_row(self, model: nn.Module, rows: int, keep: float, k: int) -> None:
        """Warn if a model with BatchNorm is about to train on a single row."""
        if k > 1 or "one row" in self._told:
            return
        self._told.add("one row")
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if any(module.training and not isinstance(module, nn.SyncBatchNorm) for module in norms):
            warnings.warn(
                f"Of a batch of {rows} candidates one row is selected (`keep`={keep}), and the model has "
                "BatchNorm, which a single row gives no statistics (BatchNorm1d raises). Pass "
                "drop_last=True to the loader or to `select.batch_sampler`, if this is the last batch; else "
                "larger batches.",
                stacklevel=4,
            )

    def of_weights(self, method: Method, weight: Tensor | None) -> None:
        """Warn if there were importance weights at the step before and nobody has read them."""
        forgotten, self.unread = self.unread, weight is not None
        if forgotten and "weights" not in self._told:
            self._told.add("weights")
            warnings.warn(
                f"The method {method.name!r} samples by importance, but its weights were not used. Write "
                "`loss = select.reduce(loss_B)` with one loss per example, or the gradient is biased.",
                stacklevel=4,
            )
