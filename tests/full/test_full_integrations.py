"""Slow checks of the integrations, outside CI: compilation by inductor, more ways to start two ranks."""

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures_integrations import (
    LEARNING_RATE,
    TRAINED,
    Classifier,
    Rows,
    assert_same_weights,
    recorded,
    through_core,
)
from test_integrations_ranks import TORCHRUN, check, launch

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]  # the compiler's own


def test_hugging_face_compiled_by_inductor_chooses_and_learns_as_core_does(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from rholoss.integrations.huggingface import RhoTrainer

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    select, seen = recorded()
    model = Classifier()
    first = copy.deepcopy(model.net)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    settings = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=TRAINED, num_train_epochs=2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", max_grad_norm=0.0, torch_compile=True,
        torch_compile_backend="inductor",
    )  # fmt: skip
    trainer = RhoTrainer(
        model, settings, train_dataset=Rows(), optimizers=(optimizer, constant), selector=select
    )
    trainer.train()
    assert list((tmp_path / "code").rglob("*.cpp")), "nothing was compiled"
    chosen, _, net = through_core(first, seen.candidates)
    assert seen.chosen == chosen
    assert len(chosen) == 8
    assert_same_weights(net, model.net)


@pytest.mark.parametrize("loop", ["lightning", "lightning_batches"])
def test_lightning_started_by_torchrun(tmp_path, loop):
    pytest.importorskip("lightning")
    check(launch(tmp_path, loop, *TORCHRUN), tmp_path)


def test_lightning_started_by_itself_with_the_selectors_batches(tmp_path):
    pytest.importorskip("lightning")
    check(launch(tmp_path, "lightning_batches"), tmp_path)
