"""Cheaper scoring: other ways to measure what a method reads of the candidates, inside the same step.

An option decides which candidates are forwarded, through which model and at which size; score, pick and
training stay as they are. All shapes are fixed and all tensors stay in place, so that a step with any of
the options can be captured. `python -m benchmarks.bench_agreement` measures what each of them saves, and how
much it changes the choice.
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
from rholoss.modes import check_materialised, own_autocast, scoring_mode
from rholoss.optimizers import MakeOptimizer, new_optimizer

if TYPE_CHECKING:
    from rholoss.engine.step import DeviceStep


# The quantities [B] by name, and the positions of the candidates that were forwarded (None: all of them).
Measured = tuple[dict[str, Tensor], Tensor | None]


class Cheaper:
    """A way to measure the candidates, for `Trainer(..., scoring=...)`. Subclass it for one of your own.

    This base class is exact scoring: every candidate, by the model itself. What `measure` and `update` do is
    captured as part of a CUDA graph: shapes must be fixed, tensors must be changed in place, and nothing may
    be read on the host.

    Attributes:
        learns: whether `update` does something. Such an option cannot be overlapped.
        only_forwarded: choose among the forwarded candidates only, though others have quantities too.
        mean_of_all: whether the mean of the measured losses stands for all candidates under the model
            itself, as `catch_up` and a `Ladder` need it.
    """

    learns = False
    only_forwarded = False
    mean_of_all = True

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that it was made with, by name: a resumed run must have the same."""
        return {}

    def attach(self, step: DeviceStep) -> None:
        """Make buffers, and raise if the option makes no sense here. Called once, before the first step.

        Args:
            step: the trainer's step: its `model`, `data`, `method`, number `k` of chosen rows, and so on.
        """

    def passes(self, candidates: int, k: int) -> tuple[int, int]:
        """How many points a step scores, and the forward passes of single points for it (for the ledger).

        Args:
            candidates: the number of candidates in a batch.
            k: the number of rows that are chosen.
        """
        return candidates, candidates

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """Measure the candidates.

        Args:
            step: the trainer's step; `step.measure` runs a model on inputs.
            model: the model that scores: the trainer's, or if scoring is overlapped the replica's.
            candidates: ids `index` [B], inputs `x` and targets `y`.
            generator: the randomness of this step.

        Returns:
            The quantities by name, [B] each, NaN if unknown: such a candidate is not chosen. And the
            positions of the candidates that were forwarded, None if all of them were.
        """
        return step.measure(model, candidates.x, candidates.y, generator), None

    def replica(self, step: DeviceStep) -> Any:
        """What scores beside training if scoring is overlapped; None for a plain copy of the model."""
        return None

    def update(self, step: DeviceStep, chosen: Examples, weight: Tensor | None) -> None:
        """Learn from the chosen rows, if the option learns.

        Args:
            step: the trainer's step.
            chosen: the rows that are trained on.
            weight: their importance weights [k], None without.
        """

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Forward FLOPs of scoring one row; None if they are those of the model on `x`."""
        return None

    def moved(self) -> list[Tensor]:
        """The tensors of its own that `measure` changes: put back after `Trainer.time_scoring`."""
        return []

    def state_dict(self) -> dict[str, Any] | None:
        """What a resumed run needs; None for nothing."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


class LowerResolution(Cheaper):
    """Score smaller images: means of `factor` x `factor` pixels.

    The model must take images of that size. BatchNorm's running statistics are not moved by scoring, because
    small images have others.

    Args:
        factor: how many times smaller they are in height and in width, 2 or more. The sides of the images
            must be multiples of it.
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
        """The argument that it was made with."""
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
        """The images [B, C, H, W] as they are scored, [B, C, H / factor, W / factor]."""
        return F.avg_pool2d(x, self.factor)

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """Measure the small images of all candidates."""
        mode = step.scorer.batch_norm
        mode = "batch" if mode == "train" else mode
        x = self.smaller(candidates.x)
        return step.measure(model, x, candidates.y, generator, batch_norm=mode), None

    def replica(self, step: DeviceStep) -> Replica:
        """A copy that does not move the model's running statistics."""
        return Replica(step.copied, step.low, moves=False)

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Forward FLOPs of a small image."""
        return step.count_flops(step.model, self.smaller(x), y)


class Proxy(Cheaper):
    """Score with a small model, which is trained along on the chosen rows.

    It takes a step of its own in each step that scores. Its training is counted in the ledger. Each trainer
    needs a `Proxy` of its own, and scoring cannot be overlapped.

    Args:
        make_model: a function without arguments that returns the small model.
        optimizer: a function from its parameters to an optimizer, whose learning rate is used as it is; by
            default AdamW at 1e-3. On a GPU the optimizer's step must be one that can be captured.
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
        self.model = ready(self.make_model(), step.data.device, "make_model")
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
        """All candidates are scored; training the small model counts as forward passes, too."""
        return candidates, candidates + (1 + BACKWARD_FORWARDS) * k

    def measure(
        self, step: DeviceStep, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        """Measure all candidates by the small model."""
        assert self.model is not None
        return step.measure(self.model, candidates.x, candidates.y, generator), None

    def update(self, step: DeviceStep, chosen: Examples, weight: Tensor | None) -> None:
        """Train the small model on the chosen rows, one step."""
        assert self.model is not None
        self.optimizer.zero_grad(set_to_none=True)
        step.loss_of(self.model, chosen, weight).backward()
        self.optimizer.step()

    def flops(self, step: DeviceStep, x: Tensor, y: Tensor) -> float | None:
        """Forward FLOPs of the small model."""
        assert self.model is not None
        return step.count_flops(self.model, x, y)

    def moved(self) -> list[Tensor]:
        """The buffers of the small model: its running statistics."""
        assert self.model is not None
        return list(self.model.buffers())

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state of the small model."""
        assert self.model is not None
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved weights and optimizer state."""
        assert self.model is not None
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def ready(model: nn.Module, device: torch.device, argument: str = "model") -> nn.Module:
    """The model on the device, in train mode; BatchNorm layers that were frozen stay in eval mode.

    A BatchNorm layer counts as frozen if it is in eval mode directly inside a module in train mode. A whole
    part in eval mode does not: a pretrained model that is used as a part often comes in eval mode.
    """
    check_materialised(model, argument)
    layers = [layer for module in model.modules() if module.training for layer in module.children()]
    frozen = [m for m in layers if isinstance(m, _BatchNorm) and not m.training]
    model = model.to(device).train()
    for layer in frozen:
        layer.eval()
    return model


def check_runs_model(option: Cheaper, step: DeviceStep) -> None:
    """Raise if the method runs no model to score, so that an option could not make it cheaper."""
    if not step.runs_model:
        raise RholossError(
            f"`{type(option).__name__}` makes scoring cheaper, but the method {step.method.name!r} runs "
            "no model to score; leave `scoring` out."
        )


def check_new(option: Cheaper, new: bool) -> None:
    """Raise if an option that holds state is used by another trainer already."""
    if not new:
        raise RholossError(
            f"This `{type(option).__name__}` belongs to another trainer and holds its state; make one "
            "for each trainer."
        )
