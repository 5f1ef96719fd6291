"""Cheaper scoring against exact scoring: do the scores agree, and does the run end as well?

    python -m benchmarks.bench_agreement scores --data DIR [--steps 1000] [--moments 100 400 700]
    python -m benchmarks.bench_agreement train  --data DIR [--steps 1500] [--seeds 0] [--compile]

`scores` trains ResNet-18 on CIFAR-10 by exact RHO-LOSS; at every step each option scores the same candidates
at the same weights, along with the run. At the moments named: Spearman's rank correlation with the exact
scores (a candidate that an option leaves out ranks last) and the share of exact RHO's choice that the option
would have chosen too, means of LOOKS steps. `train` trains by each option: milliseconds a step (median over
chunks of CHUNK steps) and final test accuracy at equal steps, learning rate up and down to zero.
`--small` takes the digits of the demo and small models instead, which a CPU can do.
Each row is appended to `--out` as it is measured; rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.problems import Setup, cifar, digits
from torch import Generator, Tensor, nn

from experiments import records
from rholoss.engine import (
    Cheaper,
    Evaluator,
    Folded,
    Gate,
    LowerResolution,
    Proxy,
    Recorded,
    Reuse,
    Shortlist,
    Trainer,
    one_cycle,
)
from rholoss.engine.ahead import Ahead
from rholoss.engine.cheaper import Measured
from rholoss.engine.folded import RECENT
from rholoss.engine.replica import Replica
from rholoss.engine.resident import Examples

RESULTS = Path(__file__).parent / "results" / "agreement.jsonl"
LOOKS = 10  # steps that a figure of agreement is the mean of
CHUNK = 50  # steps between two looks at the clock
EXACT, REPLAY = "exact", "replay"


@dataclass(frozen=True)
class Option:
    """A way to score: what is passed as `scoring`, and further arguments of the trainer."""

    scoring: Callable[[Setup], Cheaper | None] = lambda setup: None
    trainer: dict[str, Any] = field(default_factory=dict)


# One row of the page each. A new option is one more line.
OPTIONS = {
    EXACT: Option(),
    "eval BatchNorm": Option(trainer={"batch_norm": "eval"}),
    "folded": Option(lambda setup: Folded(), {"batch_norm": "eval"}),
    "overlapped": Option(trainer={"overlap": True}),
    "overlapped, ahead": Option(trainer={"overlap": "ahead"}),
    "folded and overlapped": Option(
        lambda setup: Folded(), {"batch_norm": "eval", "overlap": True}
    ),
    "folded, recent statistics": Option(lambda setup: Folded(RECENT), {"batch_norm": "eval"}),
    "folded, recent statistics, overlapped": Option(
        lambda setup: Folded(RECENT), {"batch_norm": "eval", "overlap": True}
    ),
    "folded, recent statistics, overlapped, ahead": Option(
        lambda setup: Folded(RECENT), {"batch_norm": "eval", "overlap": "ahead"}
    ),
    "folded, statistics of 32": Option(lambda setup: Folded(rows=32)),
    "half resolution": Option(lambda setup: LowerResolution(2)),
    "proxy": Option(lambda setup: Proxy(setup.small)),
    "reuse, half forwarded": Option(lambda setup: Reuse(0.5)),
    "gate, three quarters forwarded": Option(lambda setup: Gate(0.75)),
    "gate, half forwarded": Option(lambda setup: Gate(0.5)),
    "gate 75 %, folded and overlapped": Option(
        lambda setup: Gate(0.75, by=Folded()), {"batch_norm": "eval", "overlap": True}
    ),
    "gate 75 %, folded, recent statistics": Option(
        lambda setup: Gate(0.75, by=Folded(RECENT)), {"batch_norm": "eval"}
    ),
    "shortlist of 60 %": Option(lambda setup: Shortlist(0.6)),
    **{
        f"shortlist of {share} %, folded, recent statistics": Option(
            lambda setup, share=share: Shortlist(share / 100, by=Folded(RECENT)),  # type: ignore[misc]
            {"batch_norm": "eval"},
        )
        for share in (75, 60, 50, 40)
    },
    **{
        f"shortlist of {share} %, folded, recent statistics, overlapped, ahead": Option(
            lambda setup, share=share: Shortlist(share / 100, by=Folded(RECENT)),  # type: ignore[misc]
            {"batch_norm": "eval", "overlap": "ahead"},
        )
        for share in (75, 60)
    },
    "uniform": Option(trainer={"method": "uniform", "irreducible": None}),
}


class OneStepOld(Cheaper):
    """What overlapped scoring sees: the weights before the last update, or where those were to lead."""

    def __init__(self, inner: Cheaper, overlap: bool | str = True) -> None:
        self.inner, self.overlap, self.only_forwarded = inner, overlap, inner.only_forwarded

    def attach(self, step: Any) -> None:
        self.ahead = Ahead(step.model) if self.overlap == "ahead" else None
        if self.ahead is not None:
            step.copied = self.ahead.model
        self.inner.attach(step)
        low = step.scorer.dtype or torch.float32
        self.old = self.inner.replica(step) or Replica(step.copied, low)
        self._refresh()

    def _refresh(self) -> None:
        if self.ahead is not None:
            self.ahead.look()
        self.old.refresh_statistics()
        self.old.refresh_weights()

    def measure(
        self, step: Any, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        found = self.inner.measure(step, self.old.model, candidates, generator)
        self._refresh()  # for the next step, after this one's update
        return found


class Compared(Cheaper):
    """Exact scoring, with options that score the same candidates along with it and decide nothing."""

    learns = True

    def __init__(self, passengers: dict[str, tuple[Cheaper, str]]) -> None:
        self.passengers = passengers  # each with its BatchNorm mode

    def attach(self, step: Any) -> None:
        self.views = []
        for option, batch_norm in self.passengers.values():
            # A step of its own kind for each. Who only looks must not move running statistics.
            view = copy.copy(step)
            view.scorer = copy.copy(step.scorer)
            view.scorer.batch_norm = "batch" if batch_norm == "train" else batch_norm
            option.attach(view)
            self.views.append((option, view))
        size, device = step.order.size, step.data.device
        self.scores = torch.zeros(1 + len(self.views), size, device=device)  # the exact ones first
        self.open = torch.ones_like(self.scores, dtype=torch.bool)  # who may be chosen

    def measure(
        self, step: Any, model: nn.Module, candidates: Examples, generator: Generator
    ) -> Measured:
        exact = step.measure(model, candidates.x, candidates.y, generator)
        irreducible = step.irreducible.index_select(0, candidates.index)
        self.scores[0].copy_(exact["loss"] - irreducible)
        for row, (option, view) in enumerate(self.views, start=1):
            found, forwarded = option.measure(view, model, candidates, generator)
            self.scores[row].copy_(found["loss"] - irreducible)
            if option.only_forwarded and forwarded is not None:
                self.open[row].zero_().index_fill_(0, forwarded, True)
        return exact, None

    def update(self, step: Any, chosen: Examples, weight: Tensor | None) -> None:
        for option, view in self.views:
            option.update(view, chosen, weight)


def ranks(values: Tensor) -> Tensor:
    """Ranks, the mean rank where values are alike."""
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[which].double()


def agreement(exact_B: Tensor, score_B: Tensor, k: int, open_B: Any = True) -> tuple[float, float]:
    """Spearman's correlation, and the share of the k best that are among the k best who may be chosen."""
    score_B = score_B.nan_to_num(nan=-torch.inf)
    spearman = torch.corrcoef(torch.stack([ranks(exact_B), ranks(score_B)]))[0, 1]
    score_B = torch.where(torch.as_tensor(open_B), score_B, -torch.inf)
    best, chosen = (set(s.topk(k).indices.tolist()) for s in (exact_B, score_B))
    return float(spearman), len(best & chosen) / k


