"""Committed pages are what their lines make, and figures that are told elsewhere are on them."""

import re
import shlex
from pathlib import Path

import pytest
from benchmarks import pages

from experiments import __main__ as command
from experiments import records
from experiments.bench import plots
from experiments.bench import report as study_report
from experiments.bench.cell import Cell
from experiments.bench.numbers import Results
from experiments.digits import page as table1
from experiments.fair_clock import report
from experiments.fair_clock.arms import ARMS
from experiments.language import report as language
from experiments.studies import STUDIES
from experiments.studies.claims import CLAIMS
from experiments.studies.digit_claims import DIGIT_CLAIMS
from experiments.toy_maps import page as toy_maps

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
RACE = RESULTS / "fair_clock"
TOLD = [
    "README.md", "docs/engine.md", "docs/recipes.md", "docs/choosing-a-method.md",
    "experiments/results/fair_clock/FINDINGS.md", "experiments/results/language/FINDINGS.md",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(pages.made()))
def test_a_page_of_a_bench_is_what_its_lines_make(name):
    """Else: python benchmarks/pages.py."""
    assert (pages.RESULTS / name).read_text() == "\n".join(pages.made()[name]) + "\n"


def test_the_page_of_the_race_is_what_its_lines_make():
    """Else: python -m experiments.fair_clock report."""
    lines = [line for line in records.read(RACE / "runs.jsonl") if line["arm"] in ARMS]
    assert (RACE / "README.md").read_text() == report.page(lines, RACE / "curves.png")


def test_the_page_of_table_1_is_what_its_lines_make():
    """Else: python -m experiments.digits report."""
    lines = list(records.read(RESULTS / "table1" / "runs.jsonl"))
    assert (RESULTS / "table1" / "README.md").read_text() == "\n".join(table1.page(lines)) + "\n"


def test_the_page_of_the_toy_maps_is_what_its_lines_make():
    folder = RESULTS / "toy_maps"
    page = toy_maps.page(list(records.read(folder / "runs.jsonl")))
    assert (folder / "README.md").read_text() == "\n".join(page) + "\n"


def test_the_page_of_the_language_runs_is_what_its_lines_make(tmp_path):
    """Else: python -m experiments.language report."""
    pytest.importorskip("matplotlib")
    lines = list(records.read(RESULTS / "language" / "runs.jsonl"))
    assert (RESULTS / "language" / "README.md").read_text() == language.page(lines, tmp_path)


@pytest.fixture(scope="module")
def every():
    return Results.read(RESULTS)


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_of_a_study_is_what_its_lines_make(name, every, tmp_path, monkeypatch):
    """Else: python -m experiments report --study NAME. Its pictures are there."""

    def drawn(path, arms, curve, *labels):
        there = bool(plots.with_points(arms, curve))
        assert (RESULTS / name / path.name).exists() or not there
        return there

    monkeypatch.setattr(plots, "draw", drawn)
    page = study_report.page(STUDIES[name], every, tmp_path)
    assert (RESULTS / name / "README.md").read_text() == page


@pytest.mark.parametrize("name", STUDIES)
def test_the_command_of_a_line_still_stands_for_its_run(name):
    keys = {}
    for line in records.read(RESULTS / name / "runs.jsonl"):
        words = shlex.split(line["command"])
        assert words[:3] == ["python", "-m", "experiments"]
        if line["command"] not in keys:
            asked = command._cells(command._parser().parse_args(words[3:]))
            keys[line["command"]] = {cell.key() for _, cell in asked}
        assert Cell.of(line).key() in keys[line["command"]]


def test_the_verdicts_are_what_the_lines_make(every):
    """Else: python -m experiments report."""
    claims, text = [*CLAIMS, *DIGIT_CLAIMS], (RESULTS / "README.md").read_text()
    assert study_report.claims_table(claims, STUDIES, every) in text
    assert study_report.tally(claims, STUDIES, every) in text


@pytest.mark.parametrize("page", TOLD)
def test_differences_that_are_told_are_on_a_page_of_results(page):
    found = [RESULTS / "language" / "README.md", RACE / "README.md"]  # made from lines
    there = "\n".join(path.read_text() for path in found)
    told = set(re.findall(r"[+-]\d+\.\d\d ± \d+\.\d\d", (ROOT / page).read_text()))
    told -= {"+0.25 ± 0.06"}  # of `annealed, sooner`, whose lines are in pilot.jsonl
    assert {number for number in told if number not in there} == set()
