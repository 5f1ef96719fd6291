"""Wrong labels by what training remembers: how many there are, which they are, and when to say so."""

import math
from dataclasses import replace

import pytest
import torch
from test_plans import CHANCE, N, situation, some_losses

from rholoss.engine import Remembered
from rholoss.plans import wrong_labels


def losses_of_calibrated_model(wrong, seed=7):
    """Of a model that has learnt all that can be: with so many labels wrong, and no telling which."""
    generator = torch.Generator().manual_seed(seed)
    is_wrong = torch.rand(N, generator=generator) < wrong
    sure = torch.where(is_wrong, wrong / 9, 1 - wrong) if wrong else torch.full((N,), 0.999)
    noise = torch.randn(N, 4, generator=generator) * 0.2  # from one look to the next
    return -sure.log()[:, None] * noise.exp(), is_wrong


@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.4])
def test_the_share_of_wrong_labels_is_read_from_the_surest_rows(wrong):
    losses, _ = losses_of_calibrated_model(wrong)
    assert wrong_labels(losses[:, 0]) == pytest.approx(wrong, abs=0.03)


@pytest.mark.parametrize("wrong", [0.1, 0.4])
def test_what_is_left_out_is_measured(wrong):
    losses, is_wrong = losses_of_calibrated_model(wrong)
    assert len(Remembered()(situation(0.49, losses)).rows) == N
    rows = Remembered()(situation(0.5, losses)).rows
    stays = torch.zeros(N, dtype=torch.bool).index_fill(0, rows, True)
    assert (stays & is_wrong).sum() < 0.15 * is_wrong.sum()
    assert (~stays & ~is_wrong).sum() == 0


@pytest.mark.parametrize("share", [0.04, 0.2, 0.49])
def test_no_more_is_left_out_than_is_wrong_and_nothing_is_sorted_for_it(monkeypatch, share):
    """The device waits for the plan, in every pass on probation."""
    losses = CHANCE + torch.randperm(N, generator=torch.Generator().manual_seed(0)) / N
    known = situation(0.5, losses[:, None].expand(N, 4))
    expected = losses.sort(descending=True).values[round(share * N)]
    monkeypatch.setattr(torch.Tensor, "sort", None, raising=False)
    assert Remembered(CHANCE)._measured(known, 0.0, share, CHANCE) == (share, expected)


