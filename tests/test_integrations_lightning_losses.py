"""Lightning: irreducible losses that come with the batches."""

import pytest
import torch
from fixtures_integrations import CANDIDATES, ROWS, points
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho

pytest.importorskip("lightning", reason="pip install 'rholoss[lightning]'")

from test_integrations_lightning import Module, trainer_of

from rholoss.integrations.lightning import RhoCallback

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


def joined(il):
    return rho.WithIrreducible(rho.WithIndex(TensorDataset(*points())), il)


@pytest.mark.parametrize("as_dict", [False, True])
def test_irreducible_losses_that_come_with_the_batch_are_not_rounded(tmp_path, as_dict):
    """Lightning makes 16 bits of every number of a batch, and of the default type of torch."""

    def collate(items):
        batch = torch.utils.data.default_collate(items)
        if not as_dict:
            return batch
        keyed, x, y = batch
        return {**keyed._asdict(), "x": x, "labels": y}

    class Low(Module):
        def training_step(self, batch, batch_idx):
            x, y = batch.values() if as_dict else batch
            assert x.dtype == torch.bfloat16
            return F.cross_entropy(self(x), y)

    seen = []
    il = rho.Irreducible.from_losses(1 + torch.rand(ROWS))
    select = rho.Selector("rho", keep=0.25, on_scores=[lambda step, stats, _: seen.append(stats)])
    trainer = trainer_of(tmp_path, RhoCallback(select), max_epochs=1, precision="bf16-true")
    trainer.fit(Low(), DataLoader(joined(il), CANDIDATES, collate_fn=collate))
    assert len(seen) == 4
    for stats in seen:
        assert torch.equal(stats.irreducible_loss, il.lookup(stats.index))
    assert "convert_input" not in vars(trainer.precision_plugin)


def test_they_cost_what_they_cost(tmp_path):
    il = rho.Irreducible.from_losses(torch.rand(ROWS), seconds=1000.0)
    select = rho.Selector("rho", keep=0.25)
    trainer = trainer_of(tmp_path, RhoCallback(select), max_steps=1)
    trainer.fit(Module(), DataLoader(joined(il), CANDIDATES))
    assert select.ledger.il_seconds == 1000.0
