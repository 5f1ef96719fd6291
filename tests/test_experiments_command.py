"""The command of the bench, as somebody at a terminal meets it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_bench import RECIPE, cells, tiny, write_cifar10

from experiments import __main__ as command
from experiments.bench.lines import tell
from experiments.bench.run import Bench, done, run
from experiments.models import MODELS

HERE = Path(__file__).parents[1]


def test_a_list_may_be_read_in_part():
    """`python -m experiments list | head -1`"""
    listing = subprocess.Popen(
        [sys.executable, "-u", "-m", "experiments", "list"],
        cwd=HERE, env={**os.environ, "PYTHONPATH": str(HERE / "src")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with listing:
        assert listing.stdout.readline().startswith("table2_cifar10")
        listing.stdout.close()
        assert listing.stderr.read() == ""
    assert listing.returncode == 0


def test_runs_go_on_where_nobody_reads_what_they_tell(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", tiny)
    reader, writer = os.pipe()
    os.close(reader)
    bench = Bench(write_cifar10(tmp_path / "data"), recipe=RECIPE)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        tell("once")
        given = [("s", cell) for cell in cells()]
        assert run(bench, given, tmp_path / "out", progress=False) == 3
    assert len(done(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "methd=uniform"], "`only` has 'methd=uniform'; write FIELD=VALUE with one of"),
        (
            ["--only", "method=unifrom"],
            "has all of .'method=unifrom'.; there are method: 'grad_norm'",
        ),
        (
            ["--seeds", "7", "--only", "method=loss"],
            r"2 run\(s\) failed(.|\n)*CIFAR-10 was expected",
        ),
    ],
)
def test_a_mistake_is_told_in_words(tmp_path, words, told):
    where = ["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=told):
        command.main(["run", "--study", "table2_cifar10", *where, *words])
