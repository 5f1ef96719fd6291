"""A training loop as people have it: handwritten digits, a tenth of the labels wrong."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from rholoss.demo.data import Digits, load

torch.manual_seed(0)
splits = load()  # 12,000 training points, 6,000 holdout points, 4,000 clean test points
train, test = Digits(splits["train"]), Digits(splits["test"])


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


model = make_model(512)
optimizer = torch.optim.AdamW(model.parameters())

loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
for epoch in range(1):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    accuracy = (model(test.x).argmax(1) == test.targets).float().mean()
print(f"test accuracy {accuracy:.1%}")
