"""The fair race: budgets, choices made on validation points, statistics, and a tiny race on the CPU."""

import json
import math

import numpy as np
import pytest

from experiments import records
from experiments.fair_clock import race as racing
from experiments.fair_clock.arms import ARMS, Cell, kinds
from experiments.fair_clock.choose import choice_for, tuned
from experiments.fair_clock.race import Race, Running, done, rate, run
from experiments.fair_clock.report import difference, interval, page, paired, write

TIMES = {"uniform 32 of 32": 1.0, "planned 32 of 32": 1.0}
TIMES |= {"scoring 32 of 160": 3.0, "scoring 32 of 128": 3.0}


def test_a_budget_is_turned_into_steps():
    assert Cell("clean", "uniform", 32, 1e-3, 0, budget=17).steps(TIMES, il_seconds=2.0) == 17_000
    assert Cell("clean", "rho k=5", 32, 1e-3, 0, budget=17).steps(TIMES, il_seconds=2.0) == 5_000
    reused = Cell("clean", "rho k=5", 32, 1e-3, 0, budget=18, il="reused")
    assert reused.steps(TIMES, il_seconds=2.0) == 6_000
    # 30 % of the steps score: 0.3 x 3 ms + 0.7 x 1 ms a step.
    annealed = Cell("clean", "annealed 30 %, IL 2 %", 32, 1e-3, 0, budget=18)
    assert annealed.steps(TIMES, il_seconds=2.0) == 10_000
    assert ARMS["annealed 30 %, IL 2 %"].schedule(10_000).stop == 3_000
    assert [kind.key for kind in kinds(annealed)] == ["scoring 32 of 160", "uniform 32 of 32"]


def test_a_plan_pays_for_its_steps():
    cell = Cell("clean", "remembered", 32, 1e-3, 0, budget=17)
    assert {kind.key for kind in kinds(cell)} == {"planned 32 of 32"}
    assert cell.steps({"planned 32 of 32": 2.0}, il_seconds=2.0) == 8_500
    scores, plain = kinds(Cell("clean", "annealed", 32, 1e-3, 0))
    assert (scores.key, plain.key) == ("scoring 32 of 128", "planned 32 of 32")


def test_an_early_switch_leaves_time_for_more_steps():
    cell = Cell("clean", "annealed", 32, 1e-3, 0, budget=18)
    assert cell.steps(TIMES, il_seconds=2.0) == 10_000  # if it scores for 30 % of them
    assert cell.steps(TIMES, il_seconds=2.0, scoring=1_000) == 14_000  # 3 s and 13 s
    assert cell.steps(TIMES, il_seconds=2.0, scoring=3_000) == 10_000


def test_uniform_with_a_filter_pays_for_the_irreducible_losses():
    filtered = Cell("clean", "minus IL 10 %", 32, 1e-3, 0, budget=17)
    assert filtered.steps(TIMES, il_seconds=2.0) == 15_000
    schedule = ARMS["minus IL 10 %"].schedule(100)
    assert not schedule(0).score
    assert schedule(0).drop == 0.1


def test_the_rate_falls_to_zero_in_the_last_step():
    curve = rate(Cell("clean", "uniform", 32, 3e-3, 0), 1000)
    assert max(curve(step) for step in range(1000)) == pytest.approx(3e-3)
    assert 0 < curve(999) < 1e-5


def test_what_is_done_is_known_by_its_line(tmp_path):
    cell = Cell("worse", "rho k=10", 128, 3e-3, 2, split="final", budget=60.0, il="reused")
    line = {**cell.__dict__, "accuracy": 90.0}
    del line["dataset"]  # a line from before there was a second one
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert done([path, tmp_path / "none.jsonl"]) == {cell.key()}


