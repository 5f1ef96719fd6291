"""The fast path: data on the device, and the whole step in one CUDA graph."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rholoss import core, methods
from rholoss.core import Method
from rholoss.engine.capture import Captured
from rholoss.engine.overlap import OverlappedStep
from rholoss.engine.resident import Resident
from rholoss.engine.step import Counters, DeviceStep
from rholoss.errors import RholossError, TooFewFiniteScoresError
from rholoss.il.live import LiveIrreducible
from rholoss.ledger import Ledger
from rholoss.losses import Task
from rholoss.sampler import EPOCHS
from rholoss.schedules import Schedule, constant
from rholoss.scoring import Scorer
from rholoss.sources import TableSource, as_source, raise_unmeasured
from rholoss.steplog import StepLog

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
STATE_VERSION = 1
WINDOW = 100  # steps between two looks at what happened on the device


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as in the paper, in the form that a graph can hold."""
    parameters = list(parameters)
    on_gpu = bool(parameters) and parameters[0].device.type == "cuda"
    rate: Any = torch.tensor(1e-3, device=parameters[0].device) if on_gpu else 1e-3
    return torch.optim.AdamW(parameters, lr=rate, fused=on_gpu, capturable=on_gpu)


class Trainer:
    """Trains a model on resident data, each step on the selected rows of a candidate batch.

    The same scores, picks and BatchNorm modes as `Selector`, and on the CPU the same choices. On a
    CUDA device the step (gather, augment, score, choose, gather, forward, backward, optimizer) is one
    graph.

    Args:
        model: is moved to the device of the data.
        data: a `Resident` data set.
        total_steps: how many steps there will be; `learning_rate` may be a function of the step.
        candidates, keep: n_B, and the share of it that is selected.
        optimizer: a function from parameters to an optimizer; on a GPU it must be capturable.
        overlap: score the next candidates while this batch trains, with a copy of the weights that is
            one step old and in the given precision.
        log: path of a JSON-lines file for the chosen ids.
        method, irreducible, loss, batch_norm, draws, precision, compile, schedule, seed: as for
            `Selector`; `loss` must be a task's name.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Resident,
        *,
        total_steps: int,
        method: str | Method = "rho",
        irreducible: Any = None,
        candidates: int = 320,
        keep: float = 0.1,
        optimizer: MakeOptimizer = adamw,
        learning_rate: float | Callable[[int], float] = 1e-3,
        loss: str = "classification",
        batch_norm: str = "train",
        draws: int = 10,
        precision: str | None = None,
        compile: bool = False,
        overlap: bool = False,
        schedule: Schedule | None = None,
        seed: int = 0,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        self.method, self.data, device = methods.by_name(method), data, data.device
        if not 0 < keep <= 1 or not 1 <= candidates <= len(data):
            raise RholossError(
                f"`keep` must be in (0, 1] and `candidates` in 1..{len(data)}, the rows of the data, "
                f"but are {keep} and {candidates}."
            )
        self.model = model.to(device).train()
        self.candidates, self.k = candidates, core.num_selected(candidates, keep)
        self.schedule, self.seed, self.total_steps = schedule or constant(), seed, total_steps
        self.source = as_source(irreducible)
        self.optimizer = optimizer(self.model.parameters())
        rate = learning_rate if callable(learning_rate) else lambda step: learning_rate
        exact = torch.float32 if device.type == "cuda" else torch.float64
        rates = [float(rate(t)) for t in range(total_steps)]
        lr_T = torch.tensor(rates, device=device, dtype=exact)
        lr = torch.zeros((), device=device)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scorer = Scorer(loss, batch_norm=batch_norm, draws=draws, precision=precision)
        if not isinstance(scorer.loss, Task):
            raise RholossError(f"`loss` must be a task's name for the engine, but is {loss!r}.")
        self._device_generator = Generator(device).manual_seed(seed)
        self.counters = Counters.empty(WINDOW, self.k, device)
        self.body = DeviceStep(
            self.model,
            self.optimizer,
            data,
            self.method,
            scorer,
            candidates,
            self.k,
            generator=self._generator,
            irreducible=self._table(),
            live=self._live(overlap),
            compile=compile,
            lr=lr,
            lr_T=lr_T,
            counters=self.counters,
        )
        low = scorer.dtype or torch.float32
        self.overlapped = OverlappedStep(self.body, low) if overlap else None
        generators = [self._device_generator] if device.type == "cuda" else []
        select = self.overlapped or self.body.select
        chosen = Captured(select, device, generators)
        uniform = Captured(self.body.uniform, device, generators, chosen.stream)
        self.captured = {True: chosen, False: uniform}  # by whether the step scores
        self.log = StepLog(log)
        il_seconds = float(getattr(irreducible, "seconds", 0.0))
        self.ledger = Ledger(il_seconds, scoring_seconds=math.nan)  # one graph: no time of its own
        self.on_flush: list[Callable[[int, Tensor, Tensor], None]] = []
        self.step = 0
        self.losses: list[Tensor] = []  # of the steps, as they were read
        self._epochs = 0
        self._window: list[bool] = []  # whether each step since the last flush scored
        self._rows_after = self._rows_left(self.schedule.drop)  # once the schedule has stopped

    def _generator(self) -> Generator:
        """On the CPU a function of (seed, step), as in `Selector`; on a GPU one that a graph holds."""
        if self.data.device.type == "cuda":
            return self._device_generator
        return core.step_generator(self.seed, self.step)

    def _live(self, overlap: bool) -> LiveIrreducible | None:
        if not isinstance(self.source, LiveIrreducible):
            return None
        if overlap:
            raise RholossError(
                "`overlap`=True cannot be had with a `LiveIrreducible`: its model would learn from a choice "
                "that is not trained on yet. Pass overlap=False."
            )
        return self.source

    def _table(self) -> Tensor | None:
        """Irreducible losses by id on the device, checked for every row once and for all."""
        if "irreducible_loss" not in self.method.needs and not self.schedule.drop:
            return None
        if not isinstance(self.source, TableSource):
            if isinstance(self.source, LiveIrreducible) and not self.schedule.drop:
                return None
            raise RholossError(
                f"The method {self.method.name!r} needs irreducible losses; pass `irreducible=` what "
                "`fit_irreducible` returned (or a `LiveIrreducible`, if the schedule drops nothing)."
            )
        ids = self.data.ids.cpu()
        loss_N = self.source.table.lookup(ids)
        raise_unmeasured(ids, loss_N)
        table = torch.full((int(ids.max()) + 1,), torch.nan)
        table[ids] = loss_N
        return table.to(self.data.device)

    def _rows_left(self, drop: float) -> Tensor:
        """The rows without the share `drop` of highest irreducible loss."""
        rows = torch.arange(len(self.data))
        if not drop or self.body.irreducible is None:
            return rows
        loss_N = self.body.irreducible.index_select(0, self.data.ids).cpu()
        return rows[loss_N <= loss_N.quantile(1 - drop)]

    def _deal(self, scores: bool) -> None:
        """Start an epoch: a new order of the rows."""
        generator = core.step_generator(self.seed, EPOCHS + self._epochs)
        self._epochs += 1
        dropping = not scores and self.step >= self.schedule.stop
        rows = self._rows_after if dropping else torch.arange(len(self.data))
        order = self.body.order if scores else self.body.uniform_order
        order.deal(rows[torch.randperm(len(rows), generator=generator)])

    def _take_from(self, scores: bool) -> None:
        """See to it that the order has a batch left, and count it."""
        order = self.body.order if scores else self.body.uniform_order
        if order.left == 0:
            self._deal(scores)
        order.left -= 1

    def train(self, steps: int) -> None:
        """Take so many steps."""
        if self.step + steps > self.total_steps:
            raise RholossError(
                f"`steps`={steps} would go beyond `total_steps`={self.total_steps} (now at "
                f"{self.step}); give the trainer as many as it is to take."
            )
        if not self._window:
            self.log.check_new(self.step)
        with _tuned_convolutions(self.data.device):
            for _ in range(steps):
                self._one_step()

    def _one_step(self) -> None:
        if self.step == self.schedule.stop:
            self.body.uniform_order.left = 0  # what is left of an earlier order was not filtered
        phase = self.schedule(self.step)
        scores = phase.score and bool(self.method.needs)
        if scores and self.overlapped is not None and not self.overlapped.waiting:
            self._take_from(scores)
            self.overlapped.prime()
        self.ledger.start()
        self._take_from(scores)
        self.captured[scores]()
        self.step += 1
        rows = self.candidates if scores else self.k
        forwards = rows * self.body.draws if scores and self.body.runs_model else 0
        self.ledger.count(rows, rows, self.k, rows if forwards else 0, forwards)
        self._window.append(scores)
        if len(self._window) == WINDOW:
            self.flush()

    def flush(self) -> None:
        """Read what happened on the device since the last flush. Waits for the device."""
        scored, self._window = self._window, []
        num = len(scored)
        if num == 0:
            return
        counters = self.counters
        index, score, losses = (
            t[:num].cpu() for t in (counters.index, counters.score, counters.loss)
        )
        not_finite, short, broken = (
            int(t) for t in (counters.not_finite, counters.short, counters.broken)
        )
        counters.row.zero_()
        self.ledger.tick()
        self.losses.append(losses)
        for i in range(num):
            self.log.add(self.step - num + i, index[i], score[i] if scored[i] else None)
        self.log.flush()
        for tap in self.on_flush:
            tap(self.step, index, losses)
        if short or broken:
            raise TooFewFiniteScoresError(
                f"Between step {self.step - num} and step {self.step}, {broken} step(s) had a loss that "
                f"is not finite and {short} had fewer finite scores than are selected ({not_finite} "
                "scores were not finite). Lower the learning rate, clip gradients or look at the inputs."
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, the model and the optimizer included."""
        self.flush()
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "epochs": self._epochs,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.body.order.state_dict(),
            "uniform_order": self.body.uniform_order.state_dict(),
            "generator": self._device_generator.get_state(),
            "waiting": self.overlapped.waiting if self.overlapped else [],
            "irreducible": None if self.source is None else self.source.state_dict(),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was saved; the step is captured anew."""
        if state.get("version") != STATE_VERSION:
            raise RholossError(
                f"The saved state has version {state.get('version')!r}, but this trainer reads "
                f"{STATE_VERSION}; use the version of rholoss that saved it."
            )
        self.step, self._epochs = state["step"], state["epochs"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.body.lr
        self.body.number.fill_(self.step)
        self.body.order.load_state_dict(state["order"])
        self.body.uniform_order.load_state_dict(state["uniform_order"])
        self._device_generator.set_state(state["generator"].cpu())
        if self.overlapped is not None:
            self.overlapped.waiting = [t.to(self.data.device) for t in state["waiting"]]
        if self.source is not None and state["irreducible"] is not None:
            self.source.load_state_dict(state["irreducible"])
        self.ledger.load_state_dict(state["ledger"])
        self.log.rewind(self.step)
        for captured in self.captured.values():
            captured.forget()


@contextlib.contextmanager
def _tuned_convolutions(device: torch.device) -> Iterator[None]:
    """Let cuDNN try its algorithms: shapes never change here."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
