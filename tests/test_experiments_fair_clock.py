"""The fair race: budgets, choices made on validation points, statistics, and a tiny race on the CPU."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures_race import line, tiny_race

from experiments import records
from experiments.fair_clock import __main__ as command
from experiments.fair_clock import race as racing
from experiments.fair_clock.__main__ import arguments, cells_of, parts
from experiments.fair_clock.arms import ARMS, Cell, kinds
from experiments.fair_clock.race import Race, Running, done, rate, run
from rholoss.engine import Trainer
from rholoss.errors import RholossError

TIMES = {"uniform 32 of 32": 1.0, "planned 32 of 32 by annealed": 1.0}
TIMES |= {"scoring 32 of 160": 3.0, "scoring 32 of 128 by annealed": 3.0}


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
    cell = Cell("clean", "InfoBatch", 32, 1e-3, 0, budget=17)
    assert {kind.key for kind in kinds(cell)} == {"planned 32 of 32 by InfoBatch"}
    assert cell.steps({"planned 32 of 32 by InfoBatch": 2.0}, il_seconds=2.0) == 8_500
    # Losses are remembered in steps that score, too, and each plan has passes of its own length.
    scores, plain = kinds(Cell("clean", "annealed", 32, 1e-3, 0))
    assert scores.key == "scoring 32 of 128 by annealed"
    assert plain.key == "planned 32 of 32 by annealed"
    assert kinds(Cell("clean", "remembered", 32, 1e-3, 0)) == (plain, plain)  # the same plan


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
    assert done(records.read(path, tmp_path / "none.jsonl")) == {cell.key()}


def cells(words, lines=()):
    return [(c.arm, c.n_b, c.lr, c.il) for c in cells_of(arguments(words.split()), list(lines))]


def test_cells_are_what_was_asked_for():
    assert len(cells("tune --arms uniform InfoBatch --labels clean")) == 18
    lines = [
        line(accuracy=90 - rate, lr=rate * 1e-3, n_b=n_b) for rate in (1, 3) for n_b in (32, 128)
    ]
    final = "final --labels clean"
    assert cells(final, lines) == [("uniform", 32, 1e-3, "inside")]
    assert cells(f"{final} --n-b 32 128", lines) == [
        ("uniform", 32, 1e-3, "inside"), ("uniform", 128, 1e-3, "inside"),
    ]  # fmt: skip
    assert cells(f"{final} --lr 3e-3", lines) == [("uniform", 32, 3e-3, "inside")]
    assert cells(f"{final} --n-b 512 --lr 6e-3") == [("uniform", 512, 6e-3, "inside")]
    with pytest.raises(SystemExit, match="uniform was not tuned on cifar10, clean at n_b 512"):
        cells(f"{final} --n-b 512", lines)
    # who reads no irreducible losses has no second column
    assert [il for *_, il in cells(f"{final} --arms uniform annealed --il reused", lines)] == [
        "inside", "reused",
    ]  # fmt: skip


def test_labels_that_a_data_set_has_not_are_refused_at_once(capsys):
    assert arguments(["tune", "--dataset", "cifar100"]).labels == ["clean", "noise 10 %"]
    with pytest.raises(SystemExit):
        arguments(["tune", "--dataset", "cifar100", "--labels", "clean", "worse"])
    assert "--labels 'worse': cifar100 has 'clean', 'noise 10 %'" in capsys.readouterr().err


def test_a_plus_begins_further_runs_of_the_same_call():
    first = ["tune", "--dataset", "cifar100", "--arms", "uniform", "--seconds", "9"]
    assert parts([*first, "+", "--seeds", "1", "+", "--lr", "1e-3"]) == [
        first,
        ["tune", "--dataset", "cifar100", "--seeds", "1"],
        ["tune", "--dataset", "cifar100", "--lr", "1e-3"],
    ]
    with pytest.raises(SystemExit, match="2"):  # what is to be done is missing
        command.main([])
    with pytest.raises(SystemExit, match="One call has one --dataset"):
        command.main(["final", "--n-b", "8", "--lr", "1e-3", "+", "--dataset", "cifar100"])


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    return tiny_race(tmp_path, monkeypatch)


def test_each_kind_of_step_is_timed_as_its_arm_takes_it(tiny, monkeypatch):
    asked, make = [], Race.trainer
    monkeypatch.setattr(racing, "WARM_SECONDS", 0.0)

    def trainer(self, cell, steps, capacity, arm=None):
        asked.append((arm.method, arm.k, arm.plan))
        return make(self, cell, steps, capacity, arm)

    monkeypatch.setattr(Race, "trainer", trainer)
    tiny.times = {}
    arms = ("uniform", "annealed", "remembered", "random half", "uniform")
    tiny.measure_times([Cell("noise 10 %", arm, 8, 1e-3, 0) for arm in arms], steps=20)
    plans = [
        ARMS[arm].plan for arm in ("annealed", "random half")
    ]  # `remembered` has the first, too
    assert asked == [
        ("uniform", 1, None), ("rho", 4, plans[0]), ("uniform", 1, plans[0]), ("uniform", 1, plans[1]),
    ]  # fmt: skip
    assert all(0 < ms < 10_000 for ms in tiny.times.values())
    # irreducible losses of the labels that are raced, and of no others
    assert {labels for labels, *_ in tiny._il} == {"noise 10 %"}


def test_arms_score_with_the_statistics_that_they_name_and_are_timed_so(tiny, monkeypatch):
    monkeypatch.setattr(racing, "Folded", lambda **options: f"folded {options}")
    monkeypatch.setattr(racing, "WARM_SECONDS", 0.0)
    given = []

    def noted(*args, **options):
        scored = options["method"] == "rho"
        names = ("batch_norm", "scoring", "overlap")
        given.append(tuple(options[name] for name in names) if scored else None)
        return Trainer(*args, **{**options, "scoring": None})

    monkeypatch.setattr(racing, "Trainer", noted)
    tiny.times = {}
    arms = (
        "rho k=5", "rho k=5, train BN", "annealed, train BN", "rho k=5, recent BN", "rho k=5, fresh",
        "annealed, fresh rows, careful", "annealed, measured, early IL, shortlist", "rho k=5, ahead",
    )  # fmt: skip
    monkeypatch.setattr(racing, "Shortlist", lambda share, by: f"{share} of {by}")
    tiny.measure_times([Cell("clean", arm, 8, 1e-3, 0) for arm in arms], steps=20)
    assert given == [
        ("eval", "folded {}", True), None, ("train", None, True), ("train", None, True), None,
        ("eval", "folded {'momentum': 0.8}", True), ("train", None, False),
        ("train", "folded {'rows': 32}", False), None,
        ("eval", "0.6 of folded {'momentum': 0.8}", False), None,
        ("eval", "folded {'momentum': 0.5, 'means': 64}", "ahead"),
    ]  # fmt: skip
    assert list(tiny.times) == [
        "scoring 8 of 40", "uniform 8 of 8", "scoring 8 of 40, train BN",
        "scoring 8 of 32 by annealed, train BN", "planned 8 of 8 by annealed",
        "scoring 8 of 40, recent BN", "scoring 8 of 40, train BN, fresh",
        "scoring 8 of 32 by annealed, fresh, careful, rows BN, fresh",
        "planned 8 of 8 by annealed, fresh, careful",
        "scoring 8 of 32 by annealed, measured, recent BN, fresh, shortlist of 60%",
        "planned 8 of 8 by annealed, measured", "scoring 8 of 40, following BN, ahead",
    ]  # fmt: skip


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
    assert done(records.read(out)) == {cell.key() for cell in cells}


def test_a_line_tells_what_the_share_of_wrong_labels_was_taken_for(tiny):
    tiny.times |= {"planned 8 of 8 by annealed, measured": 1.0}
    cell = Cell("noise 10 %", "remembered, measured", 8, 1e-3, 0, budget=0.002)
    running = racing.Running(tiny, cell)
    running.trainer.rows.memory.notes.update(wrong=0.25, bound=1.4)
    while not running.finished:
        running.advance()
    assert running.record()["wrong"] == 0.25
    assert racing.Running(tiny, replace(cell, arm="uniform")).record()["wrong"] is None


def test_an_early_irreducible_loss_model_is_fitted_apart(tiny, tmp_path):
    tiny.times |= {"scoring 8 of 32 by annealed, early IL": 2.0}
    tiny.times |= {"planned 8 of 8 by annealed, early IL": 1.0}
    arms = ("annealed", "annealed, early IL")
    cells = [Cell("clean", arm, 8, 1e-3, 0, budget=0.02, il="reused") for arm in arms]
    run(tiny, cells, tmp_path / "runs.jsonl")
    epochs = [line["il_recipe"]["epochs"] for line in records.read(tmp_path / "runs.jsonl")]
    assert epochs == [12, 3]
    late, early = (tiny.irreducible(cell).values for cell in cells)
    assert not np.allclose(late.cpu(), early.cpu(), equal_nan=True)


def test_runs_with_a_ladder_share_its_fit_and_climb_by_themselves(tiny, tmp_path):
    tiny.times |= {"scoring 8 of 40": 2.0, "uniform 8 of 8": 1.0}
    cells = [Cell("clean", "rho k=5, ladder", 8, 1e-3, seed, budget=0.02) for seed in (0, 1)]
    run(tiny, cells, tmp_path / "runs.jsonl")
    lines = list(records.read(tmp_path / "runs.jsonl"))
    assert [line["il_recipe"]["rungs"] for line in lines] == [[1, 3]] * 2
    assert lines[0]["il_seconds"] == lines[1]["il_seconds"] > 0
    first, second = (Running(tiny, cell).trainer.source for cell in cells)
    assert first is not second
    assert first.tables is tiny.irreducible(cells[0]).tables


def test_a_race_that_diverges_is_a_result_and_takes_no_other_with_it(tiny, tmp_path, monkeypatch):
    cells = [Cell("clean", "uniform", 8, lr, 0, budget=0.3) for lr in (1e30, 1e-3)]
    monkeypatch.setattr(racing, "WARM_SECONDS", 0.0)
    timed, tiny.times = tiny.times, {}
    tiny.measure_times(
        cells
    )  # steps of the first are timed, and at its own rate they would end all
    tiny.times = timed
    run(tiny, cells, tmp_path / "runs.jsonl", side_by_side=2)
    lines = {one["lr"]: one for one in records.read(tmp_path / "runs.jsonl")}
    assert "not finite" in lines[1e30]["error"]
    assert lines[1e30]["steps"] == 100  # where it was noticed
    assert lines[1e-3]["error"] is None
    assert lines[1e-3]["steps"] == 300


def test_a_run_that_fails_takes_no_other_with_it(tiny, tmp_path, monkeypatch, capsys):
    made, fit, advance = Race._measure, Race._fit, Running.advance
    arms = ("annealed", "remembered", "random half", "rho k=5", "uniform")
    cells = [Cell("clean", arm, 8, 1e-3, 0, budget=0.3) for arm in arms]
    tiny.times |= {"scoring 8 of 40": 2.0}

    def failing(call, failed, words):
        def called(*given):
            if any(getattr(one, "cell", one) == failed for one in given):
                raise RuntimeError(words)
            return call(*given)

        return called

    del tiny.times["scoring 8 of 32 by annealed"]
    monkeypatch.setattr(Race, "_measure", failing(made, cells[0], "not timed"))
    monkeypatch.setattr(Race, "_fit", failing(fit, cells[3], "not fitted"))
    monkeypatch.setattr(Running, "advance", failing(advance, cells[2], "not trained"))
    tiny.measure_times(cells)
    with pytest.raises(RholossError, match="3 run") as told:
        run(tiny, cells, tmp_path / "runs.jsonl", side_by_side=2)
    where = capsys.readouterr().err
    for arm, words in (("annealed", "timed"), ("rho k=5", "fitted"), ("random half", "trained")):
        assert f"arm={arm}|" in str(told.value)
        assert f"RuntimeError: not {words}" in where
    lines = [one["arm"] for one in records.read(tmp_path / "runs.jsonl")]
    assert sorted(lines) == ["remembered", "uniform"]


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


def test_runs_of_other_lengths_share_what_is_compiled(tiny):
    """All that a trainer's tensors' shapes go by but the number of steps is the same for a size."""
    made = [tiny.trainer(Cell("clean", "uniform", 8, 1e-3, 0), n, n) for n in (700, 1234)]
    assert [trainer.total_steps for trainer in made] == [700, 1234]
    assert made[0].body.lr_T.shape == made[1].body.lr_T.shape


def test_a_seed_has_the_same_initial_weights_in_all_arms_and_another_has_others(tiny):
    arms = (("uniform", 0), ("annealed", 0), ("uniform", 1))
    cells = [Cell("clean", arm, 8, 1e-3, seed, budget=0.06) for arm, seed in arms]
    uniform, annealed, other = ([*Running(tiny, cell).trainer.model.parameters()] for cell in cells)
    assert all(map(torch.equal, uniform, annealed))
    assert not any(map(torch.equal, uniform, other))


def test_the_commands_from_tuning_to_the_page(tiny, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    measure, out = Race.measure_times, tmp_path / "runs.jsonl"
    monkeypatch.setattr(racing, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(Race, "measure_times", lambda self, cells: measure(self, cells, steps=20))
    made = functools.partial(Race, precision="fp32", compile=False)
    monkeypatch.setattr(racing, "Race", made)
    monkeypatch.setattr(command, "RESULTS", out)
    common = ["--data", str(tmp_path), "--out", str(out), "--labels", "clean", "--budget", "0.4"]
    common += ["--arms", "uniform", "annealed", "--il", "reused"]
    tune, *others = ([*common, "--n-b", "8", "--lr", rate] for rate in ("1e-3", "2e-3"))
    tune = ["tune", *tune, "+", *others[0]]
    for words in (tune, ["final", *common, "--seeds", "0", "1"]):
        command.main(words)
        assert "4 runs to do" in capsys.readouterr().out
        command.main(words)
        assert "0 runs to do" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # `RESULTS` is the file of committed lines
        command.main([*words, "--again"])
    assert "--again needs --out" in capsys.readouterr().err
    again = [*common, "--seeds", "1", "--again"]
    again[again.index(str(out))] = str(tmp_path / "again.jsonl")
    for number in (2, 0):  # what is committed is made again, once
        command.main(["final", *again])
        assert f"{number} runs to do" in capsys.readouterr().out
    lines = [one for one in records.read(out) if one["split"] == "final"]
    assert all(one["seconds"] == pytest.approx(0.4, abs=0.1) for one in lines)
    assert {(one["n_b"], len(one["curve"])) for one in lines} == {(8, 0)}  # judged at the end only
    assert {(one["arm"], one["il"]) for one in lines} == {
        ("uniform", "inside"),
        ("annealed", "reused"),
    }
    command.main(["report", "--out", str(out)])
    text = (tmp_path / "README.md").read_text()
    assert "cifar10, all points, 0.4 s, irreducible losses reused" in text
    assert text.count("(2)") == 2
    command.main(["report", "--out", str(tmp_path / "again.jsonl")])
    assert (tmp_path / "again.md").exists()  # beside other lines there is a page of another name
    assert (tmp_path / "README.md").read_text() == text
    monkeypatch.setattr(records, "device", lambda: "another GPU")
    with pytest.raises(SystemExit, match="runs of cpu"):
        command.main(words)


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
    cell = Cell("clean", "rho k=5", 8, 1e-3, 0, part="half")  # tuning: the judge is unseen
    tiny._fit(cell)
    judge = set(tiny.data(cell)[1].ids.tolist())
    assert set(seen["data"].ids.tolist()) == set(range(1, 200, 2)) - judge
    assert not set(seen["score"].ids.tolist()) & judge


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
