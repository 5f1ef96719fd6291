"""Losses of causal language models by row, without the logits of all tokens at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rholoss import data
from rholoss.errors import RholossError
from rholoss.losses import IGNORED, TASKS, mean_over_tokens, next_tokens, split_batch
from rholoss.modes import unwrapped


class CausalLMLoss:
    """Loss of each row under a causal language model, without holding the logits of all tokens at once.

        Selector("rho", irreducible=il, keep=0.25, loss=CausalLMLoss())

    The backbone runs on all rows; the output layer on `tokens` positions at a time. Models that change
    their logits afterwards (soft caps, scales) would get a wrong loss. The first call finds that out, by
    comparing one row with the model's own logits. For such models use loss='causal_lm' with `chunk`.

    Args:
        tokens: how many positions go through the output layer at a time; fewer take less memory.
    """

    shifted = True  # each token is predicted from those before it

    def __init__(self, tokens: int = 4096) -> None:
        if tokens < 1:
            raise RholossError(
                f"`tokens` must be at least 1, but is {tokens}: so many positions go through the output "
                "layer at a time."
            )
        self.tokens = tokens
        self._checked: Any = None  # the class of model that was compared

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy of the tokens that count, [B]."""
        positional, keywords, labels = split_batch(batch)
        loss_B = self._by_parts(model, positional, keywords, labels)
        if self._checked is not type(unwrapped(model)):
            self._compare(model, batch, loss_B)
            self._checked = type(unwrapped(model))
        return loss_B

    def _by_parts(
        self, model: nn.Module, positional: tuple[Any, ...], keywords: Any, labels: Tensor
    ) -> Tensor:
        whole: Any = unwrapped(model)
        if hasattr(whole, "get_base_model"):  # adapters (PEFT) are inside the model they adapt
            whole = whole.get_base_model()
        head = getattr(whole, "get_output_embeddings", lambda: None)()
        backbone = getattr(whole, "base_model", None)
        if head is None or backbone is None or backbone is whole:
            raise RholossError(
                f"`CausalLMLoss` needs a model with a backbone and an output layer, which "
                f"{type(whole).__name__} does not name; use loss='causal_lm', with `chunk` to save memory."
            )
        hidden_BLD = backbone(*positional, **keywords)[0]
        target_BL = next_tokens(labels)
        hidden_ND, target_N = hidden_BLD.flatten(0, 1), target_BL.flatten()
        parts = [
            F.cross_entropy(head(h).float(), t, reduction="none", ignore_index=IGNORED)
            for h, t in zip(hidden_ND.split(self.tokens), target_N.split(self.tokens), strict=True)
        ]
        return mean_over_tokens(torch.cat(parts).view(target_BL.shape), target_BL)

    def _compare(self, model: nn.Module, batch: Any, loss_B: Tensor) -> None:
        rows = len(loss_B)
        row = int((split_batch(batch)[2] != IGNORED).sum(1).argmax())  # one with tokens that count
        one = data.take(batch, torch.tensor([row]), rows, strict=False)
        own = TASKS["causal_lm"](model, one)
        if not torch.allclose(own, loss_B[row : row + 1], rtol=0.02, atol=0.02):
            raise RholossError(
                f"`CausalLMLoss` gives {float(loss_B[row]):.4f} for a row where the model's own logits give "
                f"{float(own):.4f}: {type(unwrapped(model)).__name__} changes its logits after the output "
                "layer. Use loss='causal_lm', with `chunk` to save memory."
            )
