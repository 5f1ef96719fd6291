"""The bench on a GPU: what is noted inside a captured, compiled step, and runs side by side."""

import pytest
import torch
from fixtures_bench import BASE, RECIPE, tiny, write_cifar10
from torch import nn

from experiments.bench.cell import Cell
from experiments.bench.run import Bench, done, run
from experiments.bench.watch import Watched
from experiments.models import MODELS
from rholoss.engine import Resident, Trainer


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
@pytest.mark.parametrize(
    "compile", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["eager", "compiled"]
)
@pytest.mark.parametrize("method", ["uniform", "loss", "grad_norm_is"])
def test_predictions_are_those_of_the_rows_that_were_trained_on(method, compile):
    torch.manual_seed(0)
    x, y = torch.randn(400, 6), torch.randint(0, 5, (400,))
    model = Watched(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5)), 8)
    # At a rate of zero the weights stay as they are, so each id has one prediction throughout.
    trainer = Trainer(
        model, Resident(x, y), total_steps=230, method=method, candidates=40, keep=0.2,
        learning_rate=0.0, compile=compile,
    )  # fmt: skip
    seen = []
    trainer.on_flush.append(lambda step, index, loss: seen.append((index, model.read(len(index)))))
    trainer.train(230)
    trainer.flush()
    index, predicted = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert len(index) == 230
    with torch.no_grad():
        expected = model.inner(x.to(trainer.data.device)).argmax(1).cpu()
    assert torch.equal(predicted, expected[index])
    assert len(expected.unique()) > 1


@pytest.mark.gpu
def test_runs_side_by_side_learn(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", tiny)
    root = write_cifar10(tmp_path / "data")
    base = {**BASE, "n_b": 20, "epochs": 60, "learning_rate": 1e-2}
    cells = [
        Cell(method="uniform", **base),
        Cell(method="rho", il="tiny, clean holdout", **base),
        Cell(method="rho", il="tiny, live", **base),
        Cell(method="svp", il="tiny, clean holdout", **base),
    ]
    run(Bench(root, recipe=RECIPE), [("gpu", cell) for cell in cells], tmp_path, progress=False)
    lines = done(tmp_path)
    assert len(lines) == 4
    for line in lines.values():
        assert line["error"] is None
        assert line["steps"] == 300
        assert len(line["shares"]["correct"]) == 60
        assert line["device"] != "cpu"
    last = [accuracy for _, accuracy in lines[cells[0].key()]["eval"][-10:]]
    assert sum(last) / 10 > 40  # chance is 10, the CPU has 62


@pytest.mark.gpu
def test_a_live_model_stays_where_it_is(tmp_path, monkeypatch):
    """Its optimizer is rebuilt if devices differ, which would freeze its state inside a graph."""
    monkeypatch.setitem(MODELS, "tiny", tiny)
    root = write_cifar10(tmp_path / "data")
    bench = Bench(root, recipe=RECIPE)
    current = bench.start(Cell(method="rho", il="tiny, live", **{**BASE, "epochs": 40}))
    while not current.finished:
        current.advance()
    optimizer = current.trainer.source.optimizer
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {current.step}


@pytest.mark.gpu
def test_a_look_is_not_waited_for_in_the_turn_that_begins_it(tmp_path, monkeypatch, no_waiting):
    """Whoever waits leaves the other runs without work."""
    monkeypatch.setitem(MODELS, "tiny", tiny)
    bench = Bench(write_cifar10(tmp_path / "data"), recipe=RECIPE)
    current = bench.start(Cell(method="loss", **{**BASE, "epochs": 10}))
    for _ in range(6):  # by then the evaluation is a graph, too
        current.advance()
    assert [step for step, _ in current.evals] == [5, 10, 15, 20, 25]
    current._read_look()
    with no_waiting():
        current.advance()
    assert len(current.evals) == 6
    current._read_look()
    assert [step for step, _ in current.evals][-1] == 35


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
def test_compiled_runs_and_their_looks_are_graphs_side_by_side(tmp_path):
    """What falls back to running eagerly takes ten times as long and says so in a warning alone."""
    bench = Bench(write_cifar10(tmp_path / "data"), recipe=RECIPE)
    base = {**BASE, "model": "small_cnn", "epochs": 20}
    holdout, live = "small_cnn, clean holdout", "small_cnn, live"
    cells = [
        Cell(**base),
        Cell(method="rho", il=holdout, **base),
        Cell(method="rho", il=holdout, schedule="annealed", **base),
        Cell(method="rho", il=live, **base),
        Cell(method="grad_norm_is", **base),
        Cell(method="svp", il=holdout, **base),
    ]
    runs = [bench.start(cell) for cell in cells]
    while not all(current.finished for current in runs):
        for current in (one for one in runs if not one.finished):
            current.advance(20)
    for current in runs:
        kinds = {current.cell.method in ("rho", "grad_norm_is")}  # whether a step scores
        kinds |= {False} if current.cell.schedule == "annealed" else set()
        looks = [look for look in (current.evaluate, current.evaluate_il) if look is not None]
        graphs = [current.trainer.captured[kind] for kind in kinds] + [look._run for look in looks]
        assert [one.why_eager for one in graphs if one.graph is None] == []
        assert current.error is None
        assert len(current.evals) == 20
    assert runs[3].evaluate_il is not None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
def test_runs_that_were_put_aside_go_on_as_graphs(tmp_path):
    root = write_cifar10(tmp_path / "data")
    base = {**BASE, "model": "small_cnn", "epochs": 30}
    cells = [
        Cell(**base),
        Cell(method="rho", il="small_cnn, clean holdout", **base),
        Cell(method="rho", il="small_cnn, live", **base),
    ]
    first = Bench(root, recipe=RECIPE)
    runs = [first.start(cell) for cell in cells]
    for current in runs:
        while current.step < 72:
            current.advance(72 - current.step)
    first.unfinished.put_aside(runs)
    second = Bench(root, recipe=RECIPE)
    assert [second.steps_left(cell) for cell in cells] == [150 - 72] * 3
    assert run(second, [("gpu", cell) for cell in cells], tmp_path / "out", progress=False) == 3
    for line in done(tmp_path / "out").values():
        assert line["resumed"] == 1
        assert [step for step, _ in line["eval"]] == list(range(5, 151, 5))
        assert len(line["shares"]["correct"]) == 30
        assert line["trained"] == 150 * BASE["n_b"]
