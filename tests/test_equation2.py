"""Eq. 2 of the paper, checked where Bayes can be done by hand.

log p(y_ho | x_ho; D_t u (x, y)) - log p(y_ho | x_ho; D_t) = L[y | x; D_t] - L[y | x; D_ho, D_t]

The left side is worked out from marginal likelihoods of whole data sets, the right one from predictive
distributions of the single candidate: two routes that share no formula.
"""

import math
from fractions import Fraction

import pytest
import torch

from rholoss.core import Stats
from rholoss.scores import reducible_loss, training_loss

NOISE = 0.5  # standard deviation of y around x . w, in the linear model
B, DIMENSIONS = 40, 3


def beta_marginal(heads, tails):
    """Probability of such a sequence of tosses under Beta(1, 1): heads! tails! / (heads + tails + 1)!"""
    return Fraction(
        math.factorial(heads) * math.factorial(tails), math.factorial(heads + tails + 1)
    )


@pytest.mark.parametrize("toss", [0, 1])
@pytest.mark.parametrize(("seen", "held"), [((1, 1), (3, 1)), ((0, 0), (2, 5)), ((4, 0), (0, 3))])
def test_a_coin(toss, seen, held):
    def gained(extra):
        """Probability of the holdout tosses after D_t and the extra tosses."""
        heads, tails = seen[0] + extra[0], seen[1] + extra[1]
        return beta_marginal(heads + held[0], tails + held[1]) / beta_marginal(heads, tails)

    def predictive(heads, tails):
        """Of the toss, by Laplace's rule."""
        return Fraction((heads if toss else tails) + 1, heads + tails + 2)

    left = gained((toss, 1 - toss)) / gained((0, 0))
    right = predictive(seen[0] + held[0], seen[1] + held[1]) / predictive(*seen)
    assert left == right  # exactly: the logarithm of this ratio is the score


@pytest.fixture
def linear():
    """Bayesian linear regression with prior w ~ N(0, I); a few points seen, some held out, candidates."""
    generator = torch.Generator().manual_seed(0)

    def points(num):
        x = torch.randn(num, DIMENSIONS, generator=generator, dtype=torch.float64)
        w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        y = x @ w + NOISE * torch.randn(num, generator=generator, dtype=torch.float64)
        return x, y

    candidates = points(B)
    candidates[1][::4] += 4.0  # wrong targets: what no model can foresee
    return points(4), points(12), candidates


def log_marginal(x, y):
    """log p(y | x) of a whole set: weights integrated out, one joint Gaussian."""
    covariance = x @ x.T + NOISE**2 * torch.eye(len(y), dtype=x.dtype)
    mean = torch.zeros(len(y), dtype=x.dtype)
    return torch.distributions.MultivariateNormal(mean, covariance).log_prob(y)


def predictive_losses(seen, x, y):
    """-log p(y | x; seen) of each point, from the posterior of the weights."""
    precision = torch.eye(DIMENSIONS, dtype=x.dtype) + seen[0].T @ seen[0] / NOISE**2
    posterior = torch.linalg.inv(precision)
    mean = posterior @ seen[0].T @ seen[1] / NOISE**2
    variance = ((x @ posterior) * x).sum(1) + NOISE**2
    return -torch.distributions.Normal(x @ mean, variance.sqrt()).log_prob(y)


def joined(*sets):
    return tuple(torch.cat(parts) for parts in zip(*sets, strict=True))


def holdout_gains(seen, held, candidates):
    """By how much log p(y_ho | x_ho) rises with each candidate."""

    def holdout(known):
        return log_marginal(*joined(held, known)) - log_marginal(*known)

    singles = [tuple(part[i : i + 1] for part in candidates) for i in range(B)]
    return torch.stack([holdout(joined(seen, single)) - holdout(seen) for single in singles])


def test_bayesian_linear_regression(linear):
    seen, held, candidates = linear
    measured = {
        "loss": predictive_losses(seen, *candidates),
        "irreducible_loss": predictive_losses(joined(seen, held), *candidates),
    }
    score_B = reducible_loss(Stats(torch.arange(B), measured))
    gain_B = holdout_gains(seen, held, candidates)
    torch.testing.assert_close(score_B, gain_B, rtol=1e-9, atol=1e-9)
    assert score_B.argmax() == gain_B.argmax()
    # And it is the second term that does it: the highest training loss is a wrong target here.
    hardest = training_loss(Stats(torch.arange(B), measured)).argmax()
    assert hardest % 4 == 0
    assert gain_B[hardest] < 0 < gain_B.max()


def test_without_the_seen_points_in_the_second_term_it_is_an_approximation(linear):
    """Approximation 2: L[y | x; D_ho] in place of L[y | x; D_ho, D_t]."""
    seen, held, candidates = linear
    loss_B = predictive_losses(seen, *candidates)
    gain_B = holdout_gains(seen, held, candidates)
    approximated_B = loss_B - predictive_losses(held, *candidates)
    assert (approximated_B - gain_B).abs().max() > 0.05
    ranks = torch.stack([approximated_B, gain_B]).argsort(1).argsort(1).double()
    assert 0.8 < torch.corrcoef(ranks)[0, 1] < 0.99
