"""Run one cell: a pretrained encoder, AdamW, the library's own selector; all rows stay on the device."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rholoss as rho
from experiments.language.cells import CANDIDATES, FIXED_ROWS, KEEP, UNSCORED, Cell
from experiments.language.tasks import TASKS, Task, Texts, as_it_is, load

WEIGHT_DECAY = 0.02  # the paper's; the authors' configuration has 0.01
SMALL_LAYERS = 2
IL_EPOCHS, IL_BATCH, QUICK_STEPS = 10, 32, 200
SCORED = 1024  # rows at a time where nothing is trained
SWITCH, DROP = 0.3, 0.1  # annealed: RHO-LOSS at first, then uniform without the highest IL
TIMED_STEPS, WARM_STEPS = 100, 30


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
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".tmp")
        with fresh.open("wb") as file:
            np.savez(file, loss=self.loss, seconds=self.seconds, core_set=self.core_set)
        os.replace(fresh, path)

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
    quick: bool = False  # fit irreducible losses in larger batches where rows are many
    pace: dict[str, float] = field(default_factory=dict)  # seconds a step, measured alone
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
            name = f"{self.encoder}-{task.name}-{size}-{self.il_epochs}-epochs"
            path = self.store / f"{name}{'-quick' if self.quick else ''}.npz"
            if not path.exists():
                self._fit(task, size).save(path)
            self._fitted[task.name, size] = Fitted.load(path)
        return self._fitted[task.name, size]

    def _fit(self, task: Task, size: str) -> Fitted:
        train, holdout, _ = self.texts(task, torch.device("cpu"))
        batch = quick_batch(len(holdout)) if self.quick else IL_BATCH
        rate, fused = task.lr * math.sqrt(batch / IL_BATCH), self.device.type == "cuda"
        loss = functools.partial(losses, device=self.device)
        self._warm_up(self.make(task, size), holdout, batch, loss)
        il = rho.fit_irreducible(
            lambda: self.make(task, size),
            holdout,
            score=train,
            loss=loss,
            optimizer=lambda p: adamw(p, rate, fused=fused),
            epochs=self.il_epochs,
            batch_size=batch,
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

    def _warm_up(
        self, model: nn.Module, rows: Texts, batch: int, loss: Callable[..., Tensor]
    ) -> None:
        """The first steps on a device load its kernels, which is not counted: nor is it in runs."""
        for index in torch.arange(len(rows)).split(batch)[:3]:
            some = {name: value.to(self.device) for name, value in rows.rows(index).items()}
            loss(model, some).mean().backward()


def quick_batch(rows: int) -> int:
    """32, and twice as many for as long as an epoch has more than 200 steps."""
    batch = IL_BATCH
    while rows / batch > QUICK_STEPS:
        batch *= 2
    return batch


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


def selector_of(cell: Cell, bench: Bench, steps: int) -> rho.Selector:
    """The selector of the cell; what scores nothing takes all that it is given."""
    name = {**dict.fromkeys(FIXED_ROWS, "uniform"), "annealed": "rho"}.get(cell.method, cell.method)
    reads = cell.method in ("rho", "negative_il", "annealed")
    il = bench.fitted(TASKS[cell.task], cell.irreducible).loss if reads else None
    anneal = rho.annealed(total_steps=steps, switch=SWITCH, drop=DROP)
    return rho.Selector(
        name,
        irreducible=il,
        keep=1.0 if cell.method in UNSCORED else KEEP,
        precision="bf16" if bench.device.type == "cuda" else None,
        schedule=anneal if cell.method == "annealed" else None,
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


def fixed_rows(cell: Cell, bench: Bench, num_rows: int) -> Tensor | None:
    """The rows that a run is restricted to from the start: SVP's, or half of them at random."""
    if cell.method == "svp":
        return bench.fitted(TASKS[cell.task], cell.irreducible).core_set
    if cell.method == "random_half":
        return torch.randperm(num_rows, generator=torch.Generator().manual_seed(cell.seed))[
            : num_rows // 2
        ]
    return None


