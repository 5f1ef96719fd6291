"""Cheaper scoring: other ways to come by what a method needs of the candidates, inside the same step.

An option decides which candidates are forwarded, through which model and at which size; score, pick and
training stay as they are. All shapes are fixed and all tensors stay in place, so that a step with any of
these can be captured. What each one saves and does to the choice: `python -m benchmarks.bench_agreement`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from rholoss import core
from rholoss.engine.optimizers import MakeOptimizer, adamw, for_graphs
from rholoss.engine.resident import Examples
from rholoss.errors import RholossError
from rholoss.ledger import BACKWARD_FORWARDS
from rholoss.modes import own_autocast, scoring_mode

if TYPE_CHECKING:
    from rholoss.engine.step import DeviceStep


# Quantities [B], and the positions of those that were forwarded (None: all).
Measured = tuple[dict[str, Tensor], Tensor | None]


class Cheaper:
    """A way to score. The base class scores exactly: every candidate, by the model itself."""

    learns = False  # whether `update` does something

    def attach(self, step: DeviceStep) -> None:
        """Make buffers; raise where the option makes no sense. Called once, before the first step."""

    def passes(self, candidates: int, k: int) -> tuple[int, int]:
        """Points that a step scores, and forward passes of single points that this takes."""
        return candidates, candidates

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """Quantities [B], NaN where nothing is known: such a candidate is not chosen.

        Also returns the positions of those that were forwarded; None if all were.
        """
        return step.measure(model, candidates.x, candidates.y, generator), None

    def replica(self, step: DeviceStep) -> Any:
        """What scores beside training when scoring is overlapped; None for a plain copy of the model."""
        return None

    def update(self, step: DeviceStep, chosen: Examples, weight: Tensor | None) -> None:
        """Learn from the chosen rows."""

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Forward FLOPs of one pass, if they are not those of the model on `x`."""
        return None

    def moved(self) -> list[Tensor]:
        """What `measure` changes of its own: to be put back if it was only tried."""
        return []

    def state_dict(self) -> dict[str, Any] | None:
        """What a resumed run needs."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


class LowerResolution(Cheaper):
    """Score images that are smaller by `factor` each way (means of `factor` x `factor` pixels).

    Small images have other statistics, so BatchNorm's running ones are kept while they are scored.
    """

    def __init__(self, factor: int = 2) -> None:
        if factor < 2:
            raise RholossError(
                f"`factor` must be at least 2, but is {factor}; leave `scoring` out for whole images."
            )
        self.factor = factor

    def attach(self, step: DeviceStep) -> None:
        """Check that these are images, and that the model takes smaller ones."""
        _check_runs_model(self, step)
        size = step.data.size
        if not step.data.images or any(side % self.factor for side in size):
            raise RholossError(
                f"`LowerResolution`({self.factor}) needs images whose sides are multiples of "
                f"{self.factor}, but the inputs are {size or 'not images'}; choose another factor or "
                "another option."
            )
        x, _ = step.data.batch(torch.zeros(1, dtype=torch.long, device=step.data.device))
        quiet = scoring_mode(step.model, batch_norm="eval", dropout=False)
        try:
            with torch.no_grad(), quiet, own_autocast(step.data.device, step.dtype):
                step.model(self.smaller(x))
        except RuntimeError as error:
            raise RholossError(
                f"The model does not take images of size {tuple(s // self.factor for s in size)}, which "
                f"`LowerResolution`({self.factor}) would score ({str(error).splitlines()[0]}). Pool to a "
                "fixed size before the last layer (`nn.AdaptiveAvgPool2d`), or choose another option."
            ) from error

    def smaller(self, x: Tensor) -> Tensor:
        """The images, pooled."""
        return F.avg_pool2d(x, self.factor)

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """As the model sees the small images."""
        mode = step.scorer.batch_norm
        mode = "batch" if mode == "train" else mode
        x = self.smaller(candidates.x)
        return step.measure(model, x, candidates.y, generator, batch_norm=mode), None

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Of a small image."""
        return step.count_flops(step.model, self.smaller(x), y)


