"""Fitting and scoring that was cut off goes on where it stopped."""

import functools
import logging
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_il_fit import blobs, quick, sgd, small
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from rholoss.errors import StoreError
from rholoss.il import fit as fit_module
from rholoss.il.partial import Partial
from rholoss.il.score import score_irreducible
from rholoss.il.store import Irreducible
from rholoss.il.train import fit_member


class Watched:
    """Cross-entropy that counts the points it is asked for and may break off."""

    def __repr__(self):
        return "watched"  # the name of the loss is part of what makes a run the same run

    def __init__(self, stop_after=None):
        self.stop_after, self.trained, self.scored = stop_after, 0, 0

    def __call__(self, model, batch):
        if model.training:
            self.trained += len(batch[1])
        else:
            self.scored += len(batch[1])
            if self.stop_after is not None and self.scored > self.stop_after:
                raise KeyboardInterrupt
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# Two folds of 40 points each in batches of 8; two epochs with a check of 40 points each, then scoring.
RESUMED = {"folds": 2, "epochs": 2, "batch_size": 8}


@pytest.mark.parametrize(
    ("stop_after", "trained", "scored"),
    [
        (40, 2 * 80, 2 * 120),  # during the first fit: all over again
        (80 + 16, 80, 24 + 120),  # the first fit and 16 scores are kept
        (120 + 80 + 32, 0, 8),  # the first fold and the second fit are kept
    ],
)
def test_work_that_was_cut_off_goes_on(tmp_path, stop_after, trained, scored):
    data = blobs(80, 0)
    expected = quick(small, data, loss=Watched(), **RESUMED)
    with pytest.raises(KeyboardInterrupt):
        quick(small, data, loss=Watched(stop_after), out=tmp_path / "il", **RESUMED)
    with pytest.raises(StoreError, match="Run the same command again"):
        Irreducible.load(tmp_path / "il")
    second = Watched()
    il = quick(small, data, loss=second, out=tmp_path / "il", **RESUMED)
    assert (second.trained, second.scored) == (trained, scored)
    assert il.dense.numpy().tobytes() == expected.dense.numpy().tobytes()
    assert torch.equal(il.weights(1)["4.weight"], expected.weights(1)["4.weight"])
    assert sorted(p.name.split("-")[0] for p in il.path.iterdir()) == [
        "labels",
        "loss",
        "meta.json",
        "weights",
    ]


def test_a_record_that_never_reached_the_disk_is_measured_again(tmp_path):
    data = blobs(80, 0)
    expected = quick(small, data, loss=Watched(), **RESUMED)
    with pytest.raises(KeyboardInterrupt):
        quick(small, data, loss=Watched(80 + 24), out=tmp_path / "il", **RESUMED)
    records = tmp_path / "il" / "partial" / "fold-0.scored"
    size = records.stat().st_size // 3
    whole = records.read_bytes()
    records.write_bytes(whole[:size] + bytes(size) + whole[2 * size :])  # a hole after a power cut
    with pytest.raises(KeyboardInterrupt):  # cut off a second time, in the middle of a record
        quick(small, data, loss=Watched(8), out=tmp_path / "il", **RESUMED)
    assert records.stat().st_size == 2 * size
    records.write_bytes(records.read_bytes() + b"half")
    with pytest.raises(KeyboardInterrupt):
        quick(small, data, loss=Watched(8), out=tmp_path / "il", **RESUMED)
    second = Watched()
    il = quick(small, data, loss=second, out=tmp_path / "il", **RESUMED)
    assert second.scored == 16 + 120
    assert il.dense.numpy().tobytes() == expected.dense.numpy().tobytes()


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"epochs": 3},
        {"batch_size": 9},
        {"optimizer": sgd},
        {"make_model": lambda: nn.Linear(3, 3)},
        {"data": blobs(80, 7)},
    ],
)
def test_other_work_starts_afresh(tmp_path, other):
    first = {"make_model": small, "data": blobs(80, 0), **RESUMED}
    with pytest.raises(KeyboardInterrupt):
        quick(**first, loss=Watched(80 + 16), out=tmp_path / "il")
    counter = Watched()
    il = quick(**{**first, **other}, loss=counter, out=tmp_path / "il")
    assert counter.trained == 80 * {**first, **other}["epochs"]
    expected = quick(**{**first, **other}, loss=Watched())
    assert torch.equal(il.dense, expected.dense)


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def edited(change):
    """`ce` as a user has it after an edit: the same name, other code."""

    def loss(model, batch):
        return change(ce(model, batch))

    loss.__qualname__ = ce.__qualname__
    return loss


class Scaled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 3))


class Scaled2(Scaled):
    def forward(self, x):
        return 2 * super().forward(x)


