"""The fair protocol: equal wall clock, rows on the device, each step one CUDA graph (`rholoss.engine`)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import rholoss as rho
from experiments.language.cells import (
    CANDIDATES,
    DROP,
    FRESH,
    KEEP,
    SWITCH,
    Cell,
    scoring_share,
    step_kinds,
)
from experiments.language.tasks import TASKS, Task, Texts
from experiments.language.train import IL_BATCH, Bench, adamw, evaluate
from rholoss.engine import Remembered, Resident, Trainer, fit_resident, one_cycle

WARM_UP = 0.1  # share of the steps in which the learning rate rises
LOOKS = 10  # evaluations of a run; their time is not counted
IL_STEPS_AN_EPOCH = 200  # at most, of the irreducible-loss model
WARM_SECONDS, TIMED_STEPS = 1.5, 300


class Classifier(nn.Module):
    """An encoder that takes rows of tokens alone, and says nothing to the host."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits. A mask of four dimensions is taken as it is; of two, its values would be looked at."""
        mask = (tokens != self.encoder.config.pad_token_id)[:, None, None, :]
        return self.encoder(input_ids=tokens, attention_mask=mask).logits  # type: ignore[no-any-return]


def resident(texts: Texts) -> Resident:
    """The rows of a text data set, where they are."""
    return Resident(texts.tokens, texts.labels, device=texts.tokens.device, dtype=torch.long)


def il_batch(rows: int) -> int:
    """32 rows, and twice as many for as long as an epoch has more than 200 steps."""
    batch = IL_BATCH
    while rows / batch > IL_STEPS_AN_EPOCH:
        batch *= 2
    return batch


