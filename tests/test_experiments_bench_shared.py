"""What runs of the bench share: irreducible losses that are kept, compilations, a GPU's time."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from fixtures_bench import BASE, RECIPE, cells, tiny, write_cifar10

from experiments import __main__ as command
from experiments import records
from experiments.bench import adapters, irreducible, training
from experiments.bench.cell import Cell, Group, Study
from experiments.bench.irreducible import OF_ACCURACY
from experiments.bench.pace import Pace
from experiments.bench.run import Bench, Run, done, run
from experiments.models import MODELS
from experiments.studies import STUDIES
from rholoss.engine import Trainer
from rholoss.engine import step as engine_step
from rholoss.errors import RholossError
from rholoss.il.split import folds

HOLDOUT, CROSS_FIT = "tiny, clean holdout", "tiny, cross-fit"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", tiny)
    return write_cifar10(tmp_path / "data")


@pytest.fixture
def fitted(monkeypatch):
    """Counts the fits from here on."""
    found, fit = [], irreducible.fit

    def counted(*given, **options):
        found.append(given)
        return fit(*given, **options)

    monkeypatch.setattr(irreducible, "fit", counted)
    return found


def made(root):
    return Bench(root, recipe=RECIPE)


def test_the_core_set_is_what_the_proxy_is_least_sure_of(root):
    bench = made(root)
    cell = Cell(method="svp", il="tiny, clean holdout", **BASE)
    train, (member,) = bench.problem(cell).train, bench.members(cell)
    x, _ = train.batch(torch.arange(len(train)))
    with torch.no_grad():
        entropy = torch.special.entr(member.model(x).softmax(1)).sum(1)
    expected = train.ids[entropy.topk(20).indices]
    assert set(bench.core_set(cell).ids.tolist()) == set(expected.tolist())
    assert set(Run(bench, cell).trainer.data.ids.tolist()) == set(expected.tolist())


# Irreducible losses.


def test_a_ladder_is_made_of_models_that_are_kept(root, fitted, monkeypatch, tmp_path):
    monkeypatch.setattr(irreducible, "RUNGS", (1, 2))
    bench = made(root)
    cell = Cell(method="rho", il="tiny ladder, clean holdout", **BASE)
    bench.prepare(cell)
    assert [given[3].epochs for given in fitted] == [1, 2, RECIPE.epochs]
    ladder, about = bench.irreducible(cell), bench.losses(cell).about
    assert len(ladder.tables) == len(about["rungs"]) == 3
    whole = bench.losses(Cell(method="rho", il=HOLDOUT, **BASE))
    assert ladder.tables[-1] is whole.table
    assert about["seconds"] > whole.about["seconds"]
    assert run(made(root), [("s", cell)], tmp_path / "out", progress=False) == 1
    assert len(fitted) == 3
    (line,) = done(tmp_path / "out").values()
    assert line["il_fit"]["rungs"] == about["rungs"]


def test_a_model_that_is_stopped_early_is_another_one(root, fitted):
    bench = made(root)
    early = Cell(method="rho", il="tiny of 1 epochs, clean holdout", **BASE)
    short, whole = bench.losses(early), bench.losses(Cell(method="rho", il=HOLDOUT, **BASE))
    assert [given[3].epochs for given in fitted] == [1, RECIPE.epochs]
    ids = bench.problem(early).train.ids
    assert not torch.equal(short.table.lookup(ids), whole.table.lookup(ids))
    made(root).losses(early)
    assert len(fitted) == 2  # kept under a name of its own
    for wrong in ("tiny of 0 epochs", "tiny of some"):
        with pytest.raises(RholossError, match=r"say 'tiny of 4 epochs'"):
            bench.losses(Cell(method="rho", il=f"{wrong}, clean holdout", **BASE))


def test_weights_are_those_of_the_lowest_loss_or_of_the_highest_accuracy(root, fitted, monkeypatch):
    """Losses 3, 1, 2 and accuracies 0.2, 0.3, 0.5 after three epochs."""
    epochs, chosen = {3.0: 0.2, 1.0: 0.3, 2.0: 0.5}, []
    cells = [Cell(method="rho", il=f"tiny{of}, clean holdout", **BASE) for of in ("", OF_ACCURACY)]
    with monkeypatch.context() as patched:
        for cell in cells:
            losses, accuracies = map(torch.tensor, epochs), iter(epochs.values())
            patched.setattr(irreducible, "losses_of", lambda *_, found=losses, **__: next(found))
            patched.setattr(irreducible, "_accuracy", lambda *_, found=accuracies: next(found))
            [member] = Bench(root, recipe=replace(RECIPE, epochs=3)).members(cell)
            chosen.append((member.epoch, member.loss))
    assert chosen == [(2, 1.0), (3, 2.0)]
    [member] = made(root).members(replace(cells[1], il=f"tiny{OF_ACCURACY}, noisy holdout"))
    assert 1 <= member.epoch <= RECIPE.epochs  # and as it is


def test_one_model_of_the_clean_holdout_serves_all_labels(root, fitted):
    bench = made(root)
    cell = Cell(method="rho", il=HOLDOUT, **BASE)
    wrong = Cell(method="rho", il=HOLDOUT, labels="noise 10 %", **BASE)
    clean, noisy = bench.losses(cell), bench.losses(wrong)
    assert len(fitted) == 1
    problem = bench.problem(wrong)
    ids = problem.train.ids
    changed = problem.corrupted[ids]
    assert torch.equal(clean.table.lookup(ids)[~changed], noisy.table.lookup(ids)[~changed])
    assert not torch.equal(clean.table.lookup(ids)[changed], noisy.table.lookup(ids)[changed])


def test_mixed_up_halves_leave_every_second_point_to_the_model_that_saw_it(root):
    bench = made(root)
    cell = Cell(method="rho", il="tiny, cross-fit mixed up", part="whole", **BASE)
    right = bench.losses(replace(cell, il="tiny, cross-fit"))
    mixed, problem = bench.losses(cell), bench.problem(cell)
    members = bench.members(cell)
    assert [member.epoch for member in members] == right.about["epochs"]  # the same models
    ids, own = problem.train.ids, 0
    for number, member in enumerate(members):
        alone = irreducible.losses_of(member.model, problem.train)
        trained = torch.as_tensor(folds(ids.numpy(), 2) != number)
        scored = torch.isclose(mixed.table.lookup(ids), alone)
        own += int((trained & scored).sum())
    assert 0.4 < own / len(ids) < 0.6


@pytest.mark.parametrize("il", [HOLDOUT, CROSS_FIT])
@pytest.mark.parametrize("weights", [True, False], ids=["weights kept", "losses alone"])
def test_losses_are_found_again_with_and_without_the_weights(root, fitted, il, weights):
    cell = Cell(method="rho", il=il, **BASE)
    first = made(root)
    losses, ids = first.losses(cell), first.problem(cell).train.ids
    num = len(fitted)
    for path in () if weights else first.folder.glob("*.pt"):
        path.unlink()
    again = made(root)
    found = again.losses(cell)
    assert torch.equal(found.table.lookup(ids), losses.table.lookup(ids))
    assert found.about == losses.about
    assert len(fitted) == num
    members = again.members(cell)  # a live model needs them
    assert len(fitted) == (num if weights else 2 * num)
    assert [member.epoch for member in members] == losses.about["epochs"]


def test_the_line_of_a_live_model_is_about_the_one_that_was_fitted_again(root, monkeypatch):
    cell = Cell(method="rho", il="tiny, live", **BASE)
    first, fit = made(root), irreducible.fit
    assert Run(first, cell).il_about["epochs"] != [99]
    for path in first.folder.glob("*.pt"):  # as on another machine, to which the losses alone went
        path.unlink()
    monkeypatch.setattr(irreducible, "fit", lambda *a, **k: replace(fit(*a, **k), epoch=99))
    current = Run(made(root), cell)
    assert current.il_about["epochs"] == [99]


def test_a_core_set_is_found_again_without_the_weights(root, fitted):
    cell = Cell(method="svp", il=HOLDOUT, **BASE)
    first = made(root)
    chosen = first.core_set(cell).ids
    Run(first, cell)
    for path in first.folder.glob("*.pt"):
        path.unlink()
    current = Run(made(root), cell)
    assert torch.equal(current.trainer.data.ids, chosen)
    assert current.il_about is not None
    assert len(fitted) == 1


def test_losses_of_other_points_are_not_taken(root):
    cell = Cell(method="rho", il=HOLDOUT, **BASE)
    first = made(root)
    first.losses(cell)
    (path,) = first.folder.glob("*losses*.npz")
    irreducible.save_arrays(path, loss=torch.zeros(3), ids=torch.arange(3), about="{}")
    with pytest.raises(RholossError, match="holds losses of other points; delete it to fit them"):
        made(root).losses(cell)


@pytest.mark.parametrize("suffix", ["*losses*.npz", "*tiny_3*.pt", "core-set*.npz"])
def test_a_file_that_is_damaged_is_told_with_its_name(root, suffix):
    cell = Cell(method="svp", il=HOLDOUT, **BASE)
    made(root).prepare(cell)
    (path,) = made(root).folder.glob(suffix)
    if path.suffix == ".pt":  # the weights are not read where the losses and the core-set are there
        for other in made(root).folder.glob("*.npz"):
            other.unlink()
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(
            RholossError, match=f"{path} cannot be read: [^.].+ delete it, and what"
        ):
            made(root).prepare(cell)


def test_irreducible_losses_that_there_is_no_room_for_are_used_all_the_same(
    root, fitted, monkeypatch, tmp_path, capsys
):
    """A fit takes minutes: it is not made for each run anew, and takes no run with it."""

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(irreducible.np, "savez", full)
    arms = [Cell(method=method, il=HOLDOUT, **BASE) for method in ("rho", "negative_il", "svp")]
    assert run(made(root), [("s", arm) for arm in arms], tmp_path / "out", progress=False) == 3
    assert len(fitted) == 1
    told = capsys.readouterr().err
    assert told.count("could not be written, and will be made again: [Errno 28] No space") == 3
    assert not list(made(root).folder.iterdir())


# Compilations.


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
def test_runs_share_their_compilations(root, monkeypatch):
    """Each seed and each label set: nothing is compiled anew; a method that measures the same: its score."""
    plain = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda part, **given: plain(part, backend="eager", **given)
    )
    monkeypatch.setattr(training, "COMPILED", ("tiny",))
    for cached in (engine_step.compiled, adapters._compiled_call):
        cached.cache_clear()
    before = torch._dynamo.config.cache_size_limit  # monkeypatch would delete it afterwards
    stats = torch._dynamo.utils.counters["stats"]
    bench = Bench(root, recipe=RECIPE, compile=True)

    def compiles(method, il="none", **given):
        graphs = stats["unique_graphs"]
        current = bench.start(Cell(method=method, il=il, **{**BASE, **given}))
        current.advance()
        del current
        gc.collect()  # what is guarded by a weak reference must not fall with the first run
        return stats["unique_graphs"] - graphs

    try:
        assert (
            torch._dynamo.config.cache_size_limit == 64
        )  # more than the default: many kinds of run
        assert compiles("uniform") > 0
        assert compiles("rho", HOLDOUT) > 0
        assert compiles("grad_norm") > 0
        for method, il in (("loss", "none"), ("rho", "tiny, live"), ("negative_il", HOLDOUT)):
            assert compiles(method, il) == 1
        for seed in (0, 1):
            for labels in ("clean", "noise 10 %"):
                for method in ("uniform", "loss", "grad_norm"):
                    assert compiles(method, seed=seed, labels=labels) == 0
                for il in (HOLDOUT, CROSS_FIT, "tiny, live"):
                    assert compiles("rho", il, seed=seed, labels=labels) == 0
                assert compiles("negative_il", HOLDOUT, seed=seed, labels=labels) == 0
    finally:  # made with another backend than the next one asks for
        for cached in (engine_step.compiled, adapters._compiled_call):
            cached.cache_clear()
        torch._dynamo.reset()
        torch._dynamo.config.cache_size_limit = before


def test_a_run_that_begins_leaves_the_dropout_of_others_alone(root, monkeypatch):
    """On a GPU all graphs draw from one generator, which a new run must not put back to its start."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    Run(made(root), Cell(method="rho", il=HOLDOUT, seed=7, **BASE))
    assert seeded == []


