"""The example of the engine runs on the digits, and its runs are what they say."""

import re
import runpy
import sys
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "engine.py"


def test_the_example_runs(monkeypatch, tmp_path, capsys):
    assert len(EXAMPLE.read_text().splitlines()) < 80
    monkeypatch.setattr(sys, "argv", ["engine.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLE))
    printed = capsys.readouterr().out
    accuracy = dict(re.findall(r"^(\w+) +test accuracy ([\d.]+)%", printed, re.M))
    assert set(accuracy) == {"uniform", "rho", "annealed", "gate", "replay"}
    assert all(float(value) > 85 for value in accuracy.values())
    if not torch.cuda.is_available():
        assert accuracy["replay"] == accuracy["rho"]  # the same choices from the same weights
    assert "RHO-LOSS against uniform:" in printed
    on_gpu = torch.cuda.is_available()
    assert (
        f"Steps run {'as CUDA graphs' if on_gpu else 'eagerly: cpu has no CUDA graphs'}\n"
        in printed
    )
    assert (tmp_path / "rho.pt").exists()
    assert len((tmp_path / "chosen.jsonl").read_text().splitlines()) == 400
