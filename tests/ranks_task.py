"""What each rank does in the tests of many processes: run as `ranks_task.py RANK RANKS FOLDER`."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks_run import CHECKS, check, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rholoss as rho

ROWS, STEPS = 40, 5  # candidates of each rank and steps of a run
SHARDED = hasattr(
    torch.cpu.Stream, "record_event"
)  # FSDP2 on the CPU: torch 2.6 has none that works
check_sharded = check if SHARDED else lambda function: function


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """1,000 points of four classes with an irreducible loss each."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (1000,), generator=generator)
    x = torch.randn(4, 10, generator=generator)[y] + torch.randn(1000, 10, generator=generator)
    return x, y, torch.rand(1000, generator=generator)


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(10, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers)


def rows_of(step: int, ranks: int, rank: int | None = None) -> Tensor:
    """Ids of the candidates of a step, of one rank or of all."""
    ids = torch.arange(step * ranks * ROWS, (step + 1) * ranks * ROWS) % 1000
    return ids if rank is None else ids[rank * ROWS : (rank + 1) * ROWS]


def batch_of(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, y, _ = problem()
    return ids, x[ids], y[ids]


def parameters(model: nn.Module) -> list[Tensor]:
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in model.parameters()
    ]


def train(
    model: nn.Module,
    select: rho.Selector,
    candidates: list[Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    """One step for each batch of candidates; returns the ids that this process trained on."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    chosen = []
    for ids in candidates:
        index, x, y = select(model, batch_of(ids))
        optimizer.zero_grad()
        select.reduce(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()
        chosen.append(index)
    return chosen


def _ids() -> list[Tensor]:
    return [rows_of(step, dist.get_world_size(), dist.get_rank()) for step in range(STEPS)]


def _run(method: str, choice: str, wrap: Any, **options: Any) -> dict[str, Any]:
    model = wrap(network())
    options = {"irreducible": problem()[2], "keep": 0.1, **options}
    select = rho.Selector(method, choice=choice, **options)
    chosen = train(model, select, _ids())
    return {
        "chosen": chosen,
        "parameters": parameters(model),
        "ledger": select.ledger.state_dict(),
        "score": select.selection.score,
    }


def _shard(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)  # the last layer belongs to the root
    return fully_shard(model, mesh=mesh)


@check
def local_ddp() -> Any:
    return _run("rho", "local", DistributedDataParallel)


@check
def global_ddp() -> Any:
    return _run("rho", "global", DistributedDataParallel)


@check
def global_by_number() -> Any:
    return _run("rho", "global", DistributedDataParallel, keep=None, k=4)


@check
def global_importance() -> Any:
    return _run("grad_norm_is", "global", DistributedDataParallel)


@check
def global_uniform() -> Any:
    return _run("uniform", "global", DistributedDataParallel)


@check_sharded
def local_fsdp() -> Any:
    return _run("rho", "local", _shard)


@check_sharded
def global_fsdp() -> Any:
    return _run("rho", "global", _shard)


@check
def global_live() -> Any:
    live = rho.LiveIrreducible(network(), torch.optim.SGD, lr=0.1)
    live.optimizer.param_groups[0]["lr"] = 0.1
    result = _run("rho", "global", DistributedDataParallel, irreducible=live)
    return {**result, "live": parameters(live.model)}


@check
def auto_off() -> Any:
    cost = mock.PropertyMock(return_value=9.0 if dist.get_rank() == 0 else 0.5)
    with mock.patch("rholoss.ledger.Ledger.overhead", cost), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run("rho", "global", DistributedDataParallel, auto_off=2.0, flush_every=2)


@check_sharded
def fsdp_is_sharded_after_scoring() -> Any:
    from torch.distributed.tensor import DTensor

    model = _shard(network())
    select = rho.Selector("rho", irreducible=problem()[2], keep=0.1)
    sharded = []
    for ids in _ids()[:2]:
        select(model, batch_of(ids))
        sharded.append(all(isinstance(p, DTensor) for p in model.parameters()))
    return sharded


@check_sharded
def fsdp_scores_see_the_last_step() -> Any:
    """Candidates are scored before the optimizer's step, weights change, they are scored again."""
    model, plain = _shard(network()), network()
    scorer, (_, x, y) = rho.Scorer(), batch_of(_ids()[0])
    found = []
    for _ in range(2):
        found.append([scorer.measure(m, (x, y), ROWS, {"loss"})["loss"] for m in (model, plain)])
        with torch.no_grad():
            for m in (model, plain):
                for p in m.parameters():
                    p.mul_(0.5)
    return found


@check_sharded
def fsdp_uneven_chunks() -> Any:
    """The first rank needs three passes where the others need two, or have a single row."""
    model, plain, scorer = _shard(network()), network(), rho.Scorer(chunk=ROWS // 2 - 1)
    found = []
    for fewer in (ROWS - 3, 1):
        rows = ROWS if dist.get_rank() == 0 else fewer
        _, x, y = batch_of(_ids()[0][:rows])
        found.append([scorer.measure(m, (x, y), rows, {"loss"})["loss"] for m in (model, plain)])
    return found


@check
def accumulation() -> Any:
    model = DistributedDataParallel(network())
    select = rho.Selector("rho", irreducible=problem()[2], keep=0.1, choice="global")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = _ids()
    for first, second in (ids[:2], ids[2:4]):
        with model.no_sync():
            index, x, y = select(model, batch_of(first))
            F.cross_entropy(model(x), y).backward()
        index, x, y = select(model, batch_of(second))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": parameters(model), "chosen": [index]}


@check
def uneven_rows() -> Any:
    model = network()
    select = rho.Selector("rho", irreducible=problem()[2], keep=0.2, choice="global")
    ids = rows_of(0, dist.get_world_size(), dist.get_rank())
    few = ids[: ROWS - 7 * dist.get_rank()]
    first = select(model, batch_of(ids))[0]
    return {"candidates": few, "chosen": select(model, batch_of(few))[0], "first": len(first)}


@check
def repeated_ids() -> Any:
    """`DistributedSampler` over rows that do not divide, so that ranks get some of them again."""
    rows = torch.utils.data.TensorDataset(torch.arange(997))
    sampler = torch.utils.data.DistributedSampler(rows, shuffle=False)
    candidates = list(torch.tensor(list(sampler)).split(ROWS))
    model = DistributedDataParallel(network())
    select = rho.Selector("rho", irreducible=problem()[2], keep=0.1, choice="global")
    chosen = train(model, select, candidates)
    return {"candidates": candidates, "chosen": chosen, "parameters": parameters(model)}


@check
def same_candidates() -> list[str]:
    """What is said where ranks forgot to deal the rows out, and where they did not."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for ids in (rows_of(0, 1), rows_of(0, dist.get_world_size(), dist.get_rank())):
            select = rho.Selector("rho", irreducible=problem()[2], keep=0.1)
            for _ in range(2):
                select(network(), batch_of(ids))
    return [str(warning.message) for warning in told]


@check
def rows_stay_whole() -> Any:
    """A dict of all kinds of leaves, string ids, and losses that put all chosen rows on one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = rows_of(0, ranks, rank)
    x, y, _ = problem()
    keys = [f"point-{i}" for i in ids.tolist()]
    batch = {
        "index": keys,
        "x": x[ids],
        "labels": y[ids],
        "half": x[ids].bfloat16(),
        "mask": x[ids] > 0,
        "array": x[ids].numpy(),
        "nested": (x[ids][:, :2], None),
        "scale": 3.0,
        "empty": torch.empty(len(ids), 0),
        "ragged": [torch.full((i % 5 + 1,), i) for i in ids.tolist()],
        "boxes": tuple({"boxes": torch.full((i % 3, 4), i)} for i in ids.tolist()),
    }
    il = rho.Irreducible.from_losses(
        [0.0 if i < ROWS else 5.0 for i in range(1000)], [f"point-{i}" for i in range(1000)]
    )
    select = rho.Selector(
        "negative_il", irreducible=il, keep=0.1, choice="global", loss=lambda m, b: b["x"].sum(1)
    )
    return select(network(), batch)


@check
def buffers_are_not_broadcast() -> Any:
    found = {}
    for mode in ("train", "batch", "eval"):
        model = DistributedDataParallel(network(norm=True))
        norm = model.module[1]
        select = rho.Selector("rho", irreducible=problem()[2], keep=0.1, batch_norm=mode)
        select(model, batch_of(_ids()[0]))  # the dry run goes another way
        with torch.no_grad():
            norm.running_mean.fill_(dist.get_rank() + 1.0)
        _, x, y = select(model, batch_of(_ids()[0]))
        scored = norm.running_mean.clone()
        F.cross_entropy(model(x), y).backward()
        found[mode] = (scored, norm.running_mean.clone(), norm.training)
    return found


def _message(**options: Any) -> str:
    given = {"irreducible": problem()[2], "keep": 0.1, **options}
    ids = given.pop("ids", _ids()[0])
    batch = given.pop("batch", batch_of(ids))
    model = given.pop("model", network())
    try:
        (given.pop("select", None) or rho.Selector("rho", **given))(model, batch)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Broken(nn.Module):
    """A model that fails on the last rank."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("no memory left")
        return x[:, :4]


@check
def failures() -> dict[str, str]:
    """What each rank is told where one of them, or all, cannot go on."""
    last = dist.get_rank() == dist.get_world_size() - 1
    other, missing = problem()[2], problem()[2]
    if last:
        other[0] += 1
        missing[rows_of(0, dist.get_world_size(), dist.get_rank())[3]] = torch.nan
    wide = batch_of(_ids()[0])
    if last:
        wide = (wide[0], F.pad(wide[1], (0, 1)), wide[2])
    early = rho.Selector("rho", irreducible=problem()[2], keep=0.1)
    with mock.patch("rholoss.distributed.is_running", return_value=False):  # before there are ranks
        early.batch_sampler(torch.utils.data.TensorDataset(problem()[0]), 60)
    return {
        "other losses": _message(irreducible=other),
        "other rows": _message(irreducible=problem()[2][: 999 if last else 1000]),
        "other keep": _message(keep=0.2 if last else 0.1),
        "early sampler": _message(select=early),
        "missing loss": _message(irreducible=torch.where(missing.isnan(), missing, problem()[2])),
        "on each": _message(irreducible=None),
        "broken model": _message(model=Broken()),
        "broken model, global": _message(model=Broken(), choice="global"),
        "other width": _message(batch=wide, model=Broken(), choice="global"),
        "and then": _message(),
    }


@check
def global_short_batches() -> Any:
    """While nothing is scored, the last batch of an epoch has 2 rows on one rank and 1 on the others."""
    schedule = rho.annealed(total_steps=4, switch=0.25, drop=0.0)
    select = rho.Selector("loss", keep=0.25, choice="global", schedule=schedule)
    num = 2 * 8 * dist.get_world_size() + dist.get_world_size() + 1
    data = rho.WithIndex(torch.utils.data.TensorDataset(*(part[:num] for part in problem()[:2])))
    model = DistributedDataParallel(network())
    batches = select.batch_sampler(data, 8)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    chosen = []
    for batch in loader:
        index, x, y = select(model, batch)
        F.cross_entropy(model(x), y).backward()
        chosen.append(len(index))
    return chosen


@check
def samplers() -> Any:
    data = rho.WithIndex(torch.utils.data.TensorDataset(*problem()[:2]))
    found = {}
    for rows, batch_size in ((997, 60), (4 * 60 + 1, 60), (2, 2)):
        part = torch.utils.data.Subset(data, range(rows))
        select = rho.Selector("uniform", keep=1.0)
        sampler = select.batch_sampler(part, batch_size, seed=5)
        found[rows] = (list(sampler), [sampler.rows_at(step) for step in range(len(sampler))])
    return found


@check
def logs() -> Any:
    folder = Path(sys.argv[3]) / f"logs{dist.get_world_size()}"
    select = rho.Selector("rho", irreducible=problem()[2], keep=0.1, log=folder / "run.jsonl")
    train(DistributedDataParallel(network()), select, _ids())
    state = copy.deepcopy(select.state_dict())
    try:
        rho.Selector("rho", irreducible=problem()[2], keep=0.1).load_state_dict(
            {**state, "ranks": 3}
        )
    except ValueError as error:
        return {"state": state, "error": str(error)}


if __name__ == "__main__":
    run(CHECKS)
