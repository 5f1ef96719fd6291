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
    inputs: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    target, seen = None, f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        key = next((key for key in TARGET_KEYS if key in batch), None)
        target = None if key is None else batch[key]
        keywords = {k: v for k, v in batch.items() if k != key}
        if len(keywords) == 1:  # one input needs no name, several have to fit the model's own
            inputs, keywords = tuple(keywords.values()), {}
        seen = f"keys {sorted(map(str, batch))}; a target is one of {', '.join(TARGET_KEYS)}"
    elif isinstance(batch, (list, tuple)):
        fields = getattr(batch, "_fields", [""] * len(batch))  # a named tuple may hold its ids
        *rest, target = [v for f, v in zip(fields, batch, strict=True) if f != "index"] or [None]
        inputs = tuple(rest)
        seen = f"a {type(batch).__name__} of {', '.join(type(v).__name__ for v in batch)}"
    if not isinstance(target, Tensor) or not (inputs or keywords):
        raise RholossError(
            f"No inputs and targets were found in the batch ({seen}). Let the loader put the targets "
            "last, as a tensor, or pass `loss=`, a function (model, batch) -> [B] that returns one "
            "loss per example."
        )
    return inputs, keywords, target


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


def _by_example(output: Tensor, target: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Output and target as [B, n] in float32."""
    if output.shape[:1] != target.shape[:1] or output.numel() != target.numel() or not output.ndim:
        raise RholossError(
            f"loss={name!r} needs as many outputs as targets for each example, but the model put out "
            f"{tuple(output.shape)} and the targets are {tuple(target.shape)}. Make the target as the "
            "output is, or pass a function (model, batch) -> [B]."
        )
    rows = len(output)
    return output.reshape(rows, -1), target.to(output.dtype).reshape(rows, -1)


def multi_label(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits [B, ...] and targets in [0, 1], averaged over each example."""
    output, target = _by_example(output, target, "multi_label")
    return F.binary_cross_entropy_with_logits(output, target, reduction="none").mean(1)


def regression(output: Tensor, target: Tensor) -> Tensor:
    """Squared error, averaged over each example."""
    output, target = _by_example(output, target, "regression")
    return (output - target).square().mean(1)


def tokens(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [B, L, C] and classes [B, L], averaged over the tokens that count.

    Tokens labelled -100 do not; an example without any has loss 0.
    """
    if output.ndim != 3 or target.shape != output.shape[:2] or target.is_floating_point():
        raise RholossError(
            f"loss='tokens' and 'causal_lm' need logits [B, L, C] and integer targets [B, L], but the "
            f"model put out {tuple(output.shape)} and the targets are {tuple(target.shape)} "
            f"{target.dtype}. Pass another `loss`, or a function (model, batch) -> [B]."
        )
    loss_BL = F.cross_entropy(
        output.flatten(0, 1), target.flatten(), reduction="none", ignore_index=IGNORED
    ).view(target.shape)
    return loss_BL.sum(1) / (target != IGNORED).sum(1).clamp(min=1)


def causal_lm(output: Tensor, target: Tensor) -> Tensor:
    """`tokens`, each predicted from those before it: the targets are shifted by one here."""
    # The targets move rather than the logits, which would be copied.
    return tokens(output, F.pad(target, (0, 1), value=IGNORED)[:, 1:])


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