class Run:
    """One model in training."""

    def __init__(self, cell: Cell, bench: Bench, steps: int) -> None:
        self.cell, self.bench, self.task = cell, bench, TASKS[cell.task]
        self.train, _, self.test = bench.texts(self.task)
        self.length = bench.texts(self.task, torch.device("cpu"))[0].length
        torch.manual_seed(cell.seed)
        self.model = bench.make(self.task).train()
        self.select = selector_of(cell, bench, steps)
        fused = bench.device.type == "cuda"
        self.optimizer = adamw(self.model.parameters(), self.task.lr, fused=fused)
        decay: Callable[[int], float] = lambda step: max(0.0, 1 - step / steps)  # noqa: E731
        constant: Callable[[int], float] = lambda step: 1.0  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, decay if cell.budget else constant
        )
        self.rows = fixed_rows(cell, bench, len(self.train))
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
        self.schedule.step()

    def _draw(self, num: int) -> Tensor:
        """Rows of those that are fixed, by lot."""
        assert self.rows is not None
        generator = torch.Generator().manual_seed(self.cell.seed * 10**6 + self.select.step)
        return self.rows[torch.randperm(len(self.rows), generator=generator)[:num]]

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize(self.bench.device)


def seconds_a_step(cell: Cell, bench: Bench) -> float:
    """Measured once for all seeds, with nothing beside it; of an annealed run for each of its phases."""
    known = f"{cell.task} {cell.method} {cell.irreducible}"
    if known not in bench.pace:
        # Of an annealed run of one step all is the second phase, of a long one the first.
        parts = [(10**6, SWITCH), (1, 1 - SWITCH)] if cell.method == "annealed" else [(10**6, 1.0)]
        bench.pace[known] = sum(share * _measure(cell, bench, steps) for steps, share in parts)
    return bench.pace[known]


def _measure(cell: Cell, bench: Bench, steps: int) -> float:
    """Seconds of a step of a run of so many, on a model that is thrown away."""
    run = Run(cell, bench, steps)
    for _ in range(WARM_STEPS):
        run.step()
    run.wait()
    started = time.perf_counter()
    for _ in range(TIMED_STEPS):
        run.step()
    run.wait()
    return (time.perf_counter() - started) / TIMED_STEPS


def run_cell(cell: Cell, bench: Bench) -> dict[str, Any]:
    """Train, and tell how it went."""
    task = TASKS[cell.task]
    train, _, test = bench.texts(task)
    per_epoch = math.ceil(len(train) / CANDIDATES)
    il_seconds = bench.fitted(task, cell.irreducible).seconds if cell.needs_il else 0.0
    about = {"steps_an_epoch": per_epoch, "il_seconds": il_seconds}
    if cell.budget:
        left = cell.budget - (il_seconds if cell.il_counts else 0.0)
        about["seconds_a_step"] = pace = seconds_a_step(cell, bench)
        steps = max(0, int(left / pace))
    else:
        steps = per_epoch * (cell.epochs or task.epochs)
    about["steps"] = steps
    if not steps:  # the irreducible losses took all the time there was
        return {**about, "curve": []}
    run = Run(cell, bench, steps)
    every = max(1, per_epoch // task.evaluations) if not cell.budget else max(1, steps // 20)
    curve, evaluating = [], 0.0
    run.wait()
    started = time.perf_counter()
    for step in range(1, steps + 1):
        run.step()
        if step % every == 0 or step == steps:
            run.wait()
            before = time.perf_counter()
            accuracy, correlation = evaluate(run.model, test, bench.device)
            evaluating += time.perf_counter() - before
            curve.append([step, round(accuracy, 5), round(correlation, 5)])
    run.select.flush()
    run.wait()
    wrong, rows = run.picked.tolist()
    return {
        **about,
        "curve": curve,  # step, accuracy, Matthews correlation
        "seconds": time.perf_counter() - started - evaluating,
        "wrong_share": wrong / rows,
        "trained": rows,
        "scored": run.select.ledger.scored,
    }
