"""A worker's side: scores the steps that it is given with the last weights that it got.

It uses the trainer's own selector, model and loader, made by the same script, so that with the same
weights it chooses what the trainer would choose.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rholoss import data, state
from rholoss.core import Stats
from rholoss.errors import RholossError
from rholoss.indexed import fetch
from rholoss.selector import Selector
from rholoss.steplog import Chosen, StepLog
from rholoss.workers import weights, wire


def same_everywhere(select: Selector, model: nn.Module, sampler: Any) -> dict[str, Any]:
    """What a worker and its trainer must have in common, as JSON has it."""
    return {
        **state.in_common(select),
        "`batch_norm`": select.scorer.batch_norm,
        "the rows of the data set": len(sampler.ids),
        "`batch_size`": sampler.batch_size,
        "the sampler's `seed`": sampler.seed,
        "the shapes of the model": weights.layout(model),
    }


def leaves_of(batch: Any) -> list[Any]:
    """The leaves of a batch in order, as `wire.to_bytes` takes them."""
    found: list[Any] = []

    def keep(path: data.Path, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(np.ascontiguousarray(leaf))
        plain = leaf.item() if isinstance(leaf, np.generic) else leaf
        found.append(plain.cpu() if isinstance(plain, Tensor) else plain)
        return leaf

    data.tree_map(keep, batch)
    return found


def check_carried(batch: Any, rows: int, shared: Sequence[str]) -> None:
    """Raise if a batch holds lists by row: these are not sent, as leaves must be as many at every step."""
    by_row = data.lists_by_row(rows, shared)

    def look(path: data.Path, items: Any) -> bool:
        if by_row(path, items):
            raise RholossError(
                f"{data.path_name(path)} has an entry for each example that is not stacked, which scoring "
                "workers cannot send; let the collator pad and stack it, or select without workers."
            )
        return False

    data.tree_map(lambda path, leaf: leaf, batch, whole=look)


def with_leaves(structure: Any, leaves: list[Any]) -> Any:
    """A batch of that structure with these leaves."""
    left = iter(leaves)

    def put(path: data.Path, leaf: Any) -> Any:
        new = next(left)
        return new.numpy() if isinstance(leaf, np.ndarray) else new

    return data.tree_map(put, structure)


def batch_at(loader: Any, step: int) -> Any:
    """The candidates of a step, as the loader would give them."""
    return loader.collate_fn(fetch(loader.dataset, loader.batch_sampler.at(step)))


def serve(
    connection: Connection,
    number: int,
    select: Selector,
    model: nn.Module,
    loader: Any,
    same: Mapping[str, Any],
) -> int:
    """Score until the trainer is gone; returns how many steps that were."""
    select.log, select.auto_off = StepLog(None), None
    # The dry run comes first, because it takes long and nobody waits for this worker yet.
    select(model, batch_at(loader, select.step))
    try:
        wire.send(connection, {"kind": "hello", "number": number, "same": dict(same)})
        answer, _ = wire.receive(connection)
    except wire.LOST:
        return 0  # a short run may be over before its workers are ready
    if answer["differ"]:
        raise RholossError(
            f"Scoring worker {number} and its trainer differ in {', '.join(answer['differ'])}; make "
            "the selector, the model and the loader in the same way on every rank."
        )
    select.flush_every = 1  # what goes wrong on the device belongs to this step
    statistics = weights.CandidateStatistics(model)
    statistics.keep_only_last()
    seen: list[tuple[Stats, Chosen]] = []
    select.on_scores = [lambda step, stats, chosen: seen.append((stats, chosen))]
    inbox: queue.SimpleQueue[tuple[dict[str, Any], Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, loader, inbox), daemon=True).start()
    known = done = 0
    for head, content in iter(_next(inbox), None):
        if head["kind"] == "weights":
            weights.unpack(model, content)
            known = head["step"]
            continue
        step = select.step = head["step"]
        select.k = head["rows"]
        body: bytes | None = None
        try:
            training = select(model, content.result())
            moved = statistics.read() if select.scorer.batch_norm == "train" else []
            body = _packed(training, *seen.pop(), moved)
            answer = {"kind": "chosen", "step": step, "weights": known}
        except Exception as error:  # if the data is the reason, the trainer will meet it too
            told = f"{type(error).__name__}: {error}"
            answer = {"kind": "failed", "step": step, "error": told}
        try:
            wire.send(connection, answer, body)
        except wire.LOST:
            break
        done += 1
    return done


def _packed(training: Any, stats: Stats, chosen: Chosen, statistics: list[Tensor]) -> bytes:
    """All that a trainer needs to know of a choice that was made here."""
    content = {
        "leaves": leaves_of(training),
        "position": chosen.position,
        "weight": chosen.weight,
        "score_B": chosen.score_B,
        "index": stats.index,
        "measured": dict(stats.measured),
        "statistics": statistics,
    }
    return wire.to_bytes(data.to_device(content, torch.device("cpu")))


def _read(connection: Connection, loader: Any, inbox: queue.SimpleQueue[Any]) -> None:
    """Take in what the trainer sends, and load the rows of a step while another is scored."""
    packed = bytearray()
    with ThreadPoolExecutor(max_workers=max(1, loader.num_workers)) as pool:
        try:
            while True:
                head, body = wire.receive(connection)
                if head["kind"] == "task":
                    inbox.put((head, pool.submit(batch_at, loader, head["step"])))
                    continue
                packed += body
                if head["last"]:
                    inbox.put((head, packed))
                    packed = bytearray()
        except wire.LOST:
            inbox.put(None)


def _next(inbox: queue.SimpleQueue[Any]) -> Callable[[], Any]:
    """The next message; None when the trainer is gone, or whoever watches over this process."""
    parent = os.getppid()

    def wait() -> Any:
        while True:
            try:
                return inbox.get(timeout=1.0)
            except queue.Empty:
                if os.getppid() != parent:
                    return None

    return wait
