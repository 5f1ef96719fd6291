"""Runs whose data does not fit the device: workers open the files, and the loop uses `Selector`.

Cells, lines and pages are the same as for resident data; but it is slower, since every candidate is decoded.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from experiments.bench.cell import Cell
from experiments.bench.irreducible import parse
from experiments.datasets import clothing1m
from experiments.datasets.folders import CLOTHING_CLASSES, flipped
from experiments.models import MODELS
from rholoss import Irreducible, Selector, WithIndex, annealed, constant, fit_irreducible
from rholoss.engine import Evaluation
from rholoss.errors import RholossError, TooFewFiniteScoresError

IL_BATCH, IL_EPOCHS = 64, 100  # Clothing-1M in the authors' code
IL_CHECKED = 50_000  # points whose loss decides between epochs: to decode all would take longer than to train


@dataclass(frozen=True)
class Files:
    """What is trained on (augmented and as it is), which rows are the holdout, what is tested."""

    train: Dataset[Any]
    plain: Dataset[Any]
    holdout: np.ndarray
    test: Dataset[Any]
    num_classes: int


def _clothing1m(root: Any) -> Files:
    train, holdout, _ = clothing1m(root, transform=flipped)
    plain, _, test = clothing1m(root)  # neither is augmented
    return Files(train, plain, holdout, test, CLOTHING_CLASSES)


STREAMS: dict[str, Callable[[Any], Files]] = {"clothing1m": _clothing1m}


def prepare_streamed(cell: Cell, root: Any, folder: Path) -> None:
    """Fit the irreducible-loss model that the cell names, unless that was done."""
    if not (_place(cell, folder) / "meta.json").exists():
        irreducible(cell, STREAMS[cell.dataset](root), folder)


def irreducible(
    cell: Cell, files: Files, folder: Path, *, num_workers: int = 8, epochs: int = IL_EPOCHS
) -> Irreducible | None:
    """The irreducible losses that the cell names: one fit serves all runs."""
    if cell.method == "svp":
        raise RholossError(
            f"`method` is 'svp', which needs resident data; leave it out for {cell.dataset}."
        )
    if cell.il == "none":
        return None
    name, source = parse(cell.il)
    if source != "noisy holdout":
        raise RholossError(
            f"`il` is {cell.il!r}, but {cell.dataset} has a noisy holdout only; use '{name}, noisy holdout'."
        )
    score, out = WithIndex(files.plain), _place(cell, folder)
    if (out / "meta.json").exists():
        return Irreducible.load(out, score)
    return fit_irreducible(
        functools.partial(MODELS[name], files.num_classes),
        Subset(files.train, files.holdout.tolist()),
        score=score,
        epochs=epochs,
        batch_size=IL_BATCH,
        check_rows=IL_CHECKED,
        num_workers=num_workers,
        out=out,
    )


def _place(cell: Cell, folder: Path) -> Path:
    return folder / re.sub(r"[^\w-]+", "_", f"{cell.dataset} {parse(cell.il)[0]}")


class Loop:
    """One cell in progress: an ordinary training loop. Has what `lines.line` reads."""

    def __init__(
        self,
        cell: Cell,
        root: Any,
        folder: Path,
        *,
        precision: str | None = None,
        num_workers: int = 8,
        il_epochs: int = IL_EPOCHS,
    ) -> None:
        self.cell = cell
        self.precision, self.num_workers = precision, num_workers
        self.files = STREAMS[cell.dataset](root)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        losses = irreducible(cell, self.files, folder, num_workers=num_workers, epochs=il_epochs)
        self.started = time.perf_counter()
        self.il_about = None if losses is None else {"seconds": round(losses.seconds, 2)}
        self.steps_per_epoch = len(self.files.train) // cell.n_B  # type: ignore[arg-type]
        self.total_steps = cell.epochs * self.steps_per_epoch
        torch.manual_seed(cell.seed)
        self.model = MODELS[cell.model](self.files.num_classes).to(self.device)
        decay = cell.weight_decay
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cell.learning_rate, weight_decay=decay
        )
        anneals = cell.schedule == "annealed"
        self.select = Selector(
            cell.method,
            irreducible=losses,
            k=cell.n_b,
            batch_norm=cell.batch_norm,
            precision=precision,
            schedule=annealed(self.total_steps) if anneals else constant(),
            seed=cell.seed,
        )
        self.step, self.error, self.resumed = 0, None, 0
        self.evals: list[tuple[int, float]] = []
        self.il_evals: list[tuple[int, float]] = []
        self.last: Evaluation | None = None
        self._correct = torch.zeros(cell.epochs, device=self.device)
        self._batches = self._stream()

    def _loader(self, data: Any, batch_size: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(data, batch_size, num_workers=self.num_workers, **options)

    def _stream(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.cell.seed)
        loader = self._loader(
            WithIndex(self.files.train), self.cell.n_B, shuffle=True, drop_last=True,
            generator=generator,
        )  # fmt: skip
        for _ in range(self.cell.epochs):
            yield from loader

    @property
    def finished(self) -> bool:
        return self.error is not None or self.step == self.total_steps

    def advance(self, steps: int = 50) -> int:
        """Train on, at most to the end of the epoch; returns the steps taken."""
        before = self.step
        self.model.train()
        try:
            for _ in range(min(steps, self.steps_per_epoch - before % self.steps_per_epoch)):
                self._one_step(next(self._batches))
        except TooFewFiniteScoresError as problem:  # a run that diverged is a result too
            self.error = str(problem)
            return self.step - before
        if self.step % self.steps_per_epoch == 0:
            self.last = self._evaluate()
            self.evals.append((self.step, round(100 * self.last.accuracy, 2)))
        return self.step - before

    def _autocast(self) -> torch.autocast:
        low = self.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=low)

    def _one_step(self, batch: Any) -> None:
        _, x, y = self.select(self.model, batch)
        with self._autocast():
            logits = self.model(x)
        loss_k = F.cross_entropy(logits.float(), y, reduction="none")
        self.select.reduce(loss_k).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._correct[self.step // self.steps_per_epoch] += (logits.argmax(1) == y).sum()
        self.step += 1

    def _evaluate(self) -> Evaluation:
        sums = torch.zeros(3, self.files.num_classes, device=self.device)  # loss, right, all
        self.model.eval()
        with torch.no_grad():
            for x, y in self._loader(self.files.test, 256):
                with self._autocast():
                    logits = self.model(x.to(self.device))
                sums += _by_class(logits.float(), y.to(self.device), sums.shape[1])
        loss, right, total = sums.double().cpu()
        accuracy = float(right.sum() / total.sum())
        return Evaluation(float(loss.sum() / total.sum()), accuracy, (right / total).tolist())

    @property
    def ledger(self) -> Any:
        return self.select.ledger

    def shares(self) -> dict[str, list[float]]:
        """Already-correct picks of each epoch that has begun, as in `watch`."""
        epochs = -(-self.step // self.steps_per_epoch)
        left = self.step - (epochs - 1) * self.steps_per_epoch
        steps = torch.full((epochs,), float(self.steps_per_epoch))
        steps[-1:] = left
        shares = self._correct[:epochs].cpu() / (steps * self.cell.n_b)
        return {"correct": [round(x, 4) for x in shares.tolist()]}


def _by_class(logits: Tensor, y: Tensor, num_classes: int) -> Tensor:
    loss = F.cross_entropy(logits, y, reduction="none")
    right = (logits.argmax(1) == y).float()
    return torch.stack([loss, right, torch.ones_like(loss)]) @ F.one_hot(y, num_classes).float()
