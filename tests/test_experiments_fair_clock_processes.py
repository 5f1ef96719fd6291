"""Runs of one call of the race, and processes that share them."""

import functools

import pytest
from fixtures_race import tiny_race

from experiments import processes, records
from experiments.fair_clock import __main__ as command
from experiments.fair_clock import race as racing
from experiments.fair_clock.__main__ import parts
from experiments.fair_clock.race import Race, Running


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    return tiny_race(tmp_path, monkeypatch)


def test_a_plus_begins_further_runs_of_the_same_call():
    first = ["tune", "--dataset", "cifar100", "--arms", "uniform", "--seconds", "9"]
    assert parts([*first, "+", "--seeds", "1", "+", "--lr", "1e-3"]) == [
        first,
        ["tune", "--dataset", "cifar100", "--seeds", "1"],
        ["tune", "--dataset", "cifar100", "--lr", "1e-3"],
    ]
    with pytest.raises(SystemExit, match="One call has one --dataset"):
        command.main(["final", "--n-b", "8", "--lr", "1e-3", "+", "--dataset", "cifar100"])


def test_processes_share_the_runs_after_one_has_measured_all(tiny, tmp_path, monkeypatch):
    events, begun, fit, begin = [], [], Race._fit, Running.__init__

    def measure(self, cells):
        events.append(f"{len(cells)} measured")
        self.times |= {**tiny.times, "scoring 8 of 40": 2.0}

    class InTurn:
        """A process that is run here, at once; the first takes one run only, and leaves the others."""

        def __init__(self, words):
            events.append("process")
            words = words[3:]
            if "process" not in events[:-1]:
                assert float(words[words.index("--claims") + 3]) <= 600
                words[words.index("--claims") + 3] = "0"
            command.main(words)

        def wait(self):
            return 0

    def noted(self, race, cell):
        begun.append((events.count("process"), cell.key()))
        begin(self, race, cell)

    monkeypatch.setattr(Race, "measure_times", measure)
    monkeypatch.setattr(Race, "_fit", lambda *given: events.append("fit") or fit(*given))
    monkeypatch.setattr(Running, "__init__", noted)
    monkeypatch.setattr(processes.subprocess, "Popen", InTurn)
    monkeypatch.setattr(racing, "Race", functools.partial(Race, precision="fp32", compile=False))
    out = tmp_path / "runs.jsonl"
    monkeypatch.setattr(command, "RESULTS", out)
    common = ["--n-b", "8", "--lr", "1e-3", "--labels", "clean", "--budget", "0.5"]
    words = ["tune", *common, "--seeds", "0", "1", "--seconds", "600", "--processes", "3"]
    words += ["--data", str(tmp_path), "--out", str(out), "+", *common]
    command.main([*words, "--arms", "uniform", "rho k=5"])
    # Two fits: the first warms up. Nobody fits or measures once the processes are there.
    assert events == ["3 measured", "fit", "fit", "process", "process", "process"]
    assert sorted(line["seed"] for line in records.read(out)) == [0, 0, 1]
    assert len({key for _, key in begun}) == len(begun) == 3
    by_rho = next(line for line in records.read(out) if line["arm"] == "rho k=5")
    assert by_rho["il_seconds"] > 0
    assert by_rho["steps"] == pytest.approx((0.5 - by_rho["il_seconds"]) * 1000 / 2.0, abs=2)
