"""Plans: which rows a pass trains on."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from rholoss.engine import Epoch, InfoBatch, RandomShare, Remembered, Resident, Trainer
from rholoss.errors import RholossError
from rholoss.memory import Situation

N, CHANCE = 4000, math.log(10)


def situation(progress, recent, seen=None, seed=0):
    recent = torch.as_tensor(recent)
    seen = torch.full((len(recent),), recent.shape[1]) if seen is None else torch.as_tensor(seen)
    return Situation(progress, seen, recent, None, torch.Generator().manual_seed(seed))


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
    plan = Remembered(CHANCE, filter_from=0.4, again=0)
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


def test_one_good_look_keeps_a_row_and_so_do_too_few_looks():
    losses, seen = some_losses(), torch.full((N,), 4)
    losses[3, 2], losses[7, 1], seen[7] = 2.2, torch.nan, 3
    rows = Remembered(CHANCE)(situation(0.5, losses, seen)).rows
    assert {3, 7} == set(rows[rows % 4 == 3].tolist())


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


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RandomShare(1.5), "`share` must be in"),
        (lambda: Remembered(again=-1), "`again` is -1, but must be at least 0"),
        (lambda: InfoBatch(1.0), "`prune` must be in"),
        (lambda: Remembered(CHANCE, skip=-0.1), "`skip` must be in"),
        (lambda: Remembered(measured=False), "`chance` must be given"),
        (lambda: Remembered(0.0), "`chance` is 0.0, .*the logarithm of the number of classes"),
        (lambda: Remembered(math.nan), "`chance` is nan, but must be finite and above 0"),
        (lambda: Remembered(math.inf, measured=False), "`chance` is inf"),
        (lambda: Remembered(np.int64(10)), "`chance` is 10, a whole number"),
        (lambda: Remembered(10), r"`chance` is 10, .*math.log\(10\) = 2.303 \(or 10.0, if that"),
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


@pytest.mark.parametrize("plan", [InfoBatch(0.5), Remembered(CHANCE, skip=0.5)])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_loss_that_is_none_decides_nothing(plan, bad):
    losses = torch.full((N, 4), 0.1)
    losses[N // 2 :] = 2.0  # not learnt yet
    expected = plan(situation(0.4, losses)).rows
    losses[7, 3] = bad
    rows = plan(situation(0.4, losses)).rows
    assert set(range(N // 2, N)) | {7} <= set(rows.tolist())
    assert abs(len(rows) - len(expected)) <= 1
