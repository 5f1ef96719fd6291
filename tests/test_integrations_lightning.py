"""Selection in Lightning and Fabric: as `core` chooses, with automatic optimization."""

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fixtures_integrations import (
    CANDIDATES,
    LEARNING_RATE,
    ROWS,
    TRAINED,
    Classifier,
    assert_same_weights,
    points,
    recorded,
    through_core,
    train_loader,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss.errors import RholossError

L = pytest.importorskip("lightning", reason="pip install 'rholoss[lightning]'")

from rholoss.integrations.lightning import HOOK, RhoCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
)


def plain_loader():
    return DataLoader(TensorDataset(*points()), batch_size=CANDIDATES)


class Module(L.LightningModule):
    """As users have it: `x, y = batch`."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = Classifier(dropout).net
        self.losses, self.sizes, self.validated = [], [], 0

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.losses.append(float(loss.detach()))
        self.sizes.append(len(x))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


class Validated(Module):
    """Is validated on batches without ids."""

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.validated += len(x)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return train_loader()


class OwnHook(Data):
    """A data module that has the hook itself."""

    called = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.called += 1
        return batch


def trainer_of(folder, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 2}
    return L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**quiet, **options})


@pytest.mark.parametrize("data", [None, Data, OwnHook])
@pytest.mark.parametrize("method", ["rho", "loss"])
def test_it_chooses_and_learns_as_core_does(tmp_path, data, method):
    select, seen = recorded(method)
    module = Module()
    first = copy.deepcopy(module.net)
    datamodule = None if data is None else data()
    loader = train_loader() if data is None else None
    trainer_of(tmp_path, RhoCallback(select)).fit(module, loader, datamodule=datamodule)
    chosen, losses, net = through_core(first, seen.candidates, method)
    assert seen.chosen == chosen
    assert module.losses == pytest.approx(losses, abs=1e-6)
    assert_same_weights(net, module.net)
    assert module.sizes == [TRAINED] * 8
    assert HOOK not in vars(module)
    assert data is None or HOOK not in vars(datamodule)
    assert data is not OwnHook or datamodule.called == 8
    assert select.ledger.steps == 8


def test_what_is_validated_is_left_whole(tmp_path):
    plain, select = recorded(), recorded()
    trainer_of(tmp_path, RhoCallback(plain[0])).fit(Module(), train_loader())
    module = Validated()
    trainer = trainer_of(tmp_path, RhoCallback(select[0]), num_sanity_val_steps=1)
    trainer.fit(module, train_loader(), plain_loader())
    assert module.validated == CANDIDATES + 2 * ROWS
    assert select[1].chosen == plain[1].chosen


def test_accumulation_clipping_and_precision_stay_with_the_trainer(tmp_path):
    kinds = []

    class Looking(Module):
        def forward(self, x):
            kinds.append((self.training, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return super().forward(x)

    select, seen = recorded()
    module = Looking()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    before = copy.deepcopy(module.net)
    trainer = trainer_of(tmp_path, RhoCallback(select), **options)
    trainer.fit(module, train_loader())
    assert trainer.global_step == 4
    assert kinds == [(False, True, False), (True, True, True)] * 8
    for old, new in zip(before.parameters(), module.net.parameters(), strict=True):
        assert not torch.equal(old, new)  # no gradient was lost to a cached cast
    assert len(seen.chosen) == 8


def test_accumulation_is_that_of_core(tmp_path):
    select, seen = recorded()
    module = Module()
    first = copy.deepcopy(module.net)
    trainer_of(tmp_path, RhoCallback(select), accumulate_grad_batches=2).fit(module, train_loader())
    chosen, _, net = through_core(first, seen.candidates, accumulate=2)
    assert seen.chosen == chosen
    assert_same_weights(net, module.net)


def test_a_resumed_fit_makes_the_same_choices(tmp_path):
    whole, seen_whole = recorded(log=tmp_path / "whole.jsonl")
    module = Module()
    trainer_of(tmp_path, RhoCallback(whole), max_epochs=3).fit(module, train_loader())
    first, seen_first = recorded(log=tmp_path / "log.jsonl")
    cut = trainer_of(tmp_path, RhoCallback(first), max_epochs=2)
    cut.fit(Module(), train_loader())
    cut.save_checkpoint(tmp_path / "two.ckpt")
    resumed, seen = recorded(log=tmp_path / "log.jsonl")
    last = Module()
    trainer = trainer_of(tmp_path, RhoCallback(resumed), max_epochs=3)
    trainer.fit(last, train_loader(), ckpt_path=tmp_path / "two.ckpt")
    assert seen_first.chosen + seen.chosen == seen_whole.chosen
    assert resumed.step == 12
    assert_same_weights(module, last)
    assert (tmp_path / "log.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*")  # it does not ask ours
@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fit_resumed_within_an_epoch_goes_on_with_the_next_batch(tmp_path, workers):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(select, *callbacks, checkpoint=None, **options):
        dataset, module = rho.WithIndex(TensorDataset(*points())), Module()
        batches = select.batch_sampler(dataset, CANDIDATES)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=workers)
        trainer = trainer_of(tmp_path, RhoCallback(select), *callbacks, max_epochs=3, **options)
        trainer.fit(module, loader, ckpt_path=checkpoint)
        assert trainer.global_step == select.step
        return module

    whole, seen_whole = recorded()
    undisturbed = fit(whole)
    first, seen_first = recorded()
    saving = ModelCheckpoint(tmp_path, "six", every_n_train_steps=6, save_top_k=-1)
    fit(first, saving, max_steps=7, enable_checkpointing=True)  # 4 steps an epoch
    resumed, seen = recorded()
    last = fit(resumed, checkpoint=tmp_path / "six.ckpt")
    assert seen_first.chosen[:6] + seen.chosen == seen_whole.chosen
    assert len(seen.chosen) == 6
    assert_same_weights(undisturbed, last)


def test_a_compiled_module_is_scored_and_trained(tmp_path):
    class Plain(Module):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x), y)

    select, seen = recorded()
    module = Plain()
    first = copy.deepcopy(module.net)
    compiled = torch.compile(module, backend="eager")
    trainer_of(tmp_path, RhoCallback(select)).fit(compiled, train_loader())
    chosen, _, net = through_core(first, seen.candidates)
    assert seen.chosen == chosen
    assert_same_weights(net, module.net)


OTHER_NAME = """
import sys
import pytorch_lightning as pl
from rholoss.integrations.lightning import RhoCallback
assert issubclass(RhoCallback, pl.Callback)
assert "lightning.pytorch" not in sys.modules, "it was not asked for"

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import rholoss as rho
from fixtures_integrations import Classifier, assert_same_weights, points, recorded, through_core

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Classifier().net
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(rho.WithIndex(TensorDataset(*points())), batch_size=24)

