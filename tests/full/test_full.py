"""Slow checks, outside CI: `make test-full`. Its output is committed as tests/full/output.txt."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.il import Irreducible

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]

FIT = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
import rholoss as rho
torch.set_num_threads(1)
x = torch.randn(4000, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x[:, 0] > 0).long())
make = lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
rho.fit_irreducible(make, data, folds=3, epochs=4, batch_size=20, out=sys.argv[1], progress=False)
"""


def test_an_il_fit_that_is_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", FIT, tmp_path / "whole"], check=True)
    whole = time.perf_counter() - start
    moments = random.Random(0)
    kills = 0
    while kills < 20:
        process = subprocess.Popen([sys.executable, "-c", FIT, tmp_path / "killed"])
        try:
            process.wait(timeout=moments.uniform(0.3, 1.0) * whole)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    subprocess.run([sys.executable, "-c", FIT, tmp_path / "killed"], check=True)
    ids = torch.arange(4000)
    a, b = (Irreducible.load(tmp_path / name) for name in ("whole", "killed"))
    print(f"killed {kills} times; an undisturbed run takes {whole:.1f} s")
    assert kills >= 3
    assert torch.equal(a.lookup(ids), b.lookup(ids))
    assert sorted(p.name.split("-")[0] for p in (tmp_path / "killed").iterdir()) == sorted(
        p.name.split("-")[0] for p in (tmp_path / "whole").iterdir()
    )


def test_scoring_through_inductor_chooses_as_eager_scoring_does():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    x, y, il = torch.randn(320, 20), torch.randint(0, 5, (320,)), torch.rand(320)
    chosen = {}
    for compiled in (False, True):
        select = rho.Selector("rho", irreducible=il, keep=0.1, compile=compiled, batch_norm="batch")
        select(model, (torch.arange(320), x, y))
        chosen[compiled] = select(model, (torch.arange(320), x, y))[0].tolist()
    assert len(set(chosen[False]) & set(chosen[True])) >= 31


def test_the_demo_shows_what_it_promises(tmp_path):
    start = time.perf_counter()
    command = [sys.executable, "-m", "rholoss", "demo", "--no-open", "--out", tmp_path / "demo"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    print(run.stdout.split("The whole story")[0])
    print(f"{seconds:.0f} s in all")
    lines = [
        json.loads(line) for line in (tmp_path / "demo" / "runs.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 9
    assert seconds < 120
    table = {line.split("  ")[0].strip(): line for line in run.stdout.splitlines()}
    steps = {name: int(table[name].split()[len(name.split())]) for name in ("Uniform", "RHO-LOSS")}
    assert steps["RHO-LOSS"] <= 0.5 * steps["Uniform"]


def test_the_store_meets_its_figures(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "bench_store.py", "--out", "store.md"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    page = tmp_path / "store.md"
    print(page.read_text())
    rows = {
        line.split("|")[1].strip(): line.split("|")[2]
        for line in page.read_text().splitlines()
        if "|" in line
    }
    assert float(rows["open"].split()[0]) < 50
    assert float(rows["growth of anonymous memory (RssAnon)"].split()[0]) < 100
    assert float(rows["ids looked up a second"].split()[0]) >= 10
