"""Verdicts from lines that are made by hand."""

from dataclasses import replace

import pytest
from fixtures_lines import GROUP, RHO, STUDY, UNIFORM, line, sooner, write

from experiments.bench import report
from experiments.bench.cell import Group
from experiments.bench.claims import FAILS, HOLDS, IN_PART, NOT_RUN, SILENT, Claim, Compare
from experiments.bench.numbers import Results, final, share
from experiments.studies import STUDIES
from experiments.studies.claims import CLAIMS
from experiments.studies.comparisons import cheaper, faster, faster_where, fewer_known
from experiments.studies.digit_claims import DIGIT_CLAIMS
from rholoss.errors import RholossError


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


def test_further_seeds_are_judged_too(tmp_path):
    """The study asks for seeds 0 and 1; whoever runs seed 7 finds it in the verdict."""
    both = [line(UNIFORM, [10, 50], 7), line(RHO, [50, 50], 7)]
    write(tmp_path, *both)
    claim = Claim("a claim", "", "made", [sooner()])
    assert claim.judge(STUDY, Results.read(tmp_path))[1] == "holds (0 of 2 seeds and 1 further)"
    own = [
        line(cell, run, s) for s in (0, 1) for cell, run in ((UNIFORM, [9, 50]), (RHO, [50, 50]))
    ]
    write(tmp_path, *own, line(UNIFORM, [50, 50], 7), line(RHO, [10, 50], 7))
    assert claim.judge(STUDY, Results.read(tmp_path))[1] == "holds in part"


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


def test_an_arm_without_an_epoch_to_compare_says_nothing(tmp_path):
    """Where its first accuracy is above the final one of the weakest, as after a collapse."""
    few, many = {"shares": {"correct": [0.1, 0.1]}}, {"shares": {"correct": [0.2, 0.2]}}
    fewer = fewer_known(GROUP.title, "RHO-LOSS")
    write(tmp_path, line(UNIFORM, [5, 15], **many), line(RHO, [20, 60], **few))
    results = Results.read(tmp_path)
    assert fewer.judge(STUDY, results) == ("", SILENT)
    page = report.page(STUDY, results, tmp_path)
    assert "| RHO-LOSS | 10.00 | no epoch |" in page
    write(tmp_path, line(UNIFORM, [20, 20], **many), line(RHO, [5, 60], **few))
    assert fewer.judge(STUDY, Results.read(tmp_path)) == ("", SILENT)
    write(tmp_path, line(UNIFORM, [5, 15], **many), line(RHO, [5, 60], **few))
    assert fewer.judge(STUDY, Results.read(tmp_path))[1] == HOLDS


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
    verdict = Claim("", "", "made", [higher, absent, absent]).judge(STUDY, results)[1]
    assert verdict == f"open (1 of 2 seeds, {short}, 2 of 3 parts not run)"  # most are not
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
    assert verdict(lower, absent, absent) == "open (2 of 3 parts not run)"  # one must
    assert verdict(lower, lower, lower, absent) == f"{FAILS} (1 of 4 parts not run)"  # two must
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
    assert compare.judge(STUDY, Results.read(tmp_path)) == ("", SILENT)
    write(tmp_path, line(UNIFORM, [50], 0), line(RHO, [55], 1))
    assert compare.judge(STUDY, Results.read(tmp_path)) == ("", NOT_RUN)  # no pair


def test_where_an_arm_is_faster_is_asked_only_where_the_other_gets_anywhere(tmp_path):
    far = replace(UNIFORM, epochs=100), replace(RHO, epochs=100)
    group = replace(GROUP, arms=dict(zip(GROUP.arms, far, strict=True)))
    study = replace(STUDY, groups=(group,))
    write(tmp_path, line(far[0], [40] * 100), line(far[1], [30] * 100))
    slower = Results.read(tmp_path)
    assert faster_where(GROUP.title, "RHO-LOSS", "uniform", 40).judge(study, slower)[1] == FAILS
    assert faster_where(GROUP.title, "RHO-LOSS", "uniform", 41).judge(study, slower)[1] == SILENT


