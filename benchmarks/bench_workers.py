"""Scoring workers: seconds of a step, measured and predicted.

    python benchmarks/bench_workers.py --out benchmarks/results/workers.jsonl     all of it, some minutes
    python benchmarks/bench_workers.py --out ... --only real                      one kind; others stay

Every row is a run of its own under torchrun: one trainer and M workers on this machine, each with one
thread, over the loopback. What a step consists of is measured first, without workers.

emulated   training and scoring sleep for a set time, as a host does while a device of its own works.
           Shows how far the protocol is from what M devices could do.
link       the same with a model of 20 million parameters, whose weights go out every m steps.
slow       the same with 2 million parameters, and a link that is slowed down to 20 MB a second.
real       a small CNN on the processors that all processes share. Shows what one machine gains.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from bench_store import cpu_name
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from experiments.models import SmallCNN
from rholoss.progress import Bar
from rholoss.workers import weights, wire
from rholoss.workers.cost import Prediction, Work, predict

WARM_UP, LINK_BYTES = 20, 256_000_000
RATE = 20e6  # bytes a second of the slow link


class Emulated(nn.Module):
    """A small layer, and parameters that only weigh."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.ballast = nn.Parameter(torch.zeros(parameters))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def slow_down(rate: float) -> None:
    """Let all connections of this process share a link of so many bytes a second."""
    link, plain = threading.Lock(), wire.send

    def slowly(connection: Any, head: Any, body: Any = None) -> None:
        if body is not None:
            with link:
                time.sleep(len(body) / rate)
        plain(connection, head, body)

    wire.send = slowly


def one_run(given: argparse.Namespace) -> None:
    """A rank of one run; the trainer writes what it measured."""
    torch.set_num_threads(1)
    ranks = rho.ScoringWorkers(given.workers)
    if given.rate and not ranks.is_worker:
        slow_down(given.rate)
    torch.manual_seed(0)
    real = given.what == "real"
    x = torch.randn(2048, 3, 32, 32) if real else torch.randn(2048, 16)
    y = torch.randint(4, (2048,))
    model: nn.Module = SmallCNN() if real else Emulated(given.parameters)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(given.scoring)
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    train = rho.WithIndex(TensorDataset(x, y))
    select = rho.Selector("rho", irreducible=torch.rand(2048), k=given.batch, loss=loss)
    loader = DataLoader(train, batch_sampler=select.batch_sampler(train, 10 * given.batch))
    batches = ranks.batches(select, model, loader, every=given.every, rescore=1, wait=30.0)
    trained = [p for name, p in model.named_parameters() if name != "ballast"]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    batches.wait_for_workers(60.0)
    training = started = 0.0
    before: dict[str, Any] = {}

    def steps() -> Iterator[Any]:
        while True:
            yield from batches

    for _, xs, ys in steps():
        mark = time.perf_counter()
        F.cross_entropy(model(xs), ys).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(given.training)
        training += time.perf_counter() - mark
        if select.step == WARM_UP:
            started, training = time.perf_counter(), 0.0
            before = {**vars(batches.counts), "scoring": select.ledger.scoring_seconds}
        if select.step == WARM_UP + given.steps:
            break
    seconds = time.perf_counter() - started
    counts = {name: n - before[name] for name, n in vars(batches.counts).items()}
    scored = max(counts["by_workers"], 1)
    found = {
        "seconds": seconds / given.steps,
        "training": training / given.steps,
        "scoring": (select.ledger.scoring_seconds - before["scoring"]) / given.steps,
        "by_workers": counts["by_workers"] / given.steps,
        "staleness": counts["stale_sum"] / scored,
        "stale_max": batches.counts.stale_max,
    }
    Path(given.out).write_text(json.dumps(found))


def run(what: str, folder: str, **options: Any) -> dict[str, float]:
    """One run under torchrun."""
    out = Path(folder) / "run.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(options["workers"] + 1), __file__, "--what", what, "--out", str(out)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=300, env=environment)
    return json.loads(out.read_text())


