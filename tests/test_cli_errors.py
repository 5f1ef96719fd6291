"""What the commands say when something is wrong: one line, an exit code, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import fixtures_task as task
import numpy as np
import pytest
import torch
from fixtures_cli import FIT, one_line, rholoss_

import rholoss.demo
from rholoss import cli
from rholoss.il.store import Irreducible

SHORT = "--epochs 2 --batch-size 64 --device cpu --quiet"
CHECK = "il check nowhere --data"
SCORE = "il score --model fixtures_task:small --data fixtures_task:train"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    Irreducible.from_losses(np.ones(240), dataset=task.train).save(tmp_path / "task")
    return tmp_path / "task"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{CHECK} train", "--data is 'train'; give it as module:attribute, e.g. mytask:train"),
        (
            f"{CHECK} a/mytask.py:train",
            "which names a file; give the module's name: a.mytask:train",
        ),
        (f"{CHECK} no_such:x", "there is no module 'no_such' in"),
        (f"{CHECK} fixtures_task:trian", "has no attribute 'trian'. Did you mean train"),
        (f"{CHECK} fixtures_task:Split.houldout", "Split has no attribute 'houldout'"),
        (f"{CHECK} fixtures_task:number", "is a int, which is no data set: it needs `__len__`"),
        (f"{CHECK} fixtures_task:loader", "is a DataLoader, which is no data set"),
        (f"{CHECK} fixtures_task:splits", "is a dict of 'train', 'test', which is no data set"),
        (f"{CHECK} fixtures_task:needs_argument", "cannot be called without arguments (missing a"),
        (
            f"{CHECK} fixtures_task:missing_file",
            "failed when it was called: FileNotFoundError: no data/train.bin here at",
        ),
        (f"{CHECK} fixtures_task:Points", "nowhere is not a store"),
        (f"{CHECK} fixtures_task:Split.holdout", "nowhere is not a store"),
        (f"{CHECK} fixtures_task:train --check most", "--check is 'most'; choose full or size"),
        (f"{FIT} --out x --folds 2", "and --folds is 2; give one of them"),
        (f"{FIT} --out x --lr 0", "--lr is 0.0; give a number above 0"),
        (f"{FIT} --out x --loss hinge", "`loss` is 'hinge', which is not known"),
        (
            f"{FIT} --out x --loss fixtures_task:number",
            "--loss fixtures_task:number is a int, not a",
        ),
        (
            f"{FIT} --out x --labels fixtures_task:number",
            "name a list, array or tensor with one label",
        ),
        (
            f"{FIT} --out x".replace("fixtures_task:train", "torch.nn:Sequential"),
            "--score torch.nn:Sequential is a Sequential, which is no data set",
        ),
        (f"{FIT} --out x --device quantum", "--device is 'quantum', which cannot be used here"),
        (f"{FIT} --out x --device meta", "--device is 'meta', which cannot be used here"),
        (f"{FIT} --out x --seed {2**70}", f"`seed` is {2**70}; give a whole number"),
        (f"{SCORE} --out x --seconds nan", "`seconds` is nan; give a number of at least 0"),
        (f"{FIT} --out x".replace("small", "ready"), "`rholoss il score`"),
        (
            f"{FIT} --out x".replace("small", "number"),
            "name a class or a function that makes a model",
        ),
        (f"{FIT} --out x".replace("small", "labels"), "`make_model` returned a list"),
        (
            "il score --model fixtures_task:number --data fixtures_task:train --out x",
            "is a int, not a torch.nn.Module",
        ),
        ("il fit --out x", "Error: Missing option '--score'. See `rholoss il fit --help`."),
        ("il fot", "Error: No such command 'fot'."),
        ("il fitt", "Did you mean 'fit'? See `rholoss il --help`."),
        (f"{FIT} --out x --epochs none", "Error: Invalid value for '--epochs': "),
        ("--nonsense", "Error: No such option: --nonsense"),
    ],
)
def test_errors_of_use_are_one_line(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in one_line(rholoss_(line))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--device quantum", "--loss nonsense", "--collate slow_task:x"])
@pytest.mark.parametrize(
    "line",
    [
        "il fit --folds 2 --score slow_task:data --model fixtures_task:small --out x",
        "il score --data slow_task:data --model fixtures_task:small --out x",
        "advise --data slow_task:data --model fixtures_task:small",
    ],
)
def test_options_are_checked_before_a_data_set_is_made(
    line: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "slow_task", raising=False)
    (tmp_path / "slow_task.py").write_text("x = 1\ndef data():\n    raise OSError('an hour')\n")
    assert option.split()[1] in one_line(rholoss_(f"{line} {option}"))


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "needs_more_task.py").write_text("import pandas_of_the_moon\n")
    (tmp_path / "bad_name_task.py").write_text("x = 1\ny = nonsense\n")
    said = one_line(rholoss_(f"{CHECK} needs_more_task:x"))
    assert (
        "could not be imported: ModuleNotFoundError: No module named 'pandas_of_the_moon'" in said
    )
    said = one_line(rholoss_(f"{CHECK} bad_name_task:x"))
    assert "NameError: name 'nonsense' is not defined at bad_name_task.py:2" in said
    assert "Add --traceback to see where." in said


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"{CHECK} fixtures_task:missing_file"
    shown = rholoss_(f"{line} --traceback")
    assert shown.exit_code == 2
    assert "Traceback (most recent call last)" in shown.stderr
    assert "fixtures_task.py" in shown.stderr
    assert shown.stderr.splitlines()[-1].startswith("Error: --data fixtures_task:missing_file")
    assert "Traceback" in rholoss_(line, env={"RHOLOSS_TRACEBACK": "1"}).stderr
    assert "Traceback" not in rholoss_(line, env={"RHOLOSS_TRACEBACK": "0"}).stderr


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    result = rholoss_(f"{FIT} --out {tmp_path / 'il'} {SHORT}".replace(":small", ":Broken"))
    assert isinstance(result.exception, ZeroDivisionError)


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rholoss.cli.il.fit_irreducible", stop)
    result = rholoss_(f"{FIT} --out {tmp_path / 'il'}")
    assert result.exit_code == 130
    assert result.stderr.startswith("Stopped. Run the same command again: models that are fitted")
    assert result.stderr.count("\n") == 1
    monkeypatch.setattr(rholoss.demo, "run", stop)
    result = rholoss_("demo")
    assert result.exit_code == 130
    assert "finished runs were kept" in result.stderr
    result = rholoss_(f"{CHECK} fixtures_task:interrupted")
    assert (result.exit_code, result.stderr) == (130, "Stopped.\n")


def test_complete_losses_are_replaced_only_on_request(store: Path) -> None:
    (store.parent / "task-2").mkdir(exist_ok=True)
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    score = "il score --model fixtures_task:small --data fixtures_task:train --quiet"
    for line in (f"{FIT} {SHORT}", score):
        said = one_line(rholoss_(f"{line} --out {store}"))
        assert f"--out {store} holds irreducible losses already (240 rows, made 20" in said
        assert f"for instance {store}-3, or add --overwrite to replace them." in said
    # The advice for losses that are missing does not lead to the ones that are there.
    said = one_line(rholoss_(f"il check {store} --data fixtures_task:keyed"))
    assert f"`rholoss il score ... --out {store}-3`" in said
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before


def test_losses_are_replaced_on_request_and_unfinished_work_goes_on(tmp_path: Path) -> None:
    line = f"{FIT} {SHORT} --out {tmp_path / 'il'}"
    (tmp_path / "il" / "partial").mkdir(parents=True)
    assert rholoss_(line).exit_code == 0
    first = Irreducible.load(tmp_path / "il").values.clone()
    assert rholoss_(f"{line} --seed 1 --overwrite").exit_code == 0
    assert not torch.equal(Irreducible.load(tmp_path / "il").values, first)


@pytest.mark.parametrize("taken", ["out", "out/runs.jsonl/x", "out/chosen", "out/report.html/x"])
def test_a_folder_that_the_demo_cannot_write_to(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / taken).write_text("")
    said = one_line(rholoss_(f"demo --epochs 1 --seeds 1 --limit 320 --quiet --out {tmp_path}/out"))
    assert f"`out` is '{tmp_path}/out', where the demo cannot write" in said


def test_warnings_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fit(*_: object, **__: object) -> Irreducible:

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("2 points have no finite loss", stacklevel=1)
        return Irreducible.from_losses(np.ones(3))

    monkeypatch.setattr("rholoss.cli.il.fit_irreducible", fit)
    result = rholoss_(f"{FIT} --out {tmp_path / 'il'}")
    assert result.stderr == "Warning: 2 points have no finite loss\n"


def test_without_the_extra_one_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("rholoss.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["methods"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "Error: the rholoss command needs typer; install it with: pip install 'rholoss[cli]'\n"
    )


def start(line: str, **options: object) -> subprocess.Popen[str]:
    """The real thing: a process of its own, in the directory of the user's module."""
    return subprocess.Popen(
        [sys.executable, "-m", "rholoss", *line.split()],
        cwd=task.here,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_as_a_process(store: Path) -> None:
    bad = start(f"il check {store} --data fixtures_task:changed")
    good = start(f"il show {store} --json")
    out, err = bad.communicate(timeout=300)
    assert (bad.returncode, out) == (2, "")
    assert err.startswith("Error: The store")
    assert err.count("\n") == 1
    out, err = good.communicate(timeout=300)
    assert (good.returncode, err) == (0, "")
    assert json.loads(out)["rows"] == 240


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_of_a_process(tmp_path: Path) -> None:
    out = tmp_path / "il"
    process = start(f"{FIT} --out {out} --epochs 1000000 --patience 0")
    deadline = time.monotonic() + 300
    while not (out / "partial").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("Stopped. Run the same command again")
    assert "Traceback" not in err
    said = one_line(rholoss_(f"il show {out}"))
    assert "holds work that was cut off" in said
