"""Irreducible losses at scale: scoring in parts against a bare loop, and stores that are very large.

    python benchmarks/bench_il_scale.py --out benchmarks/results/il_scale.jsonl      all of it
    python benchmarks/bench_il_scale.py --only scoring --workers 4 --rows 500000     one of it

scoring   rows a second of `score_irreducible` on one rank, everything kept in parts and merged into a store,
          against a loop over the same loader settings that only runs the model. Target: 95 %. Medians over
          rounds of both; on a CPU that others use too, many short ones (`--rows 8000 --rounds 9`).
billion   a store of a billion rows (a sparse file): time to open it, look-ups, memory of its own.
keys      100 million string keys: parts of hashed keys merged into one store; peak of memory of its own while
          merging, for a tenth of the keys and for all of them; look-ups of keys by their strings.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from bench_store import anonymous_memory, cpu_name
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from experiments import records
from experiments.models import SmallCNN
from rholoss import Irreducible, score_irreducible
from rholoss.il import files
from rholoss.il.parts import ENTRY, Merged, Parts, entries_of


class Images(Dataset[Any]):
    """Images that are made up of 4,096 that exist, fetched many at a time."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(4096, 3, 32, 32, generator=generator)
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.x[row % 4096], row % 10

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, int]]:
        return [self[row] for row in rows]


def bare(
    model: torch.nn.Module, data: Images, batch_size: int, workers: int, device: torch.device
) -> None:
    """A loop that only runs the model."""
    loader = DataLoader(data, batch_size, num_workers=workers, pin_memory=device.type == "cuda")
    with torch.no_grad():
        for x, y in loader:
            F.cross_entropy(
                model(x.to(device, non_blocking=True)),
                y.to(device, non_blocking=True),
                reduction="none",
            )
    if device.type == "cuda":
        torch.cuda.synchronize()


