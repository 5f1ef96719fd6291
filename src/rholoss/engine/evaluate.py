"""Evaluation on resident data, captured like the training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rholoss.engine.capture import Captured, says_what_to_reduce
from rholoss.engine.checks import check_data
from rholoss.engine.resident import Resident, check_classes
from rholoss.engine.streamed import Streamed
from rholoss.errors import RholossError
from rholoss.losses import output_of
from rholoss.modes import own_autocast, scoring_mode
from rholoss.scoring import Scorer


@dataclass(frozen=True)
class Evaluation:
    """What an `Evaluator` measured.

    Attributes:
        loss: the mean cross-entropy over all rows.
        accuracy: the share of rows whose label has the highest logit.
        per_class: the accuracy on the rows of each class; NaN for a class without rows.
    """

    loss: float
    accuracy: float
    per_class: list[float]


class Evaluator:
    """Measures a classifier on a data set, without augmentation and in eval mode. Call it for the result.

    On a GPU the whole evaluation becomes one CUDA graph, so it is cheap to repeat. The model is left as it
    was. The last batch is filled up with rows that do not count, because shapes in a graph are fixed.

    Args:
        model: the classifier, on the device of the data.
        data: what to evaluate on, a `Resident` or a `Streamed` (which is always evaluated eagerly).
        num_classes: the number of classes; labels must be below it.
        batch_size: rows at a time.
        precision: 'bf16' to run the model under autocast; None keeps what is in force, usually float32.
        compile: run the passes through `torch.compile`.
        capture: False evaluates eagerly on a GPU too, which is quicker for a single evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Resident | Streamed,
        *,
        num_classes: int,
        batch_size: int = 1000,
        precision: str | None = None,
        compile: bool = False,
        capture: bool = True,
    ) -> None:
        check_data(data)
        check_classes(data.targets, "classification")
        highest = int(data.targets.max())
        if highest >= num_classes:  # such a label makes a GPU unusable
            raise RholossError(
                f"`num_classes` is {num_classes}, but the data has labels up to {highest}; there must be "
                f"more classes than that: pass {highest + 1} or more."
            )
        self.model, self.data, self.num_classes = model, data, num_classes
        self.dtype = Scorer(precision=precision).dtype
        size = min(batch_size, len(data))
        place = torch.arange(-(-len(data) // size) * size, device=data.device)
        self._rows = place.clamp(max=len(data) - 1).view(-1, size)
        self._counts = (place < len(data)).float().view(-1, size)
        # By class: the sum of the losses, the number of right answers, the number of rows.
        self._sums = torch.zeros(3, num_classes, device=data.device)
        fixed = isinstance(data, Resident)  # reading from the host cannot be compiled or captured
        self._measure = self._one_batch
        if compile and fixed:
            self._measure = torch.compile(self._one_batch, dynamic=False)
        self._run: Callable[[], None] = self._body
        if capture and fixed:
            self._run = Captured(self._body, data.device)

    def _one_batch(self, rows: Tensor, counts: Tensor) -> Tensor:
        x, y = self.data.batch(rows)
        y = y.long()
        with own_autocast(self.data.device, self.dtype):
            logits = output_of(self.model(x)).float()
        loss = F.cross_entropy(logits, y, reduction="none")
        right = (logits.argmax(1) == y).float()
        by_class = F.one_hot(y, self.num_classes).float()
        with torch.autocast(self.data.device.type, enabled=False):  # autocast would round the sums
            return torch.stack([loss * counts, right * counts, counts]) @ by_class

    def _body(self) -> None:
        self._sums.zero_()
        with torch.no_grad(), scoring_mode(self.model, batch_norm="eval", dropout=False):
            for rows, counts in zip(self._rows, self._counts, strict=True):
                self._sums += self._measure(rows, counts)

    def __call__(self) -> Evaluation:
        """Evaluate the model as it is now; returns an `Evaluation`. Waits for the device."""
        self.begin()
        return self.read()

    def begin(self) -> None:
        """Start to evaluate the model as it is now. Does not wait: training steps may follow at once."""
        with says_what_to_reduce("`batch_size`"):
            self._run()

    def read(self) -> Evaluation:
        """The result of the evaluation that `begin` started, an `Evaluation`. Waits for the device."""
        loss, right, total = self._sums.double().cpu()
        return Evaluation(
            float(loss.sum() / total.sum()),
            float(right.sum() / total.sum()),
            (right / total).tolist(),
        )
