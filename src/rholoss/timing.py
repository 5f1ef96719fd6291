"""How long scoring, training and loading take with the user's own model, data and machine."""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, nn
from torch.utils.data import default_collate

from rholoss import core, data, losses
from rholoss.core import Stats
from rholoss.errors import RholossError
from rholoss.il.points import points_of, positive
from rholoss.il.views import own_randomness
from rholoss.indexed import fetch, without_ids
from rholoss.methods import METHODS
from rholoss.modes import PRECISIONS
from rholoss.progress import Bar
from rholoss.scoring import Scorer

KS = (2, 3, 4, 5, 10)
MIN_ROUNDS, MAX_ROUNDS = 3, 50
TRAINING = "training"
BAR_SHARE = 50  # of the bar's 100: there are two sets of timings


@dataclass(frozen=True)
class Timings:
    """What was measured, in seconds (medians).

    Attributes:
        batch: n_b, the rows that a step trains on.
        training: forward, backward and AdamW on n_b rows, the copy to the device included.
        scoring: by k, the copy of k x n_b candidates to the device, their scores, and the choice.
        loading: by k (1 for the uniform step), fetching and collating k x n_b rows in one process.
        rounds: how many timings each median is of.
        flops_per_example: of a forward pass, if it can be counted.
    """

    batch: int
    training: float
    scoring: Mapping[int, float]
    loading: Mapping[int, float]
    rounds: int
    device: str
    parameters: int
    flops_per_example: float | None


def measure(
    model: nn.Module,
    dataset: Any,
    *,
    loss: str | losses.LossFunction = "classification",
    batch: int = 32,
    ks: Sequence[int] = KS,
    device: str | torch.device | None = None,
    precision: str | None = None,
    train_precision: str | None = None,
    batch_norm: str = "train",
    chunk: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    progress: bool = True,
) -> Timings:
    """Time scoring, training and loading with the user's own model and data, on a copy of the model.

    Args:
        model: the target model; it is left as it was.
        dataset: what it is trained on, as it is loaded then, with augmentation if there is any.
        loss, batch_norm, chunk: as for the selector.
        batch: n_b, the rows of a training step.
        ks: candidates for each row that is trained on.
        device: where to run; by default a GPU if there is one.
        precision: of scoring ('bf16', 'fp16'); by default that of training.
        train_precision: autocast of the training step; by default none.
        collate_fn: of the loader.
        seconds: how long to measure, about; at least three rounds are timed whatever they take.
        seed: of the rows that are drawn.
        progress: show a progress bar.
    """
    _check(dataset, batch, ks, train_precision)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    scorer = Scorer(
        loss, batch_norm=batch_norm, precision=precision or train_precision, chunk=chunk
    )
    with own_randomness(where), Bar(100, "measuring", progress) as bar:
        load = _loader(without_ids(dataset), collate_fn, batch, seed)
        target = copy.deepcopy(model).to(where).train()
        candidates = {k: load(k) for k in ks}
        body = data.to_device(candidates[min(ks)], where)
        rows = min(ks) * batch
        try:
            flops = scorer.dry_run(target, body, rows, frozenset({"loss"}), discard=True)[1]
            work = {TRAINING: _training_step(target, load(1), batch, loss, train_precision)}
            for k in ks:
                work[str(k)] = _scoring_step(target, candidates[k], k * batch, batch, scorer)
            warm_up = 3 if where.type == "cuda" else 1
            took, rounds = _medians(work, where, 0.7 * seconds, bar, warm_up=warm_up)
        except torch.OutOfMemoryError:
            raise RholossError(
                f"{where} ran out of memory with `batch`={batch} and {max(ks) * batch} candidates; pass "
                "`chunk` (--chunk) to score fewer at a time, or a smaller `batch` (--batch)."
            ) from None
        by_k = {str(k): functools.partial(load, k) for k in (1, max(ks))}
        loaded, _ = _medians(by_k, torch.device("cpu"), 0.3 * seconds, bar, warm_up=0)
    slope = (loaded[str(max(ks))] - loaded["1"]) / (max(ks) - 1)
    return Timings(
        batch=batch,
        training=took[TRAINING],
        scoring={k: took[str(k)] for k in ks},
        loading={k: max(loaded["1"] + slope * (k - 1), 0.0) for k in (1, *ks)},
        rounds=rounds,
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else str(where),
        parameters=sum(p.numel() for p in model.parameters()),
        flops_per_example=flops,
    )