def test_where_labels_are_known_by_heart_chance_still_tells_the_wrong_ones():
    """A model that has learnt each row by itself is sure of the easy ones, whatever the others say."""
    losses = torch.full((N, 4), 0.001)
    losses[: N // 10] = 4.0
    assert len(Remembered()(situation(0.5, losses)).rows) == N
    assert len(Remembered(CHANCE)(situation(0.5, losses)).rows) == 0.9 * N


def some_hopeless(share=0.1, others=0.001):
    """Losses of rows of which the first ones were never better than chance."""
    losses = torch.full((N, 4), others)
    losses[: round(share * N)] = 4.0
    return losses


@pytest.mark.parametrize("measured", [True, False])
def test_hopeless_rows_are_on_probation_before_they_are_left_out_for_good(measured):
    plan, known = Remembered(CHANCE, measured), situation(0.3, some_hopeless())
    first, second = plan(known).rows, plan(known).rows  # of two passes
    for rows in (first, second):
        assert torch.isin(torch.arange(N // 10, N), rows).all()
        assert 0.06 * 0.1 * N < (rows < N // 10).sum() < 0.2 * 0.1 * N  # one in eight
    assert not torch.equal(first, second)  # others each time
    for_good = plan(replace(situation(0.5, some_hopeless()), notes=known.notes)).rows
    assert torch.equal(for_good, torch.arange(N // 10, N))


@pytest.mark.parametrize("again", [0, 8])
def test_rows_that_were_left_out_for_good_stay_out_of_a_run_that_is_made_longer(again):
    """By its new length it has not come as far as `filter_from`."""
    plan, known = Remembered(CHANCE, again=again), situation(0.5, some_hopeless())
    assert torch.equal(plan(known).rows, torch.arange(N // 10, N))
    longer = replace(situation(0.2, some_hopeless()), notes=known.notes)
    assert torch.equal(plan(longer).rows, torch.arange(N // 10, N))


def test_a_row_on_probation_comes_back_when_it_is_learnt():
    plan, notes, losses = Remembered(CHANCE), {}, some_hopeless()
    plan(replace(situation(0.3, losses), notes=notes))
    losses[7, 2] = 1.0  # better than chance, once
    for _ in range(3):
        assert 7 in plan(replace(situation(0.4, losses), notes=notes)).rows
    assert 7 in plan(replace(situation(0.6, losses), notes=notes)).rows


@pytest.mark.parametrize(
    ("plan", "losses"),
    [
        (Remembered(CHANCE, again=0), some_hopeless()),
        (Remembered(), some_hopeless()),  # what chance is, is not known
        (Remembered(CHANCE), some_hopeless(others=0.8)),  # not learnt yet: the surest have 0.45
        (Remembered(CHANCE), some_hopeless(0.05, others=0.5)),  # too much doubt for so few
        (Remembered(CHANCE), some_hopeless(0.02)),  # fewer than `least`
        (Remembered(CHANCE), some_hopeless(0.6)),
    ],
)
def test_nobody_is_on_probation_without_reason(plan, losses):
    assert len(plan(situation(0.3, losses)).rows) == N


def test_wrong_labels_on_probation_count_when_the_others_are_measured():
    """A tenth is hopeless and apart, a tenth of the others seems wrong: that is 19 % of all."""
    losses, notes, plan = some_hopeless(0.1, others=-math.log(0.9)), {}, Remembered(CHANCE)
    plan(replace(situation(0.3, losses), notes=notes))
    plan(replace(situation(0.5, losses), notes=notes))
    assert notes["wrong"] == pytest.approx(0.19)
    plan(replace(situation(0.5, losses), notes=(alone := {})))
    assert alone["wrong"] == pytest.approx(0.1)


def test_where_nothing_is_sure_chance_still_tells_the_wrong_ones():
    losses = torch.full((N, 4), 1.5)
    losses[: N // 10] = 4.0
    assert len(Remembered(CHANCE)(situation(0.5, losses)).rows) == 0.9 * N


def test_more_is_left_out_than_chance_tells_if_the_surest_rows_say_so():
    losses, is_wrong = losses_of_calibrated_model(0.4)
    losses[is_wrong] = 1.4 + torch.rand(int(is_wrong.sum()), 1)  # systematic: more than chance
    losses = losses.clamp(max=2.2)
    losses[is_wrong.nonzero()[: N // 5]] = 4.0  # half of them, as in labels by humans
    by_chance, measured = (
        len(Remembered(CHANCE, way)(situation(0.5, losses)).rows) for way in (False, True)
    )
    assert by_chance == 0.8 * N
    assert N - is_wrong.sum() <= measured < 0.66 * N


def test_doubt_of_a_model_that_is_weak_is_not_taken_for_wrong_labels():
    """Its surest rows are not sure, but few are hopeless: those alone are left out."""
    losses = 0.1 + 1.5 * torch.rand(N, 1) * torch.ones(4)
    losses[: N // 10] = 4.0
    assert wrong_labels(losses[:, 0]) > 0.4
    assert len(Remembered()(situation(0.5, losses)).rows) < 0.7 * N
    rows = Remembered(CHANCE)(situation(0.5, losses)).rows
    assert torch.equal(rows, torch.arange(N // 10, N))


def test_smoothed_labels_are_not_taken_for_wrong_ones_if_chance_is_known():
    losses = 0.5 + torch.rand(N, 1) * torch.ones(4)  # no row's can be lower
    assert wrong_labels(losses[:, 0]) > 0.3
    assert len(Remembered(CHANCE)(situation(0.5, losses)).rows) == N


def test_clean_labels_are_all_kept():
    losses, _ = losses_of_calibrated_model(0.0)
    losses[:80] = torch.linspace(9, 12, 80)[:, None]  # hard rows, and their labels are right
    for plan in (Remembered(), Remembered(CHANCE)):
        assert len(plan(situation(0.9, losses)).rows) == N


def test_it_is_measured_once_since_what_is_left_looks_cleaner():
    losses, _ = losses_of_calibrated_model(0.4)
    first = situation(0.5, losses)
    rows = Remembered()(first).rows
    losses[rows] /= 10  # surer by far
    then = replace(situation(0.6, losses), notes=first.notes)
    assert torch.equal(Remembered()(then).rows, rows)
    assert len(Remembered()(situation(0.6, losses)).rows) > len(rows)


def test_a_model_that_has_not_learnt_the_easy_rows_says_nothing_of_the_labels():
    losses = torch.full((N, 4), 1.5) + torch.rand(N, 4)
    assert len(Remembered()(situation(0.9, losses)).rows) == N


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("chance", [CHANCE, 0.1])  # a share, in place of a logarithm
def test_where_hardly_a_row_was_better_than_chance_nothing_is_left_out(measured, chance):
    losses = torch.full((N, 4), 2.4)
    losses[: N // 3] = 0.05
    for some in (losses, losses[N // 3 :]):
        notes = {}
        for progress in (0.1, 0.5, 0.9):
            seen = replace(situation(progress, some), notes=notes)
            assert len(Remembered(chance, measured)(seen).rows) == len(some)


def test_no_more_is_left_out_than_is_wrong_when_it_is_measured():
    losses = torch.full((N, 4), 0.1)  # a tenth is wrong, it seems,
    losses[: N // 2] = 5.0  # but half of the rows are not learnt yet
    assert len(Remembered()(situation(0.5, losses)).rows) >= 0.9 * N


@pytest.mark.parametrize(("wrong", "skips"), [(0.1, True), (0.4, False)])
def test_nothing_is_skipped_where_many_labels_are_wrong(wrong, skips):
    losses, _ = losses_of_calibrated_model(wrong)
    rows = Remembered(skip=0.5)(situation(0.2, losses)).rows
    assert (len(rows) < 0.8 * N) is skips


@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_rows_that_were_never_seen_stay(progress):
    losses, seen = some_losses(), torch.full((N,), 4)
    losses[:40], seen[:40] = torch.nan, 0
    rows = Remembered(CHANCE, skip=1.0)(situation(progress, losses, seen)).rows
    assert torch.isin(torch.arange(40), rows).all()
