"""Accelerate: the plain loop, prepared for any device and precision; `accelerate launch` runs it too."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from rholoss.demo.data import Digits, load
from rholoss.distributed import leave

torch.manual_seed(0)
splits = load(limit=4000)  # 4,000 points each: training, holdout, clean test
train, test = rho.WithIndex(Digits(splits["train"])), Digits(splits["test"])


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


accelerator = Accelerator(gradient_accumulation_steps=1)
model = make_model(512)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters()),
    DataLoader(train, batch_size=320, shuffle=True, drop_last=True),
)
il = rho.fit_irreducible(lambda: make_model(128), Digits(splits["holdout"]), score=train)
select = rho.Selector("rho", irreducible=il, keep=0.1)
accelerator.register_for_checkpointing(select)  # saved and loaded with the rest

for epoch in range(10):
    for candidates in loader:
        with accelerator.accumulate(model):
            index, x, y = select(model, candidates)
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

with torch.no_grad():
    logits = accelerator.unwrap_model(model)(test.x.to(accelerator.device))
accuracy = (logits.argmax(1).cpu() == test.targets).float().mean()
accelerator.print(f"test accuracy {accuracy:.1%}")
accelerator.print(select.ledger)
leave()  # several processes end together; one alone just ends
