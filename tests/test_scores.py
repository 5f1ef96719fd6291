import math

import pytest
import torch

from rholoss import scores
from rholoss.core import Stats

MEASURED = {
    "loss": torch.tensor([2.0, 0.5]),
    "irreducible_loss": torch.tensor([0.5, 3.0]),
    "grad_norm": torch.tensor([1.25, 0.25]),
    "entropy": torch.tensor([1.0, 0.75]),
    "conditional_entropy": torch.tensor([0.25, 0.75]),
}


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (scores.reducible_loss, [1.5, -2.5]),
        (scores.training_loss, [2.0, 0.5]),
        (scores.gradient_norm, [1.25, 0.25]),
        (scores.negative_irreducible_loss, [-0.5, -3.0]),
        (scores.entropy, [1.0, 0.75]),
        (scores.conditional_entropy, [0.25, 0.75]),
        (scores.bald, [0.75, 0.0]),
        (scores.loss_minus_conditional_entropy, [1.75, -0.25]),
        (scores.nothing, [0.0, 0.0]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_score_is_its_equation(score, expected):
    assert score(Stats(torch.tensor([7, 9]), MEASURED)).tolist() == expected


def test_uniform_needs_nothing_but_the_number_of_candidates():
    assert torch.equal(scores.nothing(Stats(["a", "b", "c"], {})), torch.zeros(3))


def test_an_unmeasured_point_has_no_score():
    measured = {**MEASURED, "irreducible_loss": torch.tensor([math.nan, 1.0])}
    score_B = scores.reducible_loss(Stats(torch.arange(2), measured))
    assert score_B.isnan().tolist() == [True, False]
