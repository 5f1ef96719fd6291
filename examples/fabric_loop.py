"""Lightning Fabric, by hand: `select` scores the module itself, under Fabric's own precision."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from rholoss.demo.data import Digits, load

torch.manual_seed(0)
splits = load(limit=4000)  # 4,000 points each: training, holdout, clean test
train, test = rho.WithIndex(Digits(splits["train"])), Digits(splits["test"])


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


fabric = Fabric(accelerator="auto", devices=1)
module = make_model(512)
model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
loader = fabric.setup_dataloaders(DataLoader(train, batch_size=320, shuffle=True, drop_last=True))
il = rho.fit_irreducible(lambda: make_model(128), Digits(splits["holdout"]), score=train)
select = rho.Selector("rho", irreducible=il, keep=0.1)

for epoch in range(10):
    for candidates in loader:
        with fabric.autocast():
            index, x, y = select(module, candidates)
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    logits = module(test.x.to(fabric.device))
fabric.print(f"test accuracy {(logits.argmax(1).cpu() == test.targets).float().mean():.1%}")
fabric.print(select.ledger)
