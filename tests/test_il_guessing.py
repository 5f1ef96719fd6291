"""Irreducible losses beside those of a guess."""

import functools
import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
from fixtures_cli import FIT, rholoss_
from torch.utils.data import TensorDataset

import rholoss as rho
from rholoss.engine import Resident, fit_ladder, fit_resident
from rholoss.il.guessing import assessed, guessing_loss
from rholoss.il.hashing import ABSENT

LABELS = np.array([0, 0, 0, 1] * 25, dtype=np.int32)
ENTROPY = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))


def test_a_guess_knows_the_shares_of_the_labels():
    assert guessing_loss(LABELS, "classification") == pytest.approx(ENTROPY)
    some_absent = np.concatenate([LABELS, np.full(40, ABSENT, np.int32)])
    assert guessing_loss(some_absent, "classification") == pytest.approx(ENTROPY)
    assert guessing_loss(np.arange(8) % 4, "classification") == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("labels", "loss"),
    [
        (None, "classification"),
        (LABELS, "regression"),
        (LABELS, None),
        (np.zeros(9, np.int32), "classification"),
        (np.arange(9, dtype=np.int32), "classification"),  # hashes of what is no class
    ],
)
def test_where_nothing_can_be_guessed(labels, loss):
    assert guessing_loss(labels, loss) is None


def test_losses_that_are_no_better_are_told():
    assert assessed(0.3, None) == "mean 0.3000"
    assert assessed(0.3, 0.6) == "mean 0.3000 (a guess by the classes' shares: 0.6000)"
    assert "Hardly better than guessing" not in assessed(0.57, 0.6)
    assert "Hardly better than guessing" in assessed(0.571, 0.6)


def fits(rate):
    """The same small fit three ways; at a rate of 0 it learns nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator)
    y = x[:, :3].argmax(1)
    options = {"folds": 2, "epochs": 12, "batch_size": 16}
    data, on_device = TensorDataset(x, y), Resident(x, y, device="cpu")
    optimizer = functools.partial(torch.optim.AdamW, lr=rate)
    by_steps = {"progress": False, "optimizer": optimizer, "device": "cpu"}
    yield lambda: rho.fit_irreducible(small, data, **options, **by_steps)
    yield lambda: fit_resident(small, on_device, learning_rate=rate, **options)
    yield lambda: fit_ladder(small, on_device, learning_rate=rate, **options).tables[-1]


def small():
    model = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(model.weight)  # all classes alike, to begin with
    torch.nn.init.zeros_(model.bias)
    return model


def test_a_fit_that_learnt_nothing_says_so():
    for fit in fits(rate=0.0):
        with pytest.warns(
            UserWarning, match=r"Irreducible losses: mean .*\. Hardly better than"
        ) as said:
            fit()
        assert len(said) == 1
        assert said[0].filename == __file__


def test_a_fit_that_learnt_something_is_silent_and_shows_its_mean():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fit in fits(rate=0.05):
            il = fit()
            assert re.search(
                r" loss of .*, mean 0\.\d{4} \(a guess by the classes' shares: 1\.\d{4}\)\)$",
                repr(il),
            )
    assert repr(rho.Irreducible.from_losses([math.nan, 1, 2])).endswith(", mean 1.5000)")


@pytest.mark.parametrize(("loss", "warned"), [(0.2, False), (ENTROPY, True)])
def test_show_puts_them_side_by_side(tmp_path, loss, warned):
    rows = list(zip(range(100), LABELS.tolist(), strict=True))
    il = rho.Irreducible.from_losses(
        np.full(100, loss, np.float32), dataset=rows, labels=LABELS, loss="classification"
    )
    il.save(tmp_path / "il")
    said = rholoss_(f"il show {tmp_path / 'il'}")
    assert f"mean {loss:.4f} (a guess by the classes' shares: {ENTROPY:.4f})" in said.stdout
    assert ("Hardly better than guessing" in said.stdout) == warned
    found = json.loads(rholoss_(f"il show {tmp_path / 'il'} --json").stdout)
    assert found["guess"] == pytest.approx(ENTROPY)


def test_the_command_says_it_once(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = rholoss_(f"{FIT} --out {tmp_path / 'il'} --epochs 1 --lr 1e-9 --device cpu --quiet")
    assert said.exit_code == 0
    assert "a guess by the classes' shares" in said.stdout
    assert said.stderr.startswith("Warning: Irreducible losses: mean ")
    assert said.output.count("Hardly better than guessing") == 1


def test_a_model_that_nobody_fitted_is_told_when_it_scores():
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    with pytest.warns(UserWarning, match=r"Hardly better than guessing.*check the model's weights"):
        rho.score_irreducible(torch.nn.Linear(4, 2), data, progress=False)
