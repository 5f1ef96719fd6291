"""Run one cell: a pretrained encoder, AdamW, the library's own selector; all rows stay on the device."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rholoss as rho
from experiments.language.cells import CANDIDATES, IL_EPOCHS, KEEP, UNSCORED, Cell
from experiments.language.tasks import TASKS, Task, Texts, as_it_is, load
from experiments.records import replacing

WEIGHT_DECAY = 0.02  # the paper's; the authors' configuration has 0.01
SMALL_LAYERS = 2
IL_BATCH = 32
SCORED = 1024  # rows at a time where nothing is trained


def adamw(parameters: Iterable[Tensor], lr: float, **options: Any) -> torch.optim.AdamW:
    """AdamW without weight decay on biases and norms, as the authors have it."""
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, **options)


@dataclass(frozen=True)
class Fitted:
    """What runs read of an irreducible-loss model. Its weights, 200 times as large, are not kept."""

    loss: Tensor  # of the training half, [N]
    seconds: float  # fitting and measuring
    core_set: Tensor  # the rows that SVP keeps, with this model as its proxy

    def save(self, path: Path) -> None:
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, loss=self.loss, seconds=self.seconds, core_set=self.core_set)

    @classmethod
    def load(cls, path: Path) -> Fitted:
        with np.load(path) as found:
            return cls(
                torch.from_numpy(found["loss"]),
                float(found["seconds"]),
                torch.from_numpy(found["core_set"]),
            )


@dataclass
class Bench:
    """What runs of one machine share: data, weights, irreducible losses."""

    model: Path
    data: Any
    store: Path  # of irreducible losses
    device: torch.device
    il_epochs: int = IL_EPOCHS
    _loaded: dict[tuple[str, torch.device], list[Texts]] = field(default_factory=dict)
    _fitted: dict[tuple[str, str], Fitted] = field(default_factory=dict)

    @property
    def encoder(self) -> str:
        """The name of the pretrained model, as its configuration has it."""
        config = json.loads((self.model / "config.json").read_text())
        return str(config.get("_name_or_path") or config["model_type"]).rpartition("/")[2]

    def texts(self, task: Task, device: torch.device | None = None) -> list[Texts]:
        """Training half, holdout half and test rows, on the device unless told otherwise."""
        host, device = torch.device("cpu"), device or self.device
        if (task.name, host) not in self._loaded:
            self._loaded[task.name, host] = list(load(task, self.model, self.data))
        if (task.name, device) not in self._loaded:
            parts = self._loaded[task.name, host]
            self._loaded[task.name, device] = [part.to(device) for part in parts]
        return self._loaded[task.name, device]

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def make(self, task: Task, size: str = "same") -> nn.Module:
        """A pretrained encoder with a new head."""
        from transformers import AutoModelForSequenceClassification as Auto

        layers = {} if size == "same" else {"num_hidden_layers": SMALL_LAYERS}
        model = Auto.from_pretrained(
            self.model, num_labels=task.classes, dtype=torch.float32, **layers
        )
        return model.to(self.device)

    def fitted(self, task: Task, size: str) -> Fitted:
        """Fitted on the holdout half once for all seeds and methods, as in the paper."""
        if (task.name, size) not in self._fitted:
            path = self.store / f"{self.encoder}-{task.name}-{size}-{self.il_epochs}-epochs.npz"
            if not path.exists():
                self._fit(task, size).save(path)
            self._fitted[task.name, size] = Fitted.load(path)
        return self._fitted[task.name, size]

    def _fit(self, task: Task, size: str) -> Fitted:
        train, holdout, _ = self.texts(task, torch.device("cpu"))
        fused = self.device.type == "cuda"
        il = rho.fit_irreducible(
            lambda: self.make(task, size),
            holdout,
            score=train,
            loss=functools.partial(losses, device=self.device),
            optimizer=lambda p: adamw(p, task.lr, fused=fused),
            epochs=self.il_epochs,
            batch_size=IL_BATCH,
            score_batch_size=SCORED,
            patience=2,
            collate_fn=as_it_is,
            labels=train.labels,
            device=self.device,
        )
        proxy = self.make(task, size)
        proxy.load_state_dict(il.weights())
        rows = core_set(proxy, self.texts(task)[0], self.device)
        return Fitted(il.lookup(torch.arange(len(train))), float(il.seconds), rows)


def autocast(device: torch.device) -> Any:
    """bf16 on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def losses(model: nn.Module, batch: dict[str, Tensor], device: torch.device) -> Tensor:
    """Cross-entropy of each row, [B]."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "index")}
    with autocast(device):
        logits = model(**inputs).logits
    return F.cross_entropy(logits.float(), batch["labels"], reduction="none")


def candidates(num_rows: int, seed: int) -> Iterator[Tensor]:
    """Rows of candidate batches, epoch after epoch; the last batch of an epoch may be short."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(num_rows, generator=generator).split(CANDIDATES)


