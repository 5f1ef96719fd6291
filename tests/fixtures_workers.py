"""What the tests of scoring workers share."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss.errors import RholossError
from rholoss.workers import serve, wire

WAIT = 20.0  # seconds, for what should come at once


def network(norm=False):
    """The same one each time, whatever workers in threads do to torch's own generator meanwhile."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                for parameter in layer.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)
        for parameter in model.parameters():  # so that nothing is lost on the way
            parameter.copy_(parameter.bfloat16())
    return model


ROWS, CANDIDATES = 400, 40


def problem():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator)
    y = torch.randint(3, (ROWS,), generator=generator)
    return rho.WithIndex(TensorDataset(x, y)), torch.rand(ROWS, generator=generator)


def parts(norm=False, method="rho", **options):
    """What the script makes on every rank."""
    data, il = problem()
    select = rho.Selector(method, **{"irreducible": il, "keep": 0.1, **options})
    loader = DataLoader(data, batch_sampler=select.batch_sampler(data, CANDIDATES, seed=3))
    return select, network(norm), loader


@pytest.fixture
def launch():
    """What torchrun would have set for rank 0; all of it is put back."""
    before = dict(os.environ)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
    made = []

    def start(workers, **options):
        ranks = {"RANK": "0", "WORLD_SIZE": str(1 + workers), "LOCAL_RANK": "0"}
        os.environ.update({**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)})
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        ranks = rho.ScoringWorkers(workers)
        own = parts(**options.pop("selector", {}))
        # Weights that are older than is good, so that a busy machine changes nothing in who does what.
        batches = ranks.batches(*own, wait=WAIT, **{"every": 8, **options})
        made.append(batches)
        return batches

    yield start
    for batches in made:
        batches.close()
    os.environ.clear()
    os.environ.update(before)


class InThread(threading.Thread):
    """A scoring worker in a thread of this process, with a connection that can be cut."""

    def __init__(self, number, select, model, loader):
        super().__init__(daemon=True)
        self.given = (select, model, loader)
        self.number, self.error, self.done = number, None, None
        self.connection = wire.find(wire.meeting_place(), 0, lambda: True)
        self.start()

    def run(self):
        same = serve.same_everywhere(*self.given[:2], self.given[2].batch_sampler)
        try:
            self.done = serve.serve(self.connection, self.number, *self.given, same)
        except (RholossError, *wire.LOST) as error:
            self.error = error

    def die(self):
        wire.hang_up(self.connection)


def until(happened):
    end = time.monotonic() + WAIT
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


def settle(batches):
    """Wait until weights that are on the way have arrived: these steps take no time otherwise."""
    until(lambda: not any(link.sending for link in list(batches.crew._links)))


def train(batches, steps):
    """Rows of so many steps."""
    chosen = []
    while len(chosen) < steps:
        for index, _x, _y in batches:
            chosen.append(index.tolist())
            settle(batches)
            if len(chosen) == steps:
                break
    return chosen


def candidates_of(loader, step):
    return set(loader.batch_sampler.at(step))
