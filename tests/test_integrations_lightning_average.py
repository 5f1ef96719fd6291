"""Lightning: averaged weights, whose BatchNorm is to know the data."""

import pytest
import torch
from fixtures_integrations import CANDIDATES, TRAINED, points, recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho

pytest.importorskip("lightning", reason="pip install 'rholoss[lightning]'")

from lightning.pytorch.callbacks import StochasticWeightAveraging
from test_integrations_lightning import Module, trainer_of

from rholoss.integrations.lightning import RhoCallback


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_statistics_of_averaged_weights_are_those_of_the_data(tmp_path):
    """Lightning measures them in a pass of its own, behind the last epoch; nothing is worth a step there."""
    x, y = points()
    module = Module()
    module.net = nn.Sequential(nn.BatchNorm1d(x.shape[1]), module.net)
    select, seen = recorded()
    callbacks = RhoCallback(select), StochasticWeightAveraging(1e-2, swa_epoch_start=1)
    trainer = trainer_of(tmp_path, *callbacks, max_epochs=3)
    trainer.fit(module, DataLoader(rho.WithIndex(TensorDataset(x, y)), CANDIDATES))
    assert select.step == len(seen.chosen) == 3 * 4
    assert module.sizes == [TRAINED] * (3 + 1) * 4
    norm = module.net[0]
    assert norm.num_batches_tracked == 4
    torch.testing.assert_close(norm.running_mean, x[:: CANDIDATES // TRAINED].mean(0))
