"""Cheaper scoring that forwards a share of the candidates only; the classes differ in which share."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn

from rholoss import core
from rholoss.engine.cheaper import Cheaper, Measured, check_new, check_runs_model
from rholoss.engine.resident import Examples
from rholoss.errors import RholossError
from rholoss.guard import mean_of_finite

if TYPE_CHECKING:
    from rholoss.engine.step import DeviceStep


class Partial(Cheaper):
    """Forwards a share of the candidates, by the model itself or by another option: what classes share.

    Args:
        share: of the candidates to forward, in (0, 1]; at least as many as are chosen.
        by: how they are forwarded, `Folded` or `LowerResolution`; None: by the model itself.
    """

    def __init__(self, share: float = 0.5, by: Cheaper | None = None) -> None:
        if not 0 < share <= 1:
            raise RholossError(
                f"`share` of `{type(self).__name__}` must be in (0, 1], but is {share}; 0.5 forwards half."
            )
        self.share, self.by = share, by or Cheaper()
        if self.by.learns or isinstance(self.by, Partial):
            raise RholossError(
                f"`by` of `{type(self).__name__}` is a `{type(self.by).__name__}`; use `Folded` or "
                "`LowerResolution`, or leave `by` out for the model itself."
            )

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that it was made with."""
        return {"share": self.share, "by": type(self.by).__name__, **self.by.options}

    @property
    def mean_of_all(self) -> bool:  # type: ignore[override]
        """As `by` has it; candidates that are not forwarded count with what is known of them."""
        return self.by.mean_of_all

    def attach(self, step: DeviceStep) -> None:
        """Work out how many candidates are forwarded; raise if they are fewer than are chosen."""
        self.by.attach(step)
        candidates = step.order.size
        self.num = core.num_selected(candidates, self.share)
        if self.num < step.k:
            raise RholossError(
                f"`{type(self).__name__}`({self.share}) forwards {self.num} of {candidates} candidates, but "
                f"{step.k} are chosen; pass a share of at least {step.k / candidates:.3g}."
            )

    def passes(self, candidates: int, k: int) -> tuple[int, int]:
        """The forwarded candidates, each as often as `by` forwards it."""
        return self.by.passes(self.num, k)

    def replica(self, step: DeviceStep) -> Any:
        """The replica of `by`."""
        return self.by.replica(step)

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """The FLOPs of `by`."""
        return self.by.flops(step, x, y)

    def moved(self) -> list[Tensor]:
        """What `by` changes when it measures."""
        return self.by.moved()

    def state_dict(self) -> dict[str, Any] | None:
        """The state of `by`."""
        return self.by.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state of `by`."""
        self.by.load_state_dict(state)


class Reuse(Partial):
    """Forward the share of the candidates whose last loss is oldest; the others are scored by their last one.

    Candidates that were never forwarded have no loss yet: they are forwarded first, and cannot be chosen
    before. Each row is a candidate once an epoch, so a reused loss is about an epoch old or older. For the
    methods 'rho' and 'loss'. Each trainer needs a `Reuse` of its own.

    Args:
        share: of the candidates to forward, in (0, 1]; at least as many as are chosen.
        by: how they are forwarded, `Folded` or `LowerResolution`; None: by the model itself.
    """

    loss: Tensor | None = None  # the last loss of each row, by id; NaN if it has none
    saved: tuple[str, ...] = ("loss", "seen", "now")  # names of the tensors that make up its state

    def attach(self, step: DeviceStep) -> None:
        """Make tables for the last loss of each row, by id."""
        check_new(self, self.loss is None)
        if step.needs != {"loss"} or step.draws > 1:
            raise RholossError(
                f"`{type(self).__name__}` keeps training losses, but the method {step.method.name!r} reads "
                f"{', '.join(sorted(step.method.needs)) or 'nothing'}; use 'rho' or 'loss'."
            )
        size, device = int(step.data.ids.max()) + 1, step.data.device
        super().attach(step)
        self.loss = torch.full((size,), torch.nan, dtype=torch.float32, device=device)
        # When each row was last forwarded, by `now`; -1: never. This is a count of its own, because the
        # number of the step changes while overlapped scoring runs.
        self.seen = torch.full((size,), -1, dtype=torch.long, device=device)
        self.now = torch.zeros(1, dtype=torch.long, device=device)
        self._note = step.wrap(note_losses)

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """The new losses of the forwarded candidates, and the last known losses of the others."""
        assert self.loss is not None
        position = in_order(self.forwarded(step, candidates.index))
        part = candidates.take(position)
        measured, _ = self.by.measure(step, model, part, generator)
        self.note(part.index, measured["loss"])
        # The measured values go in unchanged: `expected` would take one that is NaN for unknown.
        loss_B = self.expected(candidates.index)
        return {"loss": loss_B.index_copy(0, position, measured["loss"].float())}, position

    def forwarded(self, step: DeviceStep, index: Tensor) -> Tensor:
        """Positions of the candidates to forward: those whose last loss is oldest.

        Args:
            step: the trainer's step.
            index: ids [B] of the candidates.
        """
        age = self.seen.index_select(0, index)
        return age.sort(stable=True).indices[: self.num]  # of equals the earlier ones

    def note(self, index: Tensor, loss: Tensor) -> None:
        """Remember new losses.

        Args:
            index: ids [n] of the rows.
            loss: their losses [n].
        """
        assert self.loss is not None
        self._note(self.loss, self.seen, self.now, index, loss)

    def expected(self, index: Tensor) -> Tensor:
        """The last known losses of rows, [n]; NaN for those that were never forwarded.

        Args:
            index: their ids [n].
        """
        assert self.loss is not None
        return self.loss.index_select(0, index)

    def moved(self) -> list[Tensor]:
        """What `by` changes, and the tables of losses."""
        return [*super().moved(), *(getattr(self, name) for name in self.saved)]

    def state_dict(self) -> dict[str, Any]:
        """The tables of losses, and the state of `by`."""
        kept = {name: getattr(self, name).to("cpu", copy=True) for name in self.saved}
        return {**kept, **(super().state_dict() or {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved tables."""
        for name in self.saved:
            getattr(self, name).copy_(state[name])
        super().load_state_dict(state)


