"""The trainer of the engine: data on the device, and the whole step in one CUDA graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rholoss import core, methods
from rholoss.core import Method
from rholoss.engine import checks, state
from rholoss.engine.ahead import Ahead
from rholoss.engine.capture import Captured, says_what_to_reduce, tuned_convolutions
from rholoss.engine.cheaper import Cheaper, ready
from rholoss.engine.clock import ScoringCost
from rholoss.engine.counters import Counters
from rholoss.engine.interrupt import whole_steps
from rholoss.engine.optimizers import Rate, adamw, for_graphs, one_rate, rates
from rholoss.engine.overlap import OverlappedStep
from rholoss.engine.replay import Recorded, check_scoring
from rholoss.engine.resident import Resident
from rholoss.engine.rows import Rows, memory_of
from rholoss.engine.sources import by_id, checked_table, live_source
from rholoss.engine.step import DeviceStep
from rholoss.engine.streamed import Streamed
from rholoss.engine.tuning import Tuning
from rholoss.errors import RholossError
from rholoss.ladder import Ladder
from rholoss.ledger import Ledger
from rholoss.memory import Plan
from rholoss.modes import submodules
from rholoss.optimizers import MakeOptimizer, new_optimizer
from rholoss.schedules import Schedule, constant
from rholoss.scoring import Scorer
from rholoss.sources import as_source
from rholoss.steplog import StepLog

WINDOW = 100  # steps between two reads of what happened on the device


class Trainer:
    """Trains a model on data that lies on the device, each step on rows selected from a candidate batch.

    It has the same scores, picks and BatchNorm modes as `Selector`, and on the CPU it makes the same
    choices. On a CUDA device the whole step (gather, augment, score, choose, gather, forward, backward,
    optimizer) becomes one CUDA graph after three steps that run eagerly.

    Args:
        model: the `nn.Module` to train. It is moved to the device of the data and put in train mode.
        data: the training set, a `Resident`; or a `Streamed` if it does not fit the device.
        total_steps: the number of steps of the whole run, which `train` cannot go beyond.
        method: a name from `rholoss.METHODS`, or a `Method`.
        irreducible: irreducible losses by id, for methods that read them: what `fit_resident` or
            `fit_irreducible` returned, a tensor, a `Ladder` or a `LiveIrreducible`.
        candidates: n_B, the rows of a candidate batch.
        keep: the share of the candidates to select, in (0, 1]: n_b = round(keep x candidates).
        optimizer: a function from parameters to an optimizer; by default AdamW. Its own learning rate is
            not read. If its step cannot be captured, steps run eagerly (SGD needs fused=True).
        learning_rate: a number, or a function from the number of the step to one (`one_cycle`).
        loss: the name of a task: 'classification', 'multi_label', 'regression', 'tokens', 'causal_lm'.
        batch_norm: what BatchNorm normalises with while scoring: 'train' (statistics of the candidates,
            which also move the running ones), 'batch' (these alone) or 'eval' (the running ones).
        draws: the number of Monte-Carlo dropout passes, for methods that need them, such as 'bald'.
        precision: of scoring and training: 'bf16', or None to keep what is in force, usually float32.
        compile: run the step through `torch.compile`.
        overlap: score the next candidates on a side stream while this batch trains. False: no. True: with
            the weights from before the step that trains. 'ahead': with the weights that this step is
            expected to leave, which chooses better if the optimizer has momentum.
        schedule: at which steps to score; by default at all of them. See `rholoss.annealed`.
        catch_up: stop scoring, earlier than the schedule does, once the candidates' mean loss over 100
            steps is no higher than their mean irreducible loss: the target is then as good as that model.
        plan: which rows to train on in passes that score nothing, and with what weight: `Remembered`,
            `InfoBatch`, `RandomShare` or a function of your own. None: all rows.
        scoring: a cheaper way to score, such as `Folded()`. Or `Recorded` choices, which are trained on
            again without scoring; `method`, `candidates` and `keep` are then ignored. None: exact.
        seed: of the order of the rows, augmentation and random picks.
        log: the path of a JSON-lines file for the chosen ids and their scores. None: no log.
        tuning: how the step is laid out on a GPU, for speed alone; see `rholoss.engine.tuning.Tuning`.

    Attributes:
        step: the number of steps that were taken.
        ledger: what was scored and trained so far, and what that cost.
        losses: the training losses up to the last `flush`, a list of tensors.
        on_flush: functions (step, index, losses) that are called at each flush with the ids [steps, k]
            chosen since the last one and the training losses [steps]. Append yours.
    """

    to_reduce = "`candidates` or `keep`"  # what to advise if a step runs out of memory

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
        numbers = checks.check_run(model, data, total_steps, candidates, seed, plan)
        total_steps, candidates, seed = numbers
        self.method, self.data, device = methods.by_name(method), data, data.device
        checks.check_overlap(overlap)
        check_scoring(scoring, overlap, others=[schedule, plan])
        recorded: Tensor | None = None
        if isinstance(scoring, Recorded):
            recorded = scoring.rows(data.ids, total_steps)
            self.method, candidates, keep = methods.by_name("uniform"), scoring.k, 1.0
        checks.check_sizes(keep, candidates, len(data))
        self.model = ready(model, device)
        modules = [m.__dict__ for m in submodules(model)]
        self._modes = [(m, m["training"]) for m in modules if "training" in m]
        self.candidates, self.k = candidates, core.num_selected(candidates, keep)
        self.schedule, self.seed, self.total_steps = schedule or constant(), seed, total_steps
        checks.check_schedule(self.schedule, total_steps)
        self.planned_stop = self.schedule.stop  # `catch_up` may stop scoring earlier
        self.source = as_source(irreducible)
        table = checked_table(self.method, self.source, data, self.schedule.drop, loss)
        memory = None if plan is None else memory_of(data.ids)
        self.rows = Rows(
            data, seed=seed, irreducible=table, drop=self.schedule.drop, plan=plan, memory=memory,
            recorded=recorded,
        )  # fmt: skip
        self.catch_up = catch_up
        checks.check_compared(self.method, self.source, catch_up, scoring)
        self.optimizer = for_graphs(new_optimizer(optimizer, self.model.parameters()), device)
        lr = one_rate(self.optimizer, device)
        exact = torch.float32 if device.type == "cuda" else torch.float64
        lr_T = rates(learning_rate, total_steps).to(device, exact)
        scorer = Scorer(loss, batch_norm=batch_norm, draws=draws, precision=precision)
        checks.check_scorer(scorer, loss, precision, data.targets)
        self.device_generator = Generator(device).manual_seed(seed)
        self.counters = Counters.empty(WINDOW, self.k, device)
        # A reference to itself would keep the trainer, and the memory of its graphs, alive until Python's
        # garbage collector runs.
        own = weakref.proxy(self)
        self.body = DeviceStep(
            self.model, self.optimizer, data, self.method, scorer, candidates, self.k,
            generator=lambda: own._generator(), irreducible=table,
            live=live_source(self.source, overlap, self.model, device), compile=compile,
            lr=lr, lr_T=lr_T, counters=self.counters, memory=memory,
            scoring=scoring if isinstance(scoring, Cheaper) else None, tuning=tuning,
            ahead=Ahead(self.model) if overlap == checks.AHEAD else None,
        )  # fmt: skip
        self.overlapped = OverlappedStep(self.body) if overlap else None
        generators = [self.device_generator]
        chosen = Captured(self.overlapped or self.body.select, device, generators)
        uniform = Captured(self.body.uniform, device, generators, beside=chosen)
        self.captured = {True: chosen, False: uniform}  # the key says whether the step scores
        self.log = StepLog(log)
        reads = self.body.irreducible is not None  # a run that does not read them is not charged
        self.ledger = Ledger(float(getattr(irreducible, "seconds", 0.0)) if reads else 0.0)
        self._tuned = functools.partial(tuned_convolutions, device, self.body.tuning.algorithms)
        self._cost = ScoringCost(self.body, self.ledger, overlap=overlap)
        self.on_flush: list[Callable[[int, Tensor, Tensor], None]] = []
        self.step = 0
        self.losses: list[Tensor] = []
        self._window: list[bool] = []  # whether each step since the last flush scored
        self._whole = True  # False after an error or a second Ctrl-C in the middle of a step
        self._diverged: RholossError | None = None
        # The candidates' mean reducible loss at each scored step since the last multiple of WINDOW.
        self.reducible = torch.zeros(0, device="cpu")

    @property
    def why_eager(self) -> str:
        """Why steps run eagerly rather than as a CUDA graph; empty if they do not, or before capture."""
        return next((c.why_eager for c in self.captured.values() if c.why_eager), "")

    def _generator(self) -> Generator:
        """The generator of this step: made from (seed, step) on the CPU; on a GPU the graph holds it."""
        if self.data.device.type == "cuda":
            return self.device_generator
        return core.step_generator(self.seed, self.step)

    def _take_from(self, scores: bool) -> None:
        """Start a new pass over the data if no batch is left in this one, and count the next batch."""
        order = self.body.orders[scores]
        if order.left == 0:
            self.rows.deal(
                order, step=self.step, progress=self.step / self.total_steps, scores=scores,
                stopped=self.step >= self.schedule.stop, weight=self.body.row_weight,
            )  # fmt: skip
        if self.body.window is not None:
            self.body.window.bring(order.coming())
        order.left -= 1

    def train(self, steps: int) -> None:
        """Take `steps` steps; at the end of the run also `flush`.

        Each layer is put back into the mode that it had when the trainer was made, so the model may be
        evaluated between two calls. Ctrl-C takes effect at the end of a step.

        Args:
            steps: how many, at most as many as are left of `total_steps`.
        """
        if not 0 <= steps <= self.total_steps - self.step:
            raise RholossError(
                f"`steps` is {steps}, but must be in 0..{self.total_steps - self.step}: "
                f"{self.step} of `total_steps`={self.total_steps} are done. For a longer run make the "
                "trainer with more `total_steps`."
            )
        self._check_whole()
        if not self._window:
            self.log.check_new(self.step)
        for module, trains in self._modes:  # an evaluation may have changed them
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
                self.flush()  # so that the steps until now are in the log
            raise
        if self.step == self.total_steps:  # there may be no later call to do it
            self.flush()

    def time_scoring(self, repeats: int = 20) -> float:
        """Measure the seconds that gathering, scoring and choosing take in one step.

        On a GPU the step is one graph, so these parts are captured as a graph of their own; from then on
        the ledger's `scoring_seconds` is this time multiplied by the number of scored steps. On the CPU
        the ledger times each step itself. Model, counters and random state are left as they were.

        Args:
            repeats: how many times to run them; the median is returned.
        """
        with self._tuned(), says_what_to_reduce(self.to_reduce):
            return self._cost.time(self.captured[True].stream, repeats)

    def _one_step(self) -> None:
        if self.step == self.schedule.stop:
            self.body.uniform_order.left = 0  # the rest of this pass still has the rows to drop
        phase = self.schedule(self.step)
        scores = phase.score and bool(self.method.needs)
        self._whole = False
        if scores and self.overlapped is not None and not self.overlapped.waiting:
            self._take_from(scores)
            self.overlapped.prime()
        self.ledger.start()
        self._take_from(scores)
        self.captured[scores]()
        if self.body.window is not None:  # the host reads ahead while the device works
            self.body.window.prefetch(self.body.orders[scores].coming())
        self._window.append(scores)
        self.step += 1
        rows = self.candidates if scores else self.k
        self.ledger.count(rows, rows, self.k, *(self._cost.passes() if scores else (0, 0)))
        self._whole = True
        if self.step % WINDOW == 0:  # so that a resumed run reads at the same steps
            self.flush()

    def flush(self) -> None:
        """Read what happened on the device since the last flush, and write the log. Waits for the device.

        This happens by itself every 100 steps and at the end of the run. Raises `TooFewFiniteScoresError`
        if a loss was not finite, or if fewer scores were finite than rows are selected.
        """
        num = len(self._window)
        if num == 0:
            return
        whole, self._whole = self._whole, False  # an error below would leave things half read
        noted = self.counters.read(num)
        scored, self._window = self._window, []
        self.ledger.tick()
        self._cost.tell()
        self.losses.append(noted.loss)
        for i in range(num):
            score = noted.score[i] if scored[i] else None
            self.log.add(self.step - num + i, noted.index[i], score)
        self.log.flush()
        reducible = noted.reducible[torch.tensor(scored, device="cpu")]
        self.reducible = torch.cat([self.reducible, reducible])
        self._whole = whole
        if self.step % WINDOW == 0:
            self._look(float(self.reducible.nanmean()))
            self.reducible = self.reducible[:0]
        for tap in self.on_flush:
            tap(self.step, noted.index, noted.loss)
        if noted.short or noted.broken:
            self._diverged = noted.error(self.step - num, self.step)
            raise self._diverged

    def _look(self, reducible: float) -> None:
        """Climb a `Ladder`, or stop scoring with `catch_up`, if the target has come far enough."""
        if not self.schedule(self.step).score or math.isnan(reducible):
            return
        if isinstance(self.source, Ladder) and self.source.climb(reducible):
            self.stand()
        elif self.catch_up and reducible <= 0:
            self.stop_scoring()

    def stand(self) -> None:
        """Use the irreducible losses of the present rung of a `Ladder`; called when it has climbed."""
        table = self.body.irreducible
        if isinstance(self.source, Ladder) and table is not None:
            table.copy_(by_id(self.source.table, self.data.ids))  # in place: a graph reads them
            self.rows.use(table)

    def stop_scoring(self) -> None:
        """Score no more candidates from the next step on; the rest is uniform, or as the plan says."""
        self.schedule = dataclasses.replace(self.schedule, stop=max(self.step, self.schedule.start))

    def change_length(self, total_steps: int, learning_rate: Rate) -> None:
        """Change the number of steps of the run, and their learning rates from the next step on.

        Args:
            total_steps: the new total, from the present step to what the trainer was made with.
            learning_rate: a number, or a function from the number of the step to one.
        """
        most = len(self.body.lr_T)
        if not self.step <= total_steps <= most:
            raise RholossError(
                f"`total_steps` must be in {self.step}..{most}, from the present step to what the trainer "
                f"was made for, but is {total_steps}."
            )
        self.body.lr_T[:total_steps].copy_(rates(learning_rate, total_steps))
        self.total_steps = int(total_steps)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, a copy of the model and the optimizer included.

        Flushes first, and raises if the run has diverged, so that a good checkpoint is not overwritten.
        """
        self._check_whole()
        self.flush()
        if self._diverged is not None:
            raise self._diverged
        return state.saved(self)

    def _check_whole(self) -> None:
        if not self._whole:
            raise RholossError(
                f"Step {self.step} was interrupted in the middle, so the trainer cannot continue from it; "
                "load an earlier state (`load_state_dict`)."
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state: its step, seed, learning rates and torch's random state.

        Args:
            saved: what `state_dict` returned, of a trainer that was made with the same arguments.
        """
        state.restore(self, saved)

    def start_from(self, step: int) -> None:
        """Set the number of steps taken, and forget what has not been read; for `load_state_dict`.

        Args:
            step: the number of the next step.
        """
        self.step = step
        self._window, self.losses, self._whole, self._diverged = [], [], True, None
        self.body.number.fill_(step)
        self.counters.clear()
