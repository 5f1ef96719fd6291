"""The commands as a user types them: what they print, write and exit with."""

from __future__ import annotations

import json
import math
import types
from pathlib import Path

import fixtures_task as task
import numpy as np
import pytest
import torch
from fixtures_cli import FIT, one_line, rholoss_
from safetensors.torch import save_file

import rholoss.demo
from rholoss import METHODS
from rholoss.cli import demo as demo_command
from rholoss.cli.show import edges_of, highest, histogram, strided
from rholoss.il.store import Irreducible
from rholoss.workers.cost import HANDLING

SHORT = "--epochs 2 --batch-size 64 --device cpu --quiet"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("il") / "task"
    result = rholoss_(f"{FIT} --out {out} {SHORT} --seed 3")
    assert result.exit_code == 0, result.output
    return out


def test_fit_writes_a_store_and_says_how_to_use_it(store: Path, tmp_path: Path) -> None:
    il = Irreducible.load(store, task.train)
    assert len(il) == len(task.train)
    assert il.meta["split"]["kind"] == "holdout"
    assert il.meta["split"]["seed"] == 3
    assert il.meta["model"]["fits"][0]["epochs"] == 2
    again = rholoss_(f"{FIT} --out {tmp_path / 'two'} {SHORT} --seed 3")
    assert "240 irreducible losses, made in " in again.stdout
    assert f"rholoss il show {tmp_path / 'two'}" in again.stdout
    assert 'Selector("rho", irreducible=il, keep=0.1)' in again.stdout
    assert torch.equal(Irreducible.load(tmp_path / "two").values, il.values)


def test_fit_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict = {}

    def fit(make: object, data: object, **options: object) -> Irreducible:
        seen.update(options, data=data, made=make())
        return Irreducible.from_losses(np.ones(3))

    monkeypatch.setattr("rholoss.cli.il.fit_irreducible", fit)
    line = (
        "il fit --folds 3 --score fixtures_task:train --model fixtures_task:small --lr 0.5 --patience 0 "
        "--loss fixtures_task:per_example --labels fixtures_task:labels --workers 2 --check-rows 7 "
        f"--collate fixtures_task:collate --epochs 4 --out {tmp_path / 'il'}"
    )
    result = rholoss_(line)
    assert result.exit_code == 0, result.output
    assert seen["data"] is seen["score"] is task.train
    assert isinstance(seen["made"], task.small)
    assert (seen["folds"], seen["epochs"], seen["check_rows"]) == (3, 4, 7)
    assert (seen["num_workers"], seen["patience"]) == (2, None)
    assert seen["loss"] is task.per_example
    assert seen["collate_fn"] is task.collate
    assert seen["labels"] == task.train.targets
    assert seen["optimizer"](task.small().parameters()).defaults["lr"] == 0.5
    assert seen["progress"] is True


def test_check_says_yes_then_what_differs(store: Path) -> None:
    result = rholoss_(f"il check {store} --data fixtures_task:make_train")
    assert result.exit_code == 0
    assert result.stdout == (
        f"{store} belongs to fixtures_task:make_train: 240 rows, labels compared.\n"
    )
    assert rholoss_(f"il check {store} --data fixtures_task:Points").exit_code == 0  # a class
    said = one_line(rholoss_(f"il check {store} --data fixtures_task:changed"))
    assert said.startswith(f"Error: The store {store} was made for other labels: 1 of 240 differ")
    assert "Labels were changed." in said
    said = one_line(rholoss_(f"il check {store} --data fixtures_task:shorter"))
    assert "was made for a data set of 240 rows, but this one has 200" in said
    result = rholoss_(f"il check {store} --data fixtures_task:changed --check size")
    assert result.exit_code == 0
    assert "240 rows, number of rows compared" in result.stdout


def test_score_with_weights_of_both_kinds(tmp_path: Path) -> None:
    model = task.small()
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "small.pt")
    save_file(model.state_dict(), tmp_path / "small.safetensors")
    line = "il score --model fixtures_task:small --data fixtures_task:train --quiet"
    for name in ("small.pt", "small.safetensors"):
        out = tmp_path / f"il-{name}"
        result = rholoss_(f"{line} --weights {tmp_path / name} --out {out} --seconds 7")
        assert result.exit_code == 0, result.output
        il = Irreducible.load(out, task.train)
        with torch.no_grad():
            wanted = task.per_example(model, task.collate([task.train[i] for i in range(240)]))
        assert torch.allclose(il.values, wanted, atol=1e-6)
        assert il.seconds > 7
    out = tmp_path / "ready"
    assert rholoss_(f"{line} --out {out}".replace("small", "ready")).exit_code == 0
    assert Irreducible.load(out).meta["model"]["class"] == "small"


