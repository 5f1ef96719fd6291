"""The bench of wrong labels: what it finds on real digits, and its page."""

import json

import pytest
from benchmarks import bench_wrong_labels as bench
from benchmarks import pages


def test_wrong_labels_are_found_told_and_not_looked_for_twice(tmp_path, monkeypatch):
    out = tmp_path / "lines.jsonl"
    plan = "measured, with chance, on probation before"
    words = [
        "--labels",
        "40 %",
        "--plans",
        plan,
        "--seeds",
        "0",
        "--passes",
        "6",
        "--out",
        str(out),
    ]
    bench.main(words)
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["labels"], line["plan"], line["wrong"]) == ("40 %", plan, 0.4)
    assert line["told"] == pytest.approx(0.4, abs=0.12)
    assert line["precision"] > 0.75  # 0.4 by lot
    assert line["recall"] > 0.8
    assert line["accuracy"] > 88
    monkeypatch.setitem(bench.PROBLEMS, "digits", lambda *args: pytest.fail("it was there"))
    bench.main(words)
    page = "\n".join(pages.wrong_labels_page([line], []))
    assert f"| 6 | 40 % | {plan} | {100 * line['told']:.1f} % |" in page


def test_the_page_has_a_row_a_label_set_and_plan_and_means_over_seeds():
    about = {"command": "c", "device": "cpu", "torch": "2", "python": "3", "date": "d"}
    base = {"told": 0.1, "left_out": 0.2, "precision": 0.5, "recall": None, "passes": 16, **about}
    found = [
        {"labels": labels, "plan": plan, "accuracy": accuracy, **base}
        for labels, plan, accuracy in (
            ("clean", "x", 90.0), ("10 %", "x", 80.0), ("clean", "y", 91.0), ("clean", "x", 92.0),
        )
    ]  # fmt: skip
    rows = [
        line for line in pages.wrong_labels_page([], found) if line.startswith(("| 16 |", "| 48 |"))
    ]
    assert rows == [
        "| 16 | none | x | 10.0 % | 20.0 % | 50.0 % |  | 91.0 (2) |",
        "| 16 | none | y | 10.0 % | 20.0 % | 50.0 % |  | 91.0 (1) |",
        "| 16 | 10 % | x | 10.0 % | 20.0 % | 50.0 % |  | 80.0 (1) |",
    ]
