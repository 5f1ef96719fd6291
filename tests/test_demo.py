import gzip
import importlib.util
import json
import lzma
import os
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from rholoss.demo import __main__ as command
from rholoss.demo import run, study, summary
from rholoss.demo.data import Digits, load, read_idx, write_idx
from rholoss.demo.train import is_evaluated, shares_by_epoch
from rholoss.errors import RholossError

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"epochs": 1, "seeds": 1, "limit": 640, "progress": False, "page": False}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "make_mnist_excerpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def splits():
    return load()


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A short demo, with its page: (folder, result)."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, run(out=folder, **SHORT | {"page": True})


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(folder, method):
    """Chosen ids and scores, step by step, from the log."""
    return [
        line for line in lines_of(folder / "chosen" / f"{method}-0.jsonl") if line["type"] == "step"
    ]


# The excerpt


def test_the_excerpt_is_what_the_script_makes(tool):
    data = Path(os.environ.get("RHOLOSS_DATA", ROOT.parent / "shared" / "data")) / "mnist"
    names = [
        f"{part}-{kind}-ubyte"
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    ]
    found = [next(iter(sorted(data.glob(f"{name}*"))), None) for name in names]
    if None in found:
        pytest.skip(
            f"MNIST's idx files are not in {data}; set RHOLOSS_DATA to a folder with mnist/"
        )
    packed = resources.files("rholoss.demo").joinpath("mnist.xz").read_bytes()
    assert lzma.decompress(packed) == tool.excerpt(*map(tool.read, found))


def test_the_excerpt_is_small_and_sane(splits):
    packed = resources.files("rholoss.demo").joinpath("mnist.xz").read_bytes()
    assert len(packed) <= 3.2e6
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 12_000,
        "holdout": 6_000,
        "test": 4_000,
    }
    for split in splits.values():
        assert split.images.shape[1:] == (28, 28)
        assert split.images.max() == 255
        counts = np.bincount(split.true, minlength=10)
        assert len(counts) == 10
        assert counts.min() > 0.08 * len(split)


def test_a_tenth_of_training_and_holdout_labels_is_wrong_and_no_test_label(splits):
    assert splits["train"].wrong.sum() == 1200
    assert splits["holdout"].wrong.sum() == 600
    assert not splits["test"].wrong.any()
    for split in splits.values():
        np.testing.assert_array_equal(split.wrong, split.given != split.true)
        np.testing.assert_array_equal(Digits(split).targets.numpy(), split.given)
    assert (splits["train"].wrong[:6000] != splits["holdout"].wrong).any()  # drawn apart


def test_pixels_are_normalised(splits):
    x = Digits(splits["train"]).x
    assert x.shape == (12_000, 784)
    assert x.dtype == torch.float32
    assert abs(float(x.mean())) < 0.02
    assert abs(float(x.std()) - 1) < 0.02


def test_the_script_reads_plain_and_packed_files(tool, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(256, size=(20, 28, 28)).astype(np.uint8),
        rng.integers(10, size=20).astype(np.uint8),
        rng.integers(256, size=(10, 28, 28)).astype(np.uint8),
        rng.integers(10, size=10).astype(np.uint8),
    ]
    names = ["a", "b.gz", "c.xz", "d.gz"]
    for name, array in zip(names, arrays, strict=True):
        opener = {".gz": gzip.open, ".xz": lzma.open}.get(Path(name).suffix, open)
        with opener(tmp_path / name, "wb") as stream:
            write_idx(stream, array)
    out = tmp_path / "out.xz"
    monkeypatch.setattr(
        sys, "argv", ["tool", *(str(tmp_path / n) for n in names), "--out", str(out)]
    )
    tool.main()
    assert f"{out.stat().st_size:,} bytes" in capsys.readouterr().out
    with lzma.open(out) as stream:
        parts = [read_idx(stream) for _ in range(6)]
    for part, array, rows in zip(
        parts,
        [*arrays[:2], *arrays[:2], *arrays[2:]],
        [[0, 5, 10, 15]] * 2 + [[2, 12]] * 2 + [[0, 1, 5, 6]] * 2,
        strict=True,
    ):
        np.testing.assert_array_equal(part, array[rows])


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"\x89PNG....")
    with path.open("rb") as stream, pytest.raises(RholossError, match="no idx file of bytes"):
        read_idx(stream)
    with path.open("wb") as stream:
        write_idx(stream, np.zeros((4, 4), np.uint8))
    path.write_bytes(path.read_bytes()[:-1])
    message = r"should hold 16 values \(4, 4\) but ends after 15"
    with path.open("rb") as stream, pytest.raises(RholossError, match=message):
        read_idx(stream)


