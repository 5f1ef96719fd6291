"""The same loop with selection: as many gradient steps, each on the best tenth of 320 candidates."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from rholoss.demo.data import Digits, load

torch.manual_seed(0)
splits = load()  # 12,000 training points, 6,000 holdout points, 4,000 clean test points
train, test = rho.WithIndex(Digits(splits["train"])), Digits(splits["test"])


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


model = make_model(512)
optimizer = torch.optim.AdamW(model.parameters())
irreducible = rho.fit_irreducible(lambda: make_model(128), Digits(splits["holdout"]), score=train)
select = rho.Selector("rho", irreducible=irreducible, keep=0.1)

loader = DataLoader(train, batch_size=320, shuffle=True, drop_last=True)
for epoch in range(10):
    for batch in loader:
        index, x, y = select(model, batch)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    accuracy = (model(test.x).argmax(1) == test.targets).float().mean()
print(f"test accuracy {accuracy:.1%}")
print(select.ledger)