def line(arm="uniform", accuracy=90.0, seed=0, **others):
    cell = Cell(
        **{"labels": "clean", "n_b": 128, "lr": 1e-3, "split": "tune", **others}, arm=arm, seed=seed
    )
    about = {"device": "a GPU", "torch": "2", "date": "today", "command": "python", "error": None}
    return {**cell.__dict__, "accuracy": accuracy, **about}


def test_the_best_on_the_validation_points_is_chosen_for_each_arm():
    lines = [
        line(accuracy=90, lr=1e-3),
        line(accuracy=91, lr=3e-3, seed=0),
        line(accuracy=93, lr=3e-3, seed=1),
        line(accuracy=91.5, lr=6e-3),
        line(accuracy=99, lr=6e-3, split="final"),  # the test set chooses nothing
        line(accuracy=95, lr=6e-3) | {"error": "diverged"},
        line("InfoBatch", accuracy=80, n_b=512),
        line(accuracy=70, n_b=32, lr=1e-3),
    ]
    best = tuned(lines)
    assert choice_for(best, "cifar10", "clean", "uniform") == (128, 3e-3)
    assert choice_for(best, "cifar10", "clean", "InfoBatch") == (512, 1e-3)
    assert choice_for(best, "cifar10", "clean", "rho k=5") == (128, 3e-3)  # uniform's
    assert choice_for(best, "cifar10", "worse", "uniform") is None
    assert choice_for(tuned(lines, n_b=32), "cifar10", "clean", "uniform") == (32, 1e-3)


def test_differences_are_taken_seed_by_seed():
    ours = [line("InfoBatch", 91 + seed, seed) for seed in (0, 1, 2)]
    theirs = [
        line("uniform", accuracy, seed) for seed, accuracy in ((2, 90.0), (1, 90.5), (7, 0.0))
    ]
    assert paired(ours, theirs) == [1.5, 3.0]
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 * 1.0 / math.sqrt(3))
    assert difference(ours[:1], theirs) == ""
    assert difference(ours[1:2], theirs) == "+1.50"


def test_the_page_holds_what_was_run_and_says_what_was_not(tmp_path):
    lines = [line("uniform", 90 + seed, seed, split="final") for seed in (0, 1)]
    lines += [line("remembered", 91.5 + seed, seed, split="final") for seed in (0, 1)]
    lines += [line("uniform", 80)]
    text = page(lines, None)
    assert "| remembered | 92.00 ± 0.71 (2) | +1.50 ± 0.00 |" in text
    assert "| uniform | 90.50 ± 0.71 (2) |  |" in text
    assert text.count("Not run yet.") == 5
    assert "| clean | uniform | 128 | 80.00 (1) |" in text
    out = tmp_path / "runs.jsonl"
    curve = {"curve": [[1.0, 50.0], [2.0, 80.0]]}
    out.write_text("".join(json.dumps(each | curve) + "\n" for each in lines))
    pytest.importorskip("matplotlib")
    assert "![accuracy over seconds](curves.png)" in write(out).read_text()
    assert (tmp_path / "curves.png").stat().st_size > 5000


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A race over forty images a file, on the CPU."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        lines = rng.integers(0, 256, (40, 3073), dtype=np.uint8)
        lines[:, 0] %= 10
        lines.tofile(folder / name)
    monkeypatch.setattr(racing, "NUM_VALIDATION", 40)
    monkeypatch.setattr(racing, "IL_RECIPE", {"epochs": 1, "batch_size": 32, "learning_rate": 1e-3})
    monkeypatch.setattr(racing, "CHUNK", 2)
    monkeypatch.setattr(racing, "ResNet18", racing.SmallCNN)
    monkeypatch.setattr(racing, "Folded", lambda: None)  # the small CNN has nothing to fold
    made = Race("cifar10", str(tmp_path), precision="fp32", compile=False)
    made.times = {"uniform 8 of 8": 1.0, "planned 8 of 8": 1.0, "scoring 8 of 32": 2.0}
    return made


