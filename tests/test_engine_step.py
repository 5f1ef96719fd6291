"""The parts of a step: scores that cannot be used are counted, and what happened is noted."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.engine import Resident, Trainer, step
from rholoss.engine.counters import Counters
from rholoss.engine.resident import Examples

INDEX = torch.tensor([4, 1, 0, 3])
NAN, INF = math.nan, math.inf
SCORES = {
    name: dataclasses.replace(rho.METHODS[name], pick=step.unpicked)
    for name in ("rho", "loss", "grad_norm")
}


@pytest.fixture
def counters():
    return Counters.empty(3, 2, torch.device("cpu"))


def test_scores_are_ranked_by_the_table_of_their_ids(counters):
    table = torch.tensor([1.0, 2.0, NAN, 4.0, 8.0])
    measured = {"loss": torch.tensor([9.0, NAN, INF, 6.0])}
    score_B, mean = step.rank(SCORES["rho"], 2, False, counters, INDEX, measured, table, None)
    assert score_B.tolist() == [1.0, -INF, -INF, 2.0]
    assert mean == 1.5
    assert counters.not_finite == 2
    assert counters.short == 0
    assert set(measured) == {"loss"}  # whoever measured may keep it


def test_only_what_was_forwarded_should_have_a_score(counters):
    measured = {"loss": torch.tensor([9.0, NAN, NAN, 6.0])}
    forwarded = torch.tensor([0, 1])
    step.rank(SCORES["loss"], 2, False, counters, INDEX, measured, None, forwarded)
    assert counters.not_finite == 1


def test_what_was_not_forwarded_may_be_in_the_mean_alone(counters):
    measured = {"loss": torch.tensor([9.0, 1.0, 8.0, 6.0])}
    forwarded = torch.tensor([3, 1])
    scores, mean = step.rank(SCORES["loss"], 3, True, counters, INDEX, measured, None, forwarded)
    assert scores.tolist() == [-INF, 1.0, -INF, 6.0]
    assert mean == 6.0
    assert counters.not_finite == 0
    assert counters.short == 1  # two are left of three


@pytest.mark.parametrize(("enough", "short"), [(1, 0), (2, 0), (3, 1)])
def test_a_step_is_short_of_scores_where_too_few_can_be_used(counters, enough, short):
    measured = {"grad_norm": torch.tensor([NAN, 0.2, 0.5, NAN])}
    step.rank(SCORES["grad_norm"], enough, False, counters, INDEX, measured, None, None)
    assert counters.short == short


@pytest.mark.parametrize(("name", "short"), [("grad_norm", 1), ("grad_norm_is", 0)])
def test_one_score_is_enough_for_who_draws_it_again(name, short):
    x, y = torch.ones(8, 3), torch.tensor([0, 1] * 4)
    x[1:] = INF
    trainer = Trainer(
        nn.Linear(3, 2), Resident(x, y, device="cpu"), total_steps=2, method=name, candidates=8,
        keep=0.25,
    )  # fmt: skip
    trainer.train(1)
    assert trainer.counters.not_finite == 7
    assert trainer.counters.short == short


def test_the_chosen_rows_come_in_the_order_of_the_choice():
    candidates = Examples(INDEX, torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 2, 3]))
    rows = step.chosen_rows(candidates, torch.tensor([3, 0]), torch.tensor([1.0, 2, 3, 4]))
    expected = [[3, 4], [[6.0, 7.0], [0.0, 1.0]], [3, 0], [4.0, 1.0]]
    assert [row.tolist() for row in rows] == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_notes_what_it_chose_by(overlap):
    """By hand for the first step: the candidates are all rows, and nothing has moved yet."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, generator=generator), torch.tensor([0, 1] * 4)
    model, il = nn.Linear(3, 2), torch.linspace(0, 1, 8)
    score = nn.functional.cross_entropy(model(x), y, reduction="none").detach() - il
    trainer = Trainer(
        model, Resident(x, y, device="cpu"), total_steps=2, irreducible=il, candidates=8, keep=0.25,
        overlap=overlap,
    )  # fmt: skip
    trainer.train(1)
    best = score.topk(2)
    noted = trainer.counters
    assert torch.equal(noted.index[0], best.indices)
    torch.testing.assert_close(noted.score[0], best.values)
    torch.testing.assert_close(noted.reducible[0], score.mean())
    torch.testing.assert_close(noted.loss[0], (score + il)[best.indices].mean())
    assert noted.row == 1


def test_tokens_reach_a_live_model_as_they_are():
    def make():
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))

    live = rho.LiveIrreducible(make())
    before = live.model[0].weight.detach().clone()
    tokens = torch.randint(0, 9, (16, 3), generator=torch.Generator().manual_seed(0))
    data = Resident(tokens, torch.tensor([0, 1] * 8), device="cpu", dtype=torch.long)
    Trainer(make(), data, total_steps=2, irreducible=live, candidates=8, keep=0.5).train(2)
    assert not torch.equal(before, live.model[0].weight)
    half = Examples(torch.zeros(1), torch.ones(1, dtype=torch.bfloat16), torch.ones(1)).whole()
    assert half[0].dtype == torch.float32
