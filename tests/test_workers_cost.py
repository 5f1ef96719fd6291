"""What a step with scoring workers costs: by hand, and against what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rholoss.errors import RholossError
from rholoss.workers.cost import (
    GIGABIT,
    HANDLING,
    Work,
    enough_workers,
    least_every,
    predict,
    sentences,
)

FAST = 1e12
WORK = Work(training=0.02, scoring=0.06, weights=100e6)
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "workers.jsonl"


def test_without_workers_everything_comes_in_turn() -> None:
    found = predict(Work(2.0, 3.0, 4.0), 0, link=FAST)
    assert (found.seconds, found.bound, found.by_workers) == (9.0, "no workers", 0.0)


@pytest.mark.parametrize(
    ("workers", "seconds", "bound"),
    [(1, 0.06, "scoring"), (2, 0.03, "scoring"), (3, 0.02, "training"), (9, 0.02, "training")],
)
def test_the_slowest_of_training_and_scoring_sets_the_pace(workers, seconds, bound) -> None:
    found = predict(WORK, workers, link=FAST)
    assert found.seconds == pytest.approx(seconds)
    assert (found.bound, found.by_workers) == (bound, 1.0)
    assert enough_workers(WORK) == 3


def test_loading_runs_beside_scoring_on_a_worker() -> None:
    assert predict(Work(1.0, 3.0, 4.0), 2, link=FAST).seconds == 2.0
    assert predict(Work(1.0, 3.0, 2.0), 2, link=FAST).seconds == 1.5


def test_packing_and_handling_are_on_top_of_training() -> None:
    work = Work(training=1.0, scoring=0.0, packing=0.8, handling=0.1)
    assert predict(work, 1, link=FAST, every=8).seconds == pytest.approx(1.2)


def test_processors_that_all_share() -> None:
    found = predict(Work(1.0, 3.0), 4, link=FAST, processors=2)
    assert (found.seconds, found.bound) == (2.0, "processors")


def test_chosen_rows_can_be_too_much_for_the_link() -> None:
    found = predict(Work(1.0, 1.0, rows=30.0), 1, link=10.0)
    assert (found.seconds, found.bound) == (3.0, "rows")


def test_weights_dominate_from_a_transfer_on_that_follows_from_the_bound() -> None:
    # Pace 0.02 s, 3 workers, S = 2 x 8 + 2 x 3 = 22 steps: all steps up to D = 22 x 0.02 / 2 = 0.22 s.
    def at(transfer: float, **options):
        return predict(WORK, 3, link=3 * WORK.weights / transfer, **{"every": 8, **options})

    assert at(0.219).bound == "training"
    just = at(0.221)
    assert just.bound == "weights"
    assert just.seconds == pytest.approx(0.02, rel=0.02)
    worse = at(0.8)
    share = 22 * worse.seconds / 0.8 - 1
    assert worse.by_workers == pytest.approx(share)
    assert worse.seconds == pytest.approx(0.02 + (1 - share) * WORK.scoring)
    hopeless = at(22 * 0.08 + 0.01)
    assert hopeless.by_workers == 0
    assert hopeless.seconds == pytest.approx(WORK.alone)
    assert at(0.8, max_stale=100).bound == "training"  # who allows older weights has no such limit
    assert at(0.8, every=64).bound == "training"


def test_the_step_never_gets_slower_than_without_workers() -> None:
    for transfer in (0.1, 0.3, 0.5, 1.0, 1.7, 2.0, 50.0):
        found = predict(WORK, 3, link=3 * WORK.weights / transfer)
        assert 0.02 <= found.seconds <= WORK.alone + 1e-12
        assert 0 <= found.by_workers <= 1


def test_least_every_is_where_weights_arrive_in_time() -> None:
    link = GIGABIT  # 2.4 s for three workers: 120 steps of 20 ms
    least = least_every(WORK, 3, link)
    assert least == 120 - 3
    assert predict(WORK, 3, link=link, every=least).bound == "training"
    assert predict(WORK, 3, link=link, every=least - 1).bound == "weights"
    assert least_every(WORK, 3, FAST) == 1


def test_what_the_trainer_scores_again_is_in_its_step() -> None:
    plain, again = (predict(WORK, 3, link=FAST, rescored=share) for share in (0.0, 0.3))
    assert again.trainer == pytest.approx(plain.trainer + 0.3 * WORK.scoring)
    assert again.seconds == again.trainer > plain.seconds


def test_staleness() -> None:
    # Sent at one step, used from the next on, 0 to 7 steps more until the next comes, 5 in hand before.
    assert predict(WORK, 3, link=FAST, every=8).staleness == 1 + 3.5 + 5
    assert predict(WORK, 3, link=FAST, every=1, ahead=1).staleness == 1 + 0 + 2


def test_advice_in_words() -> None:
    assert sentences(WORK, predict(WORK, 0, link=FAST), FAST, 8) == []
    said = sentences(WORK, predict(WORK, 3, link=FAST), FAST, 8)
    assert (
        "3 scoring workers: a step at the largest k takes 20.00 ms, without them 80.00" in said[0]
    )
    assert "training sets the pace. 3 are enough" in said[0]
    assert "300 MB every 8 steps" in said[1]
    assert "at every step" in said[1]
    said = sentences(WORK, predict(WORK, 3, link=GIGABIT, every=8), GIGABIT, 8)
    assert "The trainer scores 100% of the steps itself. Send them every 117 steps" in said[1]
    link = 10 * GIGABIT  # 0.24 s: 12 steps
    said = sentences(WORK, predict(WORK, 3, link=link, every=16), link, 16)
    assert "sent more often than every 9 steps they would be too slow" in said[1]
    assert "steps old on average, and choices that old may be worse than uniform" in said[-1]


def test_small_steps_are_better_scored_by_the_trainer() -> None:
    small = Work(training=0.001, scoring=0.001, handling=HANDLING)
    found = predict(small, 2, link=FAST)
    assert found.seconds == 0.001 + HANDLING > small.alone
    assert "Scoring workers do not pay here" in sentences(small, found, FAST, 8)[1]
    large = Work(training=0.02, scoring=0.06, handling=HANDLING)
    assert "do not pay" not in " ".join(sentences(large, predict(large, 2, link=FAST), FAST, 8))


def test_what_handling_costs_is_what_was_measured() -> None:
    costs = {row["work"]["handling"] for row in measured()}
    assert 0.95 * min(costs) < HANDLING < max(costs)


@pytest.mark.parametrize(("workers", "link"), [(-1, 1.0), (1, 0.0), (1, math.nan)])
def test_impossible_arguments_are_told(workers, link) -> None:
    with pytest.raises(RholossError, match=f"`workers` is {workers}, .* the link needs a speed"):
        predict(WORK, workers, link=link)


def measured():
    return [json.loads(line) for line in MEASURED.read_text().splitlines()]


def again(row):
    """The prediction for a row, made anew from what was measured without workers."""
    shared = {} if row["processors"] is None else {"processors": row["processors"]}
    work = Work(**row["work"])
    return predict(work, row["workers"], link=row["link"], every=row["every"], **shared)


def test_predictions_agree_with_what_was_measured() -> None:
    """On a machine that others used too: three of four within a quarter, all within a factor of 1.7."""
    rows = [row for row in measured() if row["workers"]]
    assert {row["what"] for row in rows} == {"emulated", "link", "slow", "real"}
    ratios = [row["measured"]["seconds"] / again(row).seconds for row in rows]
    assert all(1 / 1.7 < ratio < 1.7 for ratio in ratios), ratios
    assert sum(0.8 < ratio < 1.25 for ratio in ratios) >= 0.75 * len(ratios), ratios
    for row in rows:
        found = again(row)
        # Too few where weights are slow: a trainer also waits for workers that have just got some.
        assert row["measured"]["by_workers"] >= found.by_workers - 0.05, row
        assert row["measured"]["stale_max"] <= 2 * row["every"] + 2 * row["workers"]
        if row["what"] == "emulated":
            assert row["measured"]["staleness"] == pytest.approx(found.staleness, abs=1)


def test_measured_steps_get_faster_with_workers_until_training_sets_the_pace() -> None:
    rows = {row["workers"]: row["measured"] for row in measured() if row["what"] == "emulated"}
    assert rows[0]["seconds"] > 1.2 * rows[1]["seconds"] > 1.2 * 1.5 * rows[2]["seconds"]
    assert rows[3]["seconds"] < 1.4 * rows[3]["training"]


def test_measured_weights_over_a_slow_link_leave_steps_to_the_trainer() -> None:
    rows = {row["every"]: row for row in measured() if row["what"] == "slow" and row["workers"]}
    assert [again(rows[m]).bound for m in (1, 4, 16)] == ["weights", "weights", "scoring"]
    seconds = [rows[m]["measured"]["seconds"] for m in (1, 4, 16)]
    assert seconds == sorted(seconds, reverse=True)
    assert rows[1]["measured"]["by_workers"] < 0.8 < 0.95 < rows[16]["measured"]["by_workers"]
