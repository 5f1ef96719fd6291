"""Cells on data that is read file by file: a tiny Clothing-1M, an ordinary loop, the same lines."""

import functools
import sys
import time
import types
from dataclasses import replace

import pytest
import torch
from fixtures_clothing import write_clothing1m
from torch import nn

from experiments.bench import streaming
from experiments.bench.cell import Cell
from experiments.bench.preparation import Preparation
from experiments.bench.run import Bench, done, run
from experiments.bench.streaming import Loop
from experiments.datasets.folders import flipped, resized
from experiments.models import MODELS
from rholoss.errors import RholossError

NUM = 60
BASE = {
    "dataset": "clothing1m",
    "labels": "human",
    "model": "tiny224",
    "n_b": 2,
    "n_B": 20,
    "epochs": 2,
}


def tiny(num_classes):
    return nn.Sequential(
        nn.AvgPool2d(56), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, num_classes)
    )


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny224", tiny)
    keys = [f"images/{i}.jpg" for i in range(NUM)]
    noisy = {key: i % 14 for i, key in enumerate(keys[:40])}
    clean = {key: i % 14 for i, key in enumerate(keys[40:], 40)}
    lists = {"noisy_train": keys[:40], "clean_train": keys[40:46], "clean_val": keys[46:48]}
    return write_clothing1m(tmp_path, noisy, clean, {**lists, "clean_test": keys[48:]})


@pytest.fixture
def loop(root, tmp_path):
    return functools.partial(Loop, root=root, folder=tmp_path / "il", num_workers=0, il_epochs=2)


@pytest.mark.parametrize("method", ["uniform", "rho", "grad_norm_is"])
def test_a_run_from_end_to_end(root, tmp_path, method, loop, monkeypatch):
    il = "tiny224, noisy holdout" if method == "rho" else "none"
    cell = Cell(**BASE, method=method, il=il)
    bench = Bench(root)
    monkeypatch.setattr(bench, "start", loop)
    assert run(bench, [("try", cell)], tmp_path / "out", progress=False) == 1
    (line,) = done(tmp_path / "out").values()
    assert Cell.of(line) == cell
    assert line["steps_per_epoch"] == 2  # 48 rows, 20 candidates
    assert line["steps"] == 4
    assert [step for step, _ in line["eval"]] == [2, 4]
    assert line["trained"] == 8
    assert line["scored"] == (0 if method == "uniform" else 80)
    assert len(line["shares"]["correct"]) == 2
    assert len(line["per_class"]) == 14
    assert (line["il_fit"] is None) == (il == "none")


def test_processes_fit_nothing_twice(root, tmp_path, monkeypatch):
    """It takes hours, and each of them would write to one place."""
    bench, fits = Bench(root, folder=tmp_path / "il"), []
    fit = functools.partial(streaming.fit_irreducible, progress=False)

    def counted(*given, **options):
        fits.append(other(Cell(**BASE, method="negative_il", il=il)))
        return fit(*given, **{**options, "epochs": 1, "num_workers": 0})

    monkeypatch.setattr(streaming, "fit_irreducible", counted)
    il = "tiny224, noisy holdout"
    cells = [Cell(**BASE, method="rho", il=il), Cell(**BASE, method="negative_il", il=il)]
    mine, other = (Preparation(bench, cells, tmp_path) for _ in range(2))
    assert mine(cells[0])
    assert other(cells[1])
    assert fits == [False]  # which waited for the one
    assert bench.start(cells[1]).il_about is not None
    assert len(fits) == 1


def test_shares_are_of_what_was_trained_on(loop):
    current = loop(Cell(**BASE))
    right = []
    forward = current.model.forward

    def watched(x):
        logits = forward(x)
        if torch.is_grad_enabled():
            right.append(logits.argmax(1))
        return logits

    current.model.forward = watched
    labels = []
    select = current.select

    def noted(model, batch):
        index, x, y = select(model, batch)
        labels.append(y)
        return index, x, y

    noted.reduce = select.reduce
    current.select = noted
    current.advance()
    assert current.step == 2
    expected = (torch.cat(right) == torch.cat(labels)).float().mean()
    assert current.shares()["correct"] == [pytest.approx(float(expected))]


def test_the_bench_starts_an_ordinary_loop_for_it(root):
    assert isinstance(Bench(root).start(Cell(**BASE)), Loop)


def test_what_streamed_data_cannot_do_is_told(loop):
    with pytest.raises(RholossError, match="'svp', which needs resident data"):
        loop(Cell(**BASE, method="svp", il="tiny224, noisy holdout"))
    with pytest.raises(RholossError, match="clothing1m has a noisy holdout only"):
        loop(Cell(**BASE, method="rho", il="tiny224, cross-fit"))


def test_torchvision_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        ImportError, match="'resnet50' for large images is torchvision's: pip install"
    ):
        MODELS["imagenet_resnet50"](14)


def test_test_images_are_not_turned_over(root, loop):
    current = loop(Cell(**BASE))
    assert current.files.test.transform is current.files.plain.transform is resized
    assert current.files.train.transform is flipped


def test_irreducible_losses_are_fitted_once_for_all_runs(loop, monkeypatch):
    cell = Cell(**BASE, method="rho", il="tiny224, noisy holdout")
    first = loop(cell)

    def never(*_, **__):
        raise AssertionError("fitted again")

    monkeypatch.setattr(streaming, "fit_irreducible", never)
    again = loop(replace(cell, method="negative_il", seed=1))
    assert again.il_about == first.il_about
    again.advance()
    assert again.step == 2


def test_seconds_of_training_do_not_hold_those_of_the_irreducible_losses(loop, monkeypatch):
    before = time.perf_counter()
    monkeypatch.setattr(streaming, "irreducible", lambda *_, **__: time.sleep(0.2))
    assert loop(Cell(**BASE)).started - before >= 0.2


@pytest.mark.parametrize(
    ("name", "heads"), [("googlenet", ["aux1", "aux2"]), ("inception_v3", ["AuxLogits"])]
)
def test_side_heads_are_taken_off_after_the_weights_were_loaded(monkeypatch, name, heads):
    """As torchvision does, which refuses `aux_logits=False` together with weights."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.aux_logits = nn.Linear(8, 1000), True
            for head in heads:
                setattr(self, head, nn.Linear(8, 1000))

    def get_model(asked, weights, **options):
        assert (asked, weights, options) == (name, "IMAGENET1K_V1", {})
        return Network()

    models = types.SimpleNamespace(get_model=get_model)
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(models=models))
    network = MODELS[f"imagenet_{name}"](14)
    assert network.fc.out_features == 14
    assert network.aux_logits is False
    assert all(getattr(network, head) is None for head in heads)


def test_low_precision_is_that_of_the_model_and_not_of_the_sums(loop):
    current = loop(Cell(**BASE), precision="bf16")
    losses = []
    forward = current.model.forward

    def watched(x):
        assert torch.is_autocast_enabled("cpu")
        logits = forward(x)
        losses.append(logits.float())
        return logits

    current.model.forward = watched
    found = current._evaluate()
    labels = torch.tensor([y for _, y in current.files.test])
    expected = nn.functional.cross_entropy(torch.cat(losses), labels)
    assert found.loss == pytest.approx(float(expected), abs=1e-6)
