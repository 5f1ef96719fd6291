import pytest
import torch

from rholoss.errors import TooFewFiniteScoresError, UnmeasuredLossError
from rholoss.guard import Guard

FINE = torch.tensor([1.0, 2.0, 3.0, 4.0])
ONE_BAD = torch.tensor([1.0, -torch.inf, 3.0, 4.0])
IDS = torch.tensor([10, 11, 12, 13])


def test_nothing_was_seen():
    guard = Guard()
    guard.read()
    assert guard.not_finite == 0


def test_scores_that_are_not_finite_are_counted_over_the_steps():
    guard = Guard()
    for score in (FINE, ONE_BAD, ONE_BAD):
        guard.observe(IDS, FINE, score, enough=3)
    assert guard.not_finite == 0  # not before it is read
    guard.read()
    guard.read()
    assert guard.not_finite == 2


def test_too_few_finite_scores():
    guard = Guard()
    guard.observe(IDS, None, ONE_BAD, enough=4)
    guard.observe(IDS, None, FINE, enough=4)
    message = (
        r"At 1 step\(s\) fewer .* Lower the learning rate.*\(1 scores were not finite so far\)"
    )
    with pytest.raises(TooFewFiniteScoresError, match=message):
        guard.read()
    guard.read()  # told once


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_irreducible_losses_that_are_not_finite_are_told_with_an_id(value):
    guard = Guard()
    guard.observe(IDS, FINE, FINE, enough=1)
    guard.observe(IDS, torch.tensor([0.0, 0.0, value, value]), ONE_BAD, enough=1)
    guard.observe(IDS + 100, FINE, FINE, enough=1)
    message = "2 candidates had no finite irreducible loss, for instance id 12; none .* `rholoss il score`"
    with pytest.raises(UnmeasuredLossError, match=message):
        guard.read()
    guard.observe(IDS, FINE, FINE, enough=1)
    guard.read()


def test_string_ids_are_named_too():
    guard = Guard()
    guard.observe(["a", "b", "c", "d"], ONE_BAD, ONE_BAD, enough=1)
    with pytest.raises(
        UnmeasuredLossError,
        match="1 candidates had no finite irreducible loss, for instance id b; none",
    ):
        guard.read()
