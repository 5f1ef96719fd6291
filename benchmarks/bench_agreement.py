"""Cheaper scoring against exact scoring: do the scores agree, and does the run end as well?

    python -m benchmarks.bench_agreement scores --data DIR [--steps 1000] [--moments 100 400 700]
    python -m benchmarks.bench_agreement train  --data DIR [--steps 1500] [--seeds 0] [--compile]

`scores` trains ResNet-18 on CIFAR-10 by each option. At the moments named exact scoring looks at the same
candidates, at the weights that are trained: Spearman's rank correlation of the two (a candidate that is left
out ranks last), and the share of exact RHO's choice that the option chose too, means of LOOKS steps. `train`
trains by each option to the end: milliseconds a step (median over chunks of CHUNK steps) and final accuracy
on the test set at equal steps, learning rate up and down to zero.
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
from rholoss.engine.folded import RECENT
from rholoss.engine.resident import Examples
from rholoss.errors import RholossError

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
    "folded, following means": Option(lambda setup: Folded(0.5, means=64), {"batch_norm": "eval"}),
    "folded, following means, overlapped, ahead": Option(
        lambda setup: Folded(0.5, means=64), {"batch_norm": "eval", "overlap": "ahead"}
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
        f"shortlist of {share} %, folded, following means, overlapped, ahead": Option(
            lambda setup, share=share: Shortlist(share / 100, by=Folded(0.5, means=64)),  # type: ignore[misc]
            {"batch_norm": "eval", "overlap": "ahead"},
        )
        for share in (90, 85, 80)
    },
    "uniform": Option(trainer={"method": "uniform", "irreducible": None}),
}


def ranks(values: Tensor) -> Tensor:
    """Ranks, the mean rank where values are alike."""
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[which].double()


def agreement(exact_B: Tensor, score_B: Tensor, chosen: Tensor) -> tuple[float, float]:
    """Spearman's correlation, and the share of the best by exact scoring that are among the chosen."""
    score_B = score_B.nan_to_num(nan=-torch.inf)
    spearman = torch.corrcoef(torch.stack([ranks(exact_B), ranks(score_B)]))[0, 1]
    best = set(exact_B.topk(len(chosen)).indices.tolist())
    return float(spearman), len(best & set(chosen.tolist())) / len(best)


class Watched:
    """A run by an option, and what exact scoring says of the same candidates at the same weights.

    Those that the chosen are trained at: which is where overlapped scoring, a step before, was not yet. It
    is a run of the option's own, for its statistics of BatchNorm are moved by what it does itself.
    """

    def __init__(self, run: Trainer) -> None:
        self.run, self.body = run, run.body
        self.exact = copy.deepcopy(run.model)
        self.seen: dict[str, Tensor] = {}
        self._choose = run.body.choose
        run.body.choose = self._noted  # type: ignore[method-assign]

    def _noted(self, model: nn.Module, candidates: Examples, generator: Generator) -> Any:
        selection, score_B, mean = self._choose(model, candidates, generator)
        index, x, y = candidates.index, candidates.x, candidates.y
        noted = {"index": index, "x": x, "y": y, "score": score_B, "chosen": selection.position}
        for name, tensor in noted.items():  # in a graph, too: to where the first step has put it
            self.seen.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        return selection, score_B, mean

    def leave(self) -> None:
        """Let go of the run, which would hold itself, and its graphs' memory, until Python looks for such."""
        del self.body.choose

    def look(self) -> tuple[float, float]:
        """Take a step, and compare."""
        if self.run.overlapped is None:  # else it is the next step's choice that is seen
            self.exact.load_state_dict(self.run.model.state_dict())
        self.run.train(1)
        if self.run.overlapped is not None:
            self.exact.load_state_dict(self.run.model.state_dict())
        seen, generator = self.seen, torch.Generator(self.run.data.device)
        self.exact.train()
        measured = self.body.measure(
            self.exact, seen["x"], seen["y"], generator, batch_norm="batch"
        )
        exact_B = measured["loss"] - self.body.irreducible.index_select(0, seen["index"])
        return agreement(exact_B.cpu(), seen["score"].cpu(), seen["chosen"].cpu())


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
    setup: Setup, name: str, steps: int, moments: list[int], seed: int
) -> list[dict[str, Any]]:
    """Agreement of this option at each moment of a run by it."""
    option, rows = OPTIONS[name], []
    run = trainer(setup, steps, seed, scoring=option.scoring(setup), **option.trainer)
    watched = Watched(run)
    try:
        for moment in moments:
            run.train(max(0, moment - LOOKS - run.step))
            pairs = [watched.look() for _ in range(LOOKS)]
            spearman, shared = (statistics.fmean(values) for values in zip(*pairs, strict=True))
            figures = {"spearman": round(spearman, 4), "shared": round(shared, 4)}
            rows.append({"option": name, "moment": moment, **figures})
        run.flush()
    finally:
        watched.leave()
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
            if run.why_eager:  # it would be timed as if it were
                raise RholossError(f"The step is not captured: {run.why_eager}")
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
    here = {**same, "device": records.device()}
    there = [row for row in records.read(arguments.out) if here.items() <= row.items()]
    done = {(row["option"], row["seed"], row.get("moment")) for row in there}
    moments = arguments.moments if arguments.mode == "scores" else [None]
    todo = {
        seed: [n for n in arguments.options if any((n, seed, m) not in done for m in moments)]
        for seed in arguments.seeds
    }
    if arguments.mode == "scores":
        apart = (EXACT, REPLAY, "uniform")
        todo = {seed: [n for n in names if n not in apart] for seed, names in todo.items()}
    if not any(todo.values()):
        print(f"All rows are in {arguments.out}; `--out FILE` makes them again, in another file.")
        return
    setup = digits(arguments) if arguments.small else cifar(arguments)

    def keep(seed: int, row: dict[str, Any]) -> None:
        if (row["option"], seed, row.get("moment")) in done:
            return
        about = records.about("benchmarks.bench_agreement")
        records.append(arguments.out, {**same, "seed": seed, **row, **about})
        print({"seed": seed, **row}, flush=True)

    for seed, names in todo.items():
        if arguments.mode == "train" and REPLAY in names and EXACT not in names:
            names = [EXACT, *names]  # there must be something to replay
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                log = Path(folder) / "log.jsonl"
                try:
                    if arguments.mode == "scores":
                        rows = compare_scores(setup, name, arguments.steps, arguments.moments, seed)
                    else:
                        rows = [train(setup, name, arguments.steps, seed, log)]
                except Exception as error:  # the other options still count
                    print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                for row in rows:
                    keep(seed, row)


if __name__ == "__main__":
    main()
