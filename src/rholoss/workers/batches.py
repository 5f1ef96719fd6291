"""The training batches of a trainer, chosen by its workers as far as they keep up."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from rholoss import core, data, modes, picks
from rholoss.core import Stats
from rholoss.errors import RholossError
from rholoss.sampler import CandidateBatches
from rholoss.selector import Selector
from rholoss.steplog import Chosen
from rholoss.workers import serve, weights, wire
from rholoss.workers.crew import Counts, Crew
from rholoss.workers.ranks import NUMBER, Role, environment_of, role_of, watch_child

RESCORE = 3  # rows that workers choose for each that is trained on


class ScoringWorkers:
    """The last `workers` ranks of torchrun score for the others, which train.

        workers = rholoss.ScoringWorkers(3)                  # the first thing that the script does
        ...                                                  # model, data, selector: on every rank
        loader = DataLoader(train, batch_sampler=select.batch_sampler(train, 320))
        batches = workers.batches(select, model, loader)     # scoring ranks stay here to the end
        for index, x, y in batches:                          # chosen rows, as `select` gives them

    From then on RANK and WORLD_SIZE count the trainers alone, so that `init_process_group`, DDP and samplers
    need not know of the workers. A scoring rank only watches a child process, which runs the script again:
    if the rank itself died, torchrun would end the whole run.

    Args:
        workers: how many ranks score; as many for each trainer. 0: nothing changes.
        restarts: how often a worker that died is started again.
    """

    def __init__(self, workers: int, *, restarts: int = 0) -> None:
        self.role = role_of(workers, os.environ)
        changed = environment_of(self.role, os.environ)
        if self.role.number is not None and NUMBER not in os.environ:
            watch_child(self.role, {**os.environ, **changed}, restarts)
            sys.exit(0)
        os.environ.update(changed)

    @property
    def is_worker(self) -> bool:
        """Whether this rank only scores."""
        return self.role.number is not None

    def batches(
        self,
        select: Selector,
        model: nn.Module,
        loader: Any,
        *,
        every: int = 1,
        wait: float = 1.0,
        ahead: int = 2,
        max_stale: int | None = None,
        rescore: int | None = None,
        silence: float = 60.0,
    ) -> Batches:
        """Iterate over the training batches, on a rank that trains.

        On a rank that scores this does not return: it scores until the run is over, and exits.

        Args:
            select: the `Selector`, made in the same way on all ranks.
            model: the target, made in the same way on all ranks. Pass it without DistributedDataParallel, and
                wrap it afterwards.
            loader: gives the candidate batches: a loader with `batch_sampler=select.batch_sampler(...)`.
            every: optimizer steps between two transfers of the weights to workers. With more of them,
                choices are made with older weights, and are worse.
            wait: the seconds to wait for a step that a worker is scoring, before it is scored here.
            ahead: how many steps each worker is given in advance.
            max_stale: the most optimizer steps by which a worker's weights may be old. By default
                2 x `every` + the steps that all workers are given, so that a transfer may take `every` steps.
            rescore: how many rows workers choose for each one that is trained on; among these the trainer
                chooses with its own weights, since choices by old weights can be worse than none. By
                default 3 if the method takes the highest scores of a model, else 1: the rows that workers
                choose are trained on.
            silence: the seconds without an answer after which a worker counts as lost.
        """
        model = modes.unwrapped(model)
        _check(select, model, loader, self.role)
        for name, value, least in (("every", every, 1), ("ahead", ahead, 1), ("wait", wait, 0)):
            if value < least:
                raise RholossError(f"`{name}` is {value}; it must be at least {least}.")
        rescore = _rescore(select, rescore)
        same = serve.same_everywhere(select, model, loader.batch_sampler)
        role = self.role
        if role.number is not None:
            _score_and_exit(role.trainer, role.number, select, model, loader, same)
        in_hand = ahead * role.workers_each
        limit = 2 * every + in_hand if max_stale is None else max_stale
        crew = Crew(same, ahead=ahead, max_stale=limit, silence=silence)
        return Batches(
            select, model, loader, crew, every, wait, role.trainer, role.workers_each, rescore
        )


class Batches:
    """Training batches from the selector's step to the end of the epoch; iterate again for the next.

    A step's candidates are those that the loader would give, whoever scores them. `print(batches)`
    says who did, and how old the weights were.
    """

    def __init__(
        self,
        select: Selector,
        model: nn.Module,
        loader: Any,
        crew: Crew,
        every: int,
        wait: float,
        trainer: int,
        workers: int,
        rescore: int,
    ) -> None:
        self.select, self.model, self.loader, self.crew = select, model, loader, crew
        self.every, self.wait, self.workers, self.rescore = every, wait, workers, rescore
        self._scorer = copy.copy(select.scorer)
        if self._scorer.batch_norm == "train":
            self._scorer.batch_norm = "batch"  # running statistics move by what the worker has seen
        self._statistics = weights.CandidateStatistics(model)
        self._structure: Any = None  # of a training batch; known after the first, chosen here
        self._note: str | None = None  # our line in the ledger's notes
        self._store: Any = None
        self._door: wire.Door | None = None
        if workers:
            listen, told = wire.own_host()
            self._store = wire.meeting_place(hosts=trainer == 0)
            self._door = wire.Door(listen, crew.welcome)
            wire.announce(self._store, trainer, told, self._door)

    @property
    def counts(self) -> Counts:
        """Who scored, how old the weights were, how long was waited."""
        return self.crew.counts

    def __str__(self) -> str:
        return f"{self.counts}; {self.crew.alive} of {self.workers} workers there"

    def __len__(self) -> int:
        return len(self.loader.batch_sampler)

    def wait_for_workers(self, seconds: float) -> bool:
        """Whether all workers are there, at the latest after so many seconds. Training need not wait."""
        return self.crew.wait_for(self.workers, seconds)

    def __iter__(self) -> Iterator[Any]:
        select, length = self.select, len(self)
        end = (select.step // length + 1) * length
        while select.step < end:
            if self._structure is not None and self.crew.alive:
                yield self._next()
                continue
            # There are no workers (yet, or any more): go on without, with the loader's own processes.
            for batch in self.loader:
                yield self._own(batch)
                if self.crew.alive:
                    self.loader.batch_sampler.hand_over()
                    break

    def _next(self) -> Any:
        select, step = self.select, self.select.step
        self.crew.send_weights(step, self.every, lambda: weights.pack(self.model, step))
        if not select.phase(step).score:
            self.crew.hand_out(step, self._rows)
            return self._own(serve.batch_at(self.loader, step), False)
        device = data.device_of(self.model)
        with select.ledger.timed(device):
            self.crew.hand_out(step, self._rows)
            found = self.crew.take(step, self.wait)
        if found is None:
            batch = serve.batch_at(self.loader, step)
            return self._own(batch, counted=True)
        content = data.to_device(wire.from_bytes(found[1]), device)
        training = serve.with_leaves(self._structure, content["leaves"])
        stats = Stats(content["index"], content["measured"])
        position, score_B, rows = content["position"], content["score_B"], len(stats.index)
        if len(position) > select.num_selected(rows):
            with select.ledger.timed(device):
                training, position, score_B = self._rescored(stats, training, position, score_B)
        index = data.take(stats.index, position, rows)
        chosen = Chosen(index, position, content["weight"], score_B)
        self._statistics.move(content["statistics"])
        select.adopt(stats, chosen, rows, rows, scored=True)
        self._tell()
        return training

    def _rescored(
        self, stats: Stats, training: Any, position: Tensor, score_B: Tensor
    ) -> tuple[Any, Tensor, Tensor]:
        """The choice by the newest weights among the rows that a worker chose by older ones."""
        select, rows = self.select, len(position)
        generator = core.step_generator(select.seed, select.step)
        needs = select.method.needs - {"irreducible_loss"}
        seed = self._scorer.seed(needs, generator)
        body, cut = select.body(training), select.cut(training, rows)
        measured = self._scorer.measure(self.model, body, rows, needs, seed=seed, cut=cut)
        if "irreducible_loss" in stats.measured:
            measured["irreducible_loss"] = stats.irreducible_loss[position]
        newest = Stats(data.take(stats.index, position, len(stats.index)), measured)
        k = select.num_selected(len(stats.index))
        again, score = core.choose(select.method, newest, k, generator)
        select.ledger.forwards += rows * self._scorer.passes(needs)
        training = data.take(training, again.position, rows, select.shared)
        return training, position[again.position], score_B.index_copy(0, position, score)

    def _rows(self, step: int) -> int:
        """How many rows a worker is to choose; 0 if the step is not scored."""
        rows = len(self.loader.batch_sampler.at(step)) if self.select.phase(step).score else 0
        return min(rows, self.rescore * self.select.num_selected(rows)) if rows else 0

    def _own(self, batch: Any, counted: bool = False) -> Any:
        """Choose on the trainer; `counted`: the step is in the counts already."""
        if self.workers and not counted and self.select.phase(self.select.step).score:
            self.counts.steps += 1
            self.counts.alone += 1
        if self._structure is None and self.workers:
            serve.check_carried(batch, len(self.select.find_index(batch)), self.select.shared)
        training = self.select(self.model, batch)
        if self._structure is None:
            self._structure = data.tree_map(_kind, training)
        self._tell()
        return training

    def _tell(self) -> None:
        """Warn of what happened to workers, and keep the ledger's line up to date."""
        while self.crew.news:
            warnings.warn(f"step {self.select.step}: {self.crew.news.pop(0)}", stacklevel=4)
        notes = self.select.ledger.notes
        if self._note in notes:
            notes.remove(self._note)
        if self.workers:
            self._note = str(self)
            notes.append(self._note)

    def close(self) -> None:
        """End the workers; that happens by itself when this process ends."""
        if self._door is not None:
            self._door.close()
        self.crew.close()


