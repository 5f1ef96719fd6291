"""What a large store of irreducible losses costs: opening it, looking ids up, memory.

python benchmarks/bench_store.py --out benchmarks/results/store.md
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from rholoss.il.store import Irreducible

TARGETS = {"open": "< 50 ms", "memory": "< 100 MB", "rate": ">= 10 million"}


def anonymous_memory() -> int:
    """RssAnon of this process in bytes: memory that is its own and not a mapped file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(path: Path, rows: int) -> None:
    """A store of random losses, written in the usual way."""
    losses = np.random.default_rng(0).random(rows, dtype=np.float32)
    Irreducible.from_losses(losses).save(path)


def measure(path: Path, lookups: int, ids_per_lookup: int) -> dict[str, float]:
    """Open the store once and look up random ids; the ids are drawn between the timed look-ups."""
    started = time.perf_counter()
    il = Irreducible.load(path)
    seconds_open = time.perf_counter() - started
    generator = torch.Generator().manual_seed(0)
    il.lookup(torch.zeros(ids_per_lookup, dtype=torch.int64))  # torch's own start-up memory
    before, seconds, checked = anonymous_memory(), 0.0, 0.0
    for _ in range(lookups):
        ids = torch.randint(len(il), (ids_per_lookup,), generator=generator)
        started = time.perf_counter()
        il.lookup(ids)
        between = time.perf_counter()
        il.check(ids)
        seconds, checked = seconds + between - started, checked + time.perf_counter() - between
    ids_in_all = lookups * ids_per_lookup
    return {
        "open": 1e3 * seconds_open,
        "memory": (anonymous_memory() - before) / 1e6,
        "rate": ids_in_all / seconds / 1e6,
        "check": ids_in_all / checked / 1e6,
    }


def page(figures: dict[str, float], arguments: argparse.Namespace, command: str) -> str:
    rows, count, size = arguments.rows, arguments.lookups, arguments.ids
    return f"""# Store of irreducible losses: {rows:,} rows

    {command}

{os.cpu_count()} cores, {cpu_name()}; Python {platform.python_version()}, torch {torch.__version__}, \
numpy {np.__version__}, {torch.get_num_threads()} threads; {datetime.now(UTC):%Y-%m-%d}

| {count:,} look-ups of {size:,} random ids | measured | target |
|---|---|---|
| open | {figures["open"]:.1f} ms | {TARGETS["open"]} |
| growth of anonymous memory (RssAnon) | {figures["memory"]:.1f} MB | {TARGETS["memory"]} |
| ids looked up a second | {figures["rate"]:.1f} million | {TARGETS["rate"]} |
| ids checked a second (`check`, just after the look-up) | {figures["check"]:.1f} million | |

The file was in the page cache (it had just been written) but not mapped yet: the first touch of each
page is part of the look-ups.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--lookups", type=int, default=10_000)
    parser.add_argument("--ids", type=int, default=4096, help="ids in each look-up")
    parser.add_argument("--out", type=Path, help="write the result to this Markdown file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # In another process, so that the memory it took is not counted as free room here.
        child = os.fork()
        if child == 0:
            write(Path(folder) / "il", arguments.rows)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit("the store could not be written")
        figures = measure(Path(folder) / "il", arguments.lookups, arguments.ids)
    text = page(figures, arguments, " ".join(["python benchmarks/bench_store.py", *sys.argv[1:]]))
    print(text)
    if arguments.out:
        temporary = arguments.out.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, arguments.out)


if __name__ == "__main__":
    main()
