"""The losses of every visit: kept as they were seen, beside the line, with the labels that are wrong."""

import math

import numpy as np
import pytest
from fixtures_race import tiny_race

from experiments import records
from experiments.fair_clock.arms import Cell
from experiments.fair_clock.race import run


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    return tiny_race(tmp_path, monkeypatch)


def test_visits_are_kept_where_they_are_asked_for(tiny, tmp_path):
    cell = Cell("noise 10 %", "random half", 8, 1e-3, 0, budget=0.1)
    run(tiny, [cell], tmp_path / "without.jsonl")
    tiny.visits = tmp_path / "visits"
    run(tiny, [cell], tmp_path / "with.jsonl")
    (path,) = tiny.visits.iterdir()
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