def test_parts_that_say_nothing_were_run_all_the_same(tmp_path):
    """What the paper says of settings where uniform gets far is not open where it gets far in few."""
    higher = Compare("Clean: a group", "RHO-LOSS", final, "uniform", above=True)
    silent = replace(higher, measure=lambda mine, other: None, paired=True)
    absent = Compare("Another", "loss", final, above=True)
    study = replace(STUDY, seeds=1)
    write(tmp_path, line(UNIFORM, [40]), line(RHO, [55]))
    results = Results.read(tmp_path)

    def verdict(*parts, spare=0):
        return Claim("", "", "made", parts, spare=spare).judge(study, results)[1]

    assert verdict(higher, silent, silent) == f"{HOLDS} (2 of 3 parts say nothing)"
    assert verdict(higher, silent, absent) == (
        f"{HOLDS} (1 of 3 parts not run, 1 of 3 parts say nothing)"
    )
    assert verdict(silent, silent) == "open (2 of 2 parts say nothing)"
    lower = replace(higher, above=False)
    assert verdict(lower, silent, silent, spare=2) == f"{FAILS} (2 of 3 parts say nothing)"


def test_a_speedup_of_one_is_not_faster(tmp_path):
    far = replace(UNIFORM, epochs=100), replace(RHO, epochs=100)
    group = replace(GROUP, arms=dict(zip(GROUP.arms, far, strict=True)))
    study, compare = replace(STUDY, groups=(group,)), faster(GROUP.title, "RHO-LOSS")
    for epoch, verdict in ((100, FAILS), (99, HOLDS)):
        rho = [30] * (epoch - 1) + [40] * (101 - epoch)
        write(tmp_path, line(far[0], [40] * 100), line(far[1], rho))
        assert compare.judge(study, Results.read(tmp_path))[1] == verdict


def test_scoring_counts_where_passes_are_compared(tmp_path):
    """Uniform: 40 steps of 3 x 32 passes; RHO-LOSS: 10 of 3 x 32 + 320. That is 3840 and 4160."""
    write(tmp_path, line(UNIFORM, [1, 2, 3, 50]), line(RHO, [50]))
    results = Results.read(tmp_path)
    told, verdict = cheaper(GROUP.title, "RHO-LOSS", 50, 1.1).judge(STUDY, results)
    assert told == "RHO-LOSS 4160 forward passes to 50 %, uniform 3840 forward passes to 50 %"
    assert verdict == HOLDS
    assert cheaper(GROUP.title, "RHO-LOSS", 50, 1.0).judge(STUDY, results)[1] == FAILS


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
        "mixed_up",
        "noise_conventions",
        "fig9_weak_target",
    }
    judged = {claim.study for claim in (*CLAIMS, *DIGIT_CLAIMS)}
    assert judged == set(STUDIES) - own


def test_verdicts_are_counted_in_a_sentence(tmp_path):
    claims = [
        Claim("It is faster", "2 x", "made", [sooner()]),
        Claim("It is slower", "2 x", "made", [replace(sooner(), above=True)]),
        Claim(
            "It was not looked at",
            "",
            "made",
            [replace(sooner(), group="Another", arm="loss", other=None)],
            why="no data",
        ),
    ]
    write(tmp_path, line(UNIFORM, [10, 50]), line(RHO, [50, 50]))
    assert report.tally(claims, {"made": STUDY}, Results.read(tmp_path)) == (
        "Of the 3 claims below 1 holds, 1 does not hold, 1 was not run. "
        "2 of the verdicts rest on fewer seeds or parts than planned."
    )
    path = report.write_claims(claims[::-1], {"made": STUDY}, tmp_path)
    text = path.read_text()
    assert "Of the 3 claims below" in text
    assert text.index("It is slower") < text.index("It is faster") < text.index("not looked at")


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
