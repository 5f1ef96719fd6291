"""A toy task that every integration is run on, and the same run through `core`."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from rholoss import METHODS, Selector, WithIndex, core

ROWS, WIDTH, CLASSES = 96, 8, 4
TRAINED, KEEP, LEARNING_RATE = 6, 0.25, 0.3
CANDIDATES = round(TRAINED / KEEP)


def points():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = (x @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1)
    return x, y


def irreducible():
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(1))


class Rows(Dataset):
    """Dict items, as Hugging Face data sets have them."""

    def __init__(self, extra=None):
        self.x, self.y = points()
        self.extra = extra or {}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return {
            "x": self.x[row],
            "labels": self.y[row],
            **{k: v[row] for k, v in self.extra.items()},
        }


class Classifier(nn.Module):
    """Returns logits, or a reduced loss too where it gets labels; takes nothing else."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES)
        )

    def forward(self, x, labels=None):
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Recorder:
    """A tap for `on_scores`: the candidates and the chosen ids of each step."""

    def __init__(self):
        self.candidates, self.chosen = [], []

    def __call__(self, step, stats, chosen):
        self.candidates.append(torch.as_tensor(stats.index).clone())
        self.chosen.append(torch.as_tensor(chosen.index).tolist())


def recorded(method="rho", **options):
    """A selector of the toy task and its recorder."""
    seen = Recorder()
    il = irreducible() if "irreducible_loss" in METHODS[method].needs else None
    select = Selector(method, irreducible=il, keep=KEEP, on_scores=[seen], **options)
    return select, seen


def through_core(net, candidates, method="rho", accumulate=1, start=0):
    """Algorithm 1 on these candidate batches: the chosen ids, the losses and the net at the end."""
    net = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    x, y = points()
    chosen, losses = [], []
    if accumulate == 1:
        for step, index in enumerate(candidates):
            selection, loss = core.train_step(
                net,
                optimizer,
                (index, x[index], y[index]),
                METHODS[method],
                core.num_selected(len(index), KEEP),
                core.step_generator(0, start + step),
                irreducible(),
            )
            chosen.append(index[selection.position].tolist())
            losses.append(float(loss))
        return chosen, losses, net
    for begin in range(0, len(candidates), accumulate):
        micro = []  # all are chosen with the weights before the step
        for step in range(begin, min(begin + accumulate, len(candidates))):
            index = candidates[step]
            measured = core.measure(net, x[index], y[index], 1, 0)
            stats = core.Stats(index, {**measured, "irreducible_loss": irreducible()[index]})
            k, generator = core.num_selected(len(index), KEEP), core.step_generator(0, start + step)
            selection, _ = core.choose(METHODS[method], stats, k, generator)
            micro.append(index[selection.position])
            chosen.append(micro[-1].tolist())
        optimizer.zero_grad()
        rows = torch.cat(micro)
        loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return chosen, losses, net


def assert_same_weights(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class Order(Sampler):
    """An order of its own for each epoch, which a resumed run repeats."""

    epoch = 0

    def set_epoch(self, epoch):  # Lightning calls it
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(ROWS, generator=generator).tolist())

    def __len__(self):
        return ROWS


def train_loader():
    return DataLoader(WithIndex(TensorDataset(*points())), batch_size=CANDIDATES, sampler=Order())
