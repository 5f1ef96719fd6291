"""What each rank does in the tests of several processes on one GPU; run as `ranks_task.py` is.

NCCL refuses two ranks on one GPU, so these go through gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks_run import check, run
from ranks_task import STEPS, batch_of, network, parameters, problem, rows_of, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rholoss as rho

OWN: dict[str, Any] = {}


def own(function: Any) -> Any:
    OWN[function.__name__] = check(function)
    return function


def _ids() -> list[torch.Tensor]:
    return [rows_of(step, dist.get_world_size(), dist.get_rank()) for step in range(STEPS)]


@own
def global_ddp() -> Any:
    model = DistributedDataParallel(network().cuda())
    select = rho.Selector("rho", irreducible=problem()[2], keep=0.1, choice="global")
    chosen = [ids.cpu() for ids in train(model, select, _ids())]
    return {"chosen": chosen, "parameters": [p.cpu() for p in parameters(model)]}


@own
def synchronised_norm() -> Any:
    """Losses of this rank's candidates, and running statistics, in each mode."""
    found = {}
    _, x, y = (part.cuda() for part in batch_of(_ids()[0]))
    for mode in ("train", "batch", "eval"):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(network(norm=True)).cuda().train()
        loss = rho.Scorer(batch_norm=mode).measure(model, (x, y), len(y), frozenset({"loss"}))
        found[mode] = (loss["loss"].cpu(), model[1].running_mean.cpu())
    return found


if __name__ == "__main__":
    torch.cuda.set_device(0)
    run(OWN)
