"""A live irreducible-loss model: the original selection function of the paper, Eq. 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rholoss import data, losses
from rholoss.distributed import average_gradients
from rholoss.sources import Source

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class LiveIrreducible(Source):
    """Irreducible losses from a model that goes on learning from the selected points.

    Args:
        model: trained on the holdout set. It is kept in eval mode throughout, so that its buffers
            never change.
        optimizer: an optimizer over its parameters, or a function from parameters to one. By default
            AdamW at `lr`; usual is 0.01 x the target's learning rate.
        loss: as for the selector.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        *,
        loss: str | losses.LossFunction = "classification",
        lr: float = 1e-5,
    ) -> None:
        self.model, self.loss = model.eval(), losses.by_name(loss)
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        elif not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(model.parameters())
        self.optimizer: torch.optim.Optimizer = optimizer

    def losses(self, ids: Any, batch: Any, device: torch.device) -> Tensor:
        """Losses [B] of the candidates under the model as it is now."""
        if data.device_of(self.model) != device:
            self.model.to(device)  # in place: the optimizer keeps its parameters
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # its state goes along
        self.model.eval()  # whatever a framework did to it since
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            loss_B = self.loss(self.model, batch)
        return losses.check_per_example(loss_B, len(ids)).float()

    def update(self, batch: Any, weight: Tensor | None = None) -> None:
        """One step of the model's own optimizer on the selected points."""
        self.optimizer.zero_grad()
        with torch.enable_grad(), torch.autocast(data.device_of(self.model).type, enabled=False):
            loss_k = self.loss(self.model, batch)
            (loss_k if weight is None else loss_k * weight).mean().backward()
        average_gradients(self.model.parameters())  # the ranks keep one model
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved weights and optimizer state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
