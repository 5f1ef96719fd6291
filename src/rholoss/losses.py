"""Per-example losses: how to get [B] numbers out of a model and a batch.

A loss is any function `(model, batch) -> [B]`, where the batch comes as the model's own code knows it
(without ids). The usual ones are `Task`s, which keep the forward pass and the loss apart, so that a
method that reads the output (gradient norm, entropies) needs no second forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.loss import _Loss

from rholoss.errors import RholossError

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # the label of a token that does not count, as in torch and Hugging Face
# Labels of these kinds can be -100; in a byte it would be 156.
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)

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


def parameters_of(model: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a model's `forward`, looked for inside of `torch.compile` and `DataParallel`."""
    while (wrapped := isinstance(model, nn.DataParallel)) or hasattr(model, "_orig_mod"):
        model = model.module if wrapped else model._orig_mod
    return inspect.signature(getattr(model, "forward", model)).parameters


def known_to(model: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """The entries of a batch that `forward` takes by name; others (a path, a weight) are left out."""
    takes = parameters_of(model)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values()):
        return keywords
    # If it takes none of them they stay, and the call fails with an error that `check_fits` explains.
    return {name: value for name, value in keywords.items() if name in takes} or keywords


def check_fits(
    model: Any, positional: tuple[Any, ...], keywords: dict[str, Any], batch: Any, error: TypeError
) -> None:
    """Raise if `forward` does not take these inputs: then the TypeError does not come from within it."""
    takes = parameters_of(model)
    try:
        inspect.Signature(list(takes.values())).bind(*positional, **keywords)
    except TypeError:
        names = ", ".join(takes) or "nothing"
        if isinstance(batch, Mapping):
            has = f"has the keys {', '.join(map(str, batch))}"
            then = "Name them alike, drop what it does not take in the collator"
            key = next((key for key in TARGET_KEYS if key in batch), "")
            if key in takes and takes[key].default is inspect.Parameter.empty:
                then = f"{key!r} is kept back for the loss: let `forward` do without ({key}=None)"
        else:
            has = f"is a {type(batch).__name__} of {len(batch)}, the last of which is the target"
            then = "Drop what it does not take in the collator"
        raise RholossError(
            f"The batch {has}, but `forward` of {type(model).__name__} takes {names} ({error}). {then}, or "
            "pass `loss=`, a function (model, batch) -> [B] that returns one loss per example."
        ) from None