def test_a_tiny_race_is_run_and_written(tiny, tmp_path):
    arms = ("uniform", "annealed", "remembered", "random half")
    cells = [Cell("noise 10 %", arm, 8, 1e-3, 0, budget=0.02, il="reused") for arm in arms]
    out = tmp_path / "runs.jsonl"
    run(tiny, cells, out, side_by_side=2)
    lines = {one["arm"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert set(lines) == set(arms)
    for one in lines.values():
        assert one["seconds"] == pytest.approx(0.02, abs=0.002)
        assert one["trained"] == 8 * one["steps"]
        assert len(one["curve"]) >= 5
    assert lines["uniform"]["steps"] == 20
    assert lines["annealed"]["scored"] > 0
    assert lines["uniform"]["scored"] == 0
    assert done([out]) == {cell.key() for cell in cells}


def test_a_race_that_diverges_is_a_result_and_takes_no_other_with_it(tiny, tmp_path):
    cells = [Cell("clean", "uniform", 8, lr, 0, budget=0.3) for lr in (1e30, 1e-3)]
    run(tiny, cells, tmp_path / "runs.jsonl", side_by_side=2)
    lines = {one["lr"]: one for one in records.read(tmp_path / "runs.jsonl")}
    assert "not finite" in lines[1e30]["error"]
    assert lines[1e30]["steps"] == 100  # where it was noticed
    assert lines[1e-3]["error"] is None
    assert lines[1e-3]["steps"] == 300


def test_irreducible_losses_are_fitted_before_anything_runs_beside_them(
    tiny, tmp_path, monkeypatch
):
    order, fit, advance = [], Race._fit, Running.advance
    monkeypatch.setattr(Race, "_fit", lambda *given: order.append("fit") or fit(*given))
    monkeypatch.setattr(Running, "advance", lambda self: order.append("step") or advance(self))
    cells = [Cell("clean", arm, 8, 1e-3, 0, budget=0.02) for arm in ("uniform", "annealed")]
    run(tiny, cells, tmp_path / "runs.jsonl", side_by_side=1)
    assert set(order) == {"fit", "step"}
    assert "fit" not in order[order.index("step") :]


def test_validation_points_are_not_trained_on(tiny):
    tune, judged = tiny.data(Cell("clean", "uniform", 8, 1e-3, 0))
    assert len(tune) == 160
    assert len(judged) == 40
    assert not set(tune.ids.tolist()) & set(judged.ids.tolist())
    whole, test = tiny.data(Cell("clean", "uniform", 8, 1e-3, 0, split="final"))
    assert len(whole) == 200
    assert test is tiny.test
    half, _ = tiny.data(Cell("clean", "uniform", 8, 1e-3, 0, split="final", part="half"))
    assert set(half.ids.tolist()) == set(range(0, 200, 2))


def test_the_abundant_case_takes_its_irreducible_losses_from_the_other_half(tiny, monkeypatch):
    seen = {}

    def fit(make, data, **options):
        seen.update(data=data, **options)

    monkeypatch.setattr(racing, "fit_resident", fit)
    tiny._fit(Cell("clean", "rho k=5", 8, 1e-3, 0, split="final", part="half"))
    assert set(seen["data"].ids.tolist()) == set(range(1, 200, 2))
    assert set(seen["score"].ids.tolist()) == set(range(0, 200, 2))


def test_an_automatic_switch_shares_out_what_is_left(tiny):
    cell = Cell("clean", "annealed", 8, 1e-3, 0, budget=0.06, il="reused")
    running = Running(tiny, cell)
    planned = running.steps
    assert running.trainer.schedule.stop == round(0.3 * planned)
    running.advance()
    running.trainer.stop_scoring()
    running.advance()
    assert running.steps > planned
    while not running.finished:
        running.advance()
    assert running.seconds() == pytest.approx(0.06, abs=0.002)
    assert running.trainer.body.lr_T[running.steps - 1] > 0
