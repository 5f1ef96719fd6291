"""Numbers, pages and verdicts from lines that are made by hand."""

import json
import math
from dataclasses import asdict, replace

import pytest

from experiments.bench import plots, report
from experiments.bench.cell import Cell, Group, Study
from experiments.bench.claims import FAILS, HOLDS, IN_PART, NOT_RUN, Claim, Compare
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
from experiments.studies.claims import CLAIMS
from experiments.studies.comparisons import behind
from experiments.studies.digit_claims import DIGIT_CLAIMS
from rholoss.errors import RholossError

UNIFORM, RHO = Cell(epochs=4), Cell(method="rho", il="resnet18, clean holdout", epochs=4)
GROUP = Group(
    "Clean: a group",
    {"uniform": UNIFORM, "RHO-LOSS": RHO},
    (50, 70),
    {"RHO-LOSS": "1 / 2 (70)"},
    ("epochs", "curves", "shares", "speedup", "classes", "share_curves", "il_curves"),
)
STUDY = Study(
    "made", "A made study", (GROUP, Group("Another", {"loss": Cell(method="loss")})), seeds=2
)


def line(cell, accuracies, seed=0, **more):
    return {
        "study": "made",
        **asdict(replace(cell, seed=seed)),
        "steps": 10 * len(accuracies),
        "steps_per_epoch": 10,
        "eval": [[10 * (i + 1), accuracy] for i, accuracy in enumerate(accuracies)],
        "il_eval": [],
        "per_class": [10.0, 60.0, None],
        "shares": {"corrupted": [0.1, 0.3], "correct": [0.2, 0.4]},
        "error": None,
        "device": "cpu",
        "torch": "2",
        "precision": "fp32",
        "date": "2026-01-01",
        **more,
    }


def write(out, *lines):
    path = out / "made" / "runs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


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


def test_runs_of_different_lengths_are_not_put_together(tmp_path):
    short = [line(replace(UNIFORM, epochs=epochs), [1] * epochs, 4 - epochs) for epochs in (3, 2)]
    write(tmp_path, *short)
    assert [run["epochs"] for run in Results.read(tmp_path).of(UNIFORM, 3)] == [3]  # the longest
    write(tmp_path, *short, line(UNIFORM, [10, 30, 40, 50], 0))
    results = Results.read(tmp_path)
    assert [run["epochs"] for run in results.of(UNIFORM, 3)] == [4]
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


# Claims.


def sooner(factor=1.0):
    return Compare("Clean: a group", "RHO-LOSS", lambda run: epochs_to(run, 50), "uniform", factor)


@pytest.mark.parametrize(
    ("uniform", "rho", "verdict"),
    [
        ([[10, 50], [10, 50]], [[50, 50], [50, 50]], HOLDS),
        ([[10, 50], [50, 50]], [[50, 50], [10, 50]], IN_PART),  # one seed of two
        ([[50, 50], [50, 50]], [[10, 50], [10, 50]], FAILS),
        ([[10, 10], [10, 10]], [[10, 10], [10, 10]], FAILS),  # neither gets there
        ([[10, 50], [10, 50]], [[10, 50], [10, 50]], FAILS),  # neither is sooner
        ([[10, 10], [10, 10]], [[10, 50], [10, 50]], HOLDS),  # uniform never
        ([], [[50, 50]], NOT_RUN),
    ],
)
def test_verdicts(tmp_path, uniform, rho, verdict):
    lines = [line(UNIFORM, run, seed) for seed, run in enumerate(uniform)]
    lines += [line(RHO, run, seed) for seed, run in enumerate(rho)]
    write(tmp_path, *lines)
    assert sooner().judge(STUDY, Results.read(tmp_path))[1] == verdict


def test_a_factor_makes_the_claim_harder(tmp_path):
    write(tmp_path, line(UNIFORM, [1, 2, 3, 50]), line(RHO, [1, 2, 50, 50]))
    results = Results.read(tmp_path)
    told, verdict = sooner(0.75).judge(STUDY, results)
    assert verdict == HOLDS
    assert told == "RHO-LOSS 3.0, uniform 4.0"
    assert sooner(0.7).judge(STUDY, results)[1] == FAILS


