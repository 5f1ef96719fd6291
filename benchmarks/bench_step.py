"""What a training step costs: uniform and RHO-LOSS, eager and as one CUDA graph, CIFAR ResNet-18.

    python benchmarks/bench_step.py [--out benchmarks/results/step.jsonl] [--steps 300] [--rows NAME ...]
    python benchmarks/bench_step.py --tunings  # some of them laid out in other ways, beside the usual one

Each row is one way to take a step, timed by events around every step, median of `--steps` (evaluation
excluded; data resident on the device; images of CIFAR's size made at random, since no time depends on what
they show). Prints a table with the FLOP floor and appends each row to `--out` as it is measured.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

import rholoss as rho
from experiments import records
from experiments.models import ResNet18
from rholoss.engine import CropFlip, Folded, Resident, Shortlist, Trainer
from rholoss.engine.folded import RECENT
from rholoss.engine.tuning import Tuning
from rholoss.errors import RholossError

FORWARD_FLOPS = 2 * 0.556e9  # of one image
PEAK_FLOPS = 790e12  # bf16 matrix product measured on an H200
ROWS = 25_000

COMBINED, STEPPED = {"combo_kernels": True}, {"coordinate_descent_tuning": True}
# triton.cooperative_reductions is not among them: inductor then splits no reduction into two kernels, and
# shares only those of at most 16 results among blocks. A BatchNorm layer would keep few blocks busy.
# Other ways to lay a step out. "uniform 32; products, books beside" is that row with these two.
WAYS: dict[str, dict] = {
    "books beside": {"books_beside": True},
    "products": {"products": "all"},
    "products in scoring": {"products": "scoring"},
    "sums": {"sums": "all"},
    "sums in scoring": {"sums": "scoring"},
    "combined": {"scoring": COMBINED, "training": COMBINED},
    "combined in scoring": {"scoring": COMBINED},
    "stepped": {"scoring": STEPPED, "training": STEPPED},
    "stepped in scoring": {"scoring": STEPPED},
    "autotuned in scoring": {"scoring": {"max_autotune": True, **STEPPED}},  # compiles for minutes
    "sort compiled": {"compiled_sort": True},
    "side level": {"side_priority": -1},
    "side first": {"side_priority": -2},
    # What a process has tried it does not try again: a run of its own.
    "all algorithms": {"algorithms": 0},
}
TRIED = {  # by `--tunings`: the rows whose targets are near, and what may reach them
    "uniform 32": [
        "books beside", "products", "combined", "stepped", "products, books beside",
        "products, combined, books beside",
    ],
    "uniform 128": ["books beside", "products", "combined", "products, books beside"],
    "rho 128 of 512, folded and overlapped": [
        "side level", "side first", "sort compiled", "books beside", "products", "combined",
        "side first, sort compiled, books beside", "side first, sort compiled, books beside, products",
    ],
    "rho 32 of 320": [
        "products in scoring", "combined in scoring", "stepped in scoring", "sort compiled",
        "products in scoring, stepped in scoring, sort compiled",
        "products, combined, stepped, sort compiled, books beside", "autotuned in scoring",
    ],
}  # fmt: skip


def tuning(ways: str) -> Tuning:
    """Of the names of ways, with commas between them."""
    options: dict = {}
    for way in ways.split(", "):
        for name, value in WAYS[way].items():
            one = isinstance(value, dict)
            options[name] = {**options.get(name, {}), **value} if one else value
    return Tuning(**options)


def resident(dtype: torch.dtype) -> Resident:
    generator = torch.Generator().manual_seed(0)
    return Resident(
        torch.randint(0, 256, (ROWS, 3, 32, 32), dtype=torch.uint8, generator=generator),
        torch.randint(0, 10, (ROWS,), generator=generator),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        augment=CropFlip(),
        dtype=dtype,
    )


def events_ms(step, steps: int, warm_up: int) -> list[float]:
    for _ in range(warm_up):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def engine(method: str, candidates: int, k: int, *, scoring=lambda: None, **options):
    def make(steps: int):
        model = ResNet18().to(memory_format=torch.channels_last)
        trainer = Trainer(
            model,
            resident(torch.bfloat16),
            total_steps=steps + 100,
            method=method,
            irreducible=torch.rand(ROWS) if method == "rho" else None,
            candidates=candidates,
            keep=k / candidates,
            precision="bf16",
            compile=True,
            scoring=scoring(),
            **options,
        )

        def step() -> None:
            trainer.train(1)
            if trainer.why_eager:  # nor is a row what its name says
                raise RholossError(f"The step is not captured: {trainer.why_eager}")

        scores = method != "uniform" and not options.get("overlap")
        return step, (trainer.time_scoring if scores else None)

    return make


def authors_way(method: str, candidates: int, k: int):
    """Eager float32 in the plain layout, through `Selector`, without tf32: how the authors' code runs."""

    def make(steps: int):
        data, model = resident(torch.float32), ResNet18().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        select = rho.Selector(method, irreducible=torch.rand(ROWS), k=k)
        generator = torch.Generator("cuda").manual_seed(0)

        def step() -> None:
            rows = torch.randint(0, ROWS, (candidates,), generator=generator, device="cuda")
            x, y = data.batch(rows, data.draw(len(rows), generator))
            _, x, y = select(model, (rows, x.contiguous(), y))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step, None

    return make


