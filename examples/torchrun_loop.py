"""A training loop for torchrun, with DDP or FSDP2, that selects and goes on after a restart.

torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun_loop.py --out run [--fsdp] [--choice global]
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss.distributed import join, leave

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def problem() -> tuple[TensorDataset, torch.Tensor]:
    """Points of four classes, and an irreducible loss each: put your data and your store here."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (3200,), generator=generator)
    x = torch.randn(4, 16, generator=generator)[y] + torch.randn(3200, 16, generator=generator)
    return TensorDataset(x, y), torch.rand(3200, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--choice", default="local")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    given = parser.parse_args()
    join()  # init_process_group
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    model = fully_shard(model) if given.fsdp else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, il = problem()
    train = rho.WithIndex(data)
    select = rho.Selector(
        "rho", irreducible=il, keep=0.1, choice=given.choice, log=given.out / "chosen.jsonl"
    )
    sampler = select.batch_sampler(train, 160)  # rows of each rank

    saved = given.out / "state.pt"
    if saved.exists():
        state = torch.load(saved, map_location="cpu", weights_only=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=WHOLE,
        )
        select.load_state_dict(state["select"])
        print(f"rank {dist.get_rank()} goes on after step {select.step}")
    else:
        select.log.rewind(0)  # of a start that was killed before there was a state

    while select.step < given.steps:
        for batch in DataLoader(train, batch_sampler=sampler):
            _, x, y = select(model, batch)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if select.step % given.save_every == 0 or select.step == given.steps:
                weights, moments = get_state_dict(model, optimizer, options=WHOLE)
                state = {"model": weights, "optimizer": moments, "select": select.state_dict()}
                if dist.get_rank() == 0:
                    given.out.mkdir(parents=True, exist_ok=True)
                    torch.save(state, saved.with_suffix(".tmp"))
                dist.barrier()  # it does not count before every rank has written its log so far
                if dist.get_rank() == 0:
                    saved.with_suffix(".tmp").replace(saved)
            if select.step == given.steps:
                break
    if dist.get_rank() == 0:
        print(select.ledger)
    leave()  # destroy_process_group, all together


if __name__ == "__main__":
    main()