def _score_and_exit(
    trainer: int, number: int, select: Selector, model: nn.Module, loader: Any, same: dict[str, Any]
) -> NoReturn:
    """What a scoring rank does: it serves its trainer until the run is over, and ends the process."""
    store = wire.meeting_place()
    parent = os.getppid()
    try:
        connection = wire.find(store, trainer, lambda: os.getppid() == parent)
    except wire.LOST as error:
        sys.exit(
            f"rholoss: scoring worker {number} did not reach its trainer ({type(error).__name__}): it is "
            "through already, or no connection leads there."
        )
    if connection is not None:
        serve.serve(connection, number, select, model, loader, same)
    sys.exit(0)


def _rescore(select: Selector, rescore: int | None) -> int:
    method = select.method
    can = method.pick is picks.top_k and bool(method.needs - {"irreducible_loss"})
    if rescore is None:
        return RESCORE if can else 1
    if rescore < 1 or (rescore > 1 and not can):
        raise RholossError(
            f"`rescore` is {rescore} for the method {method.name!r}; it must be at least 1, and 1 where the "
            "method does not take the highest scores of the model."
        )
    return rescore


def _kind(path: data.Path, leaf: Any) -> Any:
    """An empty leaf of the same kind."""
    return leaf[:0] if getattr(leaf, "ndim", 0) > 0 else leaf


