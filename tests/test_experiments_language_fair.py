"""The fair protocol of the language studies: the engine on texts, and seconds that become steps."""

import math
from dataclasses import replace

import pytest
import torch
from fixtures_language import write_bundle

from experiments import processes, records
from experiments.language import cells, tasks
from rholoss.engine import Remembered
from rholoss.engine.overlap import OverlappedStep

pytest.importorskip("transformers", reason="pip install 'rholoss[hf]'")

from experiments.language import __main__ as command
from experiments.language import fair, train

COLA = tasks.TASKS["cola"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def runs(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(fair, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(fair, "TIMED_STEPS", 2)
    bench = train.Bench(bundle / "model", bundle, tmp_path / "il", torch.device("cpu"))
    return fair.Fair(bench)


def cell(method, **more):
    return cells.Cell("cola", method, 0, "small", 1.0, **more)


def test_the_classifier_masks_padding_as_the_encoder_does(runs):
    half = runs.bench.texts(COLA)[0]
    model = fair.Classifier(runs.bench.make(COLA)).eval()
    batch = half.rows(torch.arange(20))
    batch.pop("labels")
    with torch.no_grad():
        expected, found = model.encoder(**batch).logits, model(half.tokens[:20])
        other = model(half.tokens[:20].masked_fill(half.tokens[:20] == 0, 5))  # a word
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, other, atol=1e-6)


def test_irreducible_losses_are_fitted_once_and_kept(runs, monkeypatch):
    first = runs.irreducible(COLA, "half")
    assert first.lookup(range(650)).isfinite().all()
    assert first.seconds > 0
    monkeypatch.setattr(fair, "fit_resident", None)  # not called again
    again = fair.Fair(runs.bench).irreducible(COLA, "half")
    assert torch.equal(again.lookup(range(650)), first.lookup(range(650)))
    assert again.seconds == first.seconds
    with pytest.raises(TypeError):  # another recipe is another fit
        fair.Fair(runs.bench).irreducible(replace(COLA, il_epochs=4), "half")


def test_batches_of_the_fit_grow_where_rows_are_many():
    assert [fair.il_batch(rows) for rows in (650, 6400, 6401, 33_674)] == [32, 32, 64, 256]


def test_arms_train_on_what_they_should(runs):
    def chosen(method, steps=10):
        trainer, seen = runs.trainer(cell(method), steps), []
        trainer.on_flush.append(lambda step, index, losses: seen.append(index))
        trainer.train(steps)
        return trainer, torch.cat(seen)

    trainer, ids = chosen("random_half", 20)
    assert trainer.ledger.scored == 0
    assert len(ids.unique()) == 325  # in two passes, each without another few
    trainer, ids = chosen("rho")
    assert trainer.ledger.scored == 10 * 320
    trainer, ids = chosen("annealed")
    assert trainer.ledger.scored == 3 * 320
    loss = runs.irreducible(COLA, "half").lookup(range(650))
    assert loss[ids[3:].flatten()].max() <= loss.quantile(0.9)
    rates = trainer.body.lr_T
    trainer, ids = chosen("remembered")
    assert trainer.ledger.scored == 0
    assert trainer.rows.plan == Remembered(math.log(2), measured=False, filter_from=0.3, again=0)
    trainer, ids = chosen("measured")
    assert (trainer.ledger.scored, trainer.rows.plan) == (0, Remembered(math.log(2)))
    trainer, ids = chosen("annealed_fresh")
    assert (trainer.ledger.scored, trainer.rows.plan) == (3 * 320, Remembered(math.log(2)))
    assert not isinstance(trainer.body, OverlappedStep)
    assert loss[ids[3:].flatten()].max() > loss.quantile(
        0.9
    )  # what is left out is not told by these
    trainer, ids = chosen("filtered")
    assert trainer.ledger.scored == 0
    assert loss[ids.flatten()].max() <= loss.quantile(0.9)
    assert rates.argmax() == 0  # a tenth of ten steps
    assert rates[0] == pytest.approx(COLA.lr)
    assert rates[-1] == pytest.approx(COLA.lr / 9)


def test_arms_on_all_rows_hold_nothing_out(runs):
    loss = runs.irreducible(COLA, "all").lookup(range(1300))
    assert loss.isfinite().all()
    assert not torch.equal(loss[:650], runs.irreducible(COLA, "half").lookup(range(650)))
    train, holdout, _ = runs.bench.texts(COLA)
    both = runs.texts(COLA, "all")
    assert torch.equal(both.tokens[650:], holdout.tokens)
    assert torch.equal(both.labels[:650], train.labels)
    for method in ("uniform", "annealed"):
        trainer = runs.trainer(cell(method, rows="all"), 10)
        assert len(trainer.data) == 1300
        assert torch.equal(trainer.data.targets, both.labels)
    runs.pace = {"cola uniform": 0.01, "cola rho": 0.03}
    record = runs.run(cells.Cell("cola", "uniform", 0, "small", 0.2, rows="all"))
    assert (record["steps"], record["trained"]) == (20, 640)


def test_seconds_become_steps(runs, monkeypatch):
    pace = {"uniform": 0.01, "rho": 0.03, "remembered": 0.0125, "annealed_fresh": 0.04}
    runs.pace = {"sst2 uniform": 5.0} | {f"cola {kind}": value for kind, value in pace.items()}
    runs.irreducible(COLA, "half").meta["seconds"] = 0.4
    trained = []
    monkeypatch.setattr(fair, "evaluate", lambda model, test, device: (0.5, 0.25))
    make = runs.trainer
    monkeypatch.setattr(
        runs, "trainer", lambda c, steps: trained.append((c.method, steps)) or make(c, 20)
    )
    monkeypatch.setattr(fair.Trainer, "train", lambda self, steps: None)
    arms = [cell("uniform"), cell("random_half"), cell("rho"), cell("rho", il_counts=True)]
    arms += [cell("annealed"), cell("filtered", il_counts=True), cell("remembered")]
    for arm in [*arms, cell("measured"), cell("annealed_fresh")]:
        record = runs.run(arm)
        assert record["step_ms"] == {name: 1000 * value for name, value in pace.items()}
    assert trained == [
        ("uniform", 100), ("random_half", 100), ("rho", 33), ("rho", 20), ("annealed", 62),
        ("filtered", 60), ("remembered", 80), ("measured", 80), ("annealed_fresh", 48),
    ]  # fmt: skip


def test_a_budget_that_the_irreducible_losses_use_up_leaves_no_steps(runs, monkeypatch):
    runs.pace = {"cola uniform": 0.01, "cola rho": 0.03}
    runs.irreducible(COLA, "half").meta["seconds"] = 1.5
    record = runs.run(cell("rho", il_counts=True))
    assert (record["steps"], record["curve"]) == (0, [])
    mean = float(runs.irreducible(COLA, "half").lookup(range(650)).mean())
    assert record["il_loss"] == pytest.approx(mean, abs=1e-4)


def in_turn(events):
    """A process that is run here, at once."""

    class InTurn:
        def __init__(self, words, process_group):
            events.append("process")
            self.args, self.code = words, 0
            try:
                command.main(words[3:])
            except SystemExit:
                self.code = 1

        def wait(self):
            return self.code

    return InTurn


def test_fair_runs_go_side_by_side_after_their_steps_were_timed_alone(
    runs, bundle, tmp_path, monkeypatch
):
    events, measure = [], fair.Fair._seconds

    def timed(self, task, method):
        if f"{task} {method}" not in self.pace:
            events.append(method)
        return measure(self, task, method)

    monkeypatch.setattr(command, "RESULTS", tmp_path / "committed.jsonl")
    monkeypatch.setattr(fair.Fair, "_seconds", timed)
    monkeypatch.setattr(processes.subprocess, "Popen", in_turn(events))
    out, store = tmp_path / "runs.jsonl", tmp_path / "il"
    words = f"fair --data {bundle} --store {store} --out {out} --seeds 0 --tasks cola"
    command.main([*words.split(), "--budget", "0.3", "--side-by-side", "2"])
    assert events == ["uniform", "rho", "remembered", "annealed_fresh", "process", "process"]
    lines = list(records.read(out))
    assert len(lines) == 19
    for line in lines:
        counted = line["il_seconds"] if line["cell"]["il_counts"] else 0.0
        assert line["steps"] == max(0, int((0.3 - counted) / line["seconds_a_step"]))
        if line["steps"]:
            assert line["curve"][-1][0] == line["steps"]
            assert line["trained"] == 32 * line["steps"]
    command.main(["report", "--out", str(out)])
    page = (out.parent / "README.md").read_text()
    assert "Equal wall clock" in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize("shared", [[], ["--side-by-side", "2"]], ids=["one", "two"])
def test_a_fair_run_that_fails_takes_no_other_with_it(
    runs, bundle, tmp_path, monkeypatch, capsys, shared
):
    run, timed, out = fair.Fair.run, fair.Fair._seconds, tmp_path / "runs.jsonl"

    def failing(call, name, words):
        def called(self, *given):
            if name in (given[-1], getattr(given[-1], "method", "")):
                raise RuntimeError(words)
            return call(self, *given)

        return called

    monkeypatch.setattr(command, "RESULTS", tmp_path / "committed.jsonl")
    monkeypatch.setattr(fair.Fair, "run", failing(run, "random_half", "not trained"))
    monkeypatch.setattr(fair.Fair, "_seconds", failing(timed, "remembered", "not timed"))
    monkeypatch.setattr(processes.subprocess, "Popen", in_turn([]))
    words = ["fair", "--data", str(bundle), "--store", str(tmp_path / "il"), "--out", str(out)]
    words += ["--seeds", "0", "--tasks", "cola", "--budget", "0.3", *shared]
    words += ["--methods", "remembered", "random_half", "uniform"]
    with pytest.raises(SystemExit, match=r"failed|could not be prepared"):
        command.main(words)
    told = capsys.readouterr().err
    assert "RuntimeError: not trained" in told
    assert "RuntimeError: not timed" in told
    assert {line["cell"]["method"] for line in records.read(out)} == {"uniform"}
