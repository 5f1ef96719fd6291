"""What `select` costs beyond the forward pass itself.

    python benchmarks/bench_select.py [--device cuda] [--out benchmarks/results/select_cpu.md]

Times `select(model, batch)` against the bare scoring forward (`no_grad`, same mode), for the same model and
batch, in turns, waiting for the device after each call. On a GPU the last rows do not wait: with a model that
keeps the device busy the host runs ahead, and what is left is the cost on the device.
Targets: CPU 1 ms at 320 candidates, 5 ms at 4096; GPU 0.2 ms at 320.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import rholoss as rho

ROUNDS, WARM_UP = 400, 30


def small_model() -> nn.Module:
    """Cheap enough that the cost of selecting is not lost in the noise of the forward pass."""
    return nn.Sequential(nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def deep_model() -> nn.Module:
    """62 modules, as many as a ResNet-18 has: walking them is part of the cost."""
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(15)]
    return nn.Sequential(nn.Linear(128, 32), *blocks, nn.Linear(32, 10))


def heavy_model() -> nn.Module:
    """Keeps a GPU busy for milliseconds: the host runs ahead, and only time on the device counts."""
    width = 8192
    return nn.Sequential(
        nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def forward_only(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), y, reduction="none")


def seconds(function, device: torch.device) -> tuple[float, float]:
    """Host seconds of one call, and seconds until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    host = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize()
    return host, time.perf_counter() - start


def behind_the_queue(select, model, batch, device: torch.device, calls: int = 50) -> float:
    """Milliseconds beyond the forward pass when the device, not the host, sets the pace."""
    _, x, y = batch
    total = {}
    for _ in range(2):  # the first round warms up
        for name, function in (
            ("select", lambda: select(model, batch)),
            ("forward", lambda: forward_only(model, x, y)),
        ):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                function()
            torch.cuda.synchronize(device)
            total[name] = (time.perf_counter() - start) / calls
    return 1000 * (total["select"] - total["forward"])


def candidates(make_model, rows: int, device: torch.device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 128, generator=generator).to(device)
    y = torch.randint(10, (rows,), generator=generator).to(device)
    ids = torch.randperm(50_000, generator=generator)[:rows]  # from the loader, on the CPU
    ids = ids.pin_memory() if device.type == "cuda" else ids
    model = make_model().to(device)
    select = rho.Selector("rho", irreducible=torch.rand(50_000), keep=0.1)
    return select, model, (ids, x, y)


def measure(make_model, rows: int, device: torch.device) -> dict[str, float]:
    select, model, (ids, x, y) = candidates(make_model, rows, device)
    times: dict[str, list[float]] = {
        "select": [],
        "forward": [],
        "select_host": [],
        "forward_host": [],
    }
    for round_ in range(ROUNDS + WARM_UP):
        pair = {
            "select": lambda: select(model, (ids, x, y)),
            "forward": lambda: forward_only(model, x, y),
        }
        for name, function in pair.items():
            host, total = seconds(function, device)
            if round_ >= WARM_UP and (select.step % select.flush_every):  # the flush is told apart
                times[name].append(total)
                times[name + "_host"].append(host)
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def table(device: torch.device) -> list[str]:
    lines = [
        "| model | candidates | select ms | forward ms | **beyond the forward, ms** | on the host, ms |",
        "|---|---|---|---|---|---|",
    ]
    for make_model in (small_model, deep_model):
        for rows in (320, 4096):
            t = measure(make_model, rows, device)
            lines.append(
                f"| {make_model.__name__} | {rows} | {t['select']:.3f} | {t['forward']:.3f} | "
                f"**{t['select'] - t['forward']:.3f}** | {t['select_host'] - t['forward_host']:.3f} |"
            )
            print(lines[-1], flush=True)
    if device.type == "cuda":
        for rows in (320, 4096):
            cost = behind_the_queue(*candidates(heavy_model, rows, device), device)
            lines.append(
                f"| heavy_model, not waiting between calls | {rows} | | | **{cost:.3f}** | |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    lines = [
        "# What `select` costs beyond the forward pass",
        "",
        f"`python benchmarks/bench_select.py --device {arguments.device}`; {name}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {datetime.date.today()}. Median of {ROUNDS} calls, RHO-LOSS, 10 % "
        "kept, float32; every 100th call, which flushes, left out.",
        "",
        *table(device),
        "",
        "Targets: CPU at most 1 ms at 320 candidates and 5 ms at 4096; GPU at most 0.2 ms at 320.",
    ]
    if device.type == "cuda":
        lines += [
            "",
            "The first rows wait for the device after each call, so they show what the host does: launching "
            "a dozen kernels, and some Python. A loop that is bound by launches pays that. "
            "The last rows show a loop in which the device is busy and the host runs ahead.",
        ]
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        temporary = arguments.out.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n")
        os.replace(temporary, arguments.out)


if __name__ == "__main__":
    main()