select, seen = recorded()
module = Module()
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[RhoCallback(select)], logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, datamodule=Data())
chosen, _, net = through_core(Classifier().net, seen.candidates)
assert seen.chosen == chosen and len(chosen) == 8
assert_same_weights(net, module.net)
"""


def test_under_its_other_name():
    pytest.importorskip("pytorch_lightning")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "src")])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", OTHER_NAME]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_dict_batches_and_an_inner_model(tmp_path):
    class Nested(Module):
        def forward(self, x):
            raise AssertionError("the inner model is the one that is scored")

        def training_step(self, batch, batch_idx):
            assert sorted(batch) == ["labels", "x"]
            return F.cross_entropy(self.net(batch["x"]), batch["labels"])

    def collate(items):
        index, x, y = torch.utils.data.default_collate(items)
        return {"index": index, "x": x, "labels": y}

    select, seen = recorded()
    loader = DataLoader(rho.WithIndex(TensorDataset(*points())), CANDIDATES, collate_fn=collate)
    callback = RhoCallback(select, model=lambda module: module.net)
    trainer_of(tmp_path, callback, max_epochs=1).fit(Nested(), loader)
    assert len(seen.chosen) == 4


def test_a_module_without_forward_is_asked_for_the_one_that_has_logits(tmp_path):
    class Bare(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Classifier().net

        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    with pytest.raises(RholossError, match=r"Bare has no `forward`.*model=lambda"):
        trainer_of(tmp_path, RhoCallback(recorded()[0])).fit(Bare(), train_loader())


def test_importance_weights_are_those_of_the_step(tmp_path):
    select, seen = recorded("grad_norm_is")

    class Weighted(Module):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return select.reduce(F.cross_entropy(self(x), y, reduction="none"))

    module = Weighted()
    first = copy.deepcopy(module.net)
    trainer_of(tmp_path, RhoCallback(select)).fit(module, train_loader())
    chosen, _, net = through_core(first, seen.candidates, "grad_norm_is")
    assert seen.chosen == chosen
    assert_same_weights(net, module.net)


def test_batches_without_ids_are_found_and_the_hook_is_gone(tmp_path):
    module = Module()
    with pytest.raises(RholossError, match="No ids were found in the batch"):
        trainer_of(tmp_path, RhoCallback(recorded()[0])).fit(module, plain_loader())
    assert HOOK not in vars(module)
    select, seen = recorded()
    trainer_of(tmp_path, RhoCallback(select), max_epochs=1).fit(module, train_loader())
    assert len(seen.chosen) == 4


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
def test_a_step_that_is_not_selected_for_is_an_error(tmp_path):
    class Iterates(Module):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return F.cross_entropy(self(batch[1]), batch[2])

    with pytest.raises(RholossError, match="did not pass through `on_after_batch_transfer`"):
        trainer_of(tmp_path, RhoCallback(recorded()[0])).fit(Iterates(), train_loader())


def test_validation_does_not_count(tmp_path):
    class Slow(Validated):
        def validation_step(self, batch, batch_idx):
            time.sleep(0.1)

    select, _ = recorded()
    trainer = trainer_of(tmp_path, RhoCallback(select), num_sanity_val_steps=1)
    started = time.perf_counter()
    trainer.fit(Slow(), train_loader(), plain_loader())
    assert time.perf_counter() - started > 0.8
    assert select.ledger.seconds < time.perf_counter() - started - 0.8


def test_a_hook_of_the_instance_comes_back(tmp_path):
    module, called = Module(), []

    def own(batch, dataloader_idx):
        called.append(len(batch[1]))
        return batch

    module.on_after_batch_transfer = own
    trainer_of(tmp_path, RhoCallback(recorded()[0]), max_epochs=1).fit(module, train_loader())
    assert called == [CANDIDATES] * 4
    assert module.on_after_batch_transfer is own


def test_what_cannot_be_used_is_refused(tmp_path, monkeypatch):
    with pytest.raises(RholossError, match=r"`selector` is a str; pass a `rholoss\.Selector`"):
        RhoCallback("rho")
    trainer = trainer_of(tmp_path, RhoCallback(recorded()[0]))
    sharded = type("FSDPStrategy", (type(trainer.strategy),), {})
    monkeypatch.setattr(trainer.strategy, "__class__", sharded)
    with pytest.raises(RholossError, match="uses FSDPStrategy: scoring with sharded weights"):
        trainer.fit(Module(), train_loader())


def test_it_says_which_extra_is_missing(monkeypatch):
    from rholoss.integrations import lightning

    monkeypatch.delitem(vars(lightning), "RhoCallback", raising=False)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RholossError, match=r"pip install 'rholoss\[lightning\]'"):
        _ = lightning.RhoCallback


def test_a_last_batch_of_one_row_is_told_of_at_the_first_step(tmp_path):
    """It comes at the end of the epoch, where BatchNorm would fail."""

    class Normalised(Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(points()[0].shape[1]), self.net)

    rows = torch.utils.data.Subset(rho.WithIndex(TensorDataset(*points())), range(CANDIDATES + 5))
    select = rho.Selector("loss", keep=0.1)
    trainer = trainer_of(tmp_path, RhoCallback(select), max_steps=1)
    with pytest.warns(UserWarning, match="Of a batch of 5 candidates one row is selected"):
        trainer.fit(Normalised(), DataLoader(rows, batch_size=CANDIDATES))
    assert select.step == 1