def _how_called(positional: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        seen = isinstance(value, Tensor)
        return f"{value.dtype} {tuple(value.shape)}" if seen else type(value).__name__

    inputs = [*map(shown, positional), *(f"{name}={shown(v)}" for name, v in keywords.items())]
    return (
        f"Here rholoss called model({', '.join(inputs)}) to get losses. If yours must be called otherwise, "
        "pass `loss=`, a function (model, batch) -> [B] that returns one loss per example."
    )


def target_in(batch: Any, loss: LossFunction) -> Tensor | None:
    """The target of a batch without ids, or None where it cannot be known.

    It is what a task reads, an entry with one of the usual names, or the second of a pair. What another
    loss function reads, only its author knows.
    """
    pair = isinstance(batch, (list, tuple)) and len(batch) == 2
    if not (isinstance(loss, Task) or isinstance(batch, Mapping) or pair):
        return None
    try:
        return split_batch(batch)[2]
    except RholossError:  # if the loss needs a target, it will raise this itself
        return None


def no_label_counts(batch: Any, loss: LossFunction) -> Tensor | None:
    """Which rows [B] have no label that counts (all are -100): their loss is 0, but nothing was learnt.

    None if there are none, if the labels are not known, or if this kind of loss does not use -100.
    """
    target = target_in(batch, loss)
    task = isinstance(loss, Task) and loss.per_example
    if target is None or target.dtype not in SIGNED or (task and task not in CLASSES):
        return None
    if target.device.type == "cpu" and target.numel() and int(target.min()) > IGNORED:
        return None  # the usual case; not looked for on a GPU, which would be waited for
    if target.ndim > 1 and (task is causal_lm or getattr(loss, "shifted", False)):
        target = target[:, 1:]  # the first token is predicted from nothing
    return (target == IGNORED).flatten(1).all(1) if target.ndim > 1 else target == IGNORED


def output_of(result: Any) -> Tensor:
    """The output tensor of a model: what it returned, its `logits`, or the first of a tuple."""
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
        """Run the model; returns its output in float32 and the target, whole numbers as int64."""
        positional, keywords, target = split_batch(batch)
        if len(keywords) == 1 and not set(keywords) & set(parameters_of(model)):
            positional, keywords = tuple(keywords.values()), {}  # one input needs no name
        if keywords:
            keywords = known_to(model, keywords)
        try:
            result = model(*positional, **keywords)
        except Exception as error:
            if isinstance(error, TypeError):
                check_fits(model, positional, keywords, batch, error)
            error.add_note(_how_called(positional, keywords))  # an error from within the model
            raise
        whole = not target.is_floating_point()  # torch's losses take int64 only
        return output_of(result).float(), target.long() if whole else target

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """One loss per example, [B]."""
        return self.per_example(*self.forward(model, batch))


def classification(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [B, C] and classes [B]."""
    _check_logits(output)
    if output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        then = "loss='multi_label', 'regression', 'tokens' or 'causal_lm', or a function (model, batch)"
        if target.shape == output.shape and target.is_floating_point():
            then = (
                "loss='multi_label' if each row may have several labels. If these are soft labels, pass "
                "F.cross_entropy(..., reduction='none') as a function (model, batch)"
            )
        raise RholossError(
            f"The loss was taken to be 'classification', which needs logits [B, C] and integer "
            f"targets [B], but the model put out {tuple(output.shape)} and the targets are "
            f"{tuple(target.shape)} {target.dtype}. Pass {then} -> [B]."
        )
    return F.cross_entropy(output, target, reduction="none")


def _check_logits(output: Tensor) -> None:
    if output.ndim == 2 and output.shape[1] == 1:
        raise RholossError(
            f"The loss was taken to be 'classification', but the model put out one logit, "
            f"{tuple(output.shape)}: there is no other class. Pass loss='multi_label' for a yes or no, or "
            "'regression'."
        )


def check_classes(output: Tensor, target: Tensor) -> None:
    """Raise if a label is not one of the C classes. Waits for the device, which would abort later."""
    _check_logits(output)
    classes, labels = output.shape[-1], target[target != IGNORED]
    low, high = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
    if not 0 <= low <= high < classes:
        raise RholossError(
            f"The labels go from {low} to {high}, but the model put out {classes} logits, for labels 0 to "
            f"{classes - 1}. Give the model more outputs, or number the labels from 0."
        )


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
    return mean_over_tokens(loss_BL, target)


def mean_over_tokens(loss_BL: Tensor, target_BL: Tensor) -> Tensor:
    """The mean loss of each example's tokens that count, [B]; 0 where none does."""
    return loss_BL.sum(1) / (target_BL != IGNORED).sum(1).clamp(min=1)


def next_tokens(target_BL: Tensor) -> Tensor:
    """What each token predicts: the one after it, and nothing at the end."""
    return F.pad(target_BL, (0, 1), value=IGNORED)[:, 1:]


def causal_lm(output: Tensor, target: Tensor) -> Tensor:
    """`tokens`, each predicted from those before it: the targets are shifted by one here."""
    # The targets move rather than the logits, which would be copied.
    return tokens(output, next_tokens(target))


TASKS: dict[str, Task] = {
    function.__name__: Task(function.__name__, function)
    for function in (classification, multi_label, regression, tokens, causal_lm)
}


CLASSES = (classification, tokens, causal_lm)  # those whose targets are numbers of classes


def by_name(loss: str | LossFunction) -> LossFunction:
    """The task of that name; a function (model, batch) -> [B] is returned as it is."""
    if isinstance(loss, _Loss) or getattr(loss, "__module__", None) == F.__name__:
        name = getattr(loss, "__name__", repr(loss))
        raise RholossError(
            f"`loss` is {name}, which is called with an output and a target; pass one of "
            f"{', '.join(TASKS)}, or a function (model, batch) -> [B] that returns one loss per example."
        )
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
    why = "Average over all other dimensions."
    if isinstance(loss, Tensor) and loss.numel() == 1:
        why = "It was reduced: use reduction='none'."
    elif isinstance(loss, Tensor) and loss.ndim == 1:
        num = len(loss)
        why = f"Average over all other dimensions; or, if the batch has {num} rows, give it {num} ids."
    elif isinstance(loss, Tensor) and tuple(loss.shape) == (rows, rows):
        why = (
            "Each output was compared with each target: one of them is [B, 1] and the other [B]; squeeze it, "
            "as in `output.squeeze(1)`."
        )
    raise RholossError(
        f"`{argument}` must return one number for each of the {rows} examples, shape ({rows},), but "
        f"returned {seen}. {why}"
    )
