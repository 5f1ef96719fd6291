"""A trainer's side: who its workers are, which step each of them is scoring, and what came back.

Two threads for each worker read and write, so that the trainer itself never waits for a connection;
it waits for a step that a worker has in hand, and no longer than it was told to.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from rholoss.workers import wire
from rholoss.workers.weights import Snapshot

OFTEN, OLD = 100, 1.0  # after so many choices, warn if their weights were older than so many steps
_OLD = (
    "workers choose by weights that are {:.1f} steps old on average. To these, what has been corrected since "
    "still looks wrong, and the run may end below a uniform one: compare. Younger weights: a smaller `every` "
    "or `ahead`, or fewer workers; a larger `rescore` corrects more of it (docs/many-processes.md)."
)


@dataclass
class Counts:
    """What became of the steps of one trainer.

    Attributes:
        steps: steps that were scored, here or by a worker.
        by_workers: steps whose rows a worker chose.
        alone, held, late, failed: steps that the trainer scored itself, because there was no worker
            (yet, or any more); no worker was free, or the weights of all were too old; the answer did
            not come in time; the worker could not do it.
        stale_sum, stale_max: by how many optimizer steps the weights of `by_workers` were behind.
        sent, overdue: snapshots that began to go to a worker; and how often, at a step, one should
            have begun, but the last one was still on the way.
        gone: workers that were lost.
        waited: seconds that the trainer waited for workers.
    """

    steps: int = 0
    by_workers: int = 0
    alone: int = 0
    held: int = 0
    late: int = 0
    failed: int = 0
    stale_sum: int = 0
    stale_max: int = 0
    sent: int = 0
    overdue: int = 0
    gone: int = 0
    waited: float = 0.0

    @property
    def staleness(self) -> float:
        """By how many steps the weights were behind, on average."""
        return self.stale_sum / max(self.by_workers, 1)

    def __str__(self) -> str:
        reasons = {"alone": self.alone, "held": self.held, "late": self.late, "failed": self.failed}
        own = ", ".join(f"{name} {number}" for name, number in reasons.items() if number)
        parts = [f"workers chose {self.by_workers} of {self.steps} scored steps"]
        if self.by_workers:
            parts.append(f"weights {self.staleness:.1f} steps old (at most {self.stale_max})")
        if own:
            parts.append(f"own scoring: {own}")
        parts.append(f"waited {self.waited:.1f} s")
        return "; ".join(parts + [f"{self.gone} workers lost"] * bool(self.gone))


@dataclass(eq=False)
class Link:
    """One worker, as its trainer knows it."""

    number: int
    connection: Connection
    outbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    tasks: set[int] = field(default_factory=set)  # given, and not answered yet
    void: list[int] = field(default_factory=list)  # whose answer is not wanted any more
    weights: int | None = None  # step of the last snapshot that was sent completely
    started: int | None = None  # step of the last snapshot whose transfer has begun
    sending: bool = False  # whether that transfer is still under way
    late: bool = False  # whether it is behind; it gets nothing new until it answers
    heard: float = 0.0  # when it last answered, or was given a task while it had none


class Crew:
    """The workers of one trainer. All of it may be called at any time, with any number of them.

    Args:
        same: what a worker must have in common with its trainer.
        ahead: steps that each worker has in hand: one that it scores, others that it loads.
        max_stale: no step is given to a worker whose weights would be older.
        silence: seconds without an answer after which a worker counts as lost.
    """

    def __init__(
        self, same: Mapping[str, Any], *, ahead: int, max_stale: int, silence: float
    ) -> None:
        self.same, self.ahead, self.max_stale, self.silence = same, ahead, max_stale, silence
        self.counts, self.news = Counts(), list[str]()  # what the trainer has to say to its user
        self._links: list[Link] = []
        self._given: dict[int, Link] = {}  # who has a step in hand
        self._results: dict[int, tuple[dict[str, Any], bytes]] = {}
        self._failed: set[int] = set()
        self._step = 0  # of the trainer
        self._changed = threading.Condition()

    @property
    def alive(self) -> int:
        """Workers that are there."""
        with self._changed:
            return len(self._links)

    def wait_for(self, workers: int, seconds: float) -> bool:
        """Whether so many workers are there, at the latest after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._links) >= workers, seconds)

    def welcome(self, connection: Connection) -> None:
        """A worker has come; runs in a thread of its own, which then reads what it answers."""
        link = Link(-1, connection)
        try:
            hello, _ = wire.receive(connection)
            link.number = hello["number"]
            differ = [name for name, own in self.same.items() if hello["same"].get(name) != own]
            if differ:
                with self._changed:
                    self.news.append(
                        f"scoring worker {link.number} was turned away: {', '.join(differ)} differ"
                    )
            wire.send(connection, {"kind": "welcome", "differ": differ})
            if differ:
                return
            link.heard = time.monotonic()
            with self._changed:
                self._links.append(link)
                self._changed.notify_all()
            threading.Thread(target=self._write, args=(link,), daemon=True).start()
            while True:
                self._heard(link, *wire.receive(connection))
        except wire.LOST as error:
            self._lose(link, str(error) or "connection closed")
        finally:
            link.outbox.put(None)

    def _write(self, link: Link) -> None:
        """Send what is in the outbox; tasks overtake the pieces of a snapshot."""
        pieces: deque[tuple[dict[str, Any], Any]] = deque()
        try:
            while True:
                try:
                    message = link.outbox.get(block=not pieces)
                except queue.Empty:
                    head, piece = pieces.popleft()
                    wire.send(link.connection, head, piece)
                    if head["last"]:
                        with self._changed:
                            link.sending, link.weights = False, head["step"]
                    continue
                if message is None:
                    return
                if isinstance(message, Snapshot):
                    pieces.extend(message.pieces())
                else:
                    wire.send(link.connection, message)
        except wire.LOST as error:
            self._lose(link, str(error))

    def _heard(self, link: Link, head: dict[str, Any], body: bytes) -> None:
        step = head["step"]
        with self._changed:
            link.heard, link.late = time.monotonic(), False
            if step in link.void:  # answers come in the order of the tasks
                link.void.remove(step)
                return
            link.tasks.discard(step)
            if self._given.get(step) is link:
                del self._given[step]
            if head["kind"] == "failed":
                self._failed.add(step)
                self.news.append(f"scoring worker {link.number} failed: {head['error']}")
            else:
                self._results[step] = (head, body)
            self._changed.notify_all()

    def _lose(self, link: Link, why: str) -> None:
        with self._changed:
            if link in self._links:
                self._links.remove(link)
                self._release(link)
                self.counts.gone += 1
                left = len(self._links)
                rest = f"{left} left" if left else "none is left, this trainer scores itself"
                self.news.append(f"scoring worker {link.number} is gone ({why}); {rest}")
                self._changed.notify_all()
        wire.hang_up(link.connection)  # after it was counted, or the other thread would say why

    def _release(self, link: Link) -> None:
        """Let others have what a worker had in hand."""
        self._given = {step: other for step, other in self._given.items() if other is not link}

    def _go_back(self) -> None:
        """An earlier state was loaded: weights and choices of later steps do not belong to this run."""
        self._given, self._results, self._failed = {}, {}, set()
        for link in self._links:
            link.void += sorted(link.tasks)
            link.tasks, link.started, link.weights = set(), None, None

    def send_weights(self, step: int, every: int, make: Callable[[], Snapshot]) -> None:
        """Give each worker the weights of now, if its last ones are `every` steps old.

        A snapshot that is still on the way is not given up for a newer one: it would never arrive.
        """
        with self._changed:
            if step < self._step:
                self._go_back()
            self._step = step
            due = [k for k in self._links if k.started is None or step - k.started >= every]
            free = [link for link in due if not link.sending]
            self.counts.overdue += len(due) - len(free)
        if not free:
            return
        snapshot = make()
        with self._changed:
            for link in free:
                link.sending, link.started = True, step
                link.outbox.put(snapshot)
                self.counts.sent += 1

    def hand_out(self, step: int, rows: Callable[[int], int]) -> None:
        """Give the next steps to workers that have room for them.

        `rows` says how many they are to choose; of a step that is not scored, none.
        """
        now, silent = time.monotonic(), []
        with self._changed:
            silent = [k for k in self._links if k.tasks and now - k.heard > self.silence]
        for lost in silent:
            self._lose(lost, f"no answer for {self.silence:g} s")
        with self._changed:
            # What came too late for its step.
            self._results = {t: found for t, found in self._results.items() if t >= step}
            for t in range(step, step + self.ahead * len(self._links)):
                if t in self._given or t in self._results or t in self._failed or not rows(t):
                    continue
                link = min(filter(self._room(t), self._links), key=_load, default=None)
                if link is None:
                    break  # a later step must not take a worker's room before an earlier one
                if not link.tasks:
                    link.heard = now
                link.tasks.add(t)
                self._given[t] = link
                link.outbox.put({"kind": "task", "step": t, "rows": rows(t)})

    def _room(self, step: int) -> Callable[[Link], bool]:
        def has_room(link: Link) -> bool:
            if link.late or link.weights is None or len(link.tasks) >= self.ahead:
                return False
            # Below 0: weights from before an earlier state was loaded.
            return 0 <= step - link.weights <= self.max_stale

        return has_room

    def take(self, step: int, wait: float) -> tuple[dict[str, Any], bytes] | None:
        """What a worker chose for this step; None, and counted why, if the trainer has to do it."""
        start = time.monotonic()
        with self._changed:
            self.counts.steps += 1
            while step not in self._results and step in self._given:
                left = start + wait - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self.counts.waited += time.monotonic() - start
            found = self._results.pop(step, None)
            stale = 0 if found is None else step - found[0]["weights"]
            if found is not None and stale <= self.max_stale:
                self._count_choice(stale)
                return found
            if found is not None:
                self.counts.held += 1
            elif step in self._given:
                self._give_up(self._given[step], wait)
            elif step in self._failed:
                self.counts.failed += 1
            elif self._links:
                self.counts.held += 1
            else:
                self.counts.alone += 1
            self._failed.discard(step)
            return None

    def _count_choice(self, stale: int) -> None:
        """Count a step that a worker chose for, by weights that are so many steps old."""
        counts = self.counts
        counts.by_workers += 1
        counts.stale_sum += stale
        counts.stale_max = max(counts.stale_max, stale)
        if counts.by_workers == OFTEN and counts.staleness > OLD:
            self.news.append(_OLD.format(counts.staleness))

    def _give_up(self, link: Link, wait: float) -> None:
        """Do not wait any longer for what this worker has in hand."""
        link.late = True
        self._release(link)
        self.counts.late += 1
        if self.counts.late == 1:
            self.news.append(
                f"scoring worker {link.number} did not answer within {wait:g} s; this trainer scores such "
                "steps itself, and counts them as late"
            )

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            links, self._links = self._links, []
        for link in links:
            link.outbox.put(None)
            wire.hang_up(link.connection)


def _load(link: Link) -> int:
    return len(link.tasks)