class Flipped:
    """Augmented data: some draw from torch's generator, others from one of their own."""

    def __init__(self, data, own):
        self.data, self.draw = data, torch.Generator() if own else None
        self.targets = data.tensors[1]
        if own:
            self.draw.seed()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        x, y = self.data[row]
        return x * (1 - 2 * torch.randint(2, (), generator=self.draw)), y


def moved_inputs():
    x, y = blobs(80, 0).tensors
    return TensorDataset(x.flip(0), y)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({}, None),
        ({"loss": edited(lambda loss_B: loss_B + 1000)}, "code"),
        ({"loss": functools.partial(ce)}, "loss, code"),
        ({"data": moved_inputs()}, "scored, content"),
        ({"collate_fn": lambda items: default_collate(items[::-1])}, "code"),
        ({"make_model": Scaled2}, "code"),
        ({"make_model": lambda: nn.Sequential(Scaled()[0], nn.ReLU())}, "code"),
    ],
)
def test_work_goes_on_only_with_the_code_and_inputs_it_began_with(
    tmp_path, monkeypatch, capsys, other, what
):
    """The labels, names and weights are the same each time."""
    run = {"make_model": Scaled, "data": blobs(80, 0), "loss": ce, **RESUMED}
    cut_off_in_the_second_fold(monkeypatch, **run, out=tmp_path / "il")
    assert capsys.readouterr().err == ""
    il = quick(**{**run, **other}, out=tmp_path / "il")
    assert torch.equal(il.dense, quick(**{**run, **other}).dense)
    where, said = tmp_path / "il" / "partial", capsys.readouterr().err
    if what is None:
        assert re.fullmatch(
            rf"Going on from {where} \(1 fitted model\(s\), the last of 20\d\d-\d\d-\d\d \d\d:\d\d\); "
            "delete it to start over.\n",
            said,
        )
    else:
        assert said.startswith(f"Starting over: the unfinished work in {where} was of another job")
        assert said.endswith(f"(not the same: {what}).\n")


@pytest.mark.parametrize("own", [False, True])
def test_augmented_data_does_not_keep_work_from_going_on(tmp_path, monkeypatch, capsys, own):
    plain = blobs(80, 0)
    run = {"make_model": Scaled, "score": plain, "loss": ce, **RESUMED}
    cut_off_in_the_second_fold(monkeypatch, data=Flipped(plain, own), **run, out=tmp_path / "il")
    torch.rand(3)
    quick(data=Flipped(plain, own), **run, out=tmp_path / "il")
    assert capsys.readouterr().err.startswith("Going on from")


def cut_off_in_the_second_fold(monkeypatch, **run):
    fitted = []

    def fit(*args):
        if fitted:
            raise KeyboardInterrupt
        fitted.append(fit_member(*args))
        return fitted[0]

    with monkeypatch.context() as patched:
        patched.setattr(fit_module, "fit_member", fit)
        with pytest.raises(KeyboardInterrupt):
            quick(**run)


def test_an_old_store_serves_while_the_new_one_is_made(tmp_path):
    data = blobs(80, 0)
    old = quick(small, data, loss=Watched(), out=tmp_path / "il", **RESUMED)
    with pytest.raises(KeyboardInterrupt):
        quick(small, data, loss=Watched(96), out=tmp_path / "il", seed=1, **RESUMED)
    assert torch.equal(Irreducible.load(tmp_path / "il", data).dense, old.dense)
    new = quick(small, data, loss=Watched(), out=tmp_path / "il", seed=1, **RESUMED)
    assert not torch.equal(new.dense, old.dense)


def test_scoring_alone_goes_on_where_it_stopped(tmp_path):
    data, model = blobs(80, 0), small()
    options = {"batch_size": 8, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        score_irreducible(model, data, loss=Watched(30), out=tmp_path / "il", **options)
    counter = Watched()
    il = score_irreducible(model, data, loss=counter, out=tmp_path / "il", seconds=100.0, **options)
    assert counter.scored == 80 - 24
    assert il.seconds > 100
    assert torch.equal(il.dense, score_irreducible(model, data, **options).dense)
    with pytest.raises(KeyboardInterrupt):
        score_irreducible(model, data, loss=Watched(30), out=tmp_path / "il", **options)
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    counter = Watched()
    score_irreducible(model, data, loss=counter, out=tmp_path / "il", **options)
    assert counter.scored == 80  # it is another model now


def test_a_full_disk_keeps_what_was_scored(tmp_path, monkeypatch):
    data, model, real = blobs(80, 0), small(), open
    written = []

    def full(path, mode="r", *args, **kwargs):
        if str(path).endswith(".scored") and mode == "ab":
            written.append(path)
            if len(written) > 3:
                raise OSError(28, "No space left on device")
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(
        StoreError, match=r"No space left on device\. Free some space and run the same"
    ):
        score_irreducible(model, data, batch_size=8, out=tmp_path / "il", progress=False)
    monkeypatch.undo()
    counter = Watched()
    il = score_irreducible(model, data, batch_size=8, out=tmp_path / "il", progress=False)
    again = score_irreducible(model, data, loss=counter, batch_size=8, progress=False)
    assert torch.equal(il.dense, again.dense)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(int(sys.argv[3]))  # the same number gives the same sums
import test_il_resume as t

class Deadly(t.Watched):
    def __call__(self, model, batch):
        try:
            return super().__call__(model, batch)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGKILL)