@torch.no_grad()
def evaluate(model: nn.Module, texts: Texts, device: torch.device) -> tuple[float, float]:
    """Accuracy, and the correlation of Matthews (of two classes; NaN-free: 0 if one class is missing)."""
    model.eval()
    guesses = []
    for rows in torch.arange(len(texts), device=device).split(SCORED):
        batch = texts.rows(rows)
        labels = batch.pop("labels")
        with autocast(device):
            guesses.append(torch.stack([model(**batch).logits.argmax(1), labels]))
    model.train()
    guess, label = torch.cat(guesses, 1).double().cpu()
    return float((guess == label).double().mean()), matthews(guess, label)


def matthews(guess: Tensor, label: Tensor) -> float:
    """Matthews correlation of two binary variables: their Pearson correlation."""
    a, b = guess - guess.mean(), label - label.mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / scale if scale else 0.0


def selector_of(cell: Cell, bench: Bench) -> rho.Selector:
    """The selector of the cell. Methods that score nothing are given only the rows to train on."""
    reads = cell.method in ("rho", "negative_il")
    il = bench.fitted(TASKS[cell.task], cell.irreducible).loss if reads else None
    return rho.Selector(
        "uniform" if cell.method == "svp" else cell.method,
        irreducible=il,
        keep=1.0 if cell.method in UNSCORED else KEEP,
        precision="bf16" if bench.device.type == "cuda" else None,
        seed=cell.seed,
    )


@torch.no_grad()
def core_set(proxy: nn.Module, train: Texts, device: torch.device) -> Tensor:
    """SVP: the tenth with the highest entropy under the proxy, the authors' being the IL model."""
    proxy.eval()
    scores = []
    for rows in torch.arange(len(train), device=device).split(SCORED):
        batch = train.rows(rows)
        batch.pop("labels")
        with autocast(device):
            p = proxy(**batch).logits.float().softmax(1)
        scores.append(torch.special.entr(p).sum(1))
    return torch.cat(scores).topk(round(KEEP * len(train))).indices.cpu()


class Run:
    """One model in training."""

    def __init__(self, cell: Cell, bench: Bench) -> None:
        self.cell, self.bench, self.task = cell, bench, TASKS[cell.task]
        self.train, _, self.test = bench.texts(self.task)
        self.length = bench.texts(self.task, torch.device("cpu"))[0].length
        torch.manual_seed(cell.seed)
        self.model = bench.make(self.task).train()
        self.select = selector_of(cell, bench)
        fused = bench.device.type == "cuda"
        self.optimizer = adamw(self.model.parameters(), self.task.lr, fused=fused)
        self.rows: Tensor | None = None  # that the run is restricted to from the start
        if cell.method == "svp":
            self.rows = bench.fitted(self.task, cell.irreducible).core_set
        self.order = candidates(len(self.train), cell.seed)
        self.picked = torch.zeros(2, dtype=torch.long, device=bench.device)  # wrong, all

    def step(self) -> None:
        """One gradient step on what is selected."""
        index = next(self.order)
        if self.cell.method in UNSCORED:
            # As many rows as the others train on, and no wider than these.
            k = max(1, round(KEEP * len(index)))
            index = index[:k] if self.rows is None else self._draw(k)
        width = int(self.length[index].max())
        index = index.to(self.bench.device, non_blocking=True)
        batch = self.select(self.model, {"index": index, **self.train.rows(index, width)})
        wrong = self.train.wrong[batch["index"]]
        self.picked += torch.stack([wrong.sum(), torch.full_like(wrong.sum(), len(wrong))])
        loss = self.select.reduce(losses(self.model, batch, self.bench.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _draw(self, num: int) -> Tensor:
        """Rows of those that are fixed, by lot."""
        assert self.rows is not None
        generator = torch.Generator().manual_seed(self.cell.seed * 10**6 + self.select.step)
        return self.rows[torch.randperm(len(self.rows), generator=generator)[:num]]


def run_cell(cell: Cell, bench: Bench) -> dict[str, Any]:
    """Train, and tell how it went."""
    task = TASKS[cell.task]
    train, _, test = bench.texts(task)
    per_epoch = math.ceil(len(train) / CANDIDATES)
    il_seconds = bench.fitted(task, cell.irreducible).seconds if cell.needs_il else 0.0
    steps = per_epoch * (cell.epochs or task.epochs)
    run = Run(cell, bench)
    every = max(1, per_epoch // task.evaluations)
    curve, evaluating = [], 0.0
    bench.wait()
    started = time.perf_counter()
    for step in range(1, steps + 1):
        run.step()
        if step % every == 0 or step == steps:
            bench.wait()
            before = time.perf_counter()
            accuracy, correlation = evaluate(run.model, test, bench.device)
            evaluating += time.perf_counter() - before
            curve.append([step, round(accuracy, 5), round(correlation, 5)])
    run.select.flush()
    bench.wait()
    wrong, rows = run.picked.tolist()
    return {
        "steps_an_epoch": per_epoch,
        "il_seconds": il_seconds,
        "steps": steps,
        "curve": curve,  # step, accuracy, Matthews correlation
        "seconds": time.perf_counter() - started - evaluating,
        "wrong_share": wrong / rows,
        "trained": rows,
        "scored": run.select.ledger.scored,
    }
