"""Cheaper scoring that forwards a share of the candidates: which of them, each class says."""

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
    """Forwards a share of the candidates, by the model itself or by another option (`Folded`)."""

    def __init__(self, share: float = 0.5, by: Cheaper | None = None) -> None:
        if not 0 < share <= 1:
            raise RholossError(
                f"`share` of `{type(self).__name__}` must be in (0, 1], but is {share}; 0.5 forwards half."
            )
        self.share, self.by = share, by or Cheaper()
        if self.by.learns or isinstance(self.by, Partial):
            raise RholossError(
                f"`by` of `{type(self).__name__}` is a `{type(self.by).__name__}`; what is forwarded can be "
                "forwarded by `Folded` or `LowerResolution`."
            )

    @property
    def options(self) -> dict[str, Any]:
        """The share, and by what it is forwarded."""
        return {"share": self.share, "by": type(self.by).__name__, **self.by.options}

    @property
    def mean_of_all(self) -> bool:  # type: ignore[override]
        """As the other option: those that are not forwarded have what is known of them."""
        return self.by.mean_of_all

    def attach(self, step: DeviceStep) -> None:
        """How many are forwarded: at least as many as are chosen."""
        self.by.attach(step)
        candidates = step.order.size
        self.num = core.num_selected(candidates, self.share)
        if self.num < step.k:
            raise RholossError(
                f"`{type(self).__name__}`({self.share}) forwards {self.num} of {candidates} candidates, but "
                f"{step.k} are chosen; pass a share of at least {step.k / candidates:.3g}."
            )

    def passes(self, candidates: int, k: int) -> tuple[int, int]:
        """Only those that are forwarded, as often as the other option does."""
        return self.by.passes(self.num, k)

    def replica(self, step: DeviceStep) -> Any:
        """That of the other option."""
        return self.by.replica(step)

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Those of the other option."""
        return self.by.flops(step, x, y)

    def moved(self) -> list[Tensor]:
        """What moves of the other option."""
        return self.by.moved()

    def state_dict(self) -> dict[str, Any] | None:
        """That of the other option."""
        return self.by.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with it."""
        self.by.load_state_dict(state)


