"""Per-example losses: how to get [B] numbers out of a model and a batch.

A loss is any function `(model, batch) -> [B]`, where the batch comes as the model's own code knows it
(without ids). The usual ones are `Task`s, which keep the forward pass and the loss apart, so that a
method that reads the output (gradient norm, entropies) needs no second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rholoss.errors import RholossError

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # the label of a token that does not count, as in torch and Hugging Face

LossFunction = Callable[[nn.Module, Any], Tensor]


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Positional inputs, keyword inputs and the target of a batch without ids."""
    if isinstance(batch, Mapping):
        key = next((key for key in TARGET_KEYS if key in batch), None)
        if key is not None:
            inputs = {k: v for k, v in batch.items() if k != key}
            if len(inputs) == 1:  # one input needs no name, several have to fit the model's own
                return tuple(inputs.values()), {}, batch[key]
            return (), inputs, batch[key]
        seen = f"keys {sorted(map(str, batch))}, none of {TARGET_KEYS}"
    elif isinstance(batch, (list, tuple)) and len(batch) >= 2:
        return tuple(batch[:-1]), {}, batch[-1]
    else:
        seen = f"a {type(batch).__name__}"
    raise RholossError(
        f"No inputs and targets were found in the batch ({seen}). Pass `loss=`, a function "
        "(model, batch) -> [B] that returns one loss per example."
    )


def output_of(result: Any) -> Tensor:
    """The tensor that a model puts out: itself, its `logits`, or the first of a tuple."""
    if not isinstance(result, Tensor):
        logits = result.get("logits") if isinstance(result, Mapping) else None
        result = logits if logits is not None else getattr(result, "logits", result)
    if isinstance(result, (list, tuple)) and result:
        result = result[0]
    if not isinstance(result, Tensor):
        raise RholossError(
            f"The model returned a {type(result).__name__} without `logits`. Pass `loss=`, a function "
            "(model, batch) -> [B] that returns one loss per example."
        )
    return result


@dataclass(frozen=True)
class Task:
    """A kind of task: a loss per example of the model's output (float32) and the target."""

    name: str
    per_example: Callable[[Tensor, Tensor], Tensor]

    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Run the model; returns its output in float32 and the target."""
        positional, keywords, target = split_batch(batch)
        return output_of(model(*positional, **keywords)).float(), target

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """One loss per example, [B]."""
        return self.per_example(*self.forward(model, batch))


def classification(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [B, C] and classes [B]."""
    if output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        raise RholossError(
            f"The loss was taken to be 'classification', which needs logits [B, C] and integer "
            f"targets [B], but the model put out {tuple(output.shape)} and the targets are "
            f"{tuple(target.shape)} {target.dtype}. Pass loss='multi_label', 'regression', 'tokens' "
            "or 'causal_lm', or a function (model, batch) -> [B]."
        )
    return F.cross_entropy(output, target, reduction="none")


def multi_label(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits [B, ...] and targets in [0, 1], averaged over each example."""
    loss = F.binary_cross_entropy_with_logits(output, target.float(), reduction="none")
    return loss.flatten(1).mean(1)


def regression(output: Tensor, target: Tensor) -> Tensor:
    """Squared error, averaged over each example."""
    if output.numel() != target.numel():
        raise RholossError(
            f"loss='regression' needs as many outputs as targets, but the model put out "
            f"{tuple(output.shape)} and the targets are {tuple(target.shape)}."
        )
    return (
        (output.reshape(len(target), -1) - target.float().reshape(len(target), -1)).square().mean(1)
    )


def tokens(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [B, L, C] and classes [B, L], averaged over the tokens that count.

    Tokens labelled -100 do not; an example without any has loss 0.
    """
    loss_BL = F.cross_entropy(
        output.transpose(1, 2), target, reduction="none", ignore_index=IGNORED
    )
    return loss_BL.sum(1) / (target != IGNORED).sum(1).clamp(min=1)


def causal_lm(output: Tensor, target: Tensor) -> Tensor:
    """`tokens`, each predicted from those before it: the targets are shifted by one here."""
    return tokens(output[:, :-1], target[:, 1:])


TASKS: dict[str, Task] = {
    function.__name__: Task(function.__name__, function)
    for function in (classification, multi_label, regression, tokens, causal_lm)
}


def by_name(loss: str | LossFunction) -> LossFunction:
    """The task of that name; a function (model, batch) -> [B] is returned as it is."""
    if callable(loss):
        return loss
    if loss not in TASKS:
        raise RholossError(
            f"`loss` is {loss!r}, which is not known; choose one of {', '.join(TASKS)}, or pass a "
            "function (model, batch) -> [B] that returns one loss per example."
        )
    return TASKS[loss]


def check_per_example(loss: Any, rows: int, *, argument: str = "loss") -> Tensor:
    """Raise unless it is one number per example: a reduced loss is found here."""
    if isinstance(loss, Tensor) and tuple(loss.shape) == (rows,):
        return loss
    seen = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    reduced = isinstance(loss, Tensor) and loss.numel() == 1
    why = (
        "It was reduced: use reduction='none'." if reduced else "Average over all other dimensions."
    )
    raise RholossError(
        f"`{argument}` must return one number for each of the {rows} examples, shape ({rows},), but "
        f"returned {seen}. {why}"
    )
