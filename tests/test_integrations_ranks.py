"""Every loop on two processes (DDP, gloo): each rank chooses among its own candidates, as `core` does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures_integrations import (
    LEARNING_RATE,
    ROWS,
    TRAINED,
    Classifier,
    irreducible,
    points,
)
from torch.nn import functional as F

from rholoss import core

HERE = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def launch(folder, loop, *how):
    """What each rank wrote."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *how, str(HERE / "ranks_loops.py"), loop, str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def check(ranks, folder):
    """Two micro-batches a step on each rank; all four are one gradient, of the weights before it."""
    x, y = points()
    net = Classifier().net
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for step in range(0, 8, 2):
        trained = []
        for micro in (step, step + 1):
            for rank in ranks:
                index = torch.tensor(rank["candidates"][micro])
                measured = core.measure(net, x[index], y[index], 1, 0)
                best = (measured["loss"] - irreducible()[index]).topk(TRAINED // 2).indices
                assert rank["chosen"][micro] == index[best].tolist()
                trained += rank["chosen"][micro]
        optimizer.zero_grad()
        F.cross_entropy(net(x[trained]), y[trained]).backward()
        optimizer.step()
    for rank in ranks:
        assert len(rank["chosen"]) == 8
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, rank["weights"][name], rtol=1e-5, atol=1e-6)
    first = [{row for batch in rank["candidates"][:4] for row in batch} for rank in ranks]
    assert first[0].isdisjoint(first[1])  # no point is a candidate of both
    assert first[0] | first[1] == set(range(ROWS))
    for number, name in enumerate(("log.jsonl", "log.rank1.jsonl")):
        assert ranks[number]["log"] == name
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert [line["index"] for line in lines] == ranks[number]["chosen"]


@pytest.mark.parametrize(
    ("loop", "framework"),
    [
        ("fabric", "lightning"),
        ("accelerate", "accelerate"),
        ("huggingface", "transformers"),
        ("huggingface_stream", "transformers"),  # a `Stream`, which is not dealt once more
    ],
)
def test_started_by_torchrun(tmp_path, loop, framework):
    pytest.importorskip(framework)
    ranks = launch(tmp_path, loop, *TORCHRUN)
    check(ranks, tmp_path)
    if loop == "huggingface_stream":  # each log is complete whenever there is a state to go on from
        assert [rank["logged"] for rank in ranks] == [[4, 8], [4, 8]]
    if loop == "huggingface":
        assert ranks[0]["rows"] == pytest.approx(8 * TRAINED, rel=0.05)  # of both together


@pytest.mark.parametrize("loop", ["lightning", "lightning_batches_watched"])
def test_started_by_lightning_itself(tmp_path, loop):
    pytest.importorskip("lightning")
    check(launch(tmp_path, loop), tmp_path)


def test_a_loader_that_lightning_would_not_deal_is_refused_on_every_rank(tmp_path):
    pytest.importorskip("lightning")
    for rank in launch(tmp_path, "lightning_watched"):
        assert "Lightning does not deal to its 2 ranks: each would run over all" in rank["error"]
        assert rank["chosen"] == []


def test_batches_that_lightning_would_deal_again_are_refused_on_every_rank(tmp_path):
    """By a message that says what to do, in place of Lightning's own TypeError."""
    pytest.importorskip("lightning")
    for rank in launch(tmp_path, "lightning_dealt_twice"):
        assert "made anew round a DistributedSampler" in rank["error"]
        assert "Give the Trainer `select.watch(loader)`" in rank["error"]
        assert "use_distributed_sampler=False" in rank["error"]
        assert rank["chosen"] == []
