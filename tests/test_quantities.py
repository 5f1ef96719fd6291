import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from rholoss import quantities, scores
from rholoss.core import Stats


def logits(*draws_BC):
    """Logits [K, B, C] of given probabilities."""
    return torch.tensor(draws_BC).log()


def bald(logits_KBC):
    target = torch.zeros(logits_KBC.shape[1], dtype=torch.long)
    measured = {name: f(logits_KBC, target) for name, f in quantities.QUANTITIES.items()}
    return scores.bald(Stats(target, measured)), measured


def test_gradient_norms_of_the_worked_example(fixture_a):
    found = quantities.grad_norm(fixture_a.logits[None], fixture_a.labels)
    torch.testing.assert_close(found, fixture_a.grad_norm, atol=1e-5, rtol=0)


@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(2, 12), st.floats(0.1, 50), st.data())
def test_gradient_norm_is_the_gradient_of_the_loss_at_the_logits(seed, rows, classes, scale, data):
    generator = torch.Generator().manual_seed(seed)
    logits_BC = (torch.randn(rows, classes, generator=generator) * scale).requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator)
    (grad,) = torch.autograd.grad(F.cross_entropy(logits_BC, target, reduction="sum"), logits_BC)
    found = quantities.grad_norm(logits_BC.detach()[None], target)
    torch.testing.assert_close(found, grad.norm(dim=1), atol=1e-5, rtol=1e-4)
    assert (found <= math.sqrt(2) + 1e-5).all()


def test_entropies_and_bald_of_two_draws_worked_by_hand():
    # Point 0: sure of opposite classes. Point 1: the draws agree. Point 2: sure, then unsure.
    found, measured = bald(
        logits([[0.9, 0.1], [0.8, 0.2], [0.9, 0.1]], [[0.1, 0.9], [0.8, 0.2], [0.5, 0.5]])
    )
    expected = {
        "entropy": [0.693147, 0.500402, 0.610864],
        "conditional_entropy": [0.325083, 0.500402, 0.509115],
    }
    for name, values in expected.items():
        torch.testing.assert_close(measured[name], torch.tensor(values), atol=1e-5, rtol=0)
    torch.testing.assert_close(found, torch.tensor([0.368064, 0.0, 0.101749]), atol=1e-5, rtol=0)


def test_probabilities_are_averaged_not_logits():
    entropy = quantities.entropy(logits([[0.9, 0.1]], [[0.5, 0.5]]), torch.tensor([0]))
    assert entropy.item() == pytest.approx(0.610864, abs=1e-5)  # of 0.7 and 0.3
    assert entropy.item() != pytest.approx(0.562335, abs=1e-2)  # of 0.75 and 0.25


def test_bald_is_zero_when_the_draws_agree_and_never_negative():
    draw_BC = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    found, _ = bald(draw_BC.expand(4, 50, 7))
    torch.testing.assert_close(found, torch.zeros(50), atol=1e-6, rtol=0)
    found, _ = bald(torch.randn(4, 50, 7, generator=torch.Generator().manual_seed(1)))
    assert (found > 0).all()


def test_certain_predictions_have_entropy_zero_rather_than_nan():
    certain = torch.tensor([[[1000.0, 0.0, -1000.0]]])
    for name, quantity in quantities.QUANTITIES.items():
        assert quantity(certain, torch.tensor([0])).item() == 0.0, name


def test_gradient_norm_of_several_draws_is_that_of_their_mean_probability():
    found = quantities.grad_norm(logits([[0.9, 0.1]], [[0.5, 0.5]]), torch.tensor([0]))
    assert found.item() == pytest.approx(0.3 * math.sqrt(2), abs=1e-6)