def link_speed() -> float:
    """Bytes a second to another process over the loopback, in messages of the size of weights."""
    came: list[Any] = []
    door = wire.Door("127.0.0.1", came.append)
    sink = subprocess.Popen([sys.executable, __file__, "--sink", str(door.port), door.key.hex()])
    try:
        while not came:
            time.sleep(0.05)
        body = memoryview(torch.zeros(LINK_BYTES // 8, dtype=torch.uint8).numpy())
        took = []
        for _ in range(8):
            start = time.perf_counter()
            wire.send(came[0], {"kind": "weights"}, body)
            wire.receive(came[0])
            took.append(time.perf_counter() - start)
        return len(body) / sorted(took)[len(took) // 2]
    finally:
        sink.kill()
        sink.wait()
        door.close()


def sink(port: int, key: str) -> None:
    connection = wire.connect("127.0.0.1", port, bytes.fromhex(key))
    while True:
        wire.receive(connection)
        wire.send(connection, {"kind": "done"})


def packing_seconds(model: nn.Module) -> float:
    took = []
    for _ in range(5):
        start = time.perf_counter()
        weights.pack(model, 0).bytes()
        took.append(time.perf_counter() - start)
    return sorted(took)[2]


def all_runs(steps: int, only: str | None) -> Iterator[dict[str, Any]]:
    """What was measured of each, and what the cost model says from the run without workers."""
    torch.set_num_threads(1)
    small, medium, large = 100_000, 2_000_000, 20_000_000
    kinds = {
        "emulated": ({"training": 0.02, "scoring": 0.06, "parameters": small}, [1, 2, 3, 4], [8]),
        "link": ({"training": 0.02, "scoring": 0.06, "parameters": large}, [2], [1, 4, 16, 64]),
        "slow": ({"training": 0.02, "scoring": 0.06, "parameters": medium}, [2], [1, 4, 16]),
        "real": ({"training": 0.0, "scoring": 0.0, "parameters": 0}, [1, 2], [8]),
    }
    kinds = {what: kind for what, kind in kinds.items() if only in (None, what)}
    total = sum(1 + len(workers) * len(everies) for _, workers, everies in kinds.values()) + 1
    with tempfile.TemporaryDirectory() as folder, Bar(total, "runs") as bar:
        loopback = link_speed()
        # Nothing to score: what is left beside training is what a trainer does to take over a step.
        idle = {"training": 0.02, "scoring": 0.0, "parameters": small, "batch": 32}
        taken = run("emulated", folder, **idle, workers=1, every=8, steps=steps)
        handling = max(taken["seconds"] - taken["training"], 0.0)
        bar.advance()
        for what, (options, workers, everies) in kinds.items():
            model = SmallCNN() if what == "real" else Emulated(options["parameters"])
            batch, link = 8 if what == "real" else 32, RATE if what == "slow" else loopback
            options = {**options, "batch": batch, "steps": steps}
            options["rate"] = RATE if what == "slow" else 0
            alone = run(what, folder, **options, workers=0, every=8)
            bar.advance()
            work = Work(
                training=alone["training"],
                scoring=alone["scoring"],
                loading=max(alone["seconds"] - alone["training"] - alone["scoring"], 0.0),
                weights=weights.num_bytes(model),
                rows=batch * (3 * 32 * 32 * 4 if what == "real" else 16 * 4),
                packing=packing_seconds(model),
                handling=handling,
            )
            yield row(what, work, 0, 8, link, alone)
            for m in workers:
                for every in everies:
                    found = run(what, folder, **options, workers=m, every=every)
                    bar.advance()
                    yield row(what, work, m, every, link, found)


def row(
    what: str, work: Work, workers: int, every: int, link: float, found: dict[str, float]
) -> dict[str, Any]:
    return {
        "what": what,
        "workers": workers,
        "every": every,
        "measured": found,
        "work": vars(work),
        "link": link,
        "processors": os.cpu_count() if what == "real" else None,
    }


def prediction(row: dict[str, Any]) -> Prediction:
    limit = {"processors": row["processors"]} if row["processors"] else {}
    return predict(
        Work(**row["work"]), row["workers"], link=row["link"], every=row["every"], **limit
    )


WORDS = {
    "emulated": "Training and scoring sleep, as a host does while a device of its own works",
    "link": "The same with 20 million parameters: 40 MB of weights for each worker",
    "slow": "The same with 2 million parameters over a link slowed down to 20 MB a second",
    "real": "A small CNN, 8 of 80 candidates, on the processors that all processes share",
}


def page(found: list[dict[str, Any]]) -> str:
    lines = [
        "# A step with scoring workers, measured and predicted",
        "",
        "One trainer and M workers on one machine, one thread each, over the loopback; weights every m "
        "steps. The prediction (`rholoss.workers.cost`) knows the run without workers (M = 0), how long the "
        "trainer handles one task (measured with one worker), the size of the weights and the speed of "
        "the link. Its formula for the weights' age was set after a first look at these rows. Rows: "
        "[workers.jsonl](workers.jsonl). The machine was used by others at the same time.",
        "",
        "It shows how far the protocol is from what M devices could do, that the age of the weights is "
        "bounded, and where the transfer of weights takes over. Where it does, the model predicts the "
        "time of a step, but too small a share of steps done by workers: the trainer also waits for "
        "workers that have just got weights. It cannot show several GPUs, the copy from a GPU to its "
        "host, or a network.",
    ]
    for what, words in WORDS.items():
        rows = [row for row in found if row["what"] == what]
        if not rows:
            continue
        where = f"{rows[0]['host']}, torch {rows[0]['torch']}, Python {rows[0]['python']}, {rows[0]['date']}"
        lines += ["", f"## {words}", "", f"`{rows[0]['command']}`; {where}.", ""]
        lines += ["| M | m | ms a step | predicted | set by | by workers | predicted "]
        lines[-1] += "| weights' age, steps | predicted | oldest |"
        lines += ["|---" * 10 + "|"]
        for row in rows:
            own, said = row["measured"], prediction(row)
            lines.append(
                f"| {row['workers']} | {row['every']} "
                f"| {own['seconds'] * 1e3:.1f} | {said.seconds * 1e3:.1f} "
                f"| {said.bound} | {own['by_workers']:.0%} | {said.by_workers:.0%} | {own['staleness']:.1f} "
                f"| {said.staleness:.1f} | {own['stale_max']} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", choices=("emulated", "link", "slow", "real"))
    parser.add_argument("--page", action="store_true", help="only make the page again")
    parser.add_argument("--sink", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    for name in ("workers", "every", "parameters", "batch"):
        parser.add_argument(f"--{name}", type=int, default=1, help=argparse.SUPPRESS)
    for name in ("training", "scoring", "rate"):
        parser.add_argument(f"--{name}", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sink:
        return sink(int(given.sink[0]), given.sink[1])
    if given.what:
        return one_run(given)
    about = {
        "command": "python benchmarks/bench_workers.py"
        + f" --only {given.only}" * bool(given.only),
        "host": f"{os.cpu_count()} cores, {cpu_name()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    rows: list[dict[str, Any]] = []
    if given.out and given.out.exists() and (given.only or given.page):
        rows = [json.loads(line) for line in given.out.read_text().splitlines()]
        rows = [row for row in rows if row["what"] != given.only]
    for found in [] if given.page else all_runs(given.steps, given.only):
        rows.append({**found, **about})
        said = prediction(found)
        name = f"{found['what']} M={found['workers']} m={found['every']}"
        ms = f"{1e3 * found['measured']['seconds']:.1f} ms, predicted {1e3 * said.seconds:.1f}"
        print(f"{name}: {ms} ({said.bound})")
    if given.out:
        texts = {".jsonl": "".join(json.dumps(row) + "\n" for row in rows), ".md": page(rows)}
        for suffix, text in texts.items():
            temporary = given.out.with_suffix(".tmp")
            temporary.write_text(text)
            temporary.replace(given.out.with_suffix(suffix))


if __name__ == "__main__":
    main()
