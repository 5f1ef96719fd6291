"""Numbers and pages from lines that are made by hand."""

import math
from dataclasses import replace

import pytest
from fixtures_lines import GROUP, RHO, STUDY, UNIFORM, line, write

from experiments.bench import plots, report
from experiments.bench.cell import Study
from experiments.bench.numbers import (
    Results,
    best,
    epochs_to,
    final,
    missing,
    share,
    share_below,
    speedup,
    spread,
    steps_to,
)
from experiments.studies import STUDIES
from experiments.studies.comparisons import behind


def test_numbers_of_a_run():
    run = line(UNIFORM, [10, 40, 55, 50, 60, 58, 57])
    assert steps_to(run, 50) == 30
    assert epochs_to(run, 50) == 3
    assert epochs_to(run, 61) is None
    assert final(run) == pytest.approx((55 + 50 + 60 + 58 + 57) / 5)
    assert best(run) == 60
    assert math.isnan(final(line(UNIFORM, [])))
    assert share(run, "corrupted") == pytest.approx(20)
    assert share(run, "low_relevance") is None
    assert share_below(run, "correct", 40) == pytest.approx(20)  # the first epoch alone
    assert share_below(run, "correct", 5) is None


def test_speedup_as_in_figure_2():
    uniform = line(UNIFORM, [10, 30, 20, 90])
    assert speedup(line(RHO, [31, 40, 50, 60]), uniform, epochs=3) == 3.0
    assert speedup(line(RHO, [1, 2, 30, 60]), uniform, epochs=3) == 1.0
    assert speedup(line(RHO, [1, 2, 3, 4]), uniform, epochs=3) == 0.0
    assert speedup(line(RHO, [99, 99]), uniform, epochs=3) is None  # too short to say
    broken = {"error": "a loss that is not finite"}  # it will never get any further
    assert speedup(line(RHO, [10, 20], **broken), uniform, epochs=3) == 0.0
    assert speedup(line(RHO, [10, 30], **broken), uniform, epochs=3) == 1.5
    assert speedup(line(RHO, [10, 20, 30]), line(UNIFORM, [20, 10], **broken), epochs=3) == 1.5
    assert speedup(line(RHO, [10, 20, 30]), line(UNIFORM, [], **broken), epochs=3) is None


def test_an_irreducible_loss_model_is_behind_a_target():
    run = line(RHO, [70], il_fit={"accuracy": [60.0, 62.0]})
    assert behind(run, line(UNIFORM, [80])) == 19


def test_spread_in_words():
    assert spread([]) == "not run"
    assert spread([None, None]) == "NR"
    assert spread([1.0, 3.0]) == "2.0 (1.0-3.0)"
    assert spread([1.0, None, 3.0], 0) == "2 (1-3), 2 of 3 seeds"


def test_a_shorter_run_stands_in_and_is_told(tmp_path):
    write(tmp_path, line(replace(UNIFORM, epochs=2), [10, 20]), line(RHO, [1, 2, 3, 4], 0))
    results = Results.read(tmp_path)
    assert results.get(UNIFORM)["epochs"] == 2
    assert results.get(replace(UNIFORM, seed=1)) is None
    assert missing(GROUP, results, 2) == [
        "uniform: 1 of 2 seeds",
        "uniform: at 2 epochs in place of 4",
        "RHO-LOSS: 1 of 2 seeds",
    ]


def test_arms_of_which_the_same_is_missing_are_counted_where_they_are_many(tmp_path):
    write(tmp_path, line(UNIFORM, [10, 30, 40, 50], 0))
    arms = {
        "uniform": UNIFORM,
        **{f"rate {n}": replace(UNIFORM, learning_rate=n) for n in range(2, 22)},
    }
    text = report.page(
        Study("s", "S", (replace(GROUP, arms=arms),)), Results.read(tmp_path), tmp_path
    )
    assert "Not run, or not in full: uniform: 1 of 3 seeds; 20 arms: 0 of 3 seeds." in text


def test_seeds_beyond_those_of_the_study_are_on_its_page(tmp_path):
    lines = [line(UNIFORM, [10, 30, 40, 50], seed) for seed in (0, 1, 7)]
    write(tmp_path, *lines, line(RHO, [20, 55, 72, 74], 7))
    text = report.write(STUDY, tmp_path).read_text()
    assert "2 of 6 runs and 2 of further seeds are there" in text
    assert "| uniform |  | 4 (4-4) | NR | 32.5 (32.5-32.5) | 50.0 (50.0-50.0) | 3 |" in text
    assert "Not run, or not in full: RHO-LOSS: 0 of 2 seeds and 1 further." in text


def test_runs_of_different_lengths_are_not_put_together(tmp_path):
    short = [line(replace(UNIFORM, epochs=epochs), [1] * epochs, 4 - epochs) for epochs in (3, 2)]
    write(tmp_path, *short)
    assert [run["epochs"] for run in Results.read(tmp_path).of(UNIFORM)] == [3]  # the longest
    write(tmp_path, *short, line(UNIFORM, [10, 30, 40, 50], 0))
    results = Results.read(tmp_path)
    assert [run["epochs"] for run in results.of(UNIFORM)] == [4]
    assert missing(GROUP, results, 3)[0] == "uniform: 1 of 3 seeds"
    study = Study("s", "S", (GROUP,), seeds=3)
    assert [run["epochs"] for run in results.of_study(study)] == [4]
    assert "1 of 6 runs are there" in report.page(study, results, tmp_path)


