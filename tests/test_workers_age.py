"""Scoring workers choose by weights that are old: the trainer chooses again, and says how old they are."""

import copy
import warnings

import pytest
import torch
from fixtures_workers import CANDIDATES, WAIT, InThread, launch, parts, train
from torch.nn import functional as F

import rholoss as rho
from rholoss.errors import RholossError

__all__ = ["launch"]  # a fixture


def with_old_workers(launch, **options):
    """Batches of a trainer whose weights have changed since its worker got them, and what it chooses."""
    batches = launch(1, every=8, **options)
    InThread(0, *parts())
    assert batches.wait_for_workers(WAIT)
    train(batches, 2)  # weights are there
    batches.crew.send_weights = lambda *args: None  # and no others come
    with torch.no_grad():
        for parameter in batches.model.parameters():
            parameter.neg_()
    return batches, train(batches, 6)[2:]  # what was in hand was chosen by the same old weights


def scores(model, loader, il, step):
    """Candidates of a step and their reducible losses by this model."""
    rows = loader.batch_sampler.at(step)
    _, x, y = loader.collate_fn([loader.dataset[row] for row in rows])
    with torch.no_grad():
        return torch.tensor(rows), F.cross_entropy(model(x), y, reduction="none") - il[rows]


@pytest.mark.parametrize("rescore", [1, 3, 10])
def test_the_trainer_chooses_by_its_own_weights_among_what_workers_chose(launch, rescore):
    batches, chosen = with_old_workers(launch, rescore=rescore)
    _, old, _ = parts()
    il = batches.select.source.table.lookup(range(400))
    for step, rows in enumerate(chosen, start=4):
        candidates, by_old = scores(old, batches.loader, il, step)
        _, by_new = scores(batches.model, batches.loader, il, step)
        sent = by_old.topk(4 * rescore).indices
        expected = sent[by_new[sent].topk(4).indices] if rescore > 1 else sent
        assert rows == candidates[expected].tolist()
    newest = candidates[by_new.topk(4).indices].tolist()
    assert (rows == newest) is (
        rescore == 10
    )  # who has all of them scored again chooses as if alone


def test_rows_that_are_scored_again_are_forwards_of_the_trainer(launch):
    batches, _ = with_old_workers(launch, rescore=3)
    ledger, counts = batches.select.ledger, batches.counts
    assert counts.by_workers >= 5
    assert ledger.scored == ledger.steps * CANDIDATES
    assert ledger.forwards == ledger.scored + counts.by_workers * 3 * 4
    assert ledger.trained == ledger.steps * 4


def test_scores_that_are_told_are_those_of_the_newest_weights(launch):
    batches, _ = with_old_workers(launch)
    seen = []
    batches.select.on_scores = [lambda step, stats, chosen: seen.append((step, chosen))]
    train(batches, 2)
    il = batches.select.source.table.lookup(range(400))
    for step, chosen in seen:
        candidates, by_new = scores(batches.model, batches.loader, il, step)
        assert chosen.index.tolist() == candidates[chosen.position].tolist()
        torch.testing.assert_close(chosen.score, by_new[chosen.position])


@pytest.mark.parametrize(
    ("method", "rescore"), [("rho", 3), ("loss", 3), (rho.boltzmann("rho"), 1), ("negative_il", 1)]
)
def test_only_who_takes_the_highest_scores_of_a_model_chooses_twice(launch, method, rescore):
    assert launch(1, selector={"method": method}).rescore == rescore


@pytest.mark.parametrize(("method", "rescore"), [("rho", 0), (rho.boltzmann("rho"), 2)])
def test_other_factors_are_refused(launch, method, rescore):
    with pytest.raises(RholossError, match=f"`rescore` is {rescore} for the method"):
        launch(1, selector={"method": method}, rescore=rescore)


@pytest.mark.parametrize(("every", "ahead", "told"), [(8, 2, 1), (1, 1, 0)])
def test_choices_that_are_old_are_told_once(launch, monkeypatch, every, ahead, told):
    monkeypatch.setattr("rholoss.workers.crew.OFTEN", 8)
    batches = launch(1, every=every, ahead=ahead)
    InThread(0, *parts())
    assert batches.wait_for_workers(WAIT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(batches, 20)
    found = [str(each.message) for each in caught if "steps old on average" in str(each.message)]
    assert len(found) == told
    assert all("a smaller `every` or `ahead`, or fewer workers" in text for text in found)


def test_who_goes_back_to_a_state_does_not_choose_by_weights_of_later(launch):
    """Workers had steps in hand, and weights, of a course of the run that was given up."""
    batches = launch(1, every=1, rescore=1)
    InThread(0, *parts())
    assert batches.wait_for_workers(WAIT)
    train(batches, 3)
    select, model = batches.select, batches.model
    saved, weights = select.state_dict(), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    train(batches, 9)
    select.load_state_dict(saved)
    model.load_state_dict(weights)
    before = batches.counts.by_workers
    il = select.source.table.lookup(range(400))
    for step, rows in enumerate(train(batches, 15), start=3):
        candidates, score = scores(model, batches.loader, il, step)
        assert rows == candidates[score.topk(4).indices].tolist(), step
    assert batches.counts.by_workers > before + 8