def trainer(setup: Setup, steps: int, seed: int, **options: Any) -> Trainer:
    torch.manual_seed(seed)
    model = setup.model().to(memory_format=torch.channels_last)
    options = {"irreducible": setup.irreducible, **options}
    return Trainer(
        model,
        setup.train,
        total_steps=steps,
        candidates=setup.candidates,
        keep=setup.k / setup.candidates,
        learning_rate=one_cycle(2e-3, steps),
        precision=setup.precision,
        compile=setup.compile,
        seed=seed,
        **options,
    )


def compare_scores(
    setup: Setup, names: list[str], steps: int, moments: list[int], seed: int
) -> list[dict[str, Any]]:
    """Agreement of each of these options at each moment of one exact run."""
    passengers = {}
    for name in names:
        option = OPTIONS[name]
        inner = option.scoring(setup) or Cheaper()
        overlap = option.trainer.get("overlap")
        scoring = OneStepOld(inner, overlap) if overlap else inner
        passengers[name] = (scoring, option.trainer.get("batch_norm", "train"))
    compared = Compared(passengers)
    run, rows = trainer(setup, steps, seed, scoring=compared), []
    for moment in moments:
        run.train(max(0, moment - LOOKS - run.step))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in passengers}
        for _ in range(LOOKS):
            run.train(1)
            exact_B, *others = compared.scores.cpu()
            for name, score_B, open_B in zip(
                passengers, others, compared.open[1:].cpu(), strict=True
            ):
                found[name].append(agreement(exact_B, score_B, setup.k, open_B))
        for name, pairs in found.items():
            spearman, shared = (statistics.fmean(values) for values in zip(*pairs, strict=True))
            figures = {"spearman": round(spearman, 4), "shared": round(shared, 4)}
            rows.append({"option": name, "moment": moment, **figures})
    run.flush()
    return rows