def test_above_and_a_number_that_is_not_there(tmp_path):
    write(tmp_path, line(UNIFORM, [40]), line(RHO, [55]))
    results = Results.read(tmp_path)
    higher = Compare("Clean: a group", "RHO-LOSS", final, "uniform", plus=10, above=True)
    assert higher.judge(STUDY, results)[1] == HOLDS
    assert replace(higher, plus=20.0).judge(STUDY, results)[1] == FAILS
    unknown = replace(higher, measure=lambda run: share(run, "low_relevance"))
    assert unknown.judge(STUDY, results)[1] == FAILS


def test_a_controlled_measure_gets_the_accuracy_of_the_weakest_arm(tmp_path):
    write(tmp_path, line(UNIFORM, [40, 50]), line(RHO, [55, 60]), line(UNIFORM, [], 1))
    seen = []

    def measure(run, accuracy):
        seen.append(accuracy)
        return 1.0

    compare = Compare("Clean: a group", "RHO-LOSS", measure, plus=1.0, controlled=True)
    assert compare.judge(STUDY, Results.read(tmp_path))[1] == HOLDS
    assert seen == [45.0]  # a run that broke off is not counted


def test_a_claim_of_several_parts(tmp_path):
    higher = Compare("Clean: a group", "RHO-LOSS", final, "uniform", above=True)
    lower = replace(higher, above=False)
    absent = Compare("Another", "loss", final, above=True)
    study = replace(STUDY, seeds=1)
    short = "1 of 4 epochs"
    write(tmp_path, line(replace(UNIFORM, epochs=1), [40]), line(RHO, [55]))
    results = Results.read(tmp_path)
    told, verdict = Claim("", "", "made", [higher, lower]).judge(study, results)
    assert verdict == f"{IN_PART} ({short})"
    assert told == "RHO-LOSS 55.0, uniform 40.0; RHO-LOSS 55.0, uniform 40.0"
    told, verdict = Claim("", "", "made", [higher, absent]).judge(STUDY, results)
    assert verdict == f"holds (1 of 2 seeds, {short}, 1 of 2 parts not run)"
    assert told == "Clean: a group: RHO-LOSS 55.0, uniform 40.0"  # of two groups
    many = Claim("", "", "made", [higher] * 8 + [lower]).judge(study, results)
    assert many == ("8 of 9 hold", f"{IN_PART} ({short})")
    assert Claim("", "", "made", [absent], why="no data").judge(study, results) == (
        "no data",
        NOT_RUN,
    )


def test_a_claim_has_as_many_seeds_as_the_least_run_of_its_arms(tmp_path):
    lines = [line(UNIFORM, [40] * 4, seed) for seed in range(2)] + [line(RHO, [55] * 4)]
    write(tmp_path, *lines)
    results, study = Results.read(tmp_path), replace(STUDY, seeds=3)
    alone = Compare("Clean: a group", "uniform", final, plus=1.0, above=True)
    both = Compare("Clean: a group", "RHO-LOSS", final, "uniform", above=True)
    assert Claim("", "", "made", [alone]).judge(study, results)[1] == "holds (2 of 3 seeds)"
    assert Claim("", "", "made", [alone, both]).judge(study, results)[1] == "holds (1 of 3 seeds)"


def test_some_parts_may_fail_where_the_paper_says_so(tmp_path):
    higher = Compare("Clean: a group", "RHO-LOSS", final, "uniform", above=True)
    lower, absent = replace(higher, above=False), Compare("Another", "loss", final, above=True)
    study = replace(STUDY, seeds=1)
    write(tmp_path, line(UNIFORM, [40]), line(RHO, [55]))
    results = Results.read(tmp_path)

    def verdict(*parts):
        return Claim("", "", "made", parts, spare=2).judge(study, results)[1]

    assert verdict(higher, lower, lower) == HOLDS
    assert verdict(higher, lower, lower, lower) == IN_PART
    assert verdict(lower, lower) == FAILS  # some part must hold
    assert verdict(lower, absent, absent) == f"{FAILS} (2 of 3 parts not run)"
    assert verdict(higher, absent, absent) == f"{HOLDS} (2 of 3 parts not run)"  # one must
    assert verdict(higher, absent, absent, absent) == "open (3 of 4 parts not run)"  # two must