# Time.


def test_what_would_be_cut_off_is_left_for_the_next_time(root, tmp_path, monkeypatch):
    """A long run that does not fit any more makes room for a short one behind it."""
    first, long, short = cells()
    long = Cell(**{**BASE, "seed": 1, "epochs": 50})
    asked, seen = [], []

    def allows(self, cell, steps):
        asked.append(steps)
        return steps < 100

    def look(self, running):
        seen.extend(current.step for current in running)

    monkeypatch.setattr(Pace, "allows", allows)
    monkeypatch.setattr(Pace, "look", look)
    given = [("s", cell) for cell in (first, long, short)]
    assert run(made(root), given, tmp_path, side_by_side=1, limit=1e9, progress=False) == 2
    assert set(done(tmp_path)) == {first.key(), short.key()}
    assert asked[:2] == [15, 250]
    assert seen == [5, 10, 5, 10]  # after each turn, those that are under way still


def test_a_turn_ends_before_the_step_in_which_the_trainer_waits(root, monkeypatch):
    """Whoever waits for a device with work for many steps leaves the other runs without any."""
    current, flush, ends, waits = (
        made(root).start(Cell(**{**BASE, "n_B": 4})),
        Trainer.flush,
        [],
        [],
    )

    def flushed(self):
        waits.append(self.step)
        flush(self)

    monkeypatch.setattr(Trainer, "flush", flushed)
    while not current.finished:
        current.advance()
        ends.append(current.step)
    assert ends == [50, 99, 100, 150]
    assert sorted(set(waits)) == [100, 150]