# A short run


def test_a_short_run_ends_with_records_and_a_page(short):
    folder, result = short
    assert [(r["method"], r["seed"]) for r in result.records] == [
        ("uniform", 0),
        ("loss", 0),
        ("rho", 0),
    ]
    assert lines_of(folder / "runs.jsonl") == result.records
    assert result.page == folder / "report.html"
    assert "RHO-LOSS" in result.page.read_text()
    assert not list(folder.rglob("*.tmp"))
    for record in result.records:
        assert record["step"] == [1, 2]  # two batches of 320, each the end of half an epoch
        assert 0 < record["seconds"][0] < record["seconds"][1]
        assert record["trained"] == 64
        assert record["scored"] == (0 if record["method"] == "uniform" else 640)
        assert {"date", "torch", "python", "numpy", "device"} <= record.keys()


def test_shares_are_those_of_the_chosen_ids(short):
    folder, result = short
    wrong = result.splits["train"].given != result.splits["train"].true
    for record in result.records:
        chosen = [i for line in steps_of(folder, record["method"]) for i in line["index"]]
        assert len(chosen) == 64
        assert record["wrong_by_epoch"] == [pytest.approx(wrong[chosen].mean(), abs=1e-6)]
    by_loss, rho = (result.summary.rows[name].wrong_first for name in ("loss", "rho"))
    assert rho < by_loss  # even so early: two steps


def test_all_methods_see_the_same_candidates(short):
    folder, _ = short
    order = torch.Generator().manual_seed(1000)
    candidates = [set(b.tolist()) for b in torch.randperm(640, generator=order).split(320)]
    for method in ("uniform", "loss", "rho"):
        chosen = [line["index"] for line in steps_of(folder, method)]
        assert all(set(c) <= b for c, b in zip(chosen, candidates, strict=True))


def test_rho_chooses_by_loss_less_irreducible_loss_from_the_same_weights(short):
    folder, result = short
    firsts = {}
    for method in ("loss", "rho"):
        line = steps_of(folder, method)[0]
        firsts[method] = dict(zip(line["index"], line["score"], strict=True))
    both = firsts["loss"].keys() & firsts["rho"].keys()
    assert both  # points that both chose at the first step: the same weights gave the same loss
    for index in both:
        gap = firsts["loss"][index] - firsts["rho"][index]
        assert gap == pytest.approx(result.irreducible[index], abs=1e-4)


