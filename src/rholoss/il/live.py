"""A live irreducible-loss model: the original selection function of the paper, Eq. 2."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from rholoss import data, losses, modes
from rholoss.distributed import average_gradients, place
from rholoss.errors import RholossError
from rholoss.optimizers import MakeOptimizer, check_step, new_optimizer
from rholoss.sources import Source


class LiveIrreducible(Source):
    """Irreducible losses from a model that goes on learning from the selected points (Eq. 2 of the paper).

    Args:
        model: trained on the holdout set. It is kept in eval mode throughout.
        optimizer: an optimizer over its parameters, or a function from parameters to one. By default
            AdamW at `lr`.
        loss: as for the selector: the name of a task, or a function (model, batch) -> [B].
        lr: the learning rate of the default optimizer; 0.01 x that of the target is usual.
        batch_norm: 'eval': BatchNorm uses its running statistics, which never change. They fit the weights
            less and less as these are trained; watch the model's accuracy. 'train': statistics of the
            batch, and the running ones are updated; for one process only, as each would have its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        *,
        loss: str | losses.LossFunction = "classification",
        lr: float = 1e-5,
        batch_norm: str = "eval",
    ) -> None:
        if batch_norm not in ("eval", "train"):
            raise RholossError(f"`batch_norm` is {batch_norm!r}; use 'eval' or 'train'.")
        if not isinstance(model, nn.Module):
            raise RholossError(
                f"`model` is a {type(model).__name__}; pass the torch.nn.Module that was trained on the "
                "holdout set."
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise RholossError(
                f"`model`, a {type(model).__name__}, has no parameters that learn, but a `LiveIrreducible` "
                "goes on learning; unfreeze it (`model.requires_grad_(True)`), or measure its losses once: "
                "`rholoss.score_irreducible(model, dataset)`."
            )
        self.model, self.loss, self.batch_norm = model.eval(), losses.by_name(loss), batch_norm
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        elif not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = new_optimizer(optimizer, model.parameters())
        check_step(optimizer)
        self.optimizer: torch.optim.Optimizer = optimizer
        own = {id(p) for p in model.parameters()}
        learns = [p for group in optimizer.param_groups for p in group["params"]]
        others = sum(id(p) not in own for p in learns)
        if others:
            raise RholossError(
                f"`optimizer` has {others} parameter(s) that are not the model's, which would not learn; "
                "give it an optimizer of its own, as in `lambda p: torch.optim.AdamW(p, lr=1e-5)`."
            )

    def check_target(self, target: nn.Module) -> None:
        """Raise if the target trains parameters of this model: it would be compared with itself."""
        own = {id(p): name for name, p in self.model.named_parameters()}
        both = [own[id(p)] for p in target.parameters() if p.requires_grad and id(p) in own]
        if both:
            raise RholossError(
                f"`model` of the `LiveIrreducible` has {len(both)} parameter(s) that the target trains, "
                f"'{both[0]}' for one, so that the target would be compared with itself; give it a model "
                "of its own that was trained on holdout data, or a copy of one: copy.deepcopy(model)."
            )

    def losses(self, ids: Any, batch: Any, device: torch.device) -> Tensor:
        """Losses [B] of the candidates under the model as it is now."""
        if data.device_of(self.model) != device:
            self.model.to(device)  # in place: the optimizer keeps its parameters
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # its state goes along
        with torch.no_grad(), self._mode(), torch.autocast(device.type, enabled=False):
            loss_B = self.loss(self.model, batch)
        return losses.check_per_example(loss_B, len(ids)).float()

    def update(self, batch: Any, weight: Tensor | None = None) -> None:
        """One step of the model's own optimizer on the selected points."""
        self.optimizer.zero_grad()
        device = data.device_of(self.model)
        with torch.enable_grad(), self._mode(), torch.autocast(device.type, enabled=False):
            loss_k = self.loss(self.model, batch)
            (loss_k if weight is None else loss_k * weight).mean().backward()
        average_gradients(self.model.parameters())  # the ranks keep one model
        self.optimizer.step()

    def _mode(self) -> contextlib.AbstractContextManager[None]:
        self.model.eval()  # a framework may have changed it since
        if self.batch_norm == "train" and place()[1] > 1:
            raise RholossError(
                "`batch_norm`='train' of a `LiveIrreducible` is for one process: each would have running "
                "statistics of its own. Pass batch_norm='eval', or a model without BatchNorm."
            )
        return modes.scoring_mode(self.model, batch_norm=self.batch_norm, dropout=False)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved weights and optimizer state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