# Memory.


def test_a_run_that_ended_or_failed_is_let_go_while_others_go_on(root, tmp_path, monkeypatch):
    """It holds memory of the device."""
    first, fails, last = cells()
    last, alive, seen = replace(last, epochs=9), weakref.WeakSet(), []
    advance = Run.advance

    def advances(self, steps=5):
        alive.add(self)
        if self.cell == fails and self.step == 5:
            raise RholossError("The GPU's memory does not hold this.")
        if self.cell == last:
            seen.append({current.cell.seed for current in alive})
        return advance(self, steps)

    monkeypatch.setattr(Run, "advance", advances)
    gc.disable()  # it would come by in its own time
    try:
        with pytest.raises(RholossError, match=r"1 run\(s\) failed"):
            run(
                made(root), [("s", cell) for cell in (first, fails, last)], tmp_path, progress=False
            )
    finally:
        gc.enable()
    assert seen[0] == {0, 1, 2}
    assert seen[-1] == {2}


def test_a_line_that_cannot_be_written_takes_no_run_with_it(root, tmp_path, monkeypatch):
    append = records.append

    def appends(path, record):
        if record["seed"] == 0:
            path = tmp_path / "data" / "cifar-10-batches-bin" / "test_batch.bin" / "runs.jsonl"
        append(path, record)

    monkeypatch.setattr(records, "append", appends)
    with pytest.raises(RholossError, match=r"1 run\(s\) failed(.|\n)*could not be written"):
        run(made(root), [("s", cell) for cell in cells()], tmp_path, side_by_side=3, progress=False)
    assert {line["seed"] for line in done(tmp_path).values()} == {1, 2}


def test_the_command_says_what_there_is_to_do_and_makes_it_once_more(
    root, tmp_path, monkeypatch, capsys
):
    small = Study("small", "A small one", (Group("g", {"uniform": Cell(**BASE)}),), seeds=1)
    monkeypatch.setitem(STUDIES, "small", small)
    monkeypatch.setattr(records, "RESULTS", tmp_path / "committed")
    words = ["run", "--study", "small", "--data", str(root), "--out"]
    command.main([*words, str(tmp_path / "committed")])
    assert "1 runs to do, 0 have their line\n" in capsys.readouterr().out
    command.main([*words, str(tmp_path / "mine")])
    assert "0 runs to do, 1 have their line; `--again --out DIR`" in capsys.readouterr().out
    command.main([*words, str(tmp_path / "mine"), "--again"])
    assert done(tmp_path / "mine").keys() == done(tmp_path / "committed").keys()
    with pytest.raises(SystemExit, match="`--again` needs --out"):
        command.main([*words, str(tmp_path / "committed"), "--again"])
    with pytest.raises(SystemExit):
        command.main([*words, str(tmp_path / "mine"), "--epochs", "0"])
    assert "'0': give a whole number of at least 1" in capsys.readouterr().err