@dataclass
class Fair:
    """What fair runs share: rows, irreducible losses, and the times of steps, all measured alone."""

    bench: Bench
    pace: dict[str, float] = field(default_factory=dict)  # seconds of a step
    _data: dict[tuple[str, str], Resident] = field(default_factory=dict)
    _il: dict[tuple[str, str], rho.Irreducible] = field(default_factory=dict)

    @property
    def precision(self) -> str | None:
        return "bf16" if self.bench.device.type == "cuda" else None

    def texts(self, task: Task, rows: str) -> Texts:
        """What is trained on: 'half', which leaves the holdout out, or 'all'."""
        train, holdout, _ = self.bench.texts(task)
        parts = {"half": train, "holdout": holdout}
        return parts[rows] if rows in parts else train.and_others(holdout)

    def data(self, task: Task, rows: str) -> Resident:
        """The same, for the engine."""
        key = (task.name, rows)
        if key not in self._data:
            self._data[key] = resident(self.texts(task, rows))
        return self._data[key]

    def irreducible(self, task: Task, rows: str) -> rho.Irreducible:
        """Of a model of two layers, in one short fit; on a GPU the second of two, which loads no kernels."""
        key = (task.name, rows)
        if key not in self._il:
            recipe = f"{task.il_epochs}-epochs-{task.il_lr:g}"  # of another fit nothing is taken
            path = self.bench.store / f"{self.bench.encoder}-{task.name}-fair-{rows}-{recipe}"
            if not path.exists():
                for _ in range(2 if self.bench.device.type == "cuda" else 1):
                    found = self._fit(task, rows)
                found.save(path)
            self._il[key] = rho.Irreducible.load(path)
        return self._il[key]

    def _fit(self, task: Task, rows: str) -> rho.Irreducible:
        scored, holdout = self.data(task, rows), self.data(task, "holdout")
        batch = il_batch(len(holdout))
        on: dict[str, Any] = {"data": holdout, "score": scored}
        return fit_resident(
            lambda: Classifier(self.bench.make(task, "small")),
            **(on if rows == "half" else {"data": scored, "folds": 2}),  # as many rows a model
            epochs=task.il_epochs,
            batch_size=batch,
            learning_rate=task.il_lr * math.sqrt(batch / IL_BATCH),
            precision=self.precision,
            evaluations=2,
        )

    def trainer(self, cell: Cell, steps: int) -> Trainer:
        """Of one arm, its learning rate going down to zero in so many steps."""
        task = TASKS[cell.task]
        train, fused = self.data(task, cell.rows), self.bench.device.type == "cuda"
        if cell.method == "random_half":
            draw = torch.Generator().manual_seed(cell.seed)
            half = torch.randperm(len(train), generator=draw)[: len(train) // 2]
            train = train.take(half.to(train.device))
        torch.manual_seed(cell.seed)
        model = Classifier(self.bench.make(task))
        arm: dict[str, Any] = {"method": "uniform"}
        if cell.needs_il:
            arm = {
                "method": "rho",
                "irreducible": self.irreducible(task, cell.rows),
                "overlap": cell.method != FRESH,
            }
        if cell.method == "remembered":
            chance = math.log(task.classes)
            arm["plan"] = Remembered(chance, measured=False, filter_from=0.3, again=0)
        if cell.method in ("measured", FRESH):
            arm["plan"] = Remembered(math.log(task.classes))
        if cell.method == FRESH:
            arm["schedule"] = rho.annealed(steps, switch=SWITCH, drop=0.0)
        if cell.method in ("annealed", "filtered"):
            arm["schedule"] = rho.annealed(steps, switch=scoring_share(cell.method), drop=DROP)
        return Trainer(
            model,
            train,
            total_steps=steps,
            candidates=CANDIDATES,
            keep=KEEP,
            optimizer=lambda p: adamw(p, task.lr, fused=fused),
            learning_rate=one_cycle(task.lr, steps, WARM_UP),
            precision=self.precision,
            seed=cell.seed,
            **arm,
        )

    def prepare(self, cell: Cell) -> None:
        """Time, with nothing beside it, what the cell needs."""
        if cell.needs_il:
            self.irreducible(TASKS[cell.task], cell.rows)
        self.seconds_a_step(cell)

    def seconds_a_step(self, cell: Cell) -> float:
        """Mean over a run."""
        scores, others = step_kinds(cell.method)
        plain, share = self._seconds(cell.task, others), scoring_share(cell.method)
        if not share:
            return plain
        return share * self._seconds(cell.task, scores) + (1 - share) * plain

    def _seconds(self, task: str, method: str) -> float:
        known = f"{task} {method}"
        if known not in self.pace:
            trainer = self.trainer(Cell(task, method, seed=0), 10**5)
            trainer.train(10)  # captured in them
            self.bench.wait()
            started = time.perf_counter()
            while time.perf_counter() - started < WARM_SECONDS:  # until the device has its clock
                trainer.train(20)
                self.bench.wait()
            # At least a pass over the rows, so that dealing them out is in it.
            steps = max(TIMED_STEPS, len(trainer.data) // trainer.k)
            started = time.perf_counter()
            trainer.train(steps)
            self.bench.wait()
            self.pace[known] = (time.perf_counter() - started) / steps
            print(f"{known}: {1000 * self.pace[known]:.3f} ms a step", flush=True)
        return self.pace[known]

    def run(self, cell: Cell) -> dict[str, Any]:
        """Train as long as the budget allows, and tell how it went."""
        task = TASKS[cell.task]
        train, test = self.texts(task, cell.rows), self.bench.texts(task)[2]
        il = self.irreducible(task, cell.rows) if cell.needs_il else None
        il_seconds = 0.0 if il is None else il.seconds
        pace = self.seconds_a_step(cell)
        steps = max(0, int((cell.budget - (il_seconds if cell.il_counts else 0.0)) / pace))
        about = {
            "steps_an_epoch": len(train) // CANDIDATES,
            "il_seconds": round(il_seconds, 3),
            "il_loss": None if il is None else round(float(il.values.nanmean()), 4),
            "seconds_a_step": pace,
            "step_ms": {
                known.partition(" ")[2]: round(1000 * seconds, 3)
                for known, seconds in self.pace.items()
                if known.startswith(cell.task)
            },
            "steps": steps,
        }
        if not steps:  # the irreducible losses took all the time there was
            return {**about, "curve": []}
        trainer, picked = self.trainer(cell, steps), torch.zeros(2, dtype=torch.long)
        wrong = train.wrong.cpu()
        trainer.on_flush.append(
            lambda step, index, losses: picked.add_(
                torch.tensor([int(wrong[index].sum()), index.numel()])
            )
        )
        curve, training = [], 0.0
        for look in range(1, LOOKS + 1):
            self.bench.wait()
            started = time.perf_counter()
            trainer.train(look * steps // LOOKS - trainer.step)
            self.bench.wait()
            training += time.perf_counter() - started
            accuracy, correlation = evaluate(trainer.model.encoder, test, self.bench.device)
            curve.append([trainer.step, round(accuracy, 5), round(correlation, 5)])
        graphs = {True: "scoring", False: "plain"}
        captured = [graphs[kind] for kind, c in trainer.captured.items() if c.graph is not None]
        return {
            **about,
            "curve": curve,  # step, accuracy, Matthews correlation
            "seconds": training,  # runs may have gone side by side
            "captured": captured,
            "wrong_share": float(picked[0] / picked[1]),
            "trained": trainer.ledger.trained,
            "scored": trainer.ledger.scored,
        }
