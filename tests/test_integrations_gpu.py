"""The integrations on a GPU: half precision with a scaler, compilation, the same first choice."""

import pytest
import torch
from fixtures_integrations import (
    KEEP,
    LEARNING_RATE,
    TRAINED,
    Classifier,
    Rows,
    points,
    recorded,
    through_core,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the frameworks' own


@pytest.fixture(autouse=True)
def same_precision():
    """Transformers turns TF32 on for the whole process when it compiles: not for the tests that follow."""
    everywhere, products = torch.backends.fp32_precision, torch.get_float32_matmul_precision()
    yield
    torch.backends.fp32_precision = everywhere
    torch.set_float32_matmul_precision(products)  # which accelerate sets by the old name


def check(seen, first, model):
    """The first choice is that of `core`, and every weight was trained and is finite."""
    chosen, _, _ = through_core(first, [index.cpu() for index in seen.candidates[:1]])
    assert len(seen.chosen) == 8
    assert sorted(seen.chosen[0]) == sorted(chosen[0])
    for old, new in zip(first.parameters(), model.parameters(), strict=True):
        assert new.isfinite().all()
        assert not torch.equal(old, new.cpu())


@pytest.mark.parametrize(
    "options", [{}, {"fp16": True}, {"bf16": True}, {"torch_compile": True}], ids=str
)
def test_hugging_face(tmp_path, options):
    transformers = pytest.importorskip("transformers")
    from rholoss.integrations.huggingface import RhoTrainer

    select, seen = recorded()
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    settings = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=TRAINED, num_train_epochs=2, report_to=[],
        disable_tqdm=True, save_strategy="no", max_grad_norm=0.0, **options,
    )  # fmt: skip
    trainer = RhoTrainer(
        model, settings, train_dataset=Rows(), optimizers=(optimizer, constant), selector=select
    )
    trainer.train()
    assert all(index.device.type == "cuda" for index in seen.candidates)
    check(seen, Classifier().net, model.net)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_lightning(tmp_path, precision):
    L = pytest.importorskip("lightning")
    from rholoss.integrations.lightning import RhoCallback

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Classifier().net

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    select, seen = recorded()
    module = Module()
    loader = DataLoader(
        rho.WithIndex(TensorDataset(*points())), round(TRAINED / KEEP), shuffle=True
    )
    trainer = L.Trainer(
        default_root_dir=tmp_path, max_epochs=2, accelerator="gpu", devices=1, precision=precision,
        callbacks=[RhoCallback(select)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    check(seen, Classifier().net, module.net)