def _recent() -> Folded:
    return Folded(RECENT)


def _following() -> Folded:
    return Folded(0.5, means=64)


def _shortlist(share: float, by: Callable[[], Folded]) -> Shortlist:
    return Shortlist(share, by=by())


def table() -> dict[str, tuple]:
    """By name: what makes the step, how many rows it scores and on how many it trains."""
    folded = {"batch_norm": "eval", "scoring": Folded}
    recent = {"batch_norm": "eval", "scoring": _recent}
    following = {"batch_norm": "eval", "scoring": _following}
    ahead = {**following, "overlap": "ahead"}
    kinds: dict[str, dict] = {
        "": {},
        ", overlapped": {"overlap": True},
        ", overlapped, ahead": {"overlap": "ahead"},
        ", eval BatchNorm": {"batch_norm": "eval"},
        ", folded": folded,
        ", folded and overlapped": {**folded, "overlap": True},
        ", folded, recent statistics": recent,
        ", folded, recent statistics, overlapped": {**recent, "overlap": True},
        ", folded, following means": following,
        ", folded, following means, overlapped, ahead": ahead,
        ", folded, statistics of 32": {"scoring": functools.partial(Folded, rows=32)},
    }
    shares: dict[str, float] = {}
    for percents, kind, options in (
        ((75, 60, 50), ", folded, recent statistics", recent),
        ((90, 85, 80), ", folded, following means, overlapped, ahead", ahead),
    ):
        for percent in percents:
            name, share = f", shortlist of {percent} %{kind}", percent / 100
            by = options["scoring"]
            shares[name] = share
            kinds[name] = {**options, "scoring": functools.partial(_shortlist, share, by)}
    rows: dict[str, tuple] = {}
    for k, candidates in ((32, 320), (32, 128), (128, 512), (128, 1280)):
        rows[f"uniform {k}"] = (functools.partial(engine, "uniform", candidates, k), 0, k)
        for kind, options in kinds.items():
            make = functools.partial(engine, "rho", candidates, k, **options)
            forwarded = round(shares.get(kind, 1.0) * candidates)
            rows[f"rho {k} of {candidates}{kind}"] = (make, forwarded, k)
    for method, name, scored in (("rho", "rho 32 of 320", 320), ("uniform", "uniform 32", 0)):
        make = functools.partial(authors_way, method, 320, 32)
        rows[f"{name}, eager float32"] = (make, scored, 32)
    return rows


def row(name: str) -> str:
    """A name of the table, or one with ways behind it."""
    base, _, ways = name.partition("; ")
    if base not in table() or not all(way in WAYS for way in ways.split(", ") if ways):
        known = f"{', '.join(table())}; behind a semicolon any of {', '.join(WAYS)}"
        raise argparse.ArgumentTypeError(f"{name!r} is not known; choose among {known}.")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", nargs="+", type=row, metavar="NAME")
    parser.add_argument("--tunings", action="store_true", help="rows laid out in other ways")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Steps are timed by a GPU's own clock, and there is no GPU here.")
    known = table()
    tried = [n for base, ways in TRIED.items() for n in (base, *(f"{base}; {w}" for w in ways))]
    names = [*(arguments.rows or []), *(tried if arguments.tunings else [])] or [*known]
    torch._dynamo.config.cache_size_limit = 64  # one process, many shapes
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(datetime.date.today()),
        "started": datetime.datetime.now().isoformat(
            timespec="minutes"
        ),  # rows of one run go together
        "command": f"python benchmarks/bench_step.py --steps {arguments.steps}"
        + (" --tunings" if arguments.tunings else "")
        + "".join(
            [" --rows", *(f' "{name}"' for name in arguments.rows)] if arguments.rows else []
        ),
    }
    for name in names:
        base, _, ways = name.partition("; ")
        make, scored, trained = known[base]
        torch.manual_seed(0)
        started, breaks = time.perf_counter(), sum(counters["graph_break"].values())
        try:
            made = make(tuning=tuning(ways)) if ways else make()
            step, time_scoring = made(arguments.steps)
            times = events_ms(step, arguments.steps, 20)
            scoring = None if time_scoring is None else round(1000 * time_scoring(), 4)
        except Exception as error:  # the other rows still count
            print(f"{name:60} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        floor = FORWARD_FLOPS * (scored + 3 * trained) / PEAK_FLOPS * 1000
        record = {
            "row": name,
            "ms": round(statistics.median(times), 4),
            "p90": round(sorted(times)[int(0.9 * len(times))], 4),
            "floor_ms": round(floor, 4),
            "scoring_ms": scoring,  # gather, score and choose as a graph of their own
            "graph_breaks": sum(counters["graph_break"].values()) - breaks,  # of what was compiled
            "setup_s": round(time.perf_counter() - started, 1),
            **about,
        }
        print(
            f"{name:60} {record['ms']:8.3f} ms  p90 {record['p90']:.3f}  floor {floor:.3f}"
            + (f"  scoring {scoring:.3f} ({scoring / record['ms']:.0%})" if scoring else "")
            + (f"  {record['graph_breaks']} graph breaks" if record["graph_breaks"] else ""),
            flush=True,
        )
        if arguments.out:
            records.append(arguments.out, record)


if __name__ == "__main__":
    main()