def _check(select: Selector, model: nn.Module, loader: Any, role: Role) -> None:
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, CandidateBatches):
        raise RholossError(
            f"`loader` has the batch sampler {type(sampler).__name__}, from which a worker cannot tell "
            "the candidates of a step; pass `DataLoader(dataset, "
            "batch_sampler=select.batch_sampler(dataset, batch_size))`."
        )
    if (sampler.rank, sampler.ranks) != (role.trainer, role.trainers):
        raise RholossError(
            f"The batch sampler was made for rank {sampler.rank} of {sampler.ranks}, but the trainer is "
            f"{role.trainer} of {role.trainers}; make `ScoringWorkers(...)` before the sampler and the "
            "process group."
        )
    if select.ranks.choice != "local":
        raise RholossError(
            f"`choice` is {select.ranks.choice!r}, but scoring workers choose among the candidates of "
            "one trainer; pass choice='local' to the selector."
        )
    if select.source is not None and select.source.state_dict() is not None:
        raise RholossError(
            "The irreducible losses change while it trains (a live model, or a `Ladder`), of which workers "
            "do not hear; pass losses that were measured before and stay."
        )
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise RholossError(
            "The model is sharded (FSDP2), so that a trainer cannot score alone when a worker is late; "
            "use DistributedDataParallel, or `Selector` without scoring workers."
        )