def test_a_second_call_does_only_what_is_missing(short, tmp_path, capsys, monkeypatch):
    folder, result = short
    lines = (folder / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join(lines[:2]) + "\n")
    trained = []
    honest = study.train
    monkeypatch.setattr(
        study, "train", lambda method, *a, **k: trained.append(method) or honest(method, *a, **k)
    )
    again = run(out=tmp_path, **SHORT)
    assert trained == ["loss", "rho"]  # the first one is the warm-up
    assert "2 of 3 runs are in" in capsys.readouterr().err
    assert (tmp_path / "runs.jsonl").read_text().splitlines()[:2] == lines[:2]
    for ours, theirs in zip(again.records, result.records, strict=True):
        assert ours["accuracy"] == theirs["accuracy"]  # the same seeds, the same run
        assert ours["wrong_by_epoch"] == theirs["wrong_by_epoch"]
    trained.clear()
    made = (tmp_path / "il" / "meta.json").stat().st_mtime_ns
    run(out=tmp_path, **SHORT)
    assert trained == []
    assert "nothing is left to do" in capsys.readouterr().err
    assert (tmp_path / "il" / "meta.json").stat().st_mtime_ns == made
    run(out=tmp_path, fresh=True, **SHORT)
    assert trained == ["loss", "uniform", "loss", "rho"]
    assert (tmp_path / "il" / "meta.json").stat().st_mtime_ns > made


def test_runs_of_other_settings_are_left_alone(short, tmp_path):
    folder, _ = short
    before = (folder / "runs.jsonl").read_text()
    (tmp_path / "runs.jsonl").write_text(before)
    result = run(out=tmp_path, **SHORT | {"limit": 320})
    assert all(record["settings"]["limit"] == 320 for record in result.records)
    assert (tmp_path / "runs.jsonl").read_text().startswith(before)


def test_the_table_says_what_improved_and_what_did_not(short, capsys):
    _, result = short
    summary.show(result.summary)
    printed = capsys.readouterr().out
    for text in ("Uniform", "Training loss", "RHO-LOSS", "Wrong", "Seconds,", "IL included"):
        assert text in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_the_caller_is_left_as_it_was(tmp_path):
    torch.manual_seed(11)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(out=tmp_path, **SHORT | {"limit": 320})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(state, torch.get_rng_state())


# Sums


def record(method, seed, accuracy, seconds=1.0, wrong=(0.1, 0.1)):
    n = len(accuracy)
    return {
        "method": method,
        "seed": seed,
        "settings": {"epochs": 2},
        "step": [10 * (i + 1) for i in range(n)],
        "seconds": [seconds * (i + 1) / n for i in range(n)],
        "accuracy": list(accuracy),
        "wrong_by_epoch": list(wrong),
        "correct_by_epoch": [0.5, 0.7],
    }


UNIFORM = [0.5, 0.6, 0.7, 0.75, 0.78, 0.80, 0.82, 0.80]  # ends at 0.80 over its last four
GOOD, BAD = [0.6, 0.85, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], [0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]


def study_of(rho, loss=BAD, **more):
    runs = [record("uniform", 0, UNIFORM), record("loss", 0, loss, wrong=(0.5, 0.6))]
    return summary.summarise([*runs, record("rho", 0, rho, **more)], il_seconds=2.0)


def test_summary_counts_steps_to_uniforms_final_accuracy():
    found = study_of(GOOD, wrong=(0.02, 0.12))
    assert found.target == pytest.approx(0.80)
    assert found.rows["uniform"].steps == [60]  # its own curve, by the same rule
    assert found.rows["rho"].steps == [20]
    assert found.rows["loss"].steps == [None]
    assert found.rows["rho"].seconds == pytest.approx(3.0)  # irreducible losses included
    assert found.rows["rho"].mean_reach_seconds == pytest.approx(2.25)
    assert found.rows["uniform"].seconds == pytest.approx(1.0)
    assert found.rows["rho"].wrong_first == pytest.approx(0.02)
    assert found.rows["rho"].wrong == pytest.approx(0.07)
    few = {"accuracy": [0.1, 0.2, 0.5, 0.7], "wrong_by_epoch": [0.1, 0.1]}  # steps of an epoch
    assert summary.final_accuracy(few) == pytest.approx(0.6)