def scoring(rows: int, batch_size: int, workers: int, rounds: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, data = SmallCNN().eval().to(device), Images(rows)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def ours(number: int) -> None:
        options: dict[str, Any] = {"num_workers": workers, "progress": False, "ranks": True}
        out = folder / f"il{number}"
        found = score_irreducible(model, data, batch_size=batch_size, out=out, **options)
        assert found.meta["measured"] == rows

    def theirs(number: int) -> None:
        bare(model, data, batch_size, workers, device)

    bare(model, Images(10 * batch_size), batch_size, workers, device)  # warm
    took: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        # In turn, and each of them first as often, because the machine may be busy, and get busier.
        for loop in (ours, theirs)[:: 1 if number % 2 else -1]:
            wall, cpu = time.perf_counter(), time.process_time()
            loop(number)
            took[loop.__name__].append((time.perf_counter() - wall, time.process_time() - cpu))
    dist.destroy_process_group()
    walls, cpus = (
        [b[clock] / a[clock] for a, b in zip(took["ours"], took["theirs"], strict=True)]
        for clock in (0, 1)
    )
    return {
        "rows": rows,
        "batch_size": batch_size,
        "workers": workers,
        "rounds": rounds,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "rows_a_second": rows / statistics.median(wall for wall, _ in took["ours"]),
        "bare_rows_a_second": rows / statistics.median(wall for wall, _ in took["theirs"]),
        "share": statistics.median(walls),
        "share_quartiles": _quartiles(walls),
        # Time that others take from this process does not count; nor do the loader's own processes.
        "share_of_cpu_time": statistics.median(cpus),
        "share_of_cpu_time_quartiles": _quartiles(cpus),
    }


def _quartiles(shares: list[float]) -> list[float]:
    if len(shares) == 1:
        return 2 * shares
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    return [low, high]


def billion(rows: int, folder: Path) -> dict[str, Any]:
    store = folder / "billion"
    meta = {"rows": rows, "measured": rows, "identity": None, "loss": "given"}
    written = files.write_store(store, meta, {"loss": lambda file: file.truncate(4 * rows)})
    values = np.memmap(store / written["files"]["loss"], np.float32, "r+")
    values[[0, rows // 2, rows - 1]] = [1.0, 2.0, 3.0]
    values.flush()
    del values
    ids = [np.random.default_rng(i).integers(rows, size=4096) for i in range(1000)]
    before, started = anonymous_memory(), time.perf_counter()
    il = Irreducible.load(store)
    opened = time.perf_counter() - started
    assert il.lookup([0, rows // 2, rows - 1, rows])[:3].tolist() == [1.0, 2.0, 3.0]
    started = time.perf_counter()
    for some in ids:
        il.lookup(some)
    seconds = time.perf_counter() - started
    return {
        "rows": rows,
        "open_ms": 1000 * opened,
        "lookups_a_second": 4096 * len(ids) / seconds,
        "own_memory_mb": (anonymous_memory() - before) / 1e6,
        "file_mb_on_disk": (store / written["files"]["loss"]).stat().st_blocks * 512 / 1e6,
    }


def merge_keys(rows: int, folder: Path) -> dict[str, Any]:
    """Parts of hashed keys become a store, in a process of its own."""
    folder.mkdir()
    parts, generator, part = Parts(folder, "0"), np.random.default_rng(0), 2**18
    known = [f"sample-{i}" for i in range(1000)]
    units = []
    for number, low in enumerate(range(0, rows, part)):
        entries = np.zeros(min(part, rows - low), ENTRY)
        entries["key"] = generator.integers(2**64, size=len(entries), dtype=np.uint64)
        entries["loss"] = 1.0
        if number == 0:
            entries[:1000] = entries_of(known, np.arange(1000, dtype=np.float32))
        units.append(f"u{number}")
        parts.write(units[-1], 0, entries, keyed=True, last=True, seconds=0.0)
    before, started = anonymous_memory(), time.perf_counter()
    peak = 0
    merged = Merged(path for unit in units for path in parts.of(unit)[0])
    ids, measured, _ = merged.count()
    writers = merged.writers(ids, labels=False)
    watched = {}
    for kind, write in writers.items():

        def with_peak(file: Any, write: Any = write) -> None:
            nonlocal peak

            class Watching:
                def write(self, content: bytes) -> None:
                    nonlocal peak
                    peak = max(peak, anonymous_memory() - before)
                    file.write(content)

            write(Watching())

        watched[kind] = with_peak
    meta = {"rows": ids, "measured": measured, "identity": None, "loss": "given"}
    files.write_store(folder / "store", meta, watched)
    merging = time.perf_counter() - started
    started = time.perf_counter()
    il = Irreducible.load(folder / "store")
    opened = time.perf_counter() - started
    assert il.lookup(known).tolist() == [float(i) for i in range(1000)]
    assert il.lookup(["not there"]).isnan().all()
    started = time.perf_counter()
    for _ in range(200):
        il.lookup(known)
    return {
        "rows": rows,
        "distinct": ids,
        "merge_seconds": merging,
        "merge_peak_mb": peak / 1e6,
        "open_ms": 1000 * opened,
        "lookups_a_second": 200 * 1000 / (time.perf_counter() - started),
    }


def _options(given: argparse.Namespace) -> str:
    named = {name: value for name, value in vars(given).items() if value and name != "out"}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in named.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=["scoring", "billion", "keys"])
    parser.add_argument("--rows", type=int, default=100_000, help="of scoring")
    parser.add_argument("--batch-size", type=int, default=320)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5, help="of scoring, both loops in each")
    parser.add_argument("--keys", type=int, default=100_000_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    about = {
        "command": f"python benchmarks/bench_il_scale.py {_options(given)}".strip(),
        "host": f"{os.cpu_count()} cores, {cpu_name()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": str(datetime.now(UTC).date()),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {
            "scoring": lambda: [
                scoring(given.rows, given.batch_size, given.workers, given.rounds, folder)
            ],
            "billion": lambda: [billion(10**9, folder)],
            "keys": lambda: [
                merge_keys(rows, folder / str(rows)) for rows in (given.keys // 10, given.keys)
            ],
        }
        for job, work in jobs.items():
            if given.only in (None, job):
                for found in work():
                    record = {"what": job, **found, **about}
                    print(json.dumps(record), flush=True)
                    if given.out:
                        records.append(given.out, record)


if __name__ == "__main__":
    main()