t.quick(t.small, t.blobs(80, 0), loss=Deadly(120 + 80 + 8), out=sys.argv[2], **t.RESUMED)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_run_that_was_killed_goes_on(tmp_path):
    here, out = os.path.dirname(__file__), tmp_path / "il"
    result = subprocess.run(
        [sys.executable, "-c", KILLED, here, str(out), str(torch.get_num_threads())],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    data, counter = blobs(80, 0), Watched()
    il = quick(small, data, loss=counter, out=out, **RESUMED)
    assert (counter.trained, counter.scored) == (0, 32)
    assert torch.equal(il.dense, quick(small, data, loss=Watched(), **RESUMED).dense)
    assert not (out / "partial").exists()


def test_the_work_of_two_processes_is_not_mixed_up(tmp_path):
    """The second began when the first had done two batches; both were cut off."""
    one, rows = Partial(tmp_path, {"work": 1}, 4), np.arange(24, dtype=np.float32)
    for first in (0, 4):
        one.append("model", first, rows[first : first + 4], 1.0)
    two = Partial(tmp_path, {"work": 1}, 4)
    for first, who in ((8, one), (8, two), (12, one), (12, two), (20, two)):
        who.append("model", first, rows[first : first + 4], 1.0)
    found = Partial(tmp_path, {"work": 1}, 4).records("model")
    assert found["loss"].reshape(-1).tolist() == rows[:16].tolist()  # 16 to 19 are missing
    assert found["seconds"].sum() == 4


class Prepared(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small()

    def prepare(self, x):
        return x

    def forward(self, x):
        return self.inner(self.prepare(x))


def test_work_with_other_code_in_a_method_is_done_again(tmp_path, monkeypatch):
    data, model, watched = blobs(80, 0), Prepared(), Watched(stop_after=32)
    options = {"batch_size": 8, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        score_irreducible(model, data, loss=watched, out=tmp_path / "il", **options)
    monkeypatch.setattr(Prepared, "prepare", lambda self, x: x / 255)
    found = score_irreducible(model, data, loss=Watched(), out=tmp_path / "il", **options)
    fresh = score_irreducible(model, data, loss=Watched(), **options)
    assert torch.equal(found.values, fresh.values)


class Focal:
    """A loss with a setting that neither its name nor its code tells."""

    def __init__(self, gamma):
        self.gamma, self.log = gamma, logging.getLogger("focal")  # which knows all other loggers

    def __call__(self, model, batch):
        loss_B = ce(model, batch)
        return loss_B * (1 - (-loss_B).exp()) ** self.gamma


class Weighted(nn.Module):
    """The same for a module: it shows its structure and not the weights of the classes."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", torch.full((3,), weight))

    def forward(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], self.weight, reduction="none")


def groups(lr):
    return lambda parameters: torch.optim.SGD([{"params": list(parameters), "lr": lr}], lr=0.1)


@pytest.mark.parametrize(
    ("first", "then", "goes_on"),
    [
        ({"loss": Focal(0.0)}, {"loss": Focal(2.0)}, False),
        ({"loss": Focal(2.0)}, {"loss": Focal(2.0)}, True),
        ({"loss": Weighted(1.0)}, {"loss": Weighted(2.0)}, False),
        ({"loss": Weighted(1.0)}, {"loss": Weighted(1.0)}, True),
        ({"optimizer": groups(0.1)}, {"optimizer": groups(0.2)}, False),
        ({"optimizer": groups(0.1)}, {"optimizer": groups(0.1)}, True),
    ],
)
def test_work_goes_on_only_with_the_settings_it_began_with(
    tmp_path, monkeypatch, capsys, first, then, goes_on
):
    run = {"make_model": small, "data": blobs(80, 0), **RESUMED, "out": tmp_path / "il"}
    cut_off_in_the_second_fold(monkeypatch, **run, **first)
    il = quick(**run, **then)
    assert capsys.readouterr().err.startswith("Going on" if goes_on else "Starting over")
    assert torch.equal(il.dense, quick(**{**run, "out": None}, **then).dense)
