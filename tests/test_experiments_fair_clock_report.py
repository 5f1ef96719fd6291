"""The page of the fair race: statistics, and every run in the table where it belongs."""

import json
import math
import re
import shlex
from functools import partialmethod

import pytest
from fixtures_race import line

from experiments import records
from experiments.fair_clock import __main__ as command
from experiments.fair_clock.__main__ import RESULTS
from experiments.fair_clock.arms import ARMS, LABELS, Cell
from experiments.fair_clock.choose import tuned, tuned_best
from experiments.fair_clock.report import (
    difference,
    draw_curves,
    page,
    paired,
    results,
    write,
)
from experiments.fair_clock.words import about
from experiments.intervals import interval


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
    assert "| remembered | 92.00 ± 0.71 (2) | **+1.50 ± 0.00** |" in text
    assert "| uniform | 90.50 ± 0.71 (2) |  |" in text
    assert text.count("Not run yet.") == 6
    assert "| clean | uniform | 128 | 80.00 (1) |" in text
    out = tmp_path / "runs.jsonl"
    curve = {"curve": [[1.0, 50.0], [2.0, 80.0]]}
    out.write_text("".join(json.dumps(each | curve) + "\n" for each in lines))
    pytest.importorskip("matplotlib")
    page_of = write(out).read_text()
    assert "![accuracy over seconds](curves.png)" in page_of
    out.write_text(2 * out.read_text())  # a file that was added twice has no more seeds
    assert write(out).read_text() == page_of
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_an_arm_has_one_colour_in_all_panels(tmp_path, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes").Axes
    drawn, plot = [], axes.plot

    def noted(axis, *values, **options):
        drawn.append((options["label"].split(" (")[0], options["color"]))
        return plot(axis, *values, **options)

    monkeypatch.setattr(axes, "plot", noted)
    curve = {"curve": [[1.0, 50.0], [2.0, 80.0]]}
    had = {"clean": ["InfoBatch"], "worse": ["uniform", "InfoBatch"]}
    lines = [line(arm, labels=labels) | curve for labels, arms in had.items() for arm in arms]
    draw_curves(lines, tmp_path / "curves.png", ["uniform", "random half", "InfoBatch"])
    assert drawn == [("InfoBatch", "C1"), ("uniform", "black"), ("InfoBatch", "C1")]


def test_a_curve_is_the_mean_of_all_seeds_at_the_size_that_did_best(tmp_path, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes").Axes
    drawn = []

    def noted(axis, method, *given, **options):
        drawn.append((given, options))
        return method(axis, *given, **options)

    for name in ("plot", "fill_between"):
        monkeypatch.setattr(axes, name, partialmethod(noted, getattr(axes, name)))
    lines = [
        line("InfoBatch", 80, 0) | {"curve": [[1.0, 50.0], [3.0, 80.0]]},
        line("InfoBatch", 70, 1) | {"curve": [[1.0, 30.0], [2.0, 50.0], [3.0, 70.0]]},
        line("InfoBatch", 74, 0, lr=6e-3) | {"curve": [[1.0, 99.0], [3.0, 74.0]]},
    ]
    draw_curves(lines, tmp_path / "curves.png", ["InfoBatch"])
    ((seconds, mean), options), ((_, low, high), _) = drawn
    assert options["label"] == "InfoBatch (n_b 128, 2 seeds)"
    assert [[*each] for each in (seconds, mean, low, high)] == [
        [1, 3], [40, 75], [30, 70], [50, 80]
    ]  # fmt: skip


@pytest.mark.parametrize("title", ["Main table", "The same", "n_b = 32", "Longer", "CIFAR-100"])
def test_a_table_has_the_command_that_makes_its_runs_once_more(title):
    """Of the committed page: its words give the runs of the table, each once, and no others."""
    text = section((RESULTS.parent / "README.md").read_text(), title)
    told = text.split("Once more:")[1].split("```")[1].strip()
    words = shlex.split(told)
    assert words[:3] == ["python", "-m", "experiments.fair_clock"]
    asked = [command.arguments(part) for part in command.parts(words[3:])]
    cells = [cell for a in asked for cell in command.cells_of(a, [])]
    assert len({*cells}) == len(cells)
    assert all(a.again for a in asked[:1])
    lines = [entry for entry in records.read(RESULTS) if Cell.of(entry) in {*cells}]
    assert {Cell.of(entry) for entry in lines} == {*cells}
    shown = re.findall(r"\((\d+)(?:, \d+ diverged)?\) \|", text)
    assert sum(map(int, shown)) <= len(cells)  # the table has one size and rate of each arm


def test_curves_are_those_of_the_arms_in_the_tables(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "experiments.fair_clock.report.draw_curves", lambda *given: drawn.append(given[2])
    )
    lines = [line("uniform", split="final"), line("InfoBatch", split="final"), line("annealed")]
    lines.append(line("rho k=5", split="final", budget=60.0))  # of another race
    out = tmp_path / "runs.jsonl"
    out.write_text("".join(json.dumps(each) + "\n" for each in lines))
    write(out)
    assert drawn == [["uniform", "uniform, remembering", "InfoBatch"]]
    with pytest.raises(SystemExit, match=r"typo\.jsonl has no runs"):  # the page stays as it is
        write(tmp_path / "typo.jsonl")


def test_the_rho_type_arm_that_stands_for_them_is_chosen_by_tuning_alone():
    sets = LABELS["cifar10"]
    lines = [line("uniform", 99, labels=labels) for labels in sets]
    lines += [line("remembered", 80 + i, labels=labels) for i, labels in enumerate(sets)]
    lines += [line("annealed", 82, labels=labels) for labels in sets]
    lines += [line("annealed", 10, labels=sets[0], lr=6e-3)]  # its other rate is the better one
    lines += [line("rho k=5", 98, labels=sets[0])]  # not tuned on every set
    lines += [line("remembered", 100, labels=labels, split="final") for labels in sets]
    lines += [line("annealed 15 %, measured", 90, labels=labels) for labels in sets]  # by hand
    assert tuned_best(lines) == ("annealed", 82)
    assert "**annealed** has the highest mean (82.00)" in page(lines, None)
    assert "fixed by hand, annealed 15 %, measured is first (90.00)." in page(lines, None)
    assert tuned_best(lines[:3]) is None
    assert "has the highest mean" not in page(lines[:3], None)


def section(text, title):
    return text.split(f"## {title}")[1].split("\n## ")[0]


def test_every_final_run_is_in_the_table_where_it_belongs():
    final = {"split": "final"}
    lines = [line("uniform", 90, **final), line("rho k=5", 91, **final)]
    lines += [line("rho k=5", 92, il="reused", **final)]
    lines += [line("rho k=10", 93, n_b=32, **final), line("uniform", 80, n_b=32, **final)]
    lines += [line("rho k=10", 50, n_b=32)]  # tuned: that is its best size
    lines += [
        line("annealed", 94, budget=11.33, **final),
        line("annealed", 95, il="reused", part="half", **final),
    ]
    lines += [line("InfoBatch", 99, lr=6e-3, **final), line("InfoBatch", 96, lr=3e-3, **final)]
    lines += [line("InfoBatch", 70, lr=3e-3)]
    lines += [
        line("remembered", 60, **final),
        line("remembered", 10, seed=1, **final) | {"error": "NaN"},
    ]
    text = page(lines, None)
    main = section(text, "Main table")
    assert "| uniform | 90.00 (1) |" in main
    assert "| rho k=5 | 91.00 (1) | +1.00 |" in main
    assert "| rho k=10 | 93.00 (1) | +3.00 |" in main
    assert "| InfoBatch | 96.00 (1) | +6.00 |" in main  # not the better one on the test set
    assert "| remembered | 35.00 ± 35.36 (2, 1 diverged) | -30.00 |" in main
    again = section(text, "The same with irreducible losses reused")
    assert "| rho k=5 | 92.00 (1) | +2.00 |" in again
    assert "rho k=10" not in again
    assert "| uniform | 80.00 (1) |" in section(text, "n_b = 32")
    assert "| annealed | 94.00 (1) | +4.00 |" in section(text, "Two thirds of the time")
    beyond = section(text, "Also run: cifar10, half points, 17 s, irreducible losses reused")
    assert "| annealed | 95.00 (1) |" in beyond
    assert text.count("Not run yet.") == 3  # abundant data, 60 s, CIFAR-100


def test_the_page_says_who_stands_for_the_first_of_tuning_until_that_is_raced():
    accuracies = {"annealed": 80, "remembered": 82, "rho k=5": 70}
    tune = [
        line(arm, accuracy, labels=labels)
        for labels in LABELS["cifar10"]
        for arm, accuracy in accuracies.items()
    ]
    raced = [line(arm, split="final") for arm in ("annealed", "rho k=5")]
    text = page([*tune, *raced, line("remembered", split="final", n_b=32)], None)
    assert "**remembered** has the highest mean (82.00)" in text
    assert "It has no final runs yet; of those that have, **annealed** is first (80.00)." in text
    text = page([*tune, *raced, line("remembered", split="final")], None)
    assert "no final runs yet" not in text


def test_tuning_runs_of_other_races_are_told_apart():
    lines = [
        line(accuracy=80),
        line(accuracy=60, dataset="cifar100"),
        line(accuracy=85, budget=60.0),
    ]
    text = page(lines, None)
    usual, *others = text.split("Tuning, ")
    assert "| clean | uniform | 128 | 80.00 (1) |" in usual
    assert others[0].startswith("cifar100, all points, 17 s")
    assert "| clean | uniform | 128 | 60.00 (1) |" in others[0]
    assert "| clean | uniform | 128 | 85.00 (1) |" in others[1]


def test_tuning_runs_whose_irreducible_losses_were_free_are_told_apart():
    lines = [line("annealed", 80), line("annealed", 90, il="reused"), line("annealed", 91, seed=1)]
    usual, others = page(lines, None).split("Tuning, ")
    assert "| clean | annealed | 128 | 85.50 ± 7.78 (2) |" in usual
    assert others.startswith("cifar10, all points, 17 s, irreducible losses reused")
    assert "| clean | annealed | 128 | 90.00 (1) |" in others


def test_the_page_says_what_its_arms_do():
    text = page([line(split="final"), line("annealed, ladder, recent BN", split="final")], None)
    assert "| uniform | all rows, as they come |" in text
    assert (
        "| annealed, ladder, recent BN | RHO-LOSS chooses one of 4 until the target has caught up (at "
        "most 30 % of the steps), scored with BatchNorm's recent statistics, one step stale; irreducible "
        "losses after 1, 3 and 12 epochs; rows that were never better than chance are left out from 30 % on, "
        "if they are more than 3 % |"
    ) in text
    assert "InfoBatch" not in text
    assert "Only in tuning runs" not in text
    text = page([line("InfoBatch"), line(split="final")], None)
    assert (
        text.index("| uniform |") < text.index("Only in tuning runs") < text.index("| InfoBatch |")
    )
    told = {name: about(arm) for name, arm in ARMS.items()}
    assert len(set(told.values())) == len(told)  # no two arms are the same
    assert told["minus IL 10 %"].endswith("without the 10 % of highest irreducible loss")
    assert told["loss k=2"].startswith("training loss chooses one of 2 to the end")
    assert (
        "only the 60 % that promise most are scored"
        in told["annealed, measured, early IL, shortlist"]
    )
    assert told["rho k=5, ahead"].split(";")[0].endswith("by weights that are looked ahead to")
    assert told["random half"] == "a fresh random 50 % of the rows each pass"
    assert told["remembered, skip alone"] == "50 % of what is learnt is skipped"
    assert told["remembered, measured"] == (
        "rows whose label never had more probability than the share of wrong labels, which is measured, are "
        "left out from 50 % on, if they are more than 3 %, 50 % of what is learnt is skipped, unless more "
        "than 20 % of the labels are wrong"
    )


def test_a_rate_at_which_most_runs_diverge_is_not_chosen_by_the_one_that_did_not():
    steady = [line(accuracy=92.0, lr=3e-3, seed=seed) for seed in range(3)]
    wild = [line(accuracy=10.0, lr=6e-3, seed=seed) | {"error": "NaN"} for seed in (0, 1)]
    chosen = tuned([*steady, *wild, line(accuracy=92.1, lr=6e-3, seed=2)])
    assert list(chosen.values()) == [(128, 3e-3)]


def test_where_the_size_is_given_the_rate_is_the_one_that_tuning_chose_at_it():
    lines = [
        line(accuracy=93.0, lr=3e-3),
        line(accuracy=80.0, n_b=32),
        line(accuracy=90.0, n_b=32, lr=3e-3),
    ]
    lines += [line(accuracy=89.0, n_b=32, lr=3e-3, split="final", seed=seed) for seed in (0, 1)]
    lines += [line(accuracy=70.0, n_b=32, split="final", seed=seed) for seed in range(3)]
    assert "| uniform | 89.00 ± 0.00 (2) |  |" in results(lines)