def test_score_with_the_model_that_was_fitted(tmp_path: Path) -> None:
    fit = "il fit --score fixtures_task:train --model fixtures_task:small --epochs 1 --quiet"
    line = "il score --model fixtures_task:small --data fixtures_task:train --quiet"
    one, two, again = (tmp_path / name for name in ("one", "two", "again"))
    assert rholoss_(f"{fit} --holdout fixtures_task:holdout --out {one}").exit_code == 0
    assert rholoss_(f"{line} --weights {one} --out {again}").exit_code == 0
    first, second = (Irreducible.load(store, task.train).values for store in (one, again))
    assert torch.allclose(first, second, atol=1e-6)
    assert rholoss_(f"{fit} --folds 2 --out {two}").exit_code == 0
    said = one_line(rholoss_(f"{line} --weights {two} --out {tmp_path / 'il'}"))
    assert "two holds 2 models, one for each fold; save the one that you mean" in said
    Irreducible.from_losses(first).save(tmp_path / "bare")  # as `fit_resident` makes them
    said = one_line(rholoss_(f"{line} --weights {tmp_path / 'bare'} --out {tmp_path / 'il'}"))
    assert "holds losses without the weights of the model" in said
    assert "Give a file with the model's weights; or fit with" in said
    said = one_line(rholoss_(f"{line} --weights {tmp_path} --out {tmp_path / 'il'}"))
    assert "is not a store of irreducible losses: it has no meta.json" in said


def test_weights_that_cannot_be_used(tmp_path: Path) -> None:
    line = (
        f"il score --model fixtures_task:small --data fixtures_task:train --out {tmp_path / 'il'}"
    )

    def said(file: Path) -> str:
        return one_line(rholoss_(f"{line} --weights {file}"))

    assert f"--weights is {tmp_path / 'none.pt'}, but there is no such file" in said(
        tmp_path / "none.pt"
    )
    torch.save(task.target().state_dict(), tmp_path / "other.pt")
    assert 'does not fit the model small: Missing key(s) in state_dict: "0.weight"' in said(
        tmp_path / "other.pt"
    )
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    assert "holds a Tensor; save `model.state_dict()` instead" in said(tmp_path / "tensor.pt")
    torch.save({0: torch.ones(3)}, tmp_path / "numbered.pt")
    assert "holds a dict; save `model.state_dict()` instead" in said(tmp_path / "numbered.pt")
    torch.save(task.small(), tmp_path / "pickled.pt")
    assert "cannot be read as weights alone" in said(tmp_path / "pickled.pt")
    for number, junk in enumerate((b"", b"hello", b"\x80")):
        (tmp_path / f"{number}.pt").write_bytes(junk)
        assert "cannot be read as weights alone" in said(tmp_path / f"{number}.pt")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    assert "cannot be read as safetensors" in said(tmp_path / "bad.safetensors")
    assert not (tmp_path / "il").exists()


def test_show_as_text(store: Path) -> None:
    result = rholoss_(f"il show {store} --highest 3")
    assert result.exit_code == 0
    assert "240, 240 measured, ids are integers" in result.stdout
    assert "labels (integers), 240 rows" in result.stdout
    assert "small, 195 parameters; epoch 2 of 2, loss" in result.stdout
    assert "holdout (seed 3, trained_on [160], scored [240])" in result.stdout
    assert "#" * 40 in result.stdout
    values = Irreducible.load(store).values
    top = int(values.argmax())
    assert f"{top:>12}  {float(values[top]):.4f}" in result.stdout
    assert "\x1b" not in result.stdout


def test_show_of_a_split_that_is_noted_in_the_users_words(tmp_path: Path) -> None:
    Irreducible.from_losses([0.1], split={"note": "half of it"}).save(tmp_path / "il")
    assert "split      note half of it" in rholoss_(f"il show {tmp_path / 'il'}").stdout


def test_show_tells_of_infinite_losses(tmp_path: Path) -> None:
    Irreducible.from_losses([0.5, math.inf, math.nan]).save(tmp_path / "il")
    shown = rholoss_(f"il show {tmp_path / 'il'}").stdout
    assert "3, 2 measured" in shown
    assert "infinite   1 of the losses: leave these points out" in shown


