"""One step on the device: candidates, scores, choice, gradient, with nothing read on the host in between.

Everything that a step reads and writes is a tensor that stays in place, so that the step can be captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rholoss import core, picks
from rholoss.core import Method, Selection, Stats
from rholoss.engine.ahead import Ahead
from rholoss.engine.cheaper import Cheaper
from rholoss.engine.counters import Counters
from rholoss.engine.order import Order
from rholoss.engine.resident import Examples, Resident
from rholoss.engine.streamed import Streamed, Window
from rholoss.engine.tuning import Tuning
from rholoss.guard import mean_of_finite
from rholoss.losses import Task
from rholoss.memory import Memory
from rholoss.modes import kept_random_state, own_autocast, scoring_mode
from rholoss.scoring import Scorer

# The parts that are compiled. They depend on their arguments only, so that all trainers of a process share
# one compilation.


@functools.cache
def compiled(part: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The part, compiled for fixed shapes, with these options of inductor."""
    return torch.compile(part, dynamic=False, options=options or None)


def gather(data: Resident | Window, rows: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """The inputs and targets of these rows."""
    return data.batch(rows, drawn)


def train_loss(
    model: nn.Module,
    task: Task,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The loss of a step, which `backward` can be called on, and the loss of each row, detached."""
    with own_autocast(x.device, dtype):
        loss_k = task(model, (x, y))
    loss = loss_k.mean() if weight is None else (loss_k * weight).mean()
    return loss, loss_k.detach()


def score_candidates(
    model: nn.Module,
    scorer: Scorer,
    x: Tensor,
    y: Tensor,
    needs: frozenset[str],
    draws: int,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The quantities `needs` of each row, in whatever mode the model is."""
    with own_autocast(x.device, dtype):
        return scorer.forward(model, (x, y), len(y), needs, draws)


def unpicked(score_B: Tensor, k: int, generator: Any) -> Selection:
    """Stands for the pick of a method in compiled code: real picks may draw, which is not compiled."""
    return Selection(score_B)


def rank(
    scores: Method,
    enough: int,
    only_forwarded: bool,
    counters: Counters,
    index: Tensor,
    measured: dict[str, Tensor],
    irreducible: Tensor | None,
    forwarded: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Score the candidates, and count scores that are not finite.

    Args:
        scores: the method, with `unpicked` as its pick.
        enough: how many finite scores there must be.
        only_forwarded: give only candidates at the positions `forwarded` a score that can be chosen.
        counters: where to count.
        index: ids [B] of the candidates.
        measured: their quantities [B] by name.
        irreducible: a table of irreducible losses by id, if there is one.
        forwarded: positions of the candidates that were forwarded, None for all.

    Returns:
        The scores [B], and the mean reducible loss of all candidates; of a method that does not read both
        losses, the mean score.
    """
    if irreducible is not None:
        measured = {**measured, "irreducible_loss": irreducible.index_select(0, index)}
    _, score_B = core.choose(scores, Stats(index, measured), enough, None)  # type: ignore[arg-type]
    both = [measured[name] for name in ("loss", "irreducible_loss") if name in measured]
    mean = mean_of_finite(both[0] - both[1] if len(both) == 2 else score_B)
    if only_forwarded and forwarded is not None:
        left_out = torch.full_like(score_B, -torch.inf)
        score_B = left_out.index_copy(0, forwarded, score_B.index_select(0, forwarded))
    counters.guard(score_B, enough, forwarded)
    return score_B, mean


def chosen_rows(candidates: Examples, b: Tensor, score_B: Tensor) -> tuple[Tensor, ...]:
    """Index, x, y and score of the candidates at the positions `b`."""
    return candidates.index[b], candidates.x[b], candidates.y[b], score_B[b]


def gather_next(
    order: Order, ids: Tensor, data: Resident | Window, drawn: Tensor | None
) -> tuple[Tensor, ...]:
    """The ids, inputs and targets of the next batch of an order."""
    rows = order.next()
    return ids.index_select(0, rows), *data.batch(rows, drawn)


def note(
    counters: Counters, rate: tuple[Tensor, Tensor, Tensor] | None, *what: Tensor | None
) -> None:
    """Note one step (`Counters.record`), and with `rate` set its rate, and count its number up."""
    counters.record(*what)  # type: ignore[arg-type]
    if rate is not None:
        lr, lr_T, number = rate
        lr.copy_(lr_T.index_select(0, number)[0])
        number += 1


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A block whose work goes to another stream, after the work queued so far; None: to the same one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


class DeviceStep:
    """What a step does on the device: `select`, a step that scores, and `uniform`, one that does not.

    Options of cheaper scoring get it, and may read its attributes.

    Args:
        model: trained, on the device of the data.
        optimizer: of its parameters.
        data: the training set.
        method: what to score by.
        scorer: how to score: the task, the mode of BatchNorm, precision, draws.
        candidates: n_B, the rows of a candidate batch.
        k: n_b, how many of them to choose.
        generator: a function that returns the generator of the present step.
        irreducible: irreducible losses by id, if the method or the schedule reads a table.
        live: the `LiveIrreducible`, if they come from one.
        compile: compile the parts above.
        lr: the learning rate, a tensor that the optimizer reads.
        lr_T: the learning rate of each step.
        counters: where each step is noted.
        memory: where losses are remembered for a plan, if there is one.
        scoring: a cheaper way to score; by default exact.
        tuning: how the step is laid out.
        ahead: the model with extrapolated weights, for overlap='ahead'.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Resident | Streamed,
        method: Method,
        scorer: Scorer,
        candidates: int,
        k: int,
        *,
        generator: Callable[[], Generator],
        irreducible: Tensor | None,
        live: Any = None,
        compile: bool,
        lr: Tensor,
        lr_T: Tensor,
        counters: Counters,
        memory: Memory | None = None,
        scoring: Cheaper | None = None,
        tuning: Tuning | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        assert isinstance(scorer.loss, Task)
        self.model, self.optimizer, self.data, self.method = model, optimizer, data, method
        self.scorer, self.task, self.k, self.generator = scorer, scorer.loss, k, generator
        self.irreducible, self.live, self.memory = irreducible, live, memory
        self.ahead = ahead
        self.copied = model if ahead is None else ahead.model  # what copies that score are made of
        # The plan's weight of each row, by id, for steps that do not score.
        self.row_weight = (
            None if memory is None else torch.ones_like(memory.seen, dtype=torch.float32)
        )
        self.dtype, self.lr, self.lr_T, self.counters = scorer.dtype, lr, lr_T, counters
        self.low = scorer.dtype or torch.float32  # of copies that score
        self.number = torch.zeros(1, dtype=torch.long, device=data.device)  # of the present step
        self.order = Order(len(data), candidates, data.device)
        self.uniform_order = Order(len(data), k, data.device)
        self.orders = {True: self.order, False: self.uniform_order}  # by whether a step scores
        self.window = data.window(candidates) if isinstance(data, Streamed) else None
        self._rows_from: Any = self.window or data
        self.draws = scorer.draws if method.needs & core.MONTE_CARLO else 1
        self.needs = method.needs - {"irreducible_loss"}
        self.runs_model = bool(self.needs)
        self.tuning = tuning or Tuning()
        self.wrap: Callable[..., Any] = compiled if compile else lambda part, **options: part
        self.scoring = scoring or Cheaper()
        self._wrap_parts()
        own = self.tuning.books_beside and data.device.type == "cuda"
        self._books = torch.cuda.Stream(data.device, priority=-1) if own else None
        # Entered around what a step does to choose: the ledger's clock on the CPU. A graph has no clock.
        self.timed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.scoring.attach(self)

    def _wrap_parts(self) -> None:
        """Compile the parts of the step, if asked for, and bind what stays the same."""
        method = self.method
        self._gather = self.wrap(gather)
        self._loss = self.wrap(train_loss, **self.tuning.training)
        self._scores = self.wrap(score_candidates, **self.tuning.scoring)
        self._known = nn.Identity()  # stands for the model if its output is known already
        # Notes are many small kernels; compiled, they are few.
        self._remember = self.wrap(Memory.record)
        self._next = self.wrap(gather_next)
        on_gpu = self.data.device.type == "cuda"
        rate = (self.lr, self.lr_T, self.number) if on_gpu else None
        self._note = functools.partial(self.wrap(note), self.counters, rate)
        scores = dataclasses.replace(method, pick=unpicked)
        enough = 1 if getattr(method.pick, "replacement", False) else self.k
        only = self.scoring.only_forwarded
        self._rank = functools.partial(self.wrap(rank), scores, enough, only, self.counters)
        self._chosen = self.wrap(chosen_rows)
        sorts = self.tuning.compiled_sort and method.pick is picks.top_k  # other picks may draw
        self._pick = self.wrap(method.pick) if sorts else method.pick
        if self.ahead is not None:
            self.ahead.go_on = self.wrap(self.ahead.go_on)

    def measure(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        generator: Generator,
        batch_norm: str | None = None,
    ) -> dict[str, Tensor]:
        """Run a model on inputs and return the quantities that the method reads, [B] each by name.

        Args:
            model: which model to run.
            x: inputs [B, ...].
            y: targets [B].
            generator: the seed of dropout draws comes from it, if the method needs draws.
            batch_norm: 'train', 'batch' or 'eval'; by default the scorer's.
        """
        if not self.runs_model:
            return {}
        dropout = self.scorer.dropout or self.draws > 1
        mode = scoring_mode(model, batch_norm=batch_norm or self.scorer.batch_norm, dropout=dropout)
        randomness: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if dropout and self.data.device.type == "cpu":  # a CUDA graph has random state of its own
            randomness = kept_random_state(self.data.device, core.draw_seed(generator))
        layers = self.tuning.layers(model, scoring=True)
        with torch.no_grad(), mode, randomness, layers:
            return self._scores(model, self.scorer, x, y, self.needs, self.draws, self.dtype)

    def quantities(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The quantities that the method reads, from a model's output [B, C] and targets [B]."""
        return self._scores(self._known, self.scorer, output, y, self.needs, 1, self.dtype)

    def take(self, order: Order, generator: Generator) -> Examples:
        """The next batch of an order, augmented."""
        drawn = self.data.draw(order.size, generator)
        return Examples(*self._next(order, self.data.ids, self._rows_from, drawn))

    def gather(self, rows: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """The inputs, augmented, and targets of these rows."""
        return self._gather(self._rows_from, rows, self.data.draw(len(rows), generator))

    def choose(
        self, model: nn.Module, candidates: Examples, generator: Generator
    ) -> tuple[core.Selection, Tensor, Tensor]:
        """Score the candidates with a model and choose k of them.

        Returns the selection, and what `rank` returns: all scores [B], and a mean over the candidates.
        """
        index = candidates.index
        measured, forwarded = self.scoring.measure(self, model, candidates, generator)
        table = self.irreducible if "irreducible_loss" in self.method.needs else None
        if self.live is not None and "irreducible_loss" in self.method.needs:
            body = candidates.whole()
            measured["irreducible_loss"] = self.live.losses(index, body, self.data.device)
        score_B, mean = self._rank(index, measured, table, forwarded)
        return self._pick(score_B, self.k, generator), score_B, mean

    def learn(
        self,
        chosen: Examples,
        weight: Tensor | None,
        score: Tensor | None = None,
        mean: Tensor | None = None,
        before_update: torch.cuda.Event | None = None,
    ) -> None:
        """Take a gradient step on the chosen rows, and note it in the counters.

        Args:
            chosen: the rows to train on.
            weight: the weight [k] of each in the loss; None for 1.
            score: their scores [k], to be noted.
            mean: the mean over all candidates, to be noted.
            before_update: the optimizer waits for this event: until then another stream reads the weights.
        """
        self.optimizer.zero_grad(set_to_none=True)
        x, y = chosen.x, chosen.y
        with self.tuning.layers(self.model, scoring=False):
            loss, loss_k = self._loss(self.model, self.task, x, y, weight, self.dtype)
        with beside(self._books):
            if self.memory is not None:
                self._remember(self.memory, chosen.index, loss_k)
            self._note(chosen.index, score, loss.detach(), mean)
        self._change_rate()
        loss.backward()
        if before_update is not None:
            torch.cuda.current_stream().wait_event(before_update)
        if self._books is not None:
            torch.cuda.current_stream().wait_stream(self._books)
        self.optimizer.step()

    def loss_of(self, model: nn.Module, chosen: Examples, weight: Tensor | None) -> Tensor:
        """The loss of these rows under another model, to call `backward` on."""
        return self._loss(model, self.task, chosen.x, chosen.y, weight, self.dtype)[0]

    def count_flops(self, model: nn.Module, x: Tensor, y: Tensor) -> float | None:
        """The forward FLOPs of one of these rows, counted as `Selector` does; None if they cannot be."""
        _, flops = self.scorer.dry_run(
            model, (x, y), len(y), self.needs, discard=True, compare=True
        )
        return flops

    def _change_rate(self) -> None:
        if self.data.device.type == "cuda":  # `note` has set it
            return
        for group in self.optimizer.param_groups:  # as a float, which is float64
            group["lr"] = self.lr_T[self.number].item()
        self.number += 1

    # What is captured: the two kinds of steps.

    def uniform(self) -> None:
        """Train on the next n_b rows, without scoring."""
        chosen = self.take(self.uniform_order, self.generator())
        weight = None if self.row_weight is None else self.row_weight.index_select(0, chosen.index)
        self.learn(chosen, weight)

    def select(self) -> None:
        """Score n_B candidates and train on the n_b chosen ones: lines 2 to 6 of Algorithm 1 (`core`)."""
        with self.timed():
            generator = self.generator()
            candidates = self.take(self.order, generator)
            selection, score_B, mean = self.choose(self.model, candidates, generator)
            weight = selection.weight
            *rows, score = self._chosen(candidates, selection.position, score_B)
            chosen = Examples(*rows)
            if self.live is not None:
                self.live.update(chosen.whole(), weight)
            self.scoring.update(self, chosen, weight)
        self.learn(chosen, weight, score, mean)
