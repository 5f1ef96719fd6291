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
from torch.nn.modules.batchnorm import _BatchNorm

from rholoss.engine.optimizers import adamw, for_graphs
from rholoss.engine.replica import Replica
from rholoss.engine.resident import Examples
from rholoss.errors import RholossError
from rholoss.ledger import BACKWARD_FORWARDS
from rholoss.modes import own_autocast, scoring_mode
from rholoss.optimizers import MakeOptimizer, new_optimizer

if TYPE_CHECKING:
    from rholoss.engine.step import DeviceStep


# Quantities [B], and the positions of those that were forwarded (None: all).
Measured = tuple[dict[str, Tensor], Tensor | None]


class Cheaper:
    """A way to score. The base class scores exactly: every candidate, by the model itself."""

    learns = False  # whether `update` does something
    only_forwarded = False  # whether the others are not chosen, though something is known of them
    mean_of_all = True  # whether what is measured has the mean of all candidates under the model

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with: a resumed run must have the same."""
        return {}

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

    mean_of_all = False

    def __init__(self, factor: int = 2) -> None:
        if factor < 2:
            raise RholossError(
                f"`factor` must be at least 2, but is {factor}; leave `scoring` out for whole images."
            )
        self.factor = factor

    @property
    def options(self) -> dict[str, Any]:
        """The factor."""
        return {"factor": self.factor}

    def attach(self, step: DeviceStep) -> None:
        """Check that these are images, and that the model takes smaller ones."""
        check_runs_model(self, step)
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

    def replica(self, step: DeviceStep) -> Replica:
        """A copy that leaves the running statistics alone: what it holds are those before the step."""
        return Replica(step.copied, step.dtype or torch.float32, moves=False)

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Of a small image."""
        return step.count_flops(step.model, self.smaller(x), y)


class Proxy(Cheaper):
    """Score with a small model that is trained along, on the chosen points, by an optimizer of its own.

    It learns in the steps that score. On a GPU the optimizer's step must be one that can be captured.
    """

    learns = True
    mean_of_all = False

    def __init__(
        self, make_model: Callable[[], nn.Module], optimizer: MakeOptimizer = adamw
    ) -> None:
        self.make_model, self.make_optimizer = make_model, optimizer
        self.model: nn.Module | None = None

    def attach(self, step: DeviceStep) -> None:
        """Make the model and its optimizer on the device."""
        check_runs_model(self, step)
        check_new(self, self.model is None)
        self.model = ready(self.make_model(), step.data.device)
        own = {id(p) for p in self.model.parameters() if p.requires_grad}
        shared = own & {id(p) for p in step.model.parameters()}
        if shared:
            raise RholossError(
                f"The model that `make_model` of the `Proxy` returned has {len(shared)} parameter(s) of "
                "the target, which it would train a second time; make one of its own, as in "
                "`lambda: SmallModel()`."
            )
        optimizer = new_optimizer(self.make_optimizer, self.model.parameters())
        self.optimizer = for_graphs(optimizer, step.data.device)

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


def ready(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device, in train mode; a BatchNorm layer that was frozen stays frozen.

    That is one in eval mode directly inside a module in train mode. A whole part in eval mode is not taken
    for frozen: pretrained models come that way, and may be inside another.
    """
    layers = [layer for module in model.modules() if module.training for layer in module.children()]
    frozen = [m for m in layers if isinstance(m, _BatchNorm) and not m.training]
    model = model.to(device).train()
    for layer in frozen:
        layer.eval()
    return model


def check_runs_model(option: Cheaper, step: DeviceStep) -> None:
    """Raise where nothing is scored by a model."""
    if not step.runs_model:
        raise RholossError(
            f"`{type(option).__name__}` makes scoring cheaper, but the method {step.method.name!r} runs "
            "no model to score; leave `scoring` out."
        )


def check_new(option: Cheaper, new: bool) -> None:
    """Raise where an option that holds state has another trainer's."""
    if not new:
        raise RholossError(
            f"This `{type(option).__name__}` belongs to another trainer and holds its state; make one "
            "for each trainer."
        )
