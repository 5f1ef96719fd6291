"""The bench: what a cell is, what is counted, and runs from end to end on a tiny CIFAR-10."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_bench import BASE, PER_FILE, RECIPE, cells, tiny, write_cifar10

from experiments import __main__ as command
from experiments import records
from experiments.bench import irreducible
from experiments.bench import run as bench_run
from experiments.bench.adapters import OwnPrecision
from experiments.bench.cell import Cell, Group, Study, only, shortened
from experiments.bench.problems import Problems
from experiments.bench.run import Bench, Run, done, run
from experiments.bench.watch import Shares, Watched
from experiments.models import MODELS
from experiments.studies import STUDIES
from rholoss import annealed
from rholoss.engine import Resident, Trainer
from rholoss.errors import RholossError


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", tiny)
    return write_cifar10(tmp_path / "data")


@pytest.fixture
def bench(root):
    return Bench(root, recipe=RECIPE)


# Cells and studies.


def test_a_cell_is_known_by_its_line():
    cell = Cell("cifar100", "noise 10 %", "rho", "resnet18, clean holdout", seed=3, epochs=7)
    line = json.loads(json.dumps({**cell.__dict__, "steps": 5}))
    assert Cell.of(line) == cell
    assert Cell.of({"dataset": "cifar100", "seed": 1}) == Cell("cifar100", seed=1)
    assert replace(cell, n_b=33).key() != cell.key()


def test_one_seed_of_every_arm_comes_before_the_second_of_any_and_none_twice():
    a, b = Cell(), Cell(method="loss")
    study = Study("s", "t", (Group("1", {"a": a, "b": b}), Group("2", {"again": a})), seeds=2)
    found = [(cell.method, cell.seed) for cell in study.cells()]
    assert found == [("uniform", 0), ("loss", 0), ("uniform", 1), ("loss", 1)]
    assert [cell.seed for cell in study.cells([5])] == [5, 5]


def test_some_cells_only():
    cell = Cell(labels="noise 10 %", n_b=64)
    assert only(cell, ["labels=noise 10 %", "n_b=64"])
    assert not only(cell, ["n_b=32"])
    assert only(cell, ["n_b=32", "n_b=64", "method=uniform"])  # one of several values will do
    assert not only(cell, ["n_b=32", "n_b=64", "method=rho"])
    with pytest.raises(
        RholossError, match=r"`only` has 'size=3'; write FIELD=VALUE with one of data"
    ):
        only(cell, ["size=3"])
    assert shortened(cell, 5).epochs == 5
    assert shortened(cell, 500).epochs == shortened(cell, None).epochs == 150


def test_every_study_names_what_exists():
    names = set()
    for name, study in STUDIES.items():
        assert name == study.name
        for cell in study.cells():
            names |= {cell.model}
            assert 0 < cell.n_b <= cell.n_B
            assert cell.il == "none" or irreducible.parse(cell.il)[0].split(" ")[0] in MODELS
            assert cell.il != "none" or cell.method not in ("rho", "negative_il", "svp")
            assert "cross-fit" in cell.il or cell.il == "none" or cell.part == "half"
        for group in study.groups:
            assert set(group.paper) <= set(group.arms), (name, group.title)
    assert names <= set(MODELS)


def test_figure_8_compares_at_equal_steps():
    steps = [cell.epochs * (25_000 // cell.n_B) for cell in STUDIES["fig8"].cells()]
    assert min(steps) > 0.99 * max(steps)


# What is picked.


def test_a_watched_model_notes_what_it_predicts_just_before_it_learns():
    torch.manual_seed(0)
    x, y = torch.randn(60, 5), torch.randint(0, 3, (60,))
    data = Resident(x, y, device="cpu")
    model = Watched(torch.nn.Linear(5, 3), 6)
    trainer = Trainer(model, data, total_steps=8, method="loss", candidates=30, keep=0.2)
    seen, expected = [], []
    trainer.on_flush.append(lambda step, index, loss: seen.append((index, model.read(len(index)))))
    for _ in range(8):  # flushed after each step, so the weights before it are known
        weights = [p.detach().clone() for p in model.inner.parameters()]
        trainer.train(1)
        trainer.flush()
        index = seen[-1][0][0]
        expected.append((x[index] @ weights[0].T + weights[1]).argmax(1))
        assert torch.equal(seen[-1][1][0], expected[-1])
    assert int(model.row) == 0
    assert len({tuple(e.tolist()) for e in expected}) > 1


def test_scoring_and_looking_are_not_noted():
    model = Watched(torch.nn.Linear(5, 3), 4)
    with torch.no_grad():
        model(torch.randn(9, 5))
    assert int(model.row) == 0
    assert model.state_dict().keys() == {"inner.weight", "inner.bias"}


def test_shares_count_every_step_and_go_by_epoch():
    class Problem:
        targets = torch.tensor([0, 1, 2, 0, 1])
        corrupted = torch.tensor([True, False, False, False, True])
        low_relevance = None

    model = Watched(torch.nn.Linear(1, 3), 2)
    shares = Shares(model, Problem, epochs=3, steps_per_epoch=2)
    model.predictions[:3] = torch.tensor([[0, 0], [0, 0], [1, 0]])
    shares(3, torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.zeros(3))
    # Epoch 0: picks 0, 1, 2, 3, of which 0 is corrupted, and 0 and 3 are right. Epoch 1: 4 and 0.
    assert shares.result() == {"corrupted": [0.25, 1.0], "correct": [0.5, 1.0]}


# Runs.

KINDS = [
    ("uniform", "none", "clean"),
    ("grad_norm_is", "none", "clean"),
    ("loss", "none", "noise 10 %"),
    ("rho", "tiny, clean holdout", "noise 10 %"),
    ("rho", "tiny, noisy holdout", "noise 10 %"),
    ("rho", "tiny, cross-fit", "noise 10 %"),
    ("rho", "tiny, cross-fit mixed up", "clean"),
    ("rho", "tiny, live", "clean"),
    ("rho", "tiny, live in train mode", "clean"),
    ("negative_il", "tiny, clean holdout", "clean"),
    ("svp", "tiny, clean holdout", "clean"),
]


@pytest.mark.parametrize(("method", "il", "labels"), KINDS)
def test_a_run_from_end_to_end(bench, tmp_path, method, il, labels):
    cell = Cell(labels=labels, method=method, il=il, **BASE)
    assert run(bench, [("try", cell)], tmp_path / "out", progress=False) == 1
    (line,) = records.read(tmp_path / "out" / "try" / "runs.jsonl")
    assert Cell.of(line) == cell
    assert line["steps"] == 15  # 200 of 400 rows, 40 candidates: 5 steps an epoch
    assert [step for step, _ in line["eval"]] == [5, 10, 15]
    assert len(line["per_class"]) == 10
    assert line["trained"] == 60
    scores = method in ("grad_norm_is", "loss", "rho")
    assert line["scored"] == (600 if scores else 0)
    assert line["error"] is None
    expected = {"correct"} | ({"corrupted"} if labels != "clean" else set())
    assert set(line["shares"]) == expected
    assert all(len(values) == 3 for values in line["shares"].values())
    assert (line["il_fit"] is None) == (il == "none")
    assert len(line["il_eval"]) == (3 if "live" in il else 0)
    assert {"device", "torch", "date", "command"} <= set(line)


def test_a_run_trains_as_its_cell_says(bench):
    given = {
        "learning_rate": 0.5,
        "weight_decay": 0.2,
        "batch_norm": "eval",
        "schedule": "annealed",
    }
    cell = Cell(method="rho", il="tiny, clean holdout", seed=5, **BASE, **given)
    current = Run(bench, cell)
    trainer = current.trainer
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.2]
    assert set(trainer.body.lr_T.tolist()) == {0.5}
    assert trainer.body.scorer.batch_norm == "eval"
    assert trainer.schedule == annealed(15)
    assert (trainer.candidates, trainer.k, trainer.seed) == (40, 4, 5)
    torch.manual_seed(5)
    assert torch.equal(current.watched.inner[0].weight, tiny(10)[0].weight)


def test_runs_of_a_seed_start_alike_and_those_that_score_see_the_same_candidates(bench):
    base = Cell(seed=5, **BASE)
    loss, rho = replace(base, method="loss"), replace(base, method="rho", il="tiny, clean holdout")
    runs = [Run(bench, cell) for cell in (base, loss, rho)]
    for weights in zip(*(each.watched.parameters() for each in runs), strict=True):
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[0], weights[2])
    for _ in range(7):  # into the second epoch
        orders = [
            (each.advance(1), each.trainer.body.order.state_dict()["rows"]) for each in runs[1:]
        ]
        assert torch.equal(orders[0][1], orders[1][1])


def test_side_by_side_makes_the_same_runs_as_one_after_the_other(root, tmp_path):
    lines = []
    for number, side_by_side in enumerate((1, 3)):
        out = tmp_path / str(number)
        both = [("s", cell) for cell in cells()]
        run(Bench(root, recipe=RECIPE), both, out, side_by_side=side_by_side, progress=False)
        lines.append({key: (line["eval"], line["shares"]) for key, line in done(out).items()})
    assert lines[0] == lines[1]
    assert len(lines[0]) == 3


def test_what_has_a_line_in_any_study_is_not_run_again(bench, tmp_path):
    first, second, third = cells()
    assert run(bench, [("a", first), ("c", first)], tmp_path, progress=False) == 1
    assert run(bench, [("b", first), ("b", second)], tmp_path, progress=False) == 1
    assert run(bench, [("b", third)], tmp_path, seconds=-1.0, progress=False) == 0
    elsewhere = tmp_path / "elsewhere"
    assert run(bench, [("b", second)], elsewhere, known=[tmp_path], progress=False) == 0
    assert len(done(tmp_path)) == 2


def test_a_killed_process_is_gone_on_with(root, tmp_path):
    out = tmp_path / "out"
    path = out / "kill" / "runs.jsonl"
    script = Path(__file__).with_name("fixtures_bench.py")
    where = f"{script.parents[1]}{os.pathsep}{script.parent}"
    process = subprocess.Popen(
        [sys.executable, str(script), str(root), str(out)],
        env={**os.environ, "PYTHONPATH": where},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not done(out) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(done(out)) == 1  # the second was under way
    kept = path.read_text()
    finished = run(Bench(root, recipe=RECIPE), [("kill", c) for c in cells()], out, progress=False)
    assert finished == 2
    assert path.read_text().startswith(kept)
    assert set(done(out)) == {cell.key() for cell in cells()}


def test_a_run_that_fails_takes_no_other_with_it(bench, tmp_path, monkeypatch, capsys):
    first, second, third = cells()
    start, train = bench.start, Trainer.train

    def starts(cell):
        if cell == first:
            raise FileNotFoundError("no such data")
        return start(cell)

    def trains(self, steps):  # an error of the engine that says nothing about the method
        if self.seed == third.seed and self.step == 5:
            raise RholossError("The GPU's memory does not hold this.")
        train(self, steps)

    monkeypatch.setattr(bench, "start", starts)
    monkeypatch.setattr(Trainer, "train", trains)
    told = r"2 run\(s\) failed and have no line(.|\n)*no such data(.|\n)*does not hold this"
    with pytest.raises(RholossError, match=told):
        run(bench, [("try", cell) for cell in cells()], tmp_path, progress=False)
    assert set(done(tmp_path)) == {second.key()}
    printed = capsys.readouterr().err
    assert "try: no such data" in printed
    assert "Traceback" not in printed  # both say what to do


def test_where_a_fault_arose_is_printed(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "start", lambda cell: {}["nowhere"])
    with pytest.raises(RholossError, match="run\\(s\\) failed"):
        run(bench, [("try", cells()[0])], tmp_path, progress=False)
    assert "KeyError: 'nowhere'" in capsys.readouterr().err


def test_a_run_that_diverges_is_a_result_too(bench, tmp_path):
    cell = Cell(**{**BASE, "learning_rate": 1e30})
    assert run(bench, [("try", cell)], tmp_path, progress=False) == 1
    (line,) = done(tmp_path).values()
    assert "not finite" in line["error"]


# Irreducible losses.


def test_a_model_keeps_the_weights_of_its_lowest_loss(bench):
    problem = bench.problem(Cell(**BASE))
    recipe = irreducible.Recipe(epochs=6, batch_size=40, learning_rate=0.3, patience=2)
    member = irreducible.fit(lambda: tiny(10), problem.holdout, problem.train, recipe)
    loss = float(irreducible.losses_of(member.model, problem.train).mean())
    assert loss == pytest.approx(member.loss, rel=1e-5)
    assert 1 <= member.epoch <= 6


def test_a_fit_stops_when_its_loss_falls_no_more(bench, monkeypatch):
    problem, told = bench.problem(Cell(**BASE)), iter([3.0, 2.0, 4.0, 5.0, 1.0])
    monkeypatch.setattr(irreducible, "losses_of", lambda *_, **__: torch.tensor([next(told)]))
    recipe = irreducible.Recipe(epochs=5, batch_size=40, patience=2)
    member = irreducible.fit(lambda: tiny(10), problem.holdout, problem.train, recipe)
    assert (member.epoch, member.loss) == (2, 2.0)
    assert list(told) == [1.0]  # which was never looked at


def test_cross_fitted_losses_come_from_the_model_that_did_not_see_the_point(bench, monkeypatch):
    seen = []
    fit = irreducible.fit

    def watched(make, data, judge, *rest, **options):
        seen.append((set(data.ids.tolist()), set(judge.ids.tolist())))
        return fit(make, data, judge, *rest, **options)

    monkeypatch.setattr(irreducible, "fit", watched)
    cell = Cell(method="rho", il="tiny, cross-fit", part="whole", **BASE)
    losses, problem = bench.losses(cell), bench.problem(cell)
    assert seen[0] == seen[1][::-1]
    assert seen[0][0].isdisjoint(seen[0][1])
    assert seen[0][0] | seen[0][1] == set(range(5 * PER_FILE))
    for member, (_, scored) in zip(bench.members(cell), seen[:2], strict=True):
        ids = torch.tensor(sorted(scored))
        rows = torch.isin(problem.train.ids, ids).nonzero()[:, 0]
        alone = irreducible.losses_of(member.model, problem.train.take(rows))
        assert torch.allclose(losses.table.lookup(problem.train.ids[rows]), alone)


def test_unknown_irreducible_losses_are_told(bench):
    with pytest.raises(RholossError, match=r"`il` is 'tiny'; use 'none' or '<model>, <from>'"):
        bench.losses(Cell(method="rho", il="tiny", **BASE))
    with pytest.raises(
        RholossError, match="with part='whole' nothing is held out; use 'cross-fit'"
    ):
        bench.losses(Cell(method="rho", il="tiny, clean holdout", part="whole", **BASE))
    with pytest.raises(RholossError, match="'svp' needs one model: its proxy"):
        bench.core_set(Cell(method="svp", il="tiny, cross-fit", **BASE))


def test_models_agree_when_compiled_evaluation_is_shared(bench):
    model = tiny(10).eval()
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(OwnPrecision(model, low=False)(x), model(x))
    low = OwnPrecision(model, low=True)(x)
    assert low.dtype == torch.float32
    assert torch.allclose(low, model(x), atol=0.05)


# The command.


def test_the_commands(root, tmp_path, monkeypatch, capsys):
    small = Study("small", "A small one", (Group("g", {"uniform": Cell(**BASE)}),), seeds=2)
    monkeypatch.setitem(STUDIES, "small", small)
    monkeypatch.setattr(bench_run, "Recipe", lambda: RECIPE)
    places = ["--study", "small", "--data", str(root), "--out", str(tmp_path)]
    command.main(["list", *places])
    assert "0 of   2 runs  A small one" in capsys.readouterr().out
    command.main(["run", *places, "--seeds", "1", "--precision", "bf16"])
    command.main(["list", *places])
    assert "1 of   2 runs  A small one" in capsys.readouterr().out
    (line,) = done(tmp_path).values()
    assert (line["seed"], line["precision"]) == (1, "bf16")
    with pytest.raises(SystemExit, match="needs --study"):
        command.main(["run"])
    with pytest.raises(
        SystemExit, match=r"No run of small has all of \['method=rho'\]; .*'uniform'"
    ):
        command.main(["run", *places, "--only", "method=rho"])


def test_the_list_names_every_command(tmp_path, capsys):
    command.main(["list", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    own = [p.parent.name for p in Path(command.__file__).parent.glob("*/__main__.py")]
    assert len(own) >= 4
    for name in own:
        assert f"python -m experiments.{name}" in told


def test_the_paper_s_split(root):
    problem = Problems(root).get("cifar10", "clean", "half")
    assert problem.train.ids.tolist() == list(range(0, 5 * PER_FILE, 2))
    assert problem.holdout.ids.tolist() == list(range(1, 5 * PER_FILE, 2))
    assert np.array_equal(problem.targets[problem.train.ids], problem.train.targets)