def test_a_run_that_broke_off_is_told_beside_the_verdict(tmp_path):
    higher = Compare("Clean: a group", "RHO-LOSS", final, "uniform", above=True)
    study, claim = replace(STUDY, seeds=1), Claim("", "", "made", [higher])
    write(tmp_path, line(UNIFORM, [40], error="a loss that is not finite"), line(RHO, [55]))
    assert claim.judge(study, Results.read(tmp_path))[1] == f"{HOLDS} (uniform broke off)"


def test_a_number_of_two_runs_is_held_against_that_of_another_group(tmp_path):
    wrong = {name: replace(cell, labels="noise 10 %") for name, cell in GROUP.arms.items()}
    study = replace(STUDY, groups=(GROUP, Group("Noisy", wrong)), seeds=1)
    compare = Compare(
        "Noisy", "RHO-LOSS", lambda mine, other: final(mine) - final(other), "uniform",
        above=True, paired=True, beside="Clean: a group",
    )  # fmt: skip
    clean = [line(UNIFORM, [40]), line(RHO, [55])]
    noisy = [line(wrong["uniform"], [30]), line(wrong["RHO-LOSS"], [46])]
    write(tmp_path, *clean, *noisy)
    told = "Noisy 16.0, Clean: a group 15.0"
    assert compare.judge(study, Results.read(tmp_path)) == (told, HOLDS)
    noisy[1] = line(wrong["RHO-LOSS"], [45])
    write(tmp_path, *clean, *noisy)
    assert compare.judge(study, Results.read(tmp_path))[1] == FAILS  # no greater
    write(tmp_path, *noisy)
    assert compare.judge(study, Results.read(tmp_path)) == ("", NOT_RUN)


def test_a_number_of_two_runs_is_held_against_a_bound(tmp_path):
    write(tmp_path, line(UNIFORM, [40], 0), line(UNIFORM, [10], 1), line(RHO, [55], 0))

    def gap(mine, other):
        return final(mine) - final(other) if final(other) > 20 else None

    compare = Compare("Clean: a group", "RHO-LOSS", gap, "uniform", paired=True, above=True)
    results = Results.read(tmp_path)
    assert replace(compare, plus=15.0).judge(STUDY, results) == ("RHO-LOSS 15.0", HOLDS)
    assert replace(compare, plus=15.1).judge(STUDY, results) == ("RHO-LOSS 15.0", FAILS)
    write(tmp_path, line(UNIFORM, [10], 1), line(RHO, [55], 1))
    assert compare.judge(STUDY, Results.read(tmp_path)) == ("", NOT_RUN)  # the pair says nothing


def test_the_claims_of_the_paper_name_groups_and_arms_that_exist(tmp_path):
    table = report.claims_table(CLAIMS, STUDIES, Results.read(tmp_path))
    assert table.count("[not run](") == len(CLAIMS)
    for claim in CLAIMS:
        titles = {group.title: group for group in STUDIES[claim.study].groups}
        for part in claim.parts:
            for group in filter(None, (part.group, part.beside)):
                assert {part.arm, part.other or part.arm} <= set(titles[group].arms)


def test_every_study_of_the_paper_has_a_claim():
    own = {
        "real_noise",
        "real_noise_milder",
        "il_strength",
        "noise_conventions",
        "fig9_weak_target",
    }
    judged = {claim.study for claim in (*CLAIMS, *DIGIT_CLAIMS)}
    assert judged == set(STUDIES) - own - {"fig6_official"}  # as fig6, on other files


def test_the_table_of_claims_goes_between_its_marks(tmp_path):
    claim = Claim("It is faster", "2 x", "made", [sooner()])
    write(tmp_path, line(UNIFORM, [10, 50]), line(RHO, [50, 50]))
    path = report.write_claims([claim], {"made": STUDY}, tmp_path)
    page = "# By hand\n\n" + path.read_text().partition("# Results\n\n")[2] + "\nAnd more.\n"
    path.write_text(page)
    report.write_claims([claim], {"made": STUDY}, tmp_path)
    text = path.read_text()
    assert text == page
    assert (
        "| It is faster | 2 x | RHO-LOSS 1.0, uniform 2.0 | [holds (1 of 2 seeds)](made/README.md) |"
        in text
    )
    path.write_text("# No marks\n")
    with pytest.raises(RholossError, match="put them where the table goes"):
        report.write_claims([claim], {"made": STUDY}, tmp_path)
