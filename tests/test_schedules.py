import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rholoss as rho
from rholoss.errors import RholossError
from rholoss.schedules import Phase, Schedule


def scored(schedule, steps):
    return "".join("S" if schedule(step).score else "." for step in range(steps))


def test_phases_over_time():
    assert scored(rho.constant(), 6) == "SSSSSS"
    assert scored(rho.warm_up(2), 6) == "..SSSS"
    assert scored(rho.warm_up(0), 6) == "SSSSSS"
    assert scored(rho.warm_up(2e0), 6) == "..SSSS"
    assert scored(rho.window(1, 4), 6) == ".SSS.."
    assert scored(rho.window(3, 3), 6) == "......"
    assert scored(rho.annealed(total_steps=10), 10) == "SSS......."
    assert scored(rho.annealed(10, switch=0.55), 10) == "SSSSSS...."


def test_annealing_drops_the_highest_irreducible_losses_once_it_no_longer_scores():
    schedule = rho.annealed(10, switch=0.5, drop=0.1)
    assert [schedule(step).drop for step in range(10)] == [0.0] * 5 + [0.1] * 5
    assert rho.window(2, 4)(5) == Phase(score=False, drop=0.0)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 300))
def test_a_schedule_is_a_function_of_the_step(start, length, step):
    schedule = rho.window(start, start + length)
    assert schedule(step).score == (start <= step < start + length)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rho.warm_up(-1), "start at step 0 or later .* starts at -1 and stops at inf"),
        (lambda: rho.window(5, 4), "stop after it starts, but starts at 5 and stops at 4"),
        (
            lambda: rho.warm_up(0.1),
            "counts steps, but starts at 0.1 .* shares of a run, give them t",
        ),
        (lambda: rho.window(0, 0.3), "counts steps, but starts at 0 and stops at 0.3"),
        (lambda: rho.annealed(0), r"`total_steps` must be at least 1 .* are 0 and 0.3"),
        (lambda: rho.annealed(10, switch=1.5), r"`switch` in \[0, 1\], but are 10 and 1.5"),
        (lambda: rho.annealed(10, drop=1.0), r"`drop` must be in \[0, 1\), but is 1.0; 0 drops"),
        (lambda: Schedule(drop=math.nan), r"`drop` must be in \[0, 1\), but is nan"),
    ],
)
def test_schedules_that_cannot_be(make, message):
    with pytest.raises(RholossError, match=message):
        make()


def test_the_selector_follows_the_schedule(toy):
    select = rho.Selector("rho", irreducible=toy.il, keep=0.1, schedule=rho.window(2, 5))
    model = toy.model()
    scored = []
    for step in range(8):
        before = select.ledger.scored
        select(model, toy.batch(step))
        scored.append(select.ledger.scored - before)
    assert scored == [0, 0, 320, 320, 320, 0, 0, 0]
    assert select.ledger.trained == 8 * 32


def test_the_annealed_selector_passes_over_the_highest_irreducible_losses(toy):
    schedule = rho.annealed(10, switch=0.2, drop=0.25)
    select = rho.Selector("rho", irreducible=toy.il, keep=0.5, schedule=schedule)
    model, limit = toy.model(), toy.il.quantile(0.75)
    chosen = torch.cat([select(model, toy.batch(step))[0] for step in range(10)][2:])
    assert (toy.il[chosen] <= limit).all()
    # Uniform over the rest: the mean is that of the rest.
    rest = toy.il[640:][toy.il[640:] <= limit]
    assert toy.il[chosen].mean().item() == pytest.approx(rest.mean().item(), abs=0.03)


def test_a_schedule_that_drops_needs_a_table():
    with pytest.raises(RholossError, match=r"`drop`=0.05 needs a table of irreducible losses"):
        rho.Selector("loss", keep=0.1, schedule=rho.annealed(100))


def test_annealing_works_with_string_ids(toy):
    """The threshold comes from the values, which are there for any kind of id."""
    keys = [f"image-{row}" for row in range(3200)]
    il = rho.Irreducible.from_losses(toy.il, ids=keys)
    schedule = rho.annealed(10, switch=0.2, drop=0.25)
    by_key = rho.Selector("rho", irreducible=il, keep=0.5, schedule=schedule)
    by_row = rho.Selector("rho", irreducible=toy.il, keep=0.5, schedule=schedule)
    models = toy.model(), toy.model()
    for step in range(5):
        index, x, y = toy.batch(step)
        chosen = by_key(models[0], ([keys[row] for row in index], x, y))[0]
        assert chosen == [keys[row] for row in by_row(models[1], (index, x, y))[0]]


def test_a_schedule_is_no_name():
    with pytest.raises(RholossError, match=r"`schedule` is 'annealed'; pass .*rholoss.annealed\("):
        rho.Selector("loss", keep=0.1, schedule="annealed")
