"""The fast path: data on the device, and the whole step in one CUDA graph."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rholoss import core, methods
from rholoss.arguments import tell_other_loss
from rholoss.core import Method
from rholoss.engine import state
from rholoss.engine.ahead import Ahead
from rholoss.engine.capture import Captured, says_what_to_reduce, tuned_convolutions
from rholoss.engine.cheaper import Cheaper, ready
from rholoss.engine.checks import (
    AHEAD,
    check_compared,
    check_ids,
    check_overlap,
    check_precision,
    check_run,
    check_schedule,
    check_sizes,
)
from rholoss.engine.clock import ScoringCost
from rholoss.engine.interrupt import whole_steps
from rholoss.engine.optimizers import Rate, adamw, check_rates, for_graphs, rates
from rholoss.engine.order import Order
from rholoss.engine.overlap import OverlappedStep
from rholoss.engine.replay import Recorded, check_scoring
from rholoss.engine.resident import Resident, check_classes
from rholoss.engine.rows import Rows, by_id, irreducible_table
from rholoss.engine.step import Counters, DeviceStep
from rholoss.engine.streamed import Streamed
from rholoss.engine.tuning import Tuning
from rholoss.errors import RholossError, TooFewFiniteScoresError
from rholoss.il.live import LiveIrreducible
from rholoss.ladder import Ladder
from rholoss.ledger import Ledger
from rholoss.losses import Task
from rholoss.memory import Memory, Plan
from rholoss.modes import submodules
from rholoss.optimizers import MakeOptimizer, new_optimizer
from rholoss.schedules import Schedule, constant
from rholoss.scoring import Scorer
from rholoss.sources import as_source, tell_other_labels
from rholoss.steplog import StepLog

WINDOW = 100  # steps between two looks at what happened on the device


class Trainer:
    """Trains a model on resident data, each step on the selected rows of a candidate batch.

    The same scores, picks and BatchNorm modes as `Selector`, and on the CPU the same choices. On a
    CUDA device the step (gather, augment, score, choose, gather, forward, backward, optimizer) is one
    graph.

    Args:
        model: is moved to the device of the data.
        data: a `Resident` data set, or a `Streamed` one where it does not fit the device.
        total_steps: how many steps there will be; `learning_rate` may be a function of the step.
        candidates, keep: n_B, and the share of it that is selected.
        optimizer: a function from parameters to an optimizer, whose rate is then `learning_rate`; on a
            GPU one whose step can be captured, or steps run eagerly (SGD: with fused=True).
        overlap: score the next candidates while this batch trains, with a copy of the weights in the given
            precision: True, as they are before that step; 'ahead', as they will be after it if it leads on
            as the last one did, which chooses better where the optimizer has momentum.
        catch_up: stop scoring for good, before the schedule does, as soon as the candidates' mean loss over
            100 steps is no higher than their mean irreducible loss: the target is as good as that model.
        plan: decides at the start of each pass over the rows that scores nothing which of them are
            trained on and with what weight; see `rholoss.plans`.
        scoring: a cheaper way to score (`rholoss.engine.cheaper`), or `Recorded` choices, which are
            replayed without scoring; then `method`, `candidates` and `keep` are not read.
        log: path of a JSON-lines file for the chosen ids.
        tuning: how the step is laid out on a GPU, where that makes a difference in time alone.
        method, irreducible, loss, batch_norm, draws, precision, compile, schedule, seed: as for
            `Selector`; `loss` must be a task's name, and `precision`, which trains too, not 'fp16'.
    """

    to_reduce = "`candidates` or `keep`"  # where memory runs out

    @says_what_to_reduce("the model, or what needs copies of it (`overlap`, `scoring`)")
    def __init__(
        self,
        model: nn.Module,
        data: Resident | Streamed,
        *,
        total_steps: int,
        method: str | Method = "rho",
        irreducible: Any = None,
        candidates: int = 320,
        keep: float = 0.1,
        optimizer: MakeOptimizer = adamw,
        learning_rate: Rate = 1e-3,
        loss: str = "classification",
        batch_norm: str = "train",
        draws: int = 10,
        precision: str | None = None,
        compile: bool = False,
        overlap: bool | str = False,
        schedule: Schedule | None = None,
        catch_up: bool = False,
        plan: Plan | None = None,
        scoring: Cheaper | Recorded | None = None,
        seed: int = 0,
        log: str | os.PathLike[str] | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        numbers = check_run(model, data, total_steps, candidates, seed, plan)
        total_steps, candidates, seed = numbers
        self.method, self.data, device = methods.by_name(method), data, data.device
        check_overlap(overlap)
        check_scoring(scoring, overlap, others=[schedule, plan])
        recorded: Tensor | None = None
        if isinstance(scoring, Recorded):
            recorded = scoring.rows(data.ids, total_steps)
            self.method, candidates, keep = methods.by_name("uniform"), scoring.k, 1.0
        check_sizes(keep, candidates, len(data))
        self.model = ready(model, device)
        modules = [m.__dict__ for m in submodules(model)]
        self._modes = [(m, m["training"]) for m in modules if "training" in m]
        self.candidates, self.k = candidates, core.num_selected(candidates, keep)
        self.schedule, self.seed, self.total_steps = schedule or constant(), seed, total_steps
        check_schedule(self.schedule, total_steps)
        self.planned_stop = self.schedule.stop  # before anything stopped it sooner
        self.source = as_source(irreducible)
        table = irreducible_table(self.method, self.source, data.ids, self.schedule.drop)
        if table is not None:
            tell_other_loss(self.method, self.source, loss)
            tell_other_labels(self.source, data.ids, data.targets)
        if plan is not None:
            check_ids(data.ids)
        memory = None if plan is None else Memory(int(data.ids.max()) + 1, device)
        self.rows = Rows(
            data, seed=seed, irreducible=table, drop=self.schedule.drop, plan=plan, memory=memory,
            recorded=recorded,
        )  # fmt: skip
        self.catch_up = catch_up
        check_compared(self.method, self.source, catch_up, scoring)
        self.optimizer = for_graphs(new_optimizer(optimizer, self.model.parameters()), device)
        check_rates(self.optimizer)
        exact = torch.float32 if device.type == "cuda" else torch.float64
        lr_T = rates(learning_rate, total_steps).to(device, exact)
        lr = torch.zeros((), device=device)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scorer = Scorer(loss, batch_norm=batch_norm, draws=draws, precision=precision)
        if not isinstance(scorer.loss, Task):
            raise RholossError(f"`loss` must be a task's name for the engine, but is {loss!r}.")
        check_classes(data.targets, scorer.loss.name)
        check_precision(scorer.dtype, precision)
        self.device_generator = Generator(device).manual_seed(seed)
        self.counters = Counters.empty(WINDOW, self.k, device)
        # A trainer that held itself would hold its graphs' memory, too, until Python looks for such.
        own = weakref.proxy(self)
        self.body = DeviceStep(
            self.model,
            self.optimizer,
            data,
            self.method,
            scorer,
            candidates,
            self.k,
            generator=lambda: own._generator(),
            irreducible=table,
            live=self._live(overlap),
            compile=compile,
            lr=lr,
            lr_T=lr_T,
            counters=self.counters,
            memory=memory,
            scoring=scoring if isinstance(scoring, Cheaper) else None,
            tuning=tuning,
            ahead=Ahead(self.model) if overlap == AHEAD else None,
        )
        low = scorer.dtype or torch.float32
        self.overlapped = OverlappedStep(self.body, low) if overlap else None
        generators = [self.device_generator] if device.type == "cuda" else []
        select = self.overlapped or self.body.select
        chosen = Captured(select, device, generators)
        uniform = Captured(self.body.uniform, device, generators, beside=chosen)
        self.captured = {True: chosen, False: uniform}  # by whether the step scores
        self.log = StepLog(log)
        reads = self.body.irreducible is not None  # who does not read them does not pay for them
        self.ledger = Ledger(float(getattr(irreducible, "seconds", 0.0)) if reads else 0.0)
        self._cost = ScoringCost(self.body, self.ledger, overlap=overlap)
        self.on_flush: list[Callable[[int, Tensor, Tensor], None]] = []
        self.step = 0
        self.losses: list[Tensor] = []  # of the steps from where it began, as they were read
        self._flushed = 0
        self._window: list[bool] = []  # whether each step since the last flush scored
        self._whole = True  # unless an error or a second Ctrl-C cut a step in its middle
        self._diverged: RholossError | None = None
        # Mean scores of the steps of this hundred that scored.
        self.reducible = torch.zeros(0, device="cpu")

    @property
    def why_eager(self) -> str:
        """Why steps run eagerly and not as a CUDA graph; empty where they do not, or not known yet."""
        return next((c.why_eager for c in self.captured.values() if c.why_eager), "")

    def _generator(self) -> Generator:
        """On the CPU a function of (seed, step), as in `Selector`; on a GPU one that a graph holds."""
        if self.data.device.type == "cuda":
            return self.device_generator
        return core.step_generator(self.seed, self.step)

    def _live(self, overlap: bool | str) -> LiveIrreducible | None:
        if not isinstance(self.source, LiveIrreducible):
            return None
        if overlap:
            raise RholossError(
                f"`overlap`={overlap!r} cannot be had with a `LiveIrreducible`: its model would learn from a "
                "choice that is not trained on yet. Pass overlap=False."
            )
        self.source.check_target(self.model)
        for_graphs(self.source.optimizer, self.data.device)
        return self.source

    def _order(self, scores: bool) -> Order:
        return self.body.order if scores else self.body.uniform_order

    def _take_from(self, scores: bool) -> None:
        """See to it that the order has a batch left, and count it."""
        order = self._order(scores)
        if order.left == 0:
            self.rows.deal(
                order, step=self.step, progress=self.step / self.total_steps, scores=scores,
                stopped=self.step >= self.schedule.stop, weight=self.body.row_weight,
            )  # fmt: skip
        if self.body.window is not None:
            self.body.window.bring(order.coming())
        order.left -= 1

    def train(self, steps: int) -> None:
        """Take so many steps. After the last of all, what happened is read (`flush`)."""
        if not 0 <= steps <= self.total_steps - self.step:
            raise RholossError(
                f"`steps`={steps} would go beyond `total_steps`={self.total_steps} (now at "
                f"{self.step}); give the trainer as many as it is to take."
            )
        self._check_whole()
        if not self._window:
            self.log.check_new(self.step)
        for module, trains in self._modes:  # whatever the caller did since: an evaluation, for one
            module["training"] = trains
        try:
            with says_what_to_reduce(self.to_reduce), whole_steps() as let_interrupt_through:
                self._cost.count_flops()
                with self._tuned():
                    for _ in range(steps):
                        self._one_step()
                        let_interrupt_through()
        except KeyboardInterrupt:
            with contextlib.suppress(RholossError):
                self.flush()  # what was done so far reaches the log
            raise
        if self.step == self.total_steps:  # nobody may ask any more
            self.flush()

    def time_scoring(self, repeats: int = 20) -> float:
        """Seconds that gathering, scoring and choosing take in a step; changes nothing.

        On a GPU, where the step is one graph, they are run as a graph of their own, and the ledger's time
        of scoring is this times the steps that scored. On the CPU the ledger times every step itself.
        """
        with self._tuned(), says_what_to_reduce(self.to_reduce):
            return self._cost.time(self.captured[True].stream, repeats)

    def _tuned(self) -> AbstractContextManager[None]:
        return tuned_convolutions(self.data.device, self.body.tuning.algorithms)

    def _one_step(self) -> None:
        if self.step == self.schedule.stop:
            self.body.uniform_order.left = 0  # what is left of an earlier pass was not filtered
        phase = self.schedule(self.step)
        scores = phase.score and bool(self.method.needs)
        self._whole = False
        if scores and self.overlapped is not None and not self.overlapped.waiting:
            self._take_from(scores)
            self.overlapped.prime()
        self.ledger.start()
        self._take_from(scores)
        self.captured[scores]()
        if self.body.window is not None:  # while the device is at work
            self.body.window.prefetch(self._order(scores).coming())
        self.step += 1
        rows = self.candidates if scores else self.k
        self.ledger.count(rows, rows, self.k, *(self._cost.passes() if scores else (0, 0)))
        self._window.append(scores)
        self._whole = True
        if self.step % WINDOW == 0:  # at the same steps, whoever else has flushed or resumed
            self.flush()

    def flush(self) -> None:
        """Read what happened on the device since the last flush. Waits for the device."""
        num = len(self._window)
        if num == 0:
            return
        counters, whole, self._whole = self.counters, self._whole, False
        index, score, losses = (  # copies: the next window overwrites the counters
            t[:num].to("cpu", copy=True) for t in (counters.index, counters.score, counters.loss)
        )
        not_finite, short, broken = (
            int(t) for t in (counters.not_finite, counters.short, counters.broken)
        )
        counters.row.zero_()
        reducible = counters.reducible[:num].cpu()[torch.tensor(self._window, device="cpu")]
        scored, self._window = self._window, []
        self.ledger.tick()
        self._cost.tell()
        self.losses.append(losses)
        for i in range(num):
            self.log.add(self._flushed + i, index[i], score[i] if scored[i] else None)
        self._flushed += num
        self.log.flush()
        self.reducible = torch.cat([self.reducible, reducible])
        self._whole = whole
        if self.step % WINDOW == 0:
            self._look(float(self.reducible.nanmean()))
            self.reducible = self.reducible[:0]
        for tap in self.on_flush:
            tap(self.step, index, losses)
        if short or broken:
            self._diverged = TooFewFiniteScoresError(
                f"Between step {self.step - num} and step {self.step}, {broken} step(s) had a loss that "
                f"is not finite and {short} had fewer finite scores than are selected ({not_finite} "
                "scores were not finite so far). Lower the learning rate or look at the inputs."
            )
            raise self._diverged

    def _look(self, reducible: float) -> None:
        """Climb, or stop scoring, if the target has come that far."""
        if not self.schedule(self.step).score or math.isnan(reducible):
            return
        if isinstance(self.source, Ladder) and self.source.climb(reducible):
            self.stand()
        elif self.catch_up and reducible <= 0:
            self.stop_scoring()

    def stand(self) -> None:
        """Take over the losses of the rung on which a ladder stands. In place: a graph reads them."""
        table = self.body.irreducible
        if isinstance(self.source, Ladder) and table is not None:
            table.copy_(by_id(self.source.table, self.data.ids))
            self.rows.use(table)

    def stop_scoring(self) -> None:
        """Score no more from the next step on."""
        self.schedule = dataclasses.replace(self.schedule, stop=max(self.step, self.schedule.start))

    def change_length(self, total_steps: int, learning_rate: Rate) -> None:
        """Take so many steps in all, at most as many as at first, at these rates from now on."""
        most = len(self.body.lr_T)
        if not self.step <= total_steps <= most:
            raise RholossError(
                f"`total_steps` must be in {self.step}..{most}, from the present step to what the trainer "
                f"was made for, but is {total_steps}."
            )
        self.body.lr_T[:total_steps].copy_(rates(learning_rate, total_steps))
        self.total_steps = int(total_steps)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, the model and the optimizer included."""
        self._check_whole()
        self.flush()
        if self._diverged is not None:  # an earlier state is not to be replaced by this one
            raise self._diverged
        return state.saved(self)

    def _check_whole(self) -> None:
        if not self._whole:
            raise RholossError(
                f"Step {self.step} was cut off in its middle and cannot be gone on with; take an earlier "
                "state."
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where the state was saved, with its seed and torch's random state of then."""
        state.restore(self, saved)

    def start_from(self, step: int) -> None:
        """Be at the beginning of this step; what was not read of steps before it is forgotten."""
        self.step = self._flushed = step
        self._window, self.losses, self._whole, self._diverged = [], [], True, None
        self.body.number.fill_(step)
        self.counters.clear()