def row_bytes(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> int:
    """Bytes of one row as the loader gives it."""
    sizes: list[int] = []
    view = without_ids(dataset)
    row = _loader(view, collate_fn, 1, 0)(1)
    data.tree_map(lambda path, leaf: sizes.append(getattr(leaf, "nbytes", 0)), row)
    return sum(sizes)


def _check(dataset: Any, batch: int, ks: Sequence[int], train_precision: str | None) -> None:
    points_of(dataset, "data")
    positive("batch", batch)
    for k in ks:
        positive("ks", k, least=2)
    if train_precision is not None and train_precision not in PRECISIONS:
        raise RholossError(
            f"`train_precision` is {train_precision!r}; choose one of {', '.join(PRECISIONS)}, or None."
        )


def _loader(
    view: Any, collate_fn: Callable[[list[Any]], Any] | None, batch: int, seed: int
) -> Callable[[int], Any]:
    """A function that loads k x `batch` rows at random, as the model knows them."""
    generator, collate = Generator().manual_seed(seed), collate_fn or default_collate

    def load(k: int) -> Any:
        positions = torch.randint(len(view), (k * batch,), generator=generator, device="cpu")
        loaded = collate(fetch(view, positions.tolist()))
        return data.without_index(loaded) if isinstance(loaded, Mapping) else loaded

    return load


def _training_step(
    model: nn.Module, batch: Any, rows: int, loss: str | losses.LossFunction, precision: str | None
) -> Callable[[], None]:
    """A step of AdamW at a rate so small that the weights stay sane however often it runs."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise RholossError(
            "`model` has no parameters that need gradients, so it cannot be trained."
        )
    optimizer, per_example = torch.optim.AdamW(trained, lr=1e-7), losses.by_name(loss)
    device = data.device_of(model)
    dtype = PRECISIONS[precision or "fp32"]

    def step() -> None:
        body = data.to_device(batch, device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss_B = losses.check_per_example(per_example(model, body), rows)
        loss_B.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _scoring_step(
    model: nn.Module, batch: Any, rows: int, chosen: int, scorer: Scorer
) -> Callable[[], None]:
    """What `select` does with a batch of candidates: score them, choose, gather the chosen."""
    device, method, generator = data.device_of(model), METHODS["loss"], Generator()

    def step() -> None:
        body = data.to_device(batch, device)
        stats = Stats(range(rows), scorer.measure(model, body, rows, method.needs))
        selection, _ = core.choose(method, stats, chosen, generator)
        data.take(body, selection.position, rows, strict=False)

    return step


def _medians(
    work: Mapping[str, Callable[[], Any]],
    device: torch.device,
    seconds: float,
    bar: Bar,
    *,
    warm_up: int,
) -> tuple[dict[str, float], int]:
    """Median seconds of each piece of work; in turns, so that a slow moment of the machine hits all."""
    for _ in range(warm_up):
        for run in work.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in work}
    started, rounds, shown = time.perf_counter(), 0, bar.done
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() - started < seconds):
        for name, took in zip(work, _one_round(list(work.values()), device), strict=True):
            times[name].append(took)
        rounds += 1
        past = (time.perf_counter() - started) / seconds if seconds else 1.0
        bar.advance(shown + int(min(past, 1.0) * BAR_SHARE) - bar.done)
    bar.advance(shown + BAR_SHARE - bar.done)
    return {name: statistics.median(values) for name, values in times.items()}, rounds


def _one_round(work: list[Callable[[], Any]], device: torch.device) -> list[float]:
    if device.type == "cuda":
        return _by_events(work, device)
    took = []
    for run in work:
        started = time.perf_counter()
        run()
        if device.type == "mps":
            torch.mps.synchronize()
        took.append(time.perf_counter() - started)
    return took


def _by_events(work: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Times between events: the device is waited for at the end only, as in a training loop."""
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(work) + 1)]
        events[0].record()
        for run, event in zip(work, events[1:], strict=True):
            run()
            event.record()
        torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