def train(setup: Setup, name: str, steps: int, seed: int, log: Path) -> dict[str, Any]:
    """One run by an option; exact runs are logged, so that they can be replayed."""
    torch.manual_seed(seed)
    if name == REPLAY:
        run = trainer(setup, steps, seed, scoring=Recorded(log))
    else:
        option = OPTIONS[name]
        more = {"log": log} if name == EXACT else {}
        run = trainer(setup, steps, seed, scoring=option.scoring(setup), **option.trainer, **more)
    marks = []
    while run.step < steps:
        num = min(CHUNK, steps - run.step)
        started = time.perf_counter()
        run.train(num)
        if setup.train.device.type == "cuda":
            torch.cuda.synchronize()
        marks.append((time.perf_counter() - started) / num)
    run.flush()
    result = Evaluator(
        run.model, setup.test, num_classes=int(setup.test.targets.max()) + 1, batch_size=1000,
        capture=False, precision=setup.precision,
    )()  # fmt: skip
    return {
        "option": name,
        # Without the first chunks, which compile and capture.
        "ms": round(1000 * statistics.median(marks[2:] or marks), 4),
        "accuracy": round(100 * result.accuracy, 3),
        "scored": run.ledger.scored,
        "forwards": run.ledger.forwards,
        "captured": run.captured[bool(run.method.needs)].graph is not None,
    }


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mode", choices=("scores", "train"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--moments", type=int, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--candidates", type=int, default=320)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--options", nargs="+", choices=[*OPTIONS, REPLAY])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bf16", action="store_true", default=torch.cuda.is_available())
    arguments = parser.parse_args(words)
    arguments.steps = arguments.steps or {"scores": 1000, "train": 1500}[arguments.mode]
    steps = arguments.steps
    # Not at the end, where the learning rate is 0: weights that are a step old are the weights there.
    arguments.moments = sorted(arguments.moments or [steps // 10, 2 * steps // 5, 7 * steps // 10])
    apart = all(b - a >= LOOKS for a, b in itertools.pairwise([0, *arguments.moments]))
    if arguments.mode == "scores" and not (apart and arguments.moments[-1] <= steps):
        parser.error(f"`--moments` must be in {LOOKS}..{steps}, the steps, and {LOOKS} apart.")
    arguments.options = arguments.options or [*OPTIONS, REPLAY]
    return arguments


def main(words: list[str] | None = None) -> None:
    arguments = parsed(words)
    torch._dynamo.config.cache_size_limit = 64  # one process, many shapes
    same = {
        "mode": arguments.mode,
        "data": "digits" if arguments.small else "CIFAR-10",
        "noise": 0.1 if arguments.small else arguments.noise,
        "steps": arguments.steps,
        "candidates": arguments.candidates,
        "k": arguments.k,
        "compile": arguments.compile,
    }
    there = [row for row in records.read(arguments.out) if same.items() <= row.items()]
    done = {(row["option"], row["seed"], row.get("moment")) for row in there}
    setup = digits(arguments) if arguments.small else cifar(arguments)

    def keep(seed: int, row: dict[str, Any]) -> None:
        if (row["option"], seed, row.get("moment")) in done:
            return
        about = records.about("benchmarks.bench_agreement")
        records.append(arguments.out, {**same, "seed": seed, **row, **about})
        print({"seed": seed, **row}, flush=True)

    moments = arguments.moments if arguments.mode == "scores" else [None]
    for seed in arguments.seeds:
        names = [n for n in arguments.options if any((n, seed, m) not in done for m in moments)]
        if arguments.mode == "scores":
            names = [name for name in names if name not in (EXACT, REPLAY, "uniform")]
            how = (arguments.steps, arguments.moments, seed)
            for row in compare_scores(setup, names, *how) if names else ():
                keep(seed, row)
            continue
        if REPLAY in names and EXACT not in names:
            names = [EXACT, *names]  # there must be something to replay
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                try:
                    row = train(setup, name, arguments.steps, seed, Path(folder) / "log.jsonl")
                except Exception as error:  # the other options still count
                    print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                keep(seed, row)


if __name__ == "__main__":
    main()