class Shortlist(Reuse):
    """Forward the share of the candidates whose scores are expected to be highest; choose among these.

    What is expected of a row is the score of its last loss. If it has no last loss yet, the mean loss of the
    previous step stands in, so that its irreducible loss decides. The share `again` of the forwarded
    candidates is not taken by score: it goes to the rows whose last loss is oldest, so that no row is left
    out for good. For the methods 'rho' and 'loss'. Each trainer needs a `Shortlist` of its own.

    Args:
        share: of the candidates to forward, in (0, 1]; at least as many as are chosen.
        again: of the forwarded candidates, the share that is taken by age, in (0, 1).
        by: how they are forwarded, `Folded` or `LowerResolution`; None: by the model itself.
    """

    only_forwarded = True
    saved = (*Reuse.saved, "mean")

    def __init__(self, share: float = 0.6, again: float = 0.1, by: Cheaper | None = None) -> None:
        super().__init__(share, by)
        if not 0 < again < 1:
            raise RholossError(
                f"`again` of `Shortlist` must be in (0, 1), but is {again}; with 0.1 a tenth of what is "
                "forwarded are the rows that were left out for longest."
            )
        self.again = again

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that it was made with."""
        return {**super().options, "again": self.again}

    def attach(self, step: DeviceStep) -> None:
        """Work out how many candidates are forwarded by score and how many by age."""
        super().attach(step)
        if step.live is not None:
            raise RholossError(
                "`Shortlist` reads irreducible losses before anything is forwarded, but they come from a "
                "live model; use a table, what `fit_irreducible` returned."
            )
        self.best = self.num - max(1, math.floor(self.num * self.again + 0.5))
        if self.best < step.k:
            raise RholossError(
                f"`Shortlist`({self.share}, again={self.again}) takes {self.best} candidates by score, "
                f"but {step.k} are chosen; pass a greater share, or a smaller `again`."
            )
        # The mean loss of the candidates that were forwarded in the previous step.
        self.mean = torch.zeros((), dtype=torch.float32, device=step.data.device)
        self._shortlist = functools.partial(step.wrap(shortlist), step.method)
        self._last, self._mean = step.wrap(last_or_mean), step.wrap(mean_of_finite)

    def forwarded(self, step: DeviceStep, index: Tensor) -> Tensor:
        """Positions of the candidates with the highest expected scores, then of the oldest others."""
        return self._shortlist(
            self.expected(index), self.seen, step.irreducible, index, self.best, self.num
        )

    def note(self, index: Tensor, loss: Tensor) -> None:
        """Remember new losses, and their mean for rows that have none yet."""
        super().note(index, loss)
        self.mean.copy_(self._mean(loss))

    def expected(self, index: Tensor) -> Tensor:
        """The last known losses of rows, [n]; the mean loss for those that were never forwarded."""
        return self._last(self.loss, index, self.mean)


def in_order(position: Tensor) -> Tensor:
    """The positions in rising order, which is random as to scores: the first few then stand for all.

    `Folded` relies on that, since it reads statistics off the first few rows.
    """
    return position.sort().values


def note_losses(loss: Tensor, seen: Tensor, now: Tensor, index: Tensor, new: Tensor) -> None:
    """Write new losses of these rows to the tables, and that they were seen now."""
    loss.index_copy_(0, index, new.float())
    seen.index_copy_(0, index, now.expand(len(index)))
    now += 1


def last_or_mean(loss: Tensor, index: Tensor, mean: Tensor) -> Tensor:
    """The last losses of these rows; the mean for those that have none."""
    loss_B = loss.index_select(0, index)
    return torch.where(loss_B.isnan(), mean, loss_B)


def shortlist(
    method: core.Method,
    loss_B: Tensor,
    seen: Tensor,
    irreducible: Tensor | None,
    index: Tensor,
    best: int,
    num: int,
) -> Tensor:
    """Positions of `num` candidates: the `best` with the highest expected scores, then the oldest others."""
    measured = {"loss": loss_B}
    if irreducible is not None:
        measured["irreducible_loss"] = irreducible.index_select(0, index)
    order = method.score(core.Stats(index, measured)).sort(descending=True, stable=True).indices
    rest = order[best:]
    age = seen.index_select(0, index.index_select(0, rest))
    return torch.cat([order[:best], rest[age.sort(stable=True).indices[: num - best]]])


class Gate(Partial):
    """Forward the share of the candidates with the lowest irreducible losses; choose among these.

    A row that a holdout model finds hard is mostly noise or too hard to learn, and seldom has the highest
    reducible loss. Needs a table of irreducible losses.

    Args:
        share: of the candidates to forward, in (0, 1]; at least as many as are chosen.
        by: how they are forwarded, `Folded` or `LowerResolution`; None: by the model itself.
    """

    mean_of_all = False

    def attach(self, step: DeviceStep) -> None:
        """Check that the method runs a model, and that there is a table of irreducible losses."""
        check_runs_model(self, step)
        if step.irreducible is None:
            raise RholossError(
                f"`Gate` needs a table of irreducible losses, but the method {step.method.name!r} "
                f"{'has a live model' if step.live is not None else 'reads none'}; use 'rho' with what "
                "`fit_irreducible` returned."
            )
        super().attach(step)

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """Measure the candidates that pass; NaN for the others."""
        assert step.irreducible is not None
        loss_B = step.irreducible.index_select(0, candidates.index)
        lowest = in_order(loss_B.sort(stable=True).indices[: self.num])
        part, _ = self.by.measure(step, model, candidates.take(lowest), generator)
        unknown = torch.full_like(loss_B, torch.nan)
        return {name: unknown.index_copy(0, lowest, v.float()) for name, v in part.items()}, lowest