class Reuse(Partial):
    """Forward only the share of candidates whose last known loss is oldest; the others keep theirs.

    A candidate that was never forwarded has no loss yet and is not chosen; the first to be forwarded are
    those. Every row is a candidate once an epoch, so a loss that is reused is at least about an epoch old.
    """

    loss: Tensor | None = None
    saved: tuple[str, ...] = ("loss", "seen", "now")

    def attach(self, step: DeviceStep) -> None:
        """Make room for the last loss of each row, by id."""
        check_new(self, self.loss is None)
        if step.needs != {"loss"} or step.draws > 1:
            raise RholossError(
                f"`{type(self).__name__}` keeps training losses, but the method {step.method.name!r} reads "
                f"{', '.join(sorted(step.method.needs)) or 'nothing'}; use 'rho' or 'loss'."
            )
        size, device = int(step.data.ids.max()) + 1, step.data.device
        super().attach(step)
        self.loss = torch.full((size,), torch.nan, dtype=torch.float32, device=device)
        self.seen = torch.full((size,), -1, dtype=torch.long, device=device)  # at which step
        # Its own count: the step's number moves while scoring runs beside training.
        self.now = torch.zeros(1, dtype=torch.long, device=device)
        self._note = step.wrap(note_losses)

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """New losses of those that are forwarded, old losses of the others."""
        assert self.loss is not None
        position = in_order(self.forwarded(step, candidates.index))
        part = candidates.take(position)
        measured, _ = self.by.measure(step, model, part, generator)
        self.note(part.index, measured["loss"])
        # What was measured as it is: a loss that is not finite must not be taken for an unknown one.
        loss_B = self.expected(candidates.index)
        return {"loss": loss_B.index_copy(0, position, measured["loss"].float())}, position

    def forwarded(self, step: DeviceStep, index: Tensor) -> Tensor:
        """Positions of the candidates that were not forwarded for longest."""
        age = self.seen.index_select(0, index)
        return age.sort(stable=True).indices[: self.num]  # where alike, the earlier position

    def note(self, index: Tensor, loss: Tensor) -> None:
        """Keep the new losses of these rows."""
        assert self.loss is not None
        self._note(self.loss, self.seen, self.now, index, loss)

    def expected(self, index: Tensor) -> Tensor:
        """What is known of these rows; NaN where nothing is."""
        assert self.loss is not None
        return self.loss.index_select(0, index)

    def moved(self) -> list[Tensor]:
        """The losses and when they were seen, too."""
        return [*super().moved(), *(getattr(self, name) for name in self.saved)]

    def state_dict(self) -> dict[str, Any]:
        """What moves."""
        kept = {name: getattr(self, name).to("cpu", copy=True) for name in self.saved}
        return {**kept, **(super().state_dict() or {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved losses."""
        for name in self.saved:
            getattr(self, name).copy_(state[name])
        super().load_state_dict(state)


class Shortlist(Reuse):
    """Forward only the share of candidates whose scores are expected to be highest.

    Scores by the trainer's method of expected losses: of a row, that which it had when it was last forwarded,
    and before that the mean of the last step, so that its irreducible loss decides. The others are not
    chosen; what is expected of them still counts where the mean score of all candidates is asked for (an
    automatic switch). So that nothing is left out for good, `again` of those that are forwarded are such as
    were not for longest.
    """

    only_forwarded = True
    saved = (*Reuse.saved, "mean")

    def __init__(self, share: float = 0.6, again: float = 0.1, by: Cheaper | None = None) -> None:
        super().__init__(share, by)
        if not 0 < again < 1:
            raise RholossError(
                f"`again` of `Shortlist` must be in (0, 1), but is {again}; with 0.1 a tenth of what is "
                "forwarded are those that were left out for longest."
            )
        self.again = again

    @property
    def options(self) -> dict[str, Any]:
        """And how many of those that are forwarded are so for their age."""
        return {**super().options, "again": self.again}

    def attach(self, step: DeviceStep) -> None:
        """How many of those that are forwarded are forwarded for their scores."""
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
        # The loss of those forwarded last.
        self.mean = torch.zeros((), dtype=torch.float32, device=step.data.device)
        self._shortlist = functools.partial(step.wrap(shortlist), step.method)

    def forwarded(self, step: DeviceStep, index: Tensor) -> Tensor:
        """Positions of those with the highest expected scores, then of the oldest among the others."""
        return self._shortlist(
            self.expected(index), self.seen, step.irreducible, index, self.best, self.num
        )

    def note(self, index: Tensor, loss: Tensor) -> None:
        """And what to expect of rows that have not been forwarded yet."""
        super().note(index, loss)
        self.mean.copy_(mean_of_finite(loss))

    def expected(self, index: Tensor) -> Tensor:
        """The last losses; the mean where there is none."""
        loss_B = super().expected(index)
        return torch.where(loss_B.isnan(), self.mean, loss_B)


def in_order(position: Tensor) -> Tensor:
    """These positions as the candidates came, at random: `Folded` takes the first few to stand for all."""
    return position.sort().values


def note_losses(loss: Tensor, seen: Tensor, now: Tensor, index: Tensor, new: Tensor) -> None:
    """Keep new losses of these rows, and when they were seen."""
    loss.index_copy_(0, index, new.float())
    seen.index_copy_(0, index, now.expand(len(index)))
    now += 1


def shortlist(
    method: core.Method,
    loss_B: Tensor,
    seen: Tensor,
    irreducible: Tensor | None,
    index: Tensor,
    best: int,
    num: int,
) -> Tensor:
    """Positions of `num` candidates: the `best` by expected score, then the oldest of the rest."""
    measured = {"loss": loss_B}
    if irreducible is not None:
        measured["irreducible_loss"] = irreducible.index_select(0, index)
    order = method.score(core.Stats(index, measured)).sort(descending=True, stable=True).indices
    rest = order[best:]
    age = seen.index_select(0, index.index_select(0, rest))
    return torch.cat([order[:best], rest[age.sort(stable=True).indices[: num - best]]])


class Gate(Partial):
    """Forward only the share of candidates with the lowest irreducible loss; the rest is not chosen.

    What a holdout model finds hard is noise or out of reach, and seldom the most reducible.
    """

    mean_of_all = False

    def attach(self, step: DeviceStep) -> None:
        """Check that there is a table of irreducible losses, and something to forward."""
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
        """Of those that pass; NaN for the others."""
        assert step.irreducible is not None
        loss_B = step.irreducible.index_select(0, candidates.index)
        lowest = in_order(loss_B.sort(stable=True).indices[: self.num])
        part, _ = self.by.measure(step, model, candidates.take(lowest), generator)
        unknown = torch.full_like(loss_B, torch.nan)
        return {name: unknown.index_copy(0, lowest, v.float()) for name, v in part.items()}, lowest
