"""Plans: which rows a pass trains on."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from rholoss.engine import Epoch, InfoBatch, RandomShare, Remembered, Resident, Trainer
from rholoss.errors import RholossError
from rholoss.memory import Situation
from rholoss.plans import wrong_labels

N, CHANCE = 4000, math.log(10)


def situation(progress, recent, seen=None, seed=0):
    recent = torch.as_tensor(recent)
    seen = torch.full((len(recent),), recent.shape[1]) if seen is None else torch.as_tensor(seen)
    total = recent.nanmean(1).nan_to_num() * seen  # as if all losses had been like the last ones
    return Situation(progress, seen, recent, total, None, torch.Generator().manual_seed(seed))


def some_losses():
    """A quarter each: learnt, half learnt, not learnt, and never better than chance."""
    return torch.tensor([0.01, 1.0, 2.0, 4.0]).repeat(N // 4)[:, None].repeat(1, 4)


def share_of(rows, quarter):
    return (rows % 4 == quarter).sum().item() / (N // 4)


def test_a_random_share_is_fresh_each_time():
    plan = RandomShare(0.25)
    first, second = (plan(situation(0.5, some_losses(), seed=s)).rows for s in (0, 1))
    assert len(first) == len(second) == N // 4
    assert len(set(first.tolist())) == N // 4
    shared = len(set(first.tolist()) & set(second.tolist()))
    assert abs(shared - N / 16) < 60  # four standard deviations


def test_infobatch_keeps_the_expected_gradient():
    losses = torch.rand(N, 1, generator=torch.Generator().manual_seed(1))
    gradients = torch.rand(N, generator=torch.Generator().manual_seed(2))
    sums = []
    for seed in range(200):
        epoch = InfoBatch(0.5)(situation(0.5, losses, seed=seed))
        sums.append((gradients[epoch.rows] * epoch.weight[epoch.rows]).sum())
    assert torch.stack(sums).mean() == pytest.approx(gradients.sum().item(), rel=5e-3)
    low = (losses[:, 0] < losses.mean()).nonzero().flatten()
    kept = torch.isin(low, epoch.rows).float().mean()
    assert 0.45 < kept < 0.55
    high = (losses[:, 0] >= losses.mean()).nonzero().flatten()
    assert torch.isin(high, epoch.rows).all()


@pytest.mark.parametrize("progress", [0.0, 0.9])
def test_infobatch_takes_everything_at_first_and_at_last(progress):
    seen = torch.zeros(N, dtype=torch.long) if progress == 0 else None
    recent = torch.full((N, 4), torch.nan) if progress == 0 else some_losses()
    epoch = InfoBatch()(situation(progress, recent, seen))
    assert len(epoch.rows) == N
    assert epoch.weight is None


def test_what_is_never_better_than_chance_is_left_out_from_some_time_on():
    plan = Remembered(CHANCE, filter_from=0.4)
    assert len(plan(situation(0.39, some_losses())).rows) == N
    rows = plan(situation(0.4, some_losses())).rows
    assert [share_of(rows, quarter) for quarter in range(4)] == [1, 1, 1, 0]


def test_a_few_hard_rows_are_no_noise():
    losses = torch.ones(N, 4)
    losses[:100] = 4.0  # 2.5 %
    assert len(Remembered(CHANCE, measured=False)(situation(0.5, losses)).rows) == N
    assert (
        len(Remembered(CHANCE, measured=False, least=0.02)(situation(0.5, losses)).rows) == N - 100
    )


@pytest.mark.parametrize(("by", "stay"), [("lowest", {3, 7}), ("mean", {7})])
def test_one_good_look_keeps_a_row_by_its_lowest_loss_and_too_few_looks_do_by_either(by, stay):
    losses, seen = some_losses(), torch.full((N,), 4)
    losses[3, 2], losses[7, 1], seen[7] = 2.2, torch.nan, 3
    rows = Remembered(CHANCE, by=by)(situation(0.5, losses, seen)).rows
    assert stay == set(rows[rows % 4 == 3].tolist())


def test_what_is_learnt_is_skipped_at_times_but_not_in_the_end():
    plan = Remembered(CHANCE, filter_from=0.4, skip=0.5, skip_until=0.85, most=0.3)
    rows = plan(situation(0.5, some_losses())).rows
    assert [share_of(rows, quarter) for quarter in (2, 3)] == [1, 0]
    assert all(
        0.4 < share_of(rows, quarter) < 0.6 for quarter in (0, 1)
    )  # mean of those left: 1.003
    assert len(plan(situation(0.85, some_losses())).rows) == 3 * N // 4


@pytest.mark.parametrize(("most", "skips"), [(0.3, True), (0.2, False)])
def test_where_much_is_not_learnable_nothing_is_skipped(most, skips):
    """A quarter is not. Before that is asked, what is learnt is skipped all the same."""
    plan = Remembered(CHANCE, measured=False, filter_from=0.3, skip=0.5, most=most)
    rows = plan(situation(0.5, some_losses())).rows
    assert [share_of(rows, quarter) for quarter in (2, 3)] == [1, 0]
    assert (share_of(rows, 0) < 1) is skips
    assert share_of(plan(situation(0.2, some_losses())).rows, 0) < 1


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


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RandomShare(1.5), "`share` must be in"),
        (lambda: Remembered(by="last"), "`by` is 'last', but must be one of 'lowest', 'mean'"),
        (lambda: InfoBatch(1.0), "`prune` must be in"),
        (lambda: Remembered(CHANCE, skip=-0.1), "`skip` must be in"),
        (lambda: Remembered(measured=False), "`chance` must be given"),
        (lambda: Remembered(0.0), "`chance` is 0.0, .*the logarithm of the number of classes"),
        (lambda: Remembered(math.nan), "`chance` is nan, but must be finite and above 0"),
        (lambda: Remembered(math.inf, measured=False), "`chance` is inf"),
    ],
)
def test_a_share_that_is_none_is_refused(make, says):
    with pytest.raises(RholossError, match=says):
        make()


def train(plan, steps=90, model=None, start=None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 12, generator=generator)
    y = (x @ torch.randn(12, 3, generator=generator)).argmax(1)
    y[::10] = (y[::10] + 1) % 3  # a tenth is wrong
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(12, 3), Resident(x, y, device="cpu"), total_steps=90, method="uniform", candidates=32,
        keep=1.0, plan=plan, learning_rate=0.05,
    )  # fmt: skip
    if start is not None:
        trainer.load_state_dict(start)
    ids = []
    trainer.on_flush.append(lambda step, index, losses: ids.extend(index))
    trainer.train(steps)
    trainer.flush()
    return trainer, torch.stack(ids)


def test_what_a_plan_notes_is_there_in_the_next_pass_and_after_a_resume():
    def counting(s):
        s.notes["passes"] = s.notes.get("passes", 0) + 1
        return Epoch(torch.arange(len(s.seen)))

    first, _ = train(counting, steps=40)
    assert first.rows.memory.notes == {"passes": 4}
    second, _ = train(counting, steps=20, start=first.state_dict())
    assert second.rows.memory.notes == {"passes": 6}


def test_the_trainer_leaves_out_wrong_labels():
    _, ids = train(Remembered(math.log(3)))
    wrong = (ids % 10 == 0).float().mean(1)
    assert wrong[:30].mean() > 0.08
    assert wrong[-20:].mean() < 0.04


def test_a_resumed_run_remembers():
    plan = Remembered(math.log(3), skip=0.5)
    _, whole = train(plan)
    half, first = train(plan, steps=45)
    _, second = train(plan, steps=45, start=half.state_dict())
    assert torch.equal(torch.cat([first, second]), whole)


def test_weights_of_a_plan_reach_the_loss():
    class Nothing(RandomShare):
        def __call__(self, situation):
            epoch = super().__call__(situation)
            return type(epoch)(epoch.rows, torch.zeros(len(situation.seen)))

    trainer, _ = train(Nothing(1.0), steps=5)
    assert torch.cat(trainer.losses).tolist() == [0.0] * 5


def test_a_plan_has_one_thread_and_gives_the_others_back():
    """The device waits for it, and many threads take longer to wake than the work takes."""
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(lambda s: seen.append(torch.get_num_threads()) or Epoch(torch.arange(320)), steps=15)
        assert (seen, torch.get_num_threads()) == ([1, 1], 2)
        with pytest.raises(ZeroDivisionError):
            train(lambda s: 1 / 0, steps=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("decision", "says"),
    [
        (
            Epoch(torch.ones(320, dtype=torch.bool)),
            r"of a mask take `mask.nonzero\(\).flatten\(\)`",
        ),
        (torch.arange(64), r"must return `Epoch\(rows\)`"),
        (Epoch(list(range(64))), "row numbers as a tensor of int64"),
        (Epoch(torch.arange(64) + 300), "64 rows from 300 to 363; there are 320, 0..319"),
        (
            Epoch(torch.arange(320).repeat(2)),
            "640 rows from 0 to 319; .* a pass has at most as many",
        ),
        (Epoch(torch.arange(64), torch.ones(64)), "needs one for each of all 320 rows"),
        (Epoch(torch.arange(0)), "Only 0 rows are left to train on"),
    ],
)
def test_a_decision_that_is_none_is_refused(decision, says):
    with pytest.raises(RholossError, match=says):
        train(lambda situation: decision, steps=1)
