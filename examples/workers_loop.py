"""A training loop for torchrun in which some ranks only score, and that goes on after a restart.

torchrun --nproc-per-node 3 --max-restarts 3 examples/workers_loop.py --workers 2 --out run
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss.distributed import join, leave


def problem() -> tuple[TensorDataset, torch.Tensor, TensorDataset]:
    """Points of four classes, an irreducible loss each, and points to test on: put your own here."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (6400,), generator=generator)
    x = torch.randn(4, 16, generator=generator)[y] + torch.randn(6400, 16, generator=generator)
    train, test = TensorDataset(x[:3200], y[:3200]), TensorDataset(x[3200:], y[3200:])
    return train, torch.rand(3200, generator=generator), test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0, help="of a worker that died")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--every", type=int, default=1, help="steps between two sets of weights")
    parser.add_argument("--wait", type=float, default=1.0, help="seconds, for a step of a worker")
    parser.add_argument("--gather", type=float, default=60.0, help="seconds, for workers to come")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    workers = rho.ScoringWorkers(given.workers, restarts=given.restarts)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())

    torch.manual_seed(given.seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    data, il, test = problem()
    train = rho.WithIndex(data)
    select = rho.Selector("rho", irreducible=il, keep=0.1, log=given.out / "chosen.jsonl")
    sampler = select.batch_sampler(train, 160, seed=given.seed)  # rows of each trainer
    loader = DataLoader(train, batch_sampler=sampler)
    batches = workers.batches(select, model, loader, every=given.every, wait=given.wait)

    join()  # from here on trainers alone; init_process_group
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = given.out / "state.pt"
    if saved.exists():
        state = torch.load(saved, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        select.load_state_dict(state["select"])
    else:
        select.log.rewind(0)  # of a start that was killed before there was a state

    batches.wait_for_workers(given.gather)  # or start at once: those that come later are welcome
    while select.step < given.steps:
        for _, x, y in batches:
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if select.step % given.save_every == 0 or select.step == given.steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state["select"] = select.state_dict()
                if dist.get_rank() == 0:
                    given.out.mkdir(parents=True, exist_ok=True)
                    torch.save(state, saved.with_suffix(".tmp"))
                dist.barrier()  # it does not count before every rank has written its log so far
                if dist.get_rank() == 0:
                    saved.with_suffix(".tmp").replace(saved)
            if select.step == given.steps:
                break
    if dist.get_rank() == 0:
        x, y = (tensor.to(device) for tensor in test.tensors)
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        print(select.ledger)
        result = {"accuracy": accuracy, **vars(batches.counts), "notes": select.ledger.notes}
        (given.out / "result.json").write_text(json.dumps(result))
    leave()  # destroy_process_group, all together


if __name__ == "__main__":
    main()
