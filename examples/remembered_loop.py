"""The plain loop for eight passes, without what it finds to be wrong labels: nothing is scored."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from rholoss.demo.data import Digits, load

torch.manual_seed(0)
splits = load()  # 12,000 training points, a tenth of the labels wrong; 4,000 clean test points
train, test = rho.WithIndex(Digits(splits["train"])), Digits(splits["test"])


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


model = make_model(512)
optimizer = torch.optim.AdamW(model.parameters())

passes = 8
rows = rho.Planned(train, rho.Remembered(chance=math.log(10)), passes=passes)
loader = DataLoader(train, batch_size=32, sampler=rows, drop_last=True)
for _ in range(passes):
    for index, x, y in loader:
        loss_k = F.cross_entropy(model(x), y, reduction="none")
        rows.remember(index, loss_k).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"pass {rows.begun}: {len(rows):,} rows, {rows.left_out:,} left out")

with torch.no_grad():
    accuracy = (model(test.x).argmax(1) == test.targets).float().mean()
print(f"test accuracy {accuracy:.1%}; labels that are wrong: {rows.wrong or 0:.1%}, it seems")