def test_the_run_of_the_right_length_goes_first_and_the_later_line_counts(tmp_path):
    write(
        tmp_path,
        line(UNIFORM, [1]),
        line(UNIFORM, [2]),
        line(replace(UNIFORM, epochs=9), [3]),
    )
    assert Results.read(tmp_path).get(UNIFORM)["eval"] == [[10, 2]]


def test_a_page_of_what_is_there_so_far(tmp_path):
    write(
        tmp_path,
        line(UNIFORM, [10, 30, 50, 60], 0),
        line(UNIFORM, [10, 30, 40, 50], 1),
        line(RHO, [20, 55, 72, 74], 0, il_eval=[[10, 80.0], [20, 70.0]]),
    )
    path = report.write(STUDY, tmp_path)
    text = path.read_text()
    assert "3 of 6 runs are there" in text
    assert "| RHO-LOSS | 1 / 2 (70) | 2 | 3 | 55.2 | 74.0 | 1 |" in text
    assert "| uniform |  | 4 (3-4) | NR | 35.0 (32.5-37.5) | 55.0 (50.0-60.0) | 2 |" in text
    assert "| RHO-LOSS | 35.0 | 10.0 | 50.0 |" in text  # by class
    assert "Not run, or not in full: RHO-LOSS: 1 of 2 seeds." in text
    assert "| RHO-LOSS | 1 / 2 (70) | runs too short | 55.2 | 37.5 |" in text  # speed-up
    assert "## Another\n\nNot run." in text
    assert "[made](../made/runs.jsonl)" in text
    assert "cpu, torch 2, fp32" in text
    images = sorted(file.name for file in path.parent.glob("*.png"))
    assert images == [
        "clean-a-group-accuracy.png",
        "clean-a-group-correct.png",
        "clean-a-group-corrupted.png",
        "clean-a-group-il.png",
    ]
    for name in images:
        assert f"]({name})" in text
        assert (path.parent / name).read_bytes().startswith(b"\x89PNG")
    assert not list(path.parent.glob("*.tmp"))


def test_a_page_of_nothing(tmp_path):
    text = report.write(STUDY, tmp_path).read_text()
    assert "0 of 6 runs are there" in text
    assert text.count("Not run.") == 2


def test_runs_of_several_fits_of_irreducible_losses_are_told(tmp_path):
    """A model is fitted again on another machine, and does not come out quite the same."""
    first = {"epochs": [28], "accuracy": [86.38], "seconds": 50.8}
    other = {"epochs": [25], "accuracy": [86.34], "seconds": 31.1}
    write(
        tmp_path,
        line(UNIFORM, [40]),
        line(RHO, [50], 0, il_fit=first),
        line(RHO, [50], 1, il_fit=other),
    )
    told = "Irreducible losses of more than one fit (test accuracy): RHO-LOSS (86.34 and 86.38 %)."
    assert told in report.page(STUDY, Results.read(tmp_path), tmp_path)
    live = replace(RHO, il=RHO.il.replace("clean holdout", "live"))
    group = replace(GROUP, arms={"RHO-LOSS": RHO, "original": live})
    write(tmp_path, line(RHO, [50], il_fit=first), line(live, [50], il_fit=other))
    page = report.page(replace(STUDY, groups=(group,)), Results.read(tmp_path), tmp_path)
    assert "(test accuracy): RHO-LOSS (86.38 %); original (86.34 %)." in page
    again = {**first, "loss_on_train": 2.0}  # the same model, measured on other labels
    write(tmp_path, line(RHO, [50], 0, il_fit=first), line(RHO, [50], 1, il_fit=again))
    assert "more than one fit" not in report.page(STUDY, Results.read(tmp_path), tmp_path)


def test_a_run_that_broke_off_is_on_the_page(tmp_path):
    write(tmp_path, line(UNIFORM, [], error="a loss that is not finite"))
    text = report.write(STUDY, tmp_path).read_text()
    assert "uniform, seed 0: a loss that is not finite" in text


def test_bands_go_as_far_as_the_shortest_run():
    xs, middle, low, high = plots.band([[(1, 2.0), (2, 4.0)], [(1, 4.0)]])
    assert (xs, middle, low, high) == ([1], [3.0], [2.0], [4.0])


def test_a_plot_has_room_for_what_comes_after_the_start():
    arms = [[[(1, 10.0), (5, 80.0), (50, 95.0)]], [[(1, 40.0), (5, 60.0), (50, 70.0)]]]
    assert plots.heights(arms) == (59.0, 96.0)


def test_arms_of_other_epochs_are_drawn_over_steps():
    points = plots.over_steps(plots.accuracy)(line(UNIFORM, [5, 6]))
    assert points == [(0.01, 5), (0.02, 6)]


def test_every_study_shows_what_can_be_shown():
    for study in STUDIES.values():
        for group in study.groups:
            assert set(group.show) <= set(report.SHOWS), study.name
            assert group.arms, study.name
