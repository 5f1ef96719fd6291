"""Irreducible losses beside those of a guess."""

import json
import math

import numpy as np
import pytest
from fixtures_cli import rholoss_

import rholoss as rho
from rholoss.il.guessing import guessing_loss, told
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
    assert told(0.3, None) == "mean 0.3000"
    assert told(0.3, 0.6) == "mean 0.3000 (a guess by the classes' shares: 0.6000)"
    assert "Hardly better than guessing" not in told(0.57, 0.6)
    assert "Hardly better than guessing" in told(0.571, 0.6)


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
