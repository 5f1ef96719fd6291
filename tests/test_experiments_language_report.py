"""The page of the language experiments, from lines of results."""

import pytest

from experiments import records
from experiments.language import report


def line_of(method, curve, seed=0, task="cola", **cell):
    made = {"task": task, "method": method, "seed": seed, **cell}
    about = {"device": "x", "torch": "1", "date": "2022-07-17", "command": "python -m x"}
    return {
        "cell": made,
        "steps_an_epoch": 10,
        "steps": 40,
        "curve": curve,
        "il_seconds": 5.0,
        **about,
    }


def test_the_page_counts_epochs_and_says_what_was_never_reached():
    lines = [
        line_of("uniform", [[10, 0.70, 0.1], [20, 0.76, 0.2], [40, 0.74, 0.3]]),
        line_of("uniform", [[10, 0.60, 0.1], [20, 0.70, 0.2], [40, 0.72, 0.5]], seed=1),
        line_of("rho", [[10, 0.81, 0.4], [40, 0.79, 0.6]]),
    ]
    rows = {line.split(" | ")[0]: line for line in report.page(lines).splitlines()}
    ends = "73.0 (72.0-74.0) |  | 74.0 (72.0-76.0) | 40.0 (30.0-50.0)"
    assert rows["| uniform"] == f"| uniform | 2 | 2.0, NR in 1 | NR | {ends} | 34 / NR (76) |"
    assert (
        rows["| RHO-LOSS"] == "| RHO-LOSS | 1 | 1.0 | 1.0 | 79.0 |  | 81.0 | 60.0 | 3 / 39 (80) |"
    )


def test_a_budget_that_the_irreducible_losses_used_up_is_told():
    lines = [line_of("rho", [], irreducible="small", budget=4.0, il_counts=True)]
    lines[0] |= {"steps": 0, "seconds_a_step": 0.01}
    assert (
        "| cola | half | RHO-LOSS | 5.0 s, counted | 4 | 1 | 0 | 5.0 | NR |  | NR |"
        in report.page(lines)
    )


def test_the_seconds_that_fair_runs_took_are_told():
    curve = [[40, 0.8, 0.5]]
    arm = {"irreducible": "small", "budget": 40.0}
    lines = [
        line_of("rho", curve, **arm, il_counts=True) | {"seconds_a_step": 35.5 / 40},
        line_of("rho", curve, **arm) | {"seconds_a_step": 39.5 / 40},
        line_of("random_half", curve, **arm) | {"seconds_a_step": 1.025, "il_seconds": 0.0},
    ]
    page = report.page(lines)
    assert "| RHO-LOSS | 5.0 s, counted | 40 | 1 | 40 | 40.5 | 80.0 |" in page
    assert "| RHO-LOSS | 5.0 s, reused | 40 | 1 | 40 | 39.5 | 80.0 |" in page
    assert "| random half |  | 40 | 1 | 40 | 41.0 | 80.0 |" in page


def test_the_page_names_an_encoder_that_is_not_the_usual_one():
    runs = [line_of("rho", [[40, 0.9, 0.5]]), line_of("rho", [[40, 0.8, 0.5]], encoder="albert")]
    text = report.page(runs)
    usual, other = (part.split("##")[0] for part in text.split("protocol")[1:])
    assert "| 90.0 |" in usual
    assert other.startswith(", albert")
    assert "| 80.0 |" in other


def test_the_page_shows_curves_and_the_steps_to_each_accuracy(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [line_of("uniform", [[10, 0.60, 0.1], [40, 0.70, 0.3]], seed) for seed in (0, 1)]
    for line in [*lines, line_of("rho", [[10, 0.65, 0.1], [40, 0.80, 0.3]])]:
        records.append(tmp_path / "runs.jsonl", line)
    text = report.write(tmp_path / "runs.jsonl").read_text()
    for name in ("cola-accuracy.png", "cola-steps.png"):
        assert f"({name})" in text
        assert (tmp_path / name).read_bytes()[1:4] == b"PNG"


def test_differences_are_paired_by_seed():
    def runs(*accuracies):
        curves = [[[1, accuracy, 0.0]] if accuracy else [] for accuracy in accuracies]
        return [{"cell": {"seed": seed}, "curve": curve} for seed, curve in enumerate(curves)]

    uniform = runs(0.50, 0.60, 0.70)
    told = report.minus_uniform(runs(0.52, 0.62, 0.75), uniform, report.at_the_end)
    assert told == "+3.00 ± 4.30"  # 2, 2, 5: 4.303 * sqrt(3) / sqrt(3)
    assert report.minus_uniform(uniform, uniform, report.at_the_end) == ""
    assert report.minus_uniform(runs(0.9, None), uniform, report.at_the_end) == ""  # one is no mean


def test_seconds_count_the_irreducible_losses_and_the_steps_that_score():
    record = {"steps": 100, "il_seconds": 2.0, "step_ms": {"uniform": 10.0, "rho": 30.0}}

    def at(method, step, **more):
        cell = {"task": "cola", "method": method, "seed": 0, **more}
        return report.seconds_at({"cell": cell, **record}, step)

    assert at("uniform", 50) == pytest.approx(0.5)
    assert at("rho", 50) == pytest.approx(1.5)
    assert at("rho", 50, il_counts=True) == pytest.approx(3.5)
    assert at("annealed", 20) == pytest.approx(0.6)
    assert at("annealed", 100) == pytest.approx(30 * 0.03 + 70 * 0.01)
    record["step_ms"] = {"remembered": 12.0, "annealed_fresh": 40.0}  # what other arms are timed as
    assert at("remembered", 50) == pytest.approx(0.6)
    assert at("measured", 50) == pytest.approx(0.6)
    assert at("annealed_fresh", 100) == pytest.approx(30 * 0.04 + 70 * 0.012)


def test_fair_runs_are_drawn_over_seconds(tmp_path):
    pytest.importorskip("matplotlib")
    arm = {"irreducible": "small", "budget": 6.0}
    times = {"seconds_a_step": 0.01, "step_ms": {"uniform": 10.0, "rho": 30.0}}
    for method, counts in (("uniform", False), ("rho", True)):
        line = line_of(method, [[20, 0.6, 0.1], [40, 0.7, 0.3]], **arm, il_counts=counts) | times
        records.append(tmp_path / "runs.jsonl", line)
    text = report.write(tmp_path / "runs.jsonl").read_text()
    assert "(cola-seconds.png)" in text
    records.append(tmp_path / "runs.jsonl", line)  # once more: no second seed
    assert report.write(tmp_path / "runs.jsonl").read_text() == text
    assert "sst2-seconds.png" not in text
    assert (tmp_path / "cola-seconds.png").read_bytes()[1:4] == b"PNG"


def test_fair_runs_of_other_budgets_are_other_curves(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(report.plots, "draw", lambda path, arms, *more: drawn.update(arms))
    times = {"seconds_a_step": 0.01, "step_ms": {"uniform": 10.0}}
    lines = [line_of("uniform", [[20, 0.6, 0.1]], budget=b) | times for b in (6.0, 6.0, 12.0)]
    report.draw_fair("cola", [(report.cell_of(line), line) for line in lines], tmp_path)
    assert {name: len(found) for name, found in drawn.items()} == {
        "uniform, 6 s": 2,
        "uniform, 12 s": 1,
    }
