"""The bench of choices by old weights: that they are old, and its page."""

import json

import pytest
from benchmarks import bench_staleness as bench
from benchmarks import pages
from torch import nn


def test_the_model_of_some_steps_ago():
    model = nn.Linear(1, 1)
    old, seen = bench.Old(model, age=2), []
    for step in range(5):
        nn.init.constant_(model.weight, float(step))
        seen.append(old().weight.item())
        assert model.weight.item() == step
    assert seen == [0, 0, 0, 1, 2]  # at first the oldest there is


def test_lines_and_their_page(tmp_path, monkeypatch):
    out = tmp_path / "lines.jsonl"
    words = [
        "--ages",
        "0",
        "4",
        "--rates",
        "1e-3",
        "--seeds",
        "0",
        "--steps",
        "50",
        "--out",
        str(out),
    ]
    bench.main(words)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(line["way"], line["age"]): line["accuracy"]["50"] for line in lines}
    assert set(found) == {("uniform", 0), ("rho", 0), ("rho", 4), ("rho, rescored", 4)}
    assert found["rho", 0] > found["uniform", 0]
    assert found["rho", 4] < found["rho", 0] - 10  # what this bench is about
    assert found["rho, rescored", 4] > found["rho", 4]
    page = "\n".join(pages.staleness_page(lines))
    assert f"| rho, 4 steps old | {found['rho', 4]:.1f} |" in page
    assert f"| rho, newest weights | {found['rho', 0]:.1f} |" in page
    assert f"| uniform | {found['uniform', 0]:.1f} |" in page
    shorter = [{**line, "steps": 20, "accuracy": {"20": 1.0}} for line in lines]
    both = "\n".join(pages.staleness_page([*shorter, *lines]))  # lengths have tables of their own
    assert page.partition("Learning rate")[2].partition("|")[2] in both
    assert "0.001, 20 steps:\n\n| choice by | step 20 |\n|---|---|\n| uniform | 1.0 |" in both
    monkeypatch.setattr(bench, "run", lambda *args: pytest.fail("it was there"))
    bench.main(words)
