"""The bench of how many candidates: what it counts, and its page."""

import json

import pytest
from benchmarks import bench_candidates as bench
from benchmarks import pages


def test_a_step_costs_what_is_scored_and_three_times_what_is_trained_on():
    assert [bench.cost(num) for num in (32, 96, 320)] == pytest.approx([1, 2, 13 / 3])


def test_lines_and_their_page(tmp_path, monkeypatch):
    out = tmp_path / "lines.jsonl"
    words = ["--candidates", "96", "320", "--seeds", "0", "--steps", "50", "--out", str(out)]
    bench.main(words)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    steps, costs = (
        {line["candidates"]: line[f]["50"] for line in lines} for f in ("by_steps", "by_cost")
    )
    assert list(steps) == [32, 96, 320]
    assert steps[32] == costs[32]  # uniform pays for nothing else
    assert steps[320] > steps[32] + 2  # ahead at equal steps
    assert costs[320] < costs[32] - 2  # and behind at equal arithmetic: 11 steps for 50
    assert costs[320] < costs[96] < steps[96]
    page = "\n".join(pages.candidates_page(lines))
    assert f"| 32: uniform | 1.0x | {steps[32]:.1f} |" in page
    assert page.count(f"| 320 | 4.3x | {costs[320]:.1f} |") == 1
    shorter = [{**line, "steps": 20, "by_steps": {"20": 1.0}, "by_cost": {}} for line in lines]
    both = "\n".join(pages.candidates_page([*shorter, *lines]))  # lengths have tables of their own
    assert page in both
    assert (
        "in runs of 20:\n\n| 32 of | a step costs | 20 |\n|---|---|---|\n| 32: uniform | 1.0x | 1.0 |"
        in both
    )
    monkeypatch.setattr(bench, "run", lambda *args: pytest.fail("it was there"))
    bench.main(words)
    with pytest.raises(SystemExit):
        bench.main(["--candidates", "32"])