def test_show_as_json(store: Path) -> None:
    found = json.loads(rholoss_(f"il show {store} --json --highest 5").stdout)
    values = Irreducible.load(store).values
    assert (found["rows"], found["measured"], found["not_finite"]) == (240, 240, 0)
    assert found["loss"] == "classification"
    assert found["quantiles"]["0.5"] == pytest.approx(float(values.quantile(0.5)), abs=1e-5)
    assert sum(b["count"] for b in found["histogram"]) == 240
    assert [row["loss"] for row in found["highest"]] == values.topk(5).values.tolist()
    assert found["identity"]["labels"] == "integers"


def test_show_writes_parquet(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "losses.parquet"
    result = rholoss_(f"il show {store} --parquet {file}")
    assert f"Wrote {file}." in result.stderr
    assert torch.equal(Irreducible.from_parquet(file).values, Irreducible.load(store).values)


def test_show_needs_the_data_for_string_ids(tmp_path: Path) -> None:
    losses = np.linspace(0, 1, 240, dtype=np.float32)
    Irreducible.from_losses(losses, dataset=task.keyed).save(tmp_path / "keyed")
    for wanted in ("--highest 2", f"--parquet {tmp_path / 'losses.parquet'}"):
        said = one_line(rholoss_(f"il show {tmp_path / 'keyed'} {wanted}"))
        assert "keeps hashes of its string ids only; pass --data M:TRAIN" in said
    found = rholoss_(f"il show {tmp_path / 'keyed'} --highest 2 --data fixtures_task:keyed --json")
    top = json.loads(found.stdout)["highest"]
    assert [row["id"] for row in top] == ["file239.png", "file238.png"]


def test_show_of_what_is_no_store(tmp_path: Path) -> None:
    said = one_line(rholoss_(f"il show {tmp_path / 'nothing'}"))
    assert "is not a store of irreducible losses: it does not exist" in said


@pytest.mark.parametrize("wanted", ["--highest 2", "--parquet {store}.parquet"])
def test_show_of_ids_that_the_store_does_not_have(store: Path, wanted: str) -> None:
    said = one_line(
        rholoss_(f"il show {store} --data fixtures_task:keyed {wanted.format(store=store)}")
    )
    assert "240 of 240 ids have no usable irreducible loss: 'file0.png'" in said
    assert "The stored ids are integers, those asked for are not" in said


def test_histogram_and_highest() -> None:
    values = np.array([0.0, 0.05, 0.2, 0.2, 2.9, 7.0], np.float32)
    bins = histogram(values)
    assert [b.count for b in bins if b.count] == [1, 1, 2, 1, 1]
    assert (bins[-1].low, bins[-1].high) == (3, 10)
    assert sum(b.count for b in histogram(-values)) == 6
    assert edges_of(np.array([2.0, 2.0]))[0] == 2
    assert len(strided(np.arange(100), most=30)) == 25
    il = Irreducible.from_losses(np.array([1, np.nan, 3, np.inf, 3], np.float32))
    assert highest(il, 9) == [(2, 3.0), (4, 3.0), (0, 1.0)]


def test_methods_table_has_all_of_them() -> None:
    rows = {row["method"]: row for row in json.loads(rholoss_("methods --json").stdout)}
    assert set(METHODS) <= set(rows)
    assert rows["rho"]["cost"] == pytest.approx(4.33, abs=0.01)
    assert rows["rho"]["reads"] == ["irreducible_loss", "loss"]
    assert rows["bald"]["cost"] == pytest.approx(34.33, abs=0.01)
    assert rows["rho + LiveIrreducible"]["cost"] == pytest.approx(8.67, abs=0.01)
    assert rows["svp (rholoss.coreset)"]["cost"] == 1
    assert all(row["advice"] and row["score"] and row["pick"] for row in rows.values())
    text = rholoss_("methods --keep 0.5")
    assert "loss_minus_conditional_entropy" in text.stdout
    assert "highest k: loss - irreducible loss" in text.stdout
    assert "1.67x" in text.stdout
    assert "\x1b" not in text.output
    assert "--keep must be in (0, 1], but is 2.0" in one_line(rholoss_("methods --keep 2"))


ADVISE = "advise --model fixtures_task:target --data fixtures_task:train --batch 4 --seconds 0"


def test_advise_prints_the_break_even_table() -> None:
    result = rholoss_(f"{ADVISE} --quiet --device cpu")
    assert result.exit_code == 0, result.output
    assert "899 parameters" in result.stdout
    assert "medians of 3 timings" in result.stdout
    assert "must need" in result.stdout
    assert max(map(len, result.stdout.partition("\n-")[0].splitlines()[2:])) <= 80
    for k in (2, 3, 4, 5, 10):
        assert f" {4 * k} " in result.stdout  # candidates
    assert "Scoring a point costs" in result.stdout
    assert "\x1b" not in result.output


def test_advise_as_json_with_the_cost_of_irreducible_losses(store: Path) -> None:
    found = json.loads(rholoss_(f"{ADVISE} --json --quiet --il {store} --steps 9000000").stdout)
    assert [row["k"] for row in found["table"]] == [2, 3, 4, 5, 10]
    row = found["table"][-1]
    assert row["break_even"] > row["ratio"]
    assert row["step"] == pytest.approx(row["scoring"] + row["training"] + row["loading"])
    found = json.loads(rholoss_(f"{ADVISE} --json --quiet --il-seconds 1e9 --steps 1").stdout)
    assert found["table"][0]["break_even"] is None
    assert "cannot pay" in found["advice"][0]


def test_advise_predicts_steps_with_scoring_workers() -> None:
    result = rholoss_(f"{ADVISE} --quiet --device cpu --workers 3 --link 25 --every 4")
    assert result.exit_code == 0, result.output
    assert "with 3 scoring workers:" in result.stdout
    assert "3 scoring workers: a step at the largest k takes" in result.stdout
    assert "MB every 4 steps" in result.stdout
    found = json.loads(rholoss_(f"{ADVISE} --quiet --json --workers 3").stdout)
    assert [row["workers"] for row in found["with_workers"]] == [3] * 5
    least = found["training"] + HANDLING  # a step of the trainer, which takes it over from a worker
    assert found["with_workers"][-1]["seconds"] >= least
    slow = json.loads(rholoss_(f"{ADVISE} --quiet --json --workers 3 --link 1e-6").stdout)
    assert slow["with_workers"][-1]["bound"] == "weights"
    assert "with_workers" not in json.loads(rholoss_(f"{ADVISE} --quiet --json").stdout)


def test_advise_refuses_half_an_account(store: Path) -> None:
    said = one_line(rholoss_(f"{ADVISE} --il-seconds 5"))
    assert "The irreducible losses cost 5.0 s; pass --steps" in said
    said = one_line(rholoss_(f"{ADVISE} --il-seconds 5 --il {store}"))
    assert "--il and --il-seconds were both given" in said


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list = []
    page = tmp_path / "report.html"

    def run(*args: object, **options: object) -> types.SimpleNamespace:
        seen.append((args, options))
        return types.SimpleNamespace(page=page)

    opened: list[str] = []
    monkeypatch.setattr(rholoss.demo, "run", run)
    monkeypatch.setattr(demo_command.webbrowser, "open", opened.append)
    assert (
        rholoss_("demo --epochs 2 --seeds 1 --fresh --quiet --no-page --limit 999").exit_code == 0
    )
    options = {"progress": False, "page": False, "fresh": True, "limit": 999}
    assert seen[0] == ((2, 1, Path("rholoss-demo")), options)
    assert opened == []  # no terminal, no browser
    monkeypatch.setattr(demo_command, "has_screen", lambda: True)
    assert rholoss_("demo --no-open").exit_code == 0
    assert opened == []
    assert rholoss_(f"demo --out {tmp_path}").exit_code == 0
    assert opened == [page.as_uri()]
    assert seen[2][0] == (12, 3, tmp_path)


@pytest.mark.parametrize(
    ("line", "taught"),
    [
        (
            "",
            ["An id is the row number", "An epoch is one pass over the candidates", "rholoss demo"],
        ),
        ("--help", ["batch = select(model, batch)"]),
        ("il", ["An id is the row number", "rholoss il check il/mytask --data mytask:train"]),
        (
            "il fit --help",
            ["    rholoss il fit --folds 2 --score mytask:train", "An epoch here is"],
        ),
        ("il score --help", ["rholoss il score --model mytask:small --weights small.safetensors"]),
        ("il check --help", ["rholoss il check il/mytask --data mytask:train"]),
        ("il show --help", ["rholoss il show il/mytask --highest 20"]),
        ("advise --help", ["k is 1 / keep", "--precision bf16 --loader-workers 8"]),
        ("demo --help", ["An epoch is one pass over the candidates", "rholoss demo --epochs 3"]),
        ("methods --help", ["rholoss methods --keep 0.5", "An epoch is one pass"]),
    ],
)
def test_help_teaches(line: str, taught: list[str]) -> None:
    result = rholoss_(line)
    assert result.exit_code == 0
    for words in taught:
        assert words in result.stdout
    assert "\x1b" not in result.output


def test_version() -> None:
    assert rholoss_("--version").stdout == f"rholoss {rholoss.__version__}\n"
