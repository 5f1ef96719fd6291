"""Wrong labels by what training remembers: how many there are, which they are, and when to say so."""

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


def test_where_labels_are_known_by_heart_chance_still_tells_the_wrong_ones():
    """A model that has learnt each row by itself is sure of the easy ones, whatever the others say."""
    losses = torch.full((N, 4), 0.001)
    losses[: N // 10] = 4.0
    assert len(Remembered()(situation(0.5, losses)).rows) == N
    assert len(Remembered(CHANCE)(situation(0.5, losses)).rows) == 0.9 * N


def passes_with(plan, shares, progress=0.3):
    """How many rows are left in passes in which so many were never better than chance."""
    notes, left = {}, []
    for share in shares:
        losses = torch.full((N, 4), 0.001)
        losses[: round(share * N)] = 4.0
        left.append(len(plan(replace(situation(progress, losses), notes=notes)).rows))
    return left


def test_labels_that_are_being_learnt_by_heart_are_left_out_at_once():
    assert passes_with(Remembered(CHANCE), [0.08, 0.09, 0.08]) == [N, N, 0.92 * N]


@pytest.mark.parametrize(
    "shares",
    [
        [0.08, 0.07, 0.06, 0.05],  # hard rows of clean data become fewer from the first
        [0.08, 0.09, 0.10],
        [0.08, 0.09, 0.0895],  # level
        [0.01, 0.02, 0.01],  # fewer than `least`
    ],
)
def test_other_changes_leave_nothing_out_before_its_time(shares):
    assert passes_with(Remembered(CHANCE), shares) == [N] * len(shares)


def test_rows_that_are_not_known_yet_say_nothing_of_learning_by_heart():
    notes = {}
    for known in (0.5, 0.8):  # in the second pass more is known to be never better than chance
        losses = torch.full((N, 4), 0.001)
        losses[: round(0.1 * known * N)] = 4.0
        losses[round(known * N) :, 0] = torch.nan
        Remembered(CHANCE)(replace(situation(0.3, losses), notes=notes))
    assert not notes


def test_labels_that_are_known_by_heart_by_now_are_told_by_the_mean_of_all_visits():
    losses = torch.full((N, 4), 0.001)  # the last four
    seen, total = torch.full((N,), 10), torch.full((N,), 1.0)
    total[: N // 10] = 6 * 5.0
    known = replace(situation(0.5, losses, seen), total=total)
    assert len(Remembered(CHANCE)(known).rows) == N
    rows = Remembered(CHANCE, by="mean")(known).rows
    assert torch.equal(rows, torch.arange(N // 10, N))


def test_rows_that_stay_do_so_where_no_other_row_is_known_yet():
    losses, seen = torch.full((N, 4), torch.nan), torch.zeros(N, dtype=torch.long)
    losses[: N // 10], seen[: N // 10] = 4.0, 4
    first = situation(0.5, losses, seen)
    rows = Remembered(CHANCE, by="mean")(first).rows
    losses[rows], seen[rows] = 0.5, 4  # in the next pass they are
    then = replace(situation(0.6, losses, seen), notes=first.notes)
    assert torch.equal(rows, torch.arange(N // 10, N))
    assert torch.equal(Remembered(CHANCE, by="mean")(then).rows, rows)


def test_a_row_that_stays_is_not_left_out_for_a_loss_that_is_a_little_higher():
    losses = torch.full((N, 4), 0.1)
    losses[: N // 10] = 4.0
    first = situation(0.5, losses)
    rows = Remembered(CHANCE, by="mean")(first).rows
    losses[rows] *= 2
    assert torch.equal(
        Remembered(CHANCE, by="mean")(replace(situation(0.6, losses), notes=first.notes)).rows, rows
    )


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
