"""The losses of every visit: kept as they were seen, beside the line, with the labels that are wrong."""

import math
import re

import numpy as np
import pytest
import torch
from fixtures_race import tiny_race

from experiments import records
from experiments.fair_clock.__main__ import arguments
from experiments.fair_clock.arms import Cell
from experiments.fair_clock.race import run
from experiments.fair_clock.visits import Visits, main, replay
from rholoss.engine import RandomShare, Remembered
from rholoss.memory import Memory, Situation


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    return tiny_race(tmp_path, monkeypatch)


def test_visits_are_kept_where_they_are_asked_for(tiny, tmp_path):
    cell = Cell("noise 10 %", "random half", 8, 1e-3, 0, budget=0.1)
    run(tiny, [cell], tmp_path / "without.jsonl")
    tiny.visits = tmp_path / "visits"
    run(tiny, [cell], tmp_path / "with.jsonl")
    (path,) = tiny.visits.iterdir()
    assert re.fullmatch(r"labels_noise_10_arm_random_half_[\w.-]+\.npz", path.name)
    kept = np.load(path)
    data, _ = tiny.data(cell)
    passes, rows = kept["last"].shape
    assert rows == len(data) == 160
    assert passes == math.ceil(100 * 8 / (rows // 2))
    assert np.isnan(kept["last"][0]).all()  # nothing is known when the first pass begins
    assert np.isfinite(kept["last"][1]).sum() == rows // 2
    assert list(kept["progress"]) == sorted(kept["progress"])
    assert 0 < kept["wrong"].mean() < 0.3
    assert (kept["wrong"] == (data.targets.numpy() != tiny.clean[data.ids.numpy()])).all()
    without, kept_line = (
        next(records.read(tmp_path / f"{name}.jsonl")) for name in ("without", "with")
    )
    assert without["loss"] == kept_line["loss"]  # the run is the same


def test_a_budget_of_nothing_is_refused(capsys):
    with pytest.raises(SystemExit):
        arguments(["tune", "--budget", "-1"])
    assert "--budget -1: give more than 0" in capsys.readouterr().err


def test_visits_for_which_there_is_no_room_cost_no_line(tiny, tmp_path, monkeypatch):
    def full(*given, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(Visits, "save", full)
    tiny.visits, out = tmp_path / "visits", tmp_path / "runs.jsonl"
    with pytest.raises(OSError, match="No space"):
        run(tiny, [Cell("clean", "random half", 8, 1e-3, 0, budget=0.1)], out)
    assert len(list(records.read(out))) == 1


@pytest.fixture
def recording(tmp_path):
    """Eight passes over 1,000 rows of which a tenth is wrong, and known by heart from the sixth on."""
    memory, plan, notes = Memory(1000, torch.device("cpu")), Visits(RandomShare(1.0)), {}
    wrong = np.arange(1000) < 100
    for number in range(8):
        state = (memory.seen, memory.recent, None, torch.Generator(), notes)
        plan(Situation(number / 8, *state))
        losses = torch.full((1000,), 0.1) + 0.01 * number
        losses[:100] = 4.0 + 0.01 * number if number < 5 else 0.05 * number
        memory.record(torch.arange(1000), losses)
    return plan.save(tmp_path / "made.npz", wrong=wrong)


def test_a_plan_is_asked_what_it_would_have_left_out(recording, capsys):
    found = replay(recording, Remembered(2.3))
    assert (found["pass"], found["progress"]) == (4, 0.5)  # half of the steps; after four visits
    assert found["left_out"] == pytest.approx(0.1)
    assert found["precision"] == found["recall"] == 1
    late = replay(recording, Remembered(2.3, filter_from=0.75))  # on probation until then
    assert (late["pass"], late["precision"]) == (4, 1)
    assert late["told"] == pytest.approx(0.1)
    assert 0.8 < late["recall"] < 1
    none = Remembered(2.3, filter_from=0.75, again=0)
    assert replay(recording, none) is None  # none is left to be told
    main([str(recording)])
    told = (
        "10.0% in pass 4 (50% of the steps), 12.2% told; 100.0% of them wrong, 100.0% of the wrong"
    )
    assert f"  Remembered(log(10)): {told}" in capsys.readouterr().out
