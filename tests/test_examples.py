"""The examples run, and selection costs at most 15 changed lines."""

import difflib
import re
import runpy
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def accuracy(printed: str) -> float:
    return float(re.search(r"test accuracy ([\d.]+)%", printed).group(1))


def test_the_loop_with_selection_is_the_plain_loop_and_a_few_lines(capsys):
    torch.set_num_threads(1)
    plain, selective = EXAMPLES / "plain_loop.py", EXAMPLES / "selective_loop.py"
    changed = [
        line
        for line in difflib.ndiff(
            plain.read_text().splitlines(), selective.read_text().splitlines()
        )
        if line.startswith(("+ ", "- ")) and line[2:].strip()
    ]
    assert len(changed) <= 15, "\n".join(changed)
    runpy.run_path(str(plain))
    without = accuracy(capsys.readouterr().out)
    runpy.run_path(str(selective))
    printed = capsys.readouterr().out
    assert (
        accuracy(printed) > without
    )  # at as many gradient steps, with a tenth of the labels wrong
    assert "steps 370" in printed
    assert "11840 of 118400 candidates" in printed


def test_what_is_never_better_than_chance_is_left_out_of_a_loop(capsys):
    """The same eight passes over all rows end at 93.7 %."""
    torch.set_num_threads(1)
    runpy.run_path(str(EXAMPLES / "remembered_loop.py"))
    printed = capsys.readouterr().out
    assert accuracy(printed) > 94  # 94.4 to 94.5 on different processors
    assert "pass 4: 12,000 rows, 0 left out" in printed
    left_out = int(
        re.search(r"pass 8: .* rows, ([\d,]+) left out", printed).group(1).replace(",", "")
    )
    assert 1000 < left_out < 1200  # 1,200 labels are wrong
