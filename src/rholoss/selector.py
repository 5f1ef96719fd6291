"""The call site: `batch = select(model, batch)` turns a candidate batch into a training batch."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rholoss import arguments, core, data, methods, sources, state
from rholoss.arguments import FLUSH_STEPS, Reminders, check_arguments
from rholoss.core import Method, Selection, Stats
from rholoss.distributed import Ranks, Told, place
from rholoss.guard import Guard
from rholoss.ladder import Ladder
from rholoss.ledger import Ledger
from rholoss.losses import LossFunction, check_per_example, target_in
from rholoss.quantities import Quantity
from rholoss.sampler import CandidateBatches, last_rows, uniform_choice
from rholoss.schedules import Phase, Schedule, constant
from rholoss.scoring import Scorer
from rholoss.sources import as_source, known_on_host, limit_of
from rholoss.steplog import Chosen, StepLog
from rholoss.watched import Watched

Tap = Callable[[int, Stats, "Chosen"], None]


class Selector:
    """Selects the rows of each candidate batch that are worth a gradient step.

        select = Selector("rho", irreducible=il, keep=0.1)
        train = rholoss.WithIndex(train_set)
        for batch in DataLoader(train, batch_size=320, shuffle=True, drop_last=True):
            index, x, y = select(model, batch)

    The batch comes back in its own structure, with n_b rows, on the model's device. The first call is a
    dry run that checks everything. On a GPU later calls do not wait for the device, except for a flush
    every `flush_every` steps, which raises if something went wrong there. Each run needs its own selector.

    Args:
        method: a name from `rholoss.METHODS` or a `Method`.
        irreducible: irreducible losses: what `fit_irreducible` or `Irreducible.load` returned, a tensor of
            losses by id, a function from ids to losses, a `Ladder` or a `LiveIrreducible`.
        keep: share of the candidates to select: n_b = round(keep x rows), at least 1. A short last batch
            may give a single row, which BatchNorm cannot train on: hence `drop_last=True`.
        k: the number of rows to select, in place of `keep`.
        loss, batch_norm, dropout, draws, precision, chunk, compile, quantities: see `Scorer`.
        schedule: at which steps to score; by default at all of them, as in the paper. See `annealed`.
        index: a function from a batch to its ids, if these are not where `WithIndex` puts them.
        shared: paths, as error messages name them (`batch[2]`), of parts that belong to all rows.
        seed: of the selector's own randomness, which is a function of (seed, step).
        log: path of a JSON-lines file for the chosen ids and scores; call `flush()` after the last step.
        flush_every: steps between two writes of the log, at most 100.
        on_scores: functions (step, stats, chosen) to call at each step, for TensorBoard and the like.
        auto_off: stop scoring once selection has cost more than this many times everything else.
        il_runs: how many runs share the cost of the irreducible losses, for the ledger.
        choice: with several ranks, 'local' (each among its own candidates, nothing is exchanged) or
            'global' (what one process with all candidates would choose); see `rholoss.distributed`.
    """

    def __init__(
        self,
        method: str | Method = "rho",
        *,
        irreducible: Any = None,
        keep: float | None = None,
        k: int | None = None,
        loss: str | LossFunction = "classification",
        batch_norm: str = "train",
        dropout: bool = False,
        draws: int = 10,
        precision: str | torch.dtype | None = None,
        chunk: int | None = None,
        compile: bool = False,
        quantities: Mapping[str, Quantity] | None = None,
        schedule: Schedule | None = None,
        index: Callable[[Any], Any] | None = None,
        shared: Sequence[str] = (),
        seed: int = 0,
        log: str | os.PathLike[str] | None = None,
        flush_every: int = FLUSH_STEPS,
        on_scores: Iterable[Tap] = (),
        auto_off: float | None = None,
        il_runs: int = 1,
        choice: str = "local",
    ) -> None:
        self.method = methods.by_name(method)
        self.source = as_source(irreducible)
        self.schedule = schedule or constant()
        check_arguments(self.method, self.source, self.schedule, keep, k, flush_every, loss, seed)
        arguments.check_options(index, shared, on_scores, auto_off)
        self.keep, self.k = float(1 if keep is None else keep), None if k is None else int(k)
        self.scorer = Scorer(
            loss, batch_norm=batch_norm, dropout=dropout, draws=draws, precision=precision, chunk=chunk,
            compile=compile, quantities=quantities,
        )  # fmt: skip
        self.find_index = index or data.find_index
        self.shared, self.seed = tuple(shared), int(seed)  # plain: `torch.load` reads no numpy's
        self.flush_every, self.auto_off = flush_every, auto_off
        self.on_scores, self.ranks = list(on_scores), Ranks(choice)
        if isinstance(self.source, Ladder):
            self.on_scores.append(self.source.watcher(self.ranks))
        self.log = StepLog(self.ranks.own_path(log))
        seconds = float(getattr(irreducible, "seconds", 0.0)) if self.reads_irreducible else 0.0
        self.ledger = Ledger(seconds, il_runs)
        if irreducible is not None and not self.reads_irreducible:
            self.ledger.notes.append(f"{self.method.name} reads no irreducible losses")
        self.guard = Guard()
        self.step, self.off = 0, False  # off: by `auto_off`
        self.selection: Chosen | None = None
        self._checked = False  # whether the dry run is done
        self._reminders = Reminders()
        self.sampler: CandidateBatches | None = None
        self.smallest: int | None = None  # rows of the last batch of an epoch, if they are known
        self._saved: dict[str, Any] = {}  # a loaded state, to compare with a later batch sampler

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Select from a candidate batch; returns the training batch, in the same structure."""
        device, phase = data.device_of(model), self.phase(self.step)
        generator = core.step_generator(self.seed, self.step)
        with self.ledger.timed(device, dry_run=not self._checked):
            with self.ranks.together(not self._checked or self.ranks.chooses_together) as told:
                ids, candidates, k, loss_B = self._look_at(model, batch, phase, told)
            told.warn_of_same(self.ranks.rank)
            rows, batch = len(ids), data.to_device(batch, device)
            with self.ranks.together(not self._checked):
                stats = self._measure(model, batch, ids, loss_B, phase, generator)
            stats, k = self.ranks.whole(stats, k, told)
            with self.ranks.together(not self._checked):
                known = loss_B is not None  # and checked, on the host
                selection, score_B = self._choose(stats, k, phase, generator, known)
            place_k = selection.position.to(device, non_blocking=True)
            selection = dataclasses.replace(selection, position=place_k)
            training, selection = self.ranks.share(batch, selection, rows, told, self.shared)
            training = data.without_irreducible(training)
            if phase.score and self.source is not None:
                self.source.update(self.body(training), selection.weight)
        position = selection.position
        if self.find_index is data.find_index:
            index = data.find_index(training)
        else:  # the user's own function may not work on chosen rows
            index = data.take(stats.index, position, len(stats.index))
        chosen = Chosen(index, position, selection.weight, score_B)
        self.adopt(stats, chosen, candidates, rows, scored=phase.score)
        return training

    def _look_at(
        self, model: nn.Module, batch: Any, phase: Phase, told: Told
    ) -> tuple[Any, int, int, Tensor | None]:
        """Check a batch and tell the other ranks of it, before anything is measured.

        Returns its ids; the number of candidates, which is more than its rows where the batch sampler has
        chosen already; how many to select; and the irreducible losses, where the host can look them up.
        """
        if not self._checked:
            self.log.check_new(self.step)
            if self.sampler and self.ranks.size > 1:
                self.sampler.check_ranks(self.ranks.rank, self.ranks.size)
        ids = self.find_index(batch)
        rows = candidates = len(ids)
        if self.sampler and not phase.score:
            candidates = self.sampler.rows_at(self.step)
        k = rows  # chosen already, if they are fewer than the candidates
        if rows >= candidates:
            arguments.check_rows(rows, self.k)
            k = self.num_selected(rows)
        if self.k is None:
            last = None if self._checked else self.smallest  # warned of in time, if it is known
            fewest = candidates if last is None else min(candidates, last)
            self._reminders.of_one_row(model, fewest, self.keep, self.num_selected(fewest))
        loss_B, reads = None, self._reads_irreducible(phase)
        if not self._checked:
            labels = target_in(self.body(batch), self.scorer.loss) if reads else None
            arguments.check_first(self.method, self.source, model, ids, labels)
        if reads:
            carried = data.carried_irreducible(batch)
            arguments.check_source(self.method, self.source, carried)
            loss_B = known_on_host(self.source, ids, carried)
        # Whether no sampler has chosen; of this each rank is sure without asking.
        whole = phase.score or not self.sampler or (self.step == 0 and not self._checked)
        moves = self.ranks.chooses_together and whole
        same = {} if self._checked or self.ranks.size == 1 else state.same_on_ranks(self)
        self.ranks.tell(told, ids, k, batch, self.shared, same, moves)
        return ids, candidates, k, loss_B

    @property
    def reads_irreducible(self) -> bool:
        """Whether irreducible losses are read at any step."""
        return "irreducible_loss" in self.method.needs or self.schedule.drop > 0

    def phase(self, step: int) -> Phase:
        """Whether step number `step` scores its candidates; schedule, method and `auto_off` decide."""
        phase = Phase(score=False) if self.off else self.schedule(step)
        return phase if self.method.needs else Phase(score=False, drop=phase.drop)

    def num_selected(self, rows: int) -> int:
        """How many rows are selected from a candidate batch of `rows`."""
        return core.num_selected(rows, self.keep) if self.k is None else min(self.k, rows)

    def _reads_irreducible(self, phase: Phase) -> bool:
        ahead = phase.score or not self._checked
        return phase.drop > 0 or (ahead and "irreducible_loss" in self.method.needs)

    def _measure(
        self,
        model: nn.Module,
        batch: Any,
        ids: Any,
        loss_B: Tensor | None,
        phase: Phase,
        generator: torch.Generator,
    ) -> Stats:
        """What the method needs, if this step scores; at the first call all of it, as a dry run."""
        needs = self.method.needs - {"irreducible_loss"}
        measured: dict[str, Tensor] = {}
        body, rows, device = self.body(batch), len(ids), data.device_of(model)
        if needs and (phase.score or not self._checked):
            # A dry run of a step that does not score must not draw, or a resumed run would choose otherwise.
            seed = self.scorer.seed(needs, generator) if phase.score else 0
            options: dict[str, Any] = {"seed": seed, "cut": self.cut(batch, rows)}
            if self._checked:
                measured = self.scorer.measure(model, body, rows, needs, **options)
            else:
                measured, self.ledger.flops_per_example = self.scorer.dry_run(
                    model, body, rows, needs, **options, discard=not phase.score, compare=True
                )
        if self._reads_irreducible(phase):
            if loss_B is None:
                loss_B = data.carried_irreducible(batch)
            if loss_B is None and self.source is not None:
                loss_B = self.source.losses(ids, body, device)
            loss_B = check_per_example(loss_B, rows, argument="irreducible")
            measured["irreducible_loss"] = loss_B.to(device, torch.float32, non_blocking=True)
        return Stats(ids, measured)

    def body(self, batch: Any) -> Any:
        """The batch as the model's own code expects it, without ids.

        With an `index` function a tuple stays whole, because it is not known where its ids are.
        """
        whole = self.find_index is not data.find_index and not isinstance(batch, Mapping)
        return batch if whole else data.without_index(batch)

    def cut(self, batch: Any, rows: int) -> Callable[[slice], Any]:
        """A function from a slice of the rows to that part of the batch, as `body` gives it."""
        return lambda part: self.body(data.take(batch, part, rows, self.shared, strict=False))

    def _choose(
        self, stats: Stats, k: int, phase: Phase, generator: torch.Generator, known: bool
    ) -> tuple[Selection, Tensor | None]:
        """The selection, and the scores if any were needed; `known`: irreducible losses are checked."""
        if not phase.score:
            loss_B = stats.irreducible_loss if phase.drop else None
            limit = limit_of(self.source, phase.drop)
            return Selection(uniform_choice(len(stats.index), k, generator, loss_B, limit)), None
        selection, score_B = core.choose(self.method, stats, k, generator)
        check_per_example(score_B, len(stats.index), argument="method.score")
        unsure = None if known else stats.measured.get("irreducible_loss")
        enough = 1 if getattr(self.method.pick, "replacement", False) else k
        self.guard.observe(stats.index, unsure, score_B, enough)
        if score_B.device.type == "cpu" or not self._checked:
            self.guard.read()
        return selection, score_B

    def adopt(
        self, stats: Stats, chosen: Chosen, candidates: int, loaded: int, *, scored: bool
    ) -> None:
        """Count and log a step, and go on to the next; also for a choice that was made elsewhere."""
        points = loaded if scored and self.method.needs - {"irreducible_loss"} else 0
        passes = self.scorer.passes(self.method.needs)
        self.ledger.count(candidates, loaded, len(chosen.position), points, points * passes)
        self._reminders.of_weights(self.method, chosen.weight)
        self.selection, self._checked = chosen, True
        if self.log.path is not None:
            self.log.add(self.step, chosen.index, chosen.score)
        self.step += 1
        for tap in self.on_scores:
            tap(self.step - 1, stats, chosen)
        if self.step % self.flush_every == 0:
            self.flush()
            if self.auto_off is not None and not self.off:
                # On all ranks or on none, as a single one would hang.
                overheads = self.ranks.exchange(self.ledger.overhead)
                self.off = self.ledger.is_dear(overheads, self.auto_off)
                if self.off:
                    warnings.warn(self.ledger.notes[-1], stacklevel=3)

    def flush(self) -> None:
        """Write the log, and raise if something went wrong on the device since the last flush."""
        self.log.flush()
        self.ledger.read_events()
        self.guard.read()

    @property
    def weights(self) -> Tensor | None:
        """Importance weights [k] of the last selection; None if its method has none."""
        self._reminders.unread = False
        return None if self.selection is None else self.selection.weight

    def reduce(self, loss_B: Tensor) -> Tensor:
        """The mean of `loss_B`, one loss per selected row, each times its importance weight if it has one."""
        arguments.check_reducible(loss_B)
        weight = self.weights
        return loss_B.mean() if weight is None else (loss_B * weight).mean()

    def mark(self, value: float) -> None:
        """Note a result, such as an accuracy (higher is better), with step and time in ledger and log."""
        self.log.mark(self.ledger.mark(value), write=self.step > 0)

    def watch(self, loader: Iterable[Any]) -> Watched:
        """The same loader, but the time spent waiting for it goes to the ledger."""
        self.smallest = last_rows(loader) if self.smallest is None else self.smallest
        self._charge(loader)
        return Watched(loader, self.ledger)

    def _charge(self, holder: Any) -> None:
        """Count what irreducible losses cost that a data set, or its loader, joins to the batches."""
        if self.reads_irreducible:
            self.ledger.charge(sources.irreducible_seconds(holder))

    def batch_sampler(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> CandidateBatches:
        """Make a `batch_sampler` for a DataLoader: in uniform steps only the n_b chosen rows are loaded.

        Args:
            dataset: what the loader reads.
            batch_size: n_B, the candidates of a step.
            shuffle: draw a new order in each epoch, from `seed`.
            drop_last: leave out a last batch that is not full.
            seed: of the order.
        """
        self.sampler = CandidateBatches(
            dataset, batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed, ranks=place(),
            step=functools.partial(getattr, self, "step"),  # no lambda: a copy reads its own
            choose=self._choose_ahead,
        )  # fmt: skip
        self._charge(dataset)
        state.check_decides(self._saved, {"candidates": self.sampler.about()})
        self._saved, self.smallest = {}, self.sampler.rows_at(len(self.sampler) - 1)
        return self.sampler

    def _choose_ahead(self, step: int, ids: Any) -> Tensor | None:
        phase = self.phase(step)
        if phase.score or (step == 0 and not self._checked):  # the dry run sees a whole batch
            return None
        loss_B = None
        if phase.drop and self.source is not None:
            loss_B = self.source.losses(ids, None, torch.device("cpu"))
        k, generator = self.num_selected(len(ids)), core.step_generator(self.seed, step)
        return uniform_choice(len(ids), k, generator, loss_B, limit_of(self.source, phase.drop))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to make the same choices."""
        self.flush()
        return state.saved(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state; the log is cut back to that step.

        What choices depend on must be the same: the method, `keep` or `k`, the irreducible losses, the
        batch sampler. The schedule may change.
        """
        state.restore(self, saved)
        self._saved = {} if self.sampler else saved
