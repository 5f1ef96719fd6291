"""When a run may begin: what is seen of the pace of those that are under way."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from experiments.bench import pace
from experiments.bench.cell import Cell
from experiments.bench.pace import Pace


@dataclass(eq=False)
class Going:
    step: int
    cell: Cell = field(default_factory=Cell)
    resumed: int = 0


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when told to."""
    now = [1000.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passes(seconds):
        now[0] += seconds

    return passes


def test_a_run_begins_only_if_it_would_be_through(clock):
    watch, slow, fast = Pace(limit=100.0), Going(0), Going(0)
    for seconds, slow.step, fast.step in ((50, 400, 450), (2, 500, 550), (1, 549, 640)):
        clock(seconds)  # the first steps compile
        watch.look([slow, fast])
    assert watch.allows(Cell(), 10**9)  # nothing is known yet: neither has settled for long
    clock(11)
    slow.step, fast.step = 1100, 2000  # the slower: 600 steps in 12 seconds, since it had settled
    watch.look([slow, fast])
    assert watch.allows(Cell(), 1800)  # 64 seconds are over
    assert not watch.allows(Cell(), 1850)
    assert not watch.over
    watch.look([Going(0)])
    assert not watch.allows(Cell(), 1850)  # what was seen is remembered
    clock(37)
    assert watch.over


def test_a_run_that_does_not_score_is_known_to_be_faster(clock):
    watch = Pace(limit=100.0)
    scores, plain = Going(500, Cell(method="rho")), Going(500)
    watch.look([scores])
    clock(50)
    scores.step += 1000
    watch.look([scores])
    assert not watch.allows(Cell(), 1001)  # 50 seconds, if it is as slow
    watch.look([plain])
    clock(10)
    plain.step += 1000
    watch.look([plain])
    assert watch.allows(Cell(), 3900)  # 40 seconds are left
    assert watch.allows(Cell(method="svp"), 3900)
    assert not watch.allows(Cell(method="rho"), 900)
    assert not watch.allows(Cell(n_b=64), 900)


@pytest.mark.parametrize(
    ("seen", "cell", "times"),
    [
        (Cell(), Cell(method="rho"), 416 / 96),  # scores 320 rows beside 32 with their gradients
        (Cell(method="rho"), Cell(method="rho", il="resnet18, live"), 2),
        (Cell(method="loss"), Cell(method="bald"), (3200 + 96) / 416),  # ten draws
        (Cell(method="rho"), Cell(method="grad_norm"), 1),
        (Cell(method="rho"), Cell(), 1),  # as slow as the slowest, for all one knows
    ],
)
def test_a_run_of_another_kind_is_taken_to_be_slower_by_its_work(clock, seen, cell, times):
    """Or it would begin, and be cut off by the limit."""
    watch, going = Pace(limit=100.0), Going(500, seen)
    watch.look([going])
    clock(10)
    going.step += 1000
    watch.look([going])
    most = 9000 / times  # 90 seconds are left, at a hundredth of a second
    assert watch.allows(cell, round(0.99 * most))
    assert not watch.allows(cell, round(1.01 * most))


def test_nothing_begins_when_time_is_over(clock):
    watch = Pace(seconds=10)
    assert not watch.over
    assert watch.allows(Cell(), 10**12)
    clock(11)
    assert watch.over


def test_the_pace_of_a_run_that_goes_on_is_seen_when_it_was_compiled_again(clock):
    watch, going = Pace(limit=1000.0), Going(9000, resumed=1)
    for seconds, going.step in ((0, 9050), (100, 9200), (50, 9600), (1, 9701)):
        clock(seconds)
        watch.look([going])
    assert watch.allows(Cell(), 80_000)  # a hundredth of a second a step
    assert not watch.allows(Cell(), 90_000)