def test_findings_follow_the_numbers():
    found = study_of(GOOD, wrong=(0.02, 0.22))
    improved, not_improved = "\n".join(found.improved), "\n".join(found.not_improved)
    assert "20 with RHO-LOSS, 60 uniform" in improved
    assert "90.0 % with RHO-LOSS, 80.0 % uniform (+10.0 points)" in improved
    assert "first epoch: 2.0 % with RHO-LOSS, 10.0 % uniform, 50.0 % by training loss" in improved
    assert "over 2 epochs: 12.0 % with RHO-LOSS" in not_improved
    assert "took 3.0 s with RHO-LOSS, 1.0 s uniform; 2.0 s of RHO-LOSS's" in not_improved
    assert "30.0 % by training loss" in not_improved
    assert "after 20 steps, uniform after 60; it ended at 90.0 %" in found.headline
    assert "It did not save time here: 2.2 s with RHO-LOSS, 0.8 s uniform" in found.headline


def test_findings_when_selection_fails():
    found = study_of(BAD, loss=GOOD)
    not_improved = "\n".join(found.not_improved)
    assert "did not reach uniform's final accuracy of 80.0 % with every seed" in not_improved
    assert "30.0 % with RHO-LOSS, 80.0 % uniform (-50.0 points)" in not_improved
    assert "90.0 % by training loss" in "\n".join(found.improved)
    assert "with 0 of 1 seeds" in found.headline


def test_findings_when_it_saves_time():
    runs = [record("uniform", 0, UNIFORM, 100.0), record("loss", 0, BAD), record("rho", 0, GOOD)]
    found = summary.summarise(runs, il_seconds=2.0)
    assert "It saved time, too: 2.2 s with RHO-LOSS, 75.0 s uniform" in found.headline
    assert any(text.startswith("Seconds:") for text in found.improved)


def test_a_target_reached_by_some_seeds_only_is_said():
    runs = [
        *(record("uniform", s, UNIFORM) for s in (0, 1)),
        *(record("loss", s, BAD) for s in (0, 1)),
        record("rho", 0, GOOD),
        record("rho", 1, BAD),
    ]
    found = summary.summarise(runs, il_seconds=0.0)
    assert found.rows["rho"].mean_steps is None
    assert summary.cells(found.rows["rho"])[1] == "20 (1 of 2 seeds)"
    assert summary.cells(found.rows["loss"])[1] == "not reached"
    assert "with 1 of 2 seeds" in found.headline


@pytest.mark.parametrize(("rows", "evaluated"), [(38, 4), (4, 4), (2, 2), (1, 1)])
def test_an_epoch_is_evaluated_evenly_and_at_its_end(rows, evaluated):
    steps = [step for step in range(1, 3 * rows + 1) if is_evaluated(step, rows)]
    assert len(steps) == 3 * evaluated
    assert {rows, 2 * rows, 3 * rows} <= set(steps)


def test_each_point_of_an_epoch_counts_once():
    flags = [np.array([True] * 4), np.array([False]), np.array([False] * 4), np.array([True])]
    assert shares_by_epoch(flags, per_epoch=2) == [0.8, 0.2]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "`epochs` is 0; give a whole number of at least 1"),
        ({"seeds": -1}, "`seeds` is -1"),
        ({"limit": 10}, "`limit` is 10; give at least 320"),
    ],
)
def test_arguments_are_checked(arguments, message, tmp_path):
    with pytest.raises(RholossError, match=message):
        run(out=tmp_path / "new", page=False, **arguments)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("line", [b"{broken", b'{"method": "rho"}', b"7", b"\xff"])
def test_a_foreign_file_of_runs(tmp_path, line):
    (tmp_path / "runs.jsonl").write_bytes(line + b"\n")
    with pytest.raises(RholossError, match="lines that the demo did not write; pass --fresh"):
        study.finished(tmp_path / "runs.jsonl", {})


def test_a_missing_extra_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(RholossError, match=r"pip install 'rholoss\[report\]'"):
        run(out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_module_is_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--epochs", "0", "--out", str(tmp_path)])
    assert command.main() == 2
    assert capsys.readouterr().err.startswith("error: `epochs` is 0")
