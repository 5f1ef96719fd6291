"""The benches of a GPU in one command: what it asks for is there."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import bench_agreement, bench_step

ROOT = Path(__file__).parent.parent


def test_every_row_and_option_that_is_asked_for_is_there(tmp_path):
    told = tmp_path / "told.jsonl"
    python = tmp_path / "python"  # in place of the real one: notes what it is asked for
    note = f"print(json.dumps(sys.argv[1:]), file=open({str(told)!r}, 'a'))"
    python.write_text(f"#!{sys.executable}\nimport json, sys\n{note}\n")
    python.chmod(0o755)
    script = ["bash", str(ROOT / "benchmarks/gpu.sh"), "data"]
    subprocess.run(script, check=True, env={"PYTHON": str(python), "PATH": "/usr/bin:/bin"})
    asked = [json.loads(line) for line in told.read_text().splitlines()]
    steps = [words for words in asked if words[0] == "benchmarks/bench_step.py"]
    agreements = [words[2:] for words in asked if words[:2] == ["-m", "benchmarks.bench_agreement"]]
    assert asked[-1] == ["benchmarks/pages.py"]
    assert len(steps) + len(agreements) + 1 == len(asked)
    rows = [name for words in steps for name in words[words.index("--rows") + 1 :]]
    assert "rho 32 of 320; products, combined, sort compiled, sums" in rows
    assert [bench_step.row(name) for name in rows] == rows
    for words in agreements:  # argparse refuses what it does not know
        assert bench_agreement.parsed(words).data == "data"
    assert {words[0] for words in agreements} == {"scores", "train"}
