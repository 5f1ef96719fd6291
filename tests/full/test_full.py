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


def names(folder):
    return sorted(path.name.split("-")[0] for path in folder.iterdir())


def test_il_fits_killed_20_times_at_random_end_as_an_undisturbed_one(tmp_path):
    """Each run goes on where the killed one stopped; whenever one ends, its result is looked at."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", FIT, tmp_path / "whole"], check=True)
    whole = time.perf_counter() - start
    expected = Irreducible.load(tmp_path / "whole").lookup(torch.arange(4000))
    moments = random.Random(0)
    kills = ends = 0
    while kills < 20 or ends == 0:
        process = subprocess.Popen([sys.executable, "-c", FIT, tmp_path / str(ends)])
        try:
            process.wait(timeout=moments.uniform(0.4, 1.0) * whole if kills < 20 else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0
        found = Irreducible.load(tmp_path / str(ends)).lookup(torch.arange(4000))
        assert torch.equal(found, expected)
        assert names(tmp_path / str(ends)) == names(tmp_path / "whole")
        ends += 1
    print(f"killed {kills} times, ended {ends} times; an undisturbed run takes {whole:.1f} s")


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