class Proxy(Cheaper):
    """Score with a small model that is trained along, on the chosen points, by an optimizer of its own.

    It learns in the steps that score. On a GPU the optimizer's step must be one that can be captured.
    """

    learns = True

    def __init__(
        self, make_model: Callable[[], nn.Module], optimizer: MakeOptimizer = adamw
    ) -> None:
        self.make_model, self.make_optimizer = make_model, optimizer
        self.model: nn.Module | None = None

    def attach(self, step: DeviceStep) -> None:
        """Make the model and its optimizer on the device."""
        _check_runs_model(self, step)
        _check_new(self, self.model is None)
        self.model = self.make_model().to(step.data.device).train()
        self.optimizer = for_graphs(self.make_optimizer(self.model.parameters()), step.data.device)

    def passes(self, candidates: int, k: int) -> tuple[int, int]:
        """Its own training counts too."""
        return candidates, candidates + (1 + BACKWARD_FORWARDS) * k

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """As the small model sees the candidates."""
        assert self.model is not None
        return step.measure(self.model, candidates.x, candidates.y, generator), None

    def update(self, step: DeviceStep, chosen: Examples, weight: Tensor | None) -> None:
        """One step of the small model."""
        assert self.model is not None
        self.optimizer.zero_grad(set_to_none=True)
        step.loss_of(self.model, chosen, weight).backward()
        self.optimizer.step()

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Of the small model."""
        assert self.model is not None
        return step.count_flops(self.model, x, y)

    def moved(self) -> list[Tensor]:
        """Running statistics."""
        assert self.model is not None
        return list(self.model.buffers())

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state."""
        assert self.model is not None
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved weights and optimizer state."""
        assert self.model is not None
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


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
        """Only those that are forwarded."""
        return self.num, self.num

    def replica(self, step: DeviceStep) -> Any:
        """That of the other option."""
        return self.by.replica(step)

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Those of the other option."""
        return self.by.flops(step, x, y)

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

    def attach(self, step: DeviceStep) -> None:
        """Make room for the last loss of each row, by id."""
        _check_new(self, self.loss is None)
        if step.needs != {"loss"} or step.draws > 1:
            raise RholossError(
                f"`Reuse` keeps training losses, but the method {step.method.name!r} reads "
                f"{', '.join(sorted(step.method.needs)) or 'nothing'}; use 'rho' or 'loss'."
            )
        size, device = int(step.data.ids.max()) + 1, step.data.device
        super().attach(step)
        self.loss = torch.full((size,), torch.nan, device=device)
        self.seen = torch.full((size,), -1, dtype=torch.long, device=device)  # at which step
        # Its own count: the step's number moves while scoring runs beside training.
        self.now = torch.zeros(1, dtype=torch.long, device=device)

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """New losses of the oldest, old losses of the others."""
        assert self.loss is not None
        age = self.seen.index_select(0, candidates.index)
        oldest = age.sort(stable=True).indices[: self.num]  # where alike, the earlier position
        forwarded = candidates.take(oldest)
        measured, _ = self.by.measure(step, model, forwarded, generator)
        self.loss.index_copy_(0, forwarded.index, measured["loss"].float())
        self.seen.index_copy_(0, forwarded.index, self.now.expand(self.num))
        self.now += 1
        return {"loss": self.loss.index_select(0, candidates.index)}, oldest

    def moved(self) -> list[Tensor]:
        """The losses and when they were seen."""
        assert self.loss is not None
        return [self.loss, self.seen, self.now]

    def state_dict(self) -> dict[str, Any]:
        """The losses and when they were seen."""
        loss, seen, now = (tensor.to("cpu", copy=True) for tensor in self.moved())
        return {"loss": loss, "seen": seen, "now": now, **(super().state_dict() or {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved losses."""
        for tensor, name in zip(self.moved(), ("loss", "seen", "now"), strict=True):
            tensor.copy_(state[name])
        super().load_state_dict(state)


class Gate(Partial):
    """Forward only the share of candidates with the lowest irreducible loss; the rest is not chosen.

    What a holdout model finds hard is noise or out of reach, and seldom the most reducible.
    """

    def attach(self, step: DeviceStep) -> None:
        """Check that there is a table of irreducible losses, and something to forward."""
        _check_runs_model(self, step)
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
        lowest = loss_B.sort(stable=True).indices[: self.num]
        part, _ = self.by.measure(step, model, candidates.take(lowest), generator)
        unknown = torch.full_like(loss_B, torch.nan)
        return {name: unknown.index_copy(0, lowest, v.float()) for name, v in part.items()}, lowest


def _check_runs_model(option: Cheaper, step: DeviceStep) -> None:
    if not step.runs_model:
        raise RholossError(
            f"`{type(option).__name__}` makes scoring cheaper, but the method {step.method.name!r} runs "
            "no model to score; leave `scoring` out."
        )


def _check_new(option: Cheaper, new: bool) -> None:
    if not new:
        raise RholossError(
            f"This `{type(option).__name__}` belongs to another trainer and holds its state; make one "
            "for each trainer."
        )
