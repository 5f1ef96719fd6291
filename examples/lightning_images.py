"""Lightning: handwritten digits, a tenth of the labels wrong; each step on the best tenth of 320."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from rholoss.demo.data import Digits, load
from rholoss.integrations.lightning import RhoCallback


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(512)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch  # 32 of the 320 candidates
        return F.cross_entropy(self(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


L.seed_everything(0, verbose=False)
splits = load(limit=4000)  # 4,000 points each: training, holdout, clean test
train, test = rho.WithIndex(Digits(splits["train"])), Digits(splits["test"])
il = rho.fit_irreducible(lambda: make_model(128), Digits(splits["holdout"]), score=train)
select = rho.Selector("rho", irreducible=il, keep=0.1)

trainer = L.Trainer(
    max_epochs=10, callbacks=[RhoCallback(select)], accelerator="auto", devices=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
module = Classifier()
trainer.fit(module, DataLoader(train, batch_size=320, shuffle=True, drop_last=True))
(result,) = trainer.test(module, DataLoader(test, batch_size=1000), verbose=False)
print(f"test accuracy {result['accuracy']:.1%}")
print(select.ledger)
