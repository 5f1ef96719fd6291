import contextlib
import json
import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from rholoss.errors import RholossError
from rholoss.ledger import Ledger
from rholoss.steplog import StepLog
from rholoss.verdict import Verdict
from rholoss.watched import Watched

CPU = torch.device("cpu")


class Clock:
    """Time passes when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("rholoss.ledger.time.perf_counter", clock)
    return clock


def a_run(clock, ledger, steps=10, select=2.0, train=3.0):
    """Ten steps; the first call is a dry run."""
    for step in range(steps):
        with ledger.timed(CPU, dry_run=step == 0):
            clock.wait(select)
        ledger.count(320, 320, 32, 320, 320)
        clock.wait(train)
    ledger.read_events()
    return ledger


def test_counts_and_seconds(clock):
    ledger = a_run(clock, Ledger())
    assert (ledger.steps, ledger.candidates, ledger.trained) == (10, 3200, 320)
    assert (ledger.scored, ledger.forwards) == (3200, 3200)
    assert ledger.seconds == pytest.approx(50)
    assert ledger.scoring_seconds == pytest.approx(18)
    assert ledger.dry_run_seconds == pytest.approx(2)
    assert ledger.overhead == pytest.approx(18 / 30)


def test_the_clock_starts_with_the_first_call(clock):
    ledger = Ledger()
    ledger.mark(0.1)
    clock.wait(100)
    ledger.tick()
    with ledger.paused():
        clock.wait(100)
    clock.wait(100)
    assert a_run(clock, ledger).seconds == pytest.approx(50)
    assert ledger.marks[0] == (0, 0.0, 0.1)


def test_a_pause_does_not_count_nor_does_what_happens_in_it(clock):
    ledger = a_run(clock, Ledger())
    with ledger.paused():
        clock.wait(7)
        ledger.mark(0.5)
        with ledger.paused():
            clock.wait(7)
        clock.wait(7)
        with ledger.timed(CPU):  # a selection for its own sake, say
            clock.wait(7)
        clock.wait(7)
    clock.wait(1)
    ledger.mark(0.6)
    assert [mark[1] for mark in ledger.marks] == pytest.approx([50, 51])
    with contextlib.suppress(KeyError), ledger.paused():
        clock.wait(7)
        raise KeyError
    clock.wait(1)
    ledger.tick()
    assert ledger.seconds == pytest.approx(52)


def test_break_even_by_hand(clock):
    """30 s of training, 20 s of selecting, 12 s of 40 IL seconds: 62 / 30."""
    ledger = a_run(clock, Ledger(il_seconds=36.0, il_runs=3))
    assert ledger.uniform_seconds() == pytest.approx(30)
    assert ledger.break_even() == pytest.approx((50 + 12) / 30)
    ledger.loading_seconds = 10.0  # nine tenths of which loaded what was not trained on
    assert ledger.uniform_seconds() == pytest.approx(50 - 20 - 9)


def test_the_papers_break_even():
    """Scoring 320 costs 320 forwards, training 32 costs 96: selection must need 4.33x fewer steps."""
    ledger = Ledger(seconds=416.0, scoring_seconds=320.0, steps=1, candidates=320, trained=32)
    assert ledger.break_even() == pytest.approx(1 + 1 / (3 * 0.1))


def test_break_even_of_nothing_but_selecting(clock):
    ledger = Ledger()
    with ledger.timed(CPU, dry_run=True):
        clock.wait(1)
    ledger.count(320, 320, 32, 320, 320)
    assert ledger.break_even() == math.inf
    assert "pays" not in str(ledger)
    assert ledger.overhead == 0.0


def test_flops():
    ledger = Ledger(forwards=320, trained=32)
    assert ledger.flops is None
    ledger.flops_per_example = 10.0
    assert ledger.flops == 10 * (320 + 3 * 32)


def test_a_watched_loader_is_waited_for(clock):
    class Loader(list):
        batch_size = 7

        def __iter__(self):
            for item in range(3):
                clock.wait(2)
                yield item

    ledger = Ledger()
    watched = Watched(Loader("abc"), ledger)
    for number, item in enumerate(watched):
        assert item == number
        clock.wait(1)
    ledger.tick()
    assert ledger.loading_seconds == pytest.approx(6)
    assert ledger.seconds == pytest.approx(9)
    assert len(watched) == 3
    assert watched.batch_size == 7
    with pytest.raises(AttributeError, match="nonsense"):
        _ = watched.nonsense


@pytest.mark.parametrize("by_file", [False, True])
def test_verdict_against_a_baseline(tmp_path, by_file):
    base = Ledger(il_seconds=0.0)
    base.marks = [(10, 100.0, 0.5), (20, 200.0, 0.9), (30, 300.0, 0.8)]
    baseline = base
    if by_file:
        log = StepLog(tmp_path / "base.jsonl")
        log.add(0, torch.tensor([1]), None)
        for step, seconds, value in base.marks:
            log.mark({"type": "mark", "step": step, "seconds": seconds, "value": value})
        log.flush()
        baseline = log.path
    own = Ledger(il_seconds=80.0, il_runs=2)
    own.marks = [(5, 50.0, 0.6), (8, 80.0, 0.9), (9, 90.0, 0.95)]
    verdict = own.verdict(baseline)
    assert verdict == Verdict(0.9, 120.0, 8, 200.0, 20)
    assert verdict.paid
    assert str(verdict) == (
        "paid: reached 0.9 after 8 steps, 120.0 s with the irreducible losses; the baseline took "
        "20 steps, 200.0 s (1.67x)"
    )
    own.il_runs = 1
    assert own.verdict(baseline).paid  # 160 s
    own.il_seconds = 120.0
    late = own.verdict(baseline)
    assert not late.paid
    assert str(late).startswith("did not pay: reached 0.9 after 8 steps, 200.0 s")


def test_verdict_where_one_run_never_gets_there():
    base, own = Ledger(), Ledger()
    base.marks, own.marks = [(10, 100.0, 0.5), (20, 200.0, 0.7)], [(9, 500.0, 0.8)]
    better = own.verdict(base, target=0.75)
    assert better.paid
    assert str(better).endswith("the baseline did not reach it in 20 steps, 200.0 s (0.40x)")
    never = base.verdict(own)
    assert (never.seconds, never.steps, never.paid) == (None, None, False)
    assert str(never) == ("did not pay: never reached 0.8; the baseline took 9 steps, 500.0 s")
    assert not base.verdict(own, target=0.99).paid


def test_a_baseline_is_a_ledger_or_a_log():
    class Run:
        ledger = Ledger(marks=[(1, 1.0, 0.5)])

    with pytest.raises(
        RholossError, match=r"`baseline` is a Run; pass its ledger \(`\.ledger`\) or"
    ):
        Run.ledger.verdict(Run())


def test_verdict_needs_marks():
    marked = Ledger()
    marked.mark(0.5)
    for own, base in ((marked, Ledger()), (Ledger(), marked)):
        with pytest.raises(RholossError, match=r"call `select.mark\(accuracy\)` at each"):
            own.verdict(base)


def test_one_line_says_it_all(clock):
    ledger = a_run(clock, Ledger(il_seconds=36.0, il_runs=3))
    ledger.loading_seconds, ledger.flops_per_example = 4.0, 1e6
    ledger.notes.append("a note")
    assert str(ledger) == (
        "steps 10 | trained 320 of 3200 candidates (10%), 3200 scored | 50.0 s, 36% of it selecting | "
        "4.0 s waiting for data | 4.16e+09 FLOPs | IL 36.0 s over 3 run(s) | "
        "pays if it needs 2.35x fewer steps than uniform | a note"
    )
    compiled = str(Ledger(seconds=43.7, dry_run_seconds=43.5))
    assert "0% of it selecting | 43.5 s for the first call, with its checks" in compiled
    assert (
        str(Ledger())
        == "steps 0 | trained 0 of 0 candidates (0%), 0 scored | 0.0 s, 0% of it selecting"
    )


def test_state_goes_on_and_the_time_in_between_does_not_count(clock):
    first = a_run(clock, Ledger())
    first.flops_per_example = 5.0
    first.mark(0.5)
    first.notes.append("a note")
    state = first.state_dict()
    clock.wait(1000)
    second = a_run(clock, Ledger())  # which is forgotten, its clock too
    second.load_state_dict(state)
    clock.wait(1000)
    assert second.state_dict() == state
    a_run(clock, second)
    assert second.seconds == pytest.approx(100)
    assert second.steps == 20
    assert second.marks == [(10, pytest.approx(50), 0.5)]
    second.notes.append("another")
    assert state["notes"] == ["a note"]


def test_the_cost_is_shared_by_at_least_this_run():
    with pytest.raises(RholossError, match="`il_runs` must be at least 1, but is 0"):
        Ledger(il_runs=0)


def test_a_run_on_a_gpu_waits_for_it_at_marks_and_pauses(monkeypatch):
    waited, gpu = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    ledger = Ledger()
    ledger.runs_on(CPU)
    ledger.mark(0.1)
    assert not waited
    ledger.runs_on(gpu)
    ledger.mark(0.2)
    with ledger.paused():
        assert waited == [gpu, gpu]


def test_figures_that_are_none_do_not_decide():
    base, own = Ledger(), Ledger()
    own.marks = [(5, 3.0, 0.95)]
    for marks in ([(10, 5.0, math.nan), (20, 10.0, 0.9)], [(20, 10.0, 0.9), (30, 15.0, math.nan)]):
        base.marks = marks
        verdict = own.verdict(base)
        assert (verdict.target, verdict.baseline_seconds, verdict.paid) == (0.9, 10.0, True)


@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("inf"))])
def test_a_figure_that_is_none_is_logged_as_json_has_it(value):
    ledger = Ledger()
    assert json.loads(json.dumps(ledger.mark(value), allow_nan=False))["value"] is None
    assert not math.isfinite(ledger.marks[0][2])


def test_the_log_of_a_baseline_tells_what_its_irreducible_losses_cost(tmp_path):
    base = Ledger(il_seconds=200.0, il_runs=2)
    path = tmp_path / "base.jsonl"
    path.write_text(json.dumps(base.mark(0.9)) + "\n")
    own = Ledger()
    own.marks = [(10, 50.0, 0.95)]
    assert own.verdict(path).baseline_seconds == own.verdict(base).baseline_seconds >= 100
    assert own.verdict(path).paid


def test_ranks_that_all_run_over_the_same_rows_are_told_of(monkeypatch):
    rows = list(range(8))
    plain = Watched(DataLoader(rows, batch_size=4), Ledger())
    assert not plain.undealt  # alone
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.warns(
        UserWarning, match="Each rank runs over all rows of the loader that `select.w"
    ):
        assert len(list(plain)) == 2
    list(plain)  # once
    list(Watched(DataLoader(rows, sampler=DistributedSampler(rows, 2, 0)), Ledger()))
    list(Watched(DataLoader(rows, batch_sampler=[[0, 1], [2, 3]]), Ledger()))
    list(Watched(iter([1, 2]), Ledger()))
    prepared = DataLoader(rows, batch_size=4)
    prepared._is_accelerate_prepared = True  # one rank reads for all
    list(Watched(prepared, Ledger()))
