"""The selector over many steps: arguments, schedules, the switch, the log, its state."""

import io
import itertools
import json

import numpy as np
import pytest
import torch
from test_selector import Logits, worked
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss.errors import RholossError, UnmeasuredLossError
from rholoss.selector import Selector


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(select, toy, model, steps, start=0):
    return [select(model, toy.batch(step % 10))[0].tolist() for step in range(start, start + steps)]


# Arguments.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"Pass `keep` \(a share\) or `k` \(a number\); got keep=None and k=None"),
        ({"keep": 0.1, "k": 3}, "got keep=0.1 and k=3"),
        ({"keep": 0.0}, r"`keep` must be in \(0, 1\], but is 0.0; the paper has 0.1"),
        ({"keep": 1.5}, r"`keep` must be in \(0, 1\], but is 1.5"),
        ({"keep": float("nan")}, r"`keep` must be in \(0, 1\], but is nan"),
        ({"k": 0}, "`k` must be a whole number of at least 1, but is 0"),
        ({"k": 3.5}, "`k` must be a whole number of at least 1, but is 3.5"),
        ({"keep": "0.1"}, r"`keep` must be in \(0, 1\], but is '0.1'"),
        (
            {"keep": 0.5, "loss": torch.nn.CrossEntropyLoss(reduction="none")},
            "`loss` is CrossEntropy",
        ),
        ({"k": 3, "seed": None}, "`seed` must be a whole number, but is None; the default is 0"),
        ({"k": 3, "flush_every": 0}, "`flush_every` must be in 1..100, but is 0"),
        ({"k": 3, "flush_every": 101}, "`flush_every` must be in 1..100, but is 101"),
        (
            {"k": 3, "method": "magic"},
            "`method` is 'magic', which is not known; choose one of uniform",
        ),
        ({"k": 3, "irreducible": "il"}, "`irreducible` is a str; pass what `fit_irreducible`"),
        ({"k": 3, "flush_every": 2.5}, "`flush_every` must be in 1..100, but is 2.5"),
        ({"k": 3, "index": "id"}, "`index` is 'id'; pass a function from a batch to its ids"),
        ({"k": 3, "shared": "batch[1]"}, r"pass a list of paths, shared=\['batch\[1\]'\]"),
        ({"k": 3, "on_scores": print}, "`on_scores` is <.*>; pass a list of functions"),
        ({"k": 3, "auto_off": 0}, "`auto_off` must be above 0, but is 0"),
        ({"k": 3, "il_runs": 0}, "`il_runs` must be at least 1, but is 0"),
        (
            {"k": 3, "schedule": rho.annealed(10), "irreducible": lambda ids: ids},
            "`drop`=0.05 needs a table of irreducible losses; pass `irreducible=` what",
        ),
    ],
)
def test_arguments_that_cannot_be_used(options, message):
    with pytest.raises(RholossError, match=message):
        Selector(**options)


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        (
            {"method": "loss", "k": 7},
            6,
            "`k`=7 is larger than the candidate batch of 6. Make the loader",
        ),
        (
            {"method": "loss", "k": 1},
            0,
            "The candidate batch is empty; check the data set and the sampler",
        ),
        (
            {"method": "rho", "k": 1},
            6,
            "'rho' needs irreducible losses; pass `irreducible=`, or join them in the loader with",
        ),
        ({"method": "loss", "k": 1, "loss": lambda m, b: m(b[0]).mean()}, 6, "It was reduced"),
    ],
)
def test_batches_that_cannot_be_used(fixture_a, options, rows, message):
    select = Selector(**options)
    ids, x, y = worked(fixture_a)
    for schedule in (rho.constant(), rho.warm_up(3)):  # told at the first call, scored or not
        select.schedule = schedule
        with pytest.raises(RholossError, match=message):
            select(Logits(), (ids[:rows], x[:rows], y[:rows]))
        assert select.step == select.ledger.steps == 0


# Schedules.


def test_warm_up_is_uniform_and_looks_ahead_at_the_first_call(toy):
    model = toy.model()
    before = buffers(model)
    select = Selector("rho", irreducible=toy.il, keep=0.1, schedule=rho.warm_up(2))
    uniform = Selector("uniform", keep=0.1)
    for step in range(2):
        chosen = select(model, toy.batch(step))[0]
        assert torch.equal(chosen, uniform(model, toy.batch(step))[0])
        assert equal(before, buffers(model))
    assert select.selection.score is None
    assert select.ledger.scored == 0
    assert select.ledger.flops_per_example == 2 * (20 * 32 + 32 * 5)
    select(model, toy.batch(2))
    assert select.ledger.scored == 320
    assert not equal(before, buffers(model))
    plain = Selector("rho", irreducible=toy.il, keep=0.1)
    assert torch.equal(plain(toy.model(), toy.batch(2))[0], select.selection.index)


def test_warm_up_finds_unmeasured_losses_at_the_first_call(toy):
    il = toy.il.clone()
    il[5] = torch.nan
    select = Selector("rho", irreducible=il, keep=0.1, schedule=rho.warm_up(100))
    with pytest.raises(UnmeasuredLossError, match=r"ids 5\."):
        select(toy.model(), toy.batch(0))


@pytest.mark.parametrize(
    ("schedule", "scored"),
    [
        (rho.constant(), [1, 1, 1, 1, 1, 1]),
        (rho.warm_up(2), [0, 0, 1, 1, 1, 1]),
        (rho.window(1, 4), [0, 1, 1, 1, 0, 0]),
        (rho.annealed(10, switch=0.3), [1, 1, 1, 0, 0, 0]),
    ],
)
def test_what_is_scored_when(toy, schedule, scored):
    select, model = Selector("rho", irreducible=toy.il, keep=0.1, schedule=schedule), toy.model()
    seen = []
    for step in range(6):
        before = select.ledger.scored
        assert len(select(model, toy.batch(step))[0]) == 32
        assert (select.selection.score is not None) == bool(scored[step])
        seen.append((select.ledger.scored - before) // 320)
    assert seen == scored


def test_annealing_drops_the_points_of_highest_irreducible_loss(toy):
    schedule = rho.annealed(10, switch=0.1, drop=0.25)
    select = Selector("rho", irreducible=toy.il, keep=0.5, schedule=schedule)
    model = toy.model()
    select(model, toy.batch(0))
    limit = toy.il.quantile(0.75)
    for step in range(1, 5):
        index, _, _ = select(model, toy.batch(step))
        assert len(index) == 160
        assert (toy.il[index] <= limit).all()


# The automatic switch.


class Slow(nn.Module):
    """Takes five seconds, by a clock of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.now, self.passes = inner, 0.0, 0

    def forward(self, x):
        self.now += 5.0
        self.passes += 1
        return self.inner(x)


def test_auto_off_stops_scoring_and_says_so_once(toy, monkeypatch):
    model = Slow(toy.model())
    monkeypatch.setattr("rholoss.ledger.time.perf_counter", lambda: model.now)
    select = Selector("rho", irreducible=toy.il, keep=0.1, auto_off=np.float64(2), flush_every=4)
    for step in range(3):
        select(model, toy.batch(step))
        model.now += 1.0
    with pytest.warns(
        UserWarning, match=r"auto_off: selecting cost 5.00x .* 2.00x allowed; uniform from step 4"
    ):
        select(model, toy.batch(3))
    assert select.off
    assert model.passes == 4
    run(select, toy, model, 6, start=4)
    assert model.passes == 4
    assert select.ledger.scored == 4 * 320
    assert select.ledger.notes == [n for n in str(select.ledger).split(" | ") if "auto_off" in n]
    assert len(select.ledger.notes) == 1
    resumed = Selector("rho", irreducible=toy.il, keep=0.1, auto_off=2.0)
    resumed.load_state_dict(select.state_dict())
    assert resumed.off is True  # no number of numpy's, which `torch.load` does not read
    assert resumed.ledger.notes == select.ledger.notes


def test_auto_off_leaves_on_what_is_cheap_enough(toy, monkeypatch):
    model = Slow(toy.model())
    monkeypatch.setattr("rholoss.ledger.time.perf_counter", lambda: model.now)
    select = Selector("rho", irreducible=toy.il, keep=0.1, auto_off=2.0, flush_every=2)
    for step in range(6):
        select(model, toy.batch(step))
        model.now += 3.0
    assert not select.off
    assert select.ledger.scored == 6 * 320


# The log.


def test_the_log_is_written_every_so_many_steps(fixture_a, tmp_path):
    path = tmp_path / "chosen.jsonl"
    select = Selector("rho", irreducible=fixture_a.il, k=2, log=path, flush_every=2)
    for step in range(3):
        select(Logits(), worked(fixture_a))
        assert path.exists() == (step > 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"type": "step", "step": s, "index": [3, 4], "score": [3.217736, 0.191311]} for s in (0, 1)
    ]
    select.mark(0.75)  # is in the log at once: a run may end here
    last, mark = (json.loads(line) for line in path.read_text().splitlines()[2:])
    assert (last["step"], mark["type"], mark["step"], mark["value"]) == (2, "mark", 3, 0.75)
    assert mark["seconds"] == select.ledger.marks[0][1] > 0


def test_uniform_is_logged_without_scores(fixture_a, tmp_path):
    select = Selector("uniform", k=2, log=tmp_path / "log", flush_every=1)
    index, _, _ = select(Logits(), worked(fixture_a))
    line = json.loads((tmp_path / "log").read_text())
    assert line == {"type": "step", "step": 0, "index": index.tolist()}


# State.


@pytest.mark.parametrize(
    "options", [{"keep": 0.1, "seed": 5}, {"k": np.int64(32), "seed": np.int64(5)}]
)
def test_state_needs_no_pickle_and_gives_the_same_choices(toy, options):
    first = Selector("rho", irreducible=toy.il, **options)
    first.batch_sampler(range(960), np.int64(320), seed=np.int64(3))
    model = toy.model()
    run(first, toy, model, 3)
    file = io.BytesIO()
    torch.save({"select": first.state_dict(), "model": model.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second, other = Selector("rho", irreducible=toy.il, **{**options, "seed": 0}), toy.model()
    other.load_state_dict(state["model"])
    second.load_state_dict(state["select"])
    assert (second.step, second.seed) == (3, 5)
    assert second.ledger.candidates == 960
    assert run(first, toy, model, 3, start=3) == run(second, toy, other, 3, start=3)
    assert second.ledger.candidates == 1920


@pytest.mark.parametrize("method", ["uniform", "grad_norm_is", "bald", "boltzmann"])
@pytest.mark.parametrize("schedule", [rho.constant(), rho.warm_up(100)])
def test_random_choices_are_repeated_by_a_resumed_run(toy, method, schedule):
    """Also within a phase that scores nothing, where the first call looks ahead."""
    method = rho.boltzmann("loss") if method == "boltzmann" else method
    first, model = Selector(method, keep=0.1, schedule=schedule, draws=2), toy.model()

    def three(select, start):
        chosen = []
        for step in range(start, start + 3):
            chosen.append(select(model, toy.batch(step))[0].tolist())
            _ = select.weights
        return chosen

    three(first, 0)
    state, weights = first.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    expected = three(first, 3)
    model.load_state_dict(weights)
    second = Selector(method, keep=0.1, schedule=schedule, draws=2)
    second.load_state_dict(state)
    assert three(second, 3) == expected


def test_state_of_another_kind_is_refused(toy):
    select = Selector("rho", irreducible=toy.il, keep=0.1)
    state = select.state_dict()
    live = rho.LiveIrreducible(toy.model())
    wrong = {
        r"has version 2, but this selector has 1; make the selector as it was": {"version": 2},
        r"has version None, but": {"version": None},
        r"has method 'loss', but this selector has 'rho'": {"method": "loss"},
        r"has live model True, but this selector has False": {"irreducible": live.state_dict()},
    }
    for message, changed in wrong.items():
        with pytest.raises(RholossError, match=message):
            select.load_state_dict({**state, "step": 9, **changed})
        assert select.step == 0
    with pytest.raises(RholossError, match="has live model False, but this selector has True"):
        Selector("rho", irreducible=live, keep=0.1).load_state_dict(state)


def test_the_batch_sampler_goes_on_with_the_next_batch_and_ids_stay_aligned():
    """Check 10: each sample gets the irreducible loss of its id, also after a resume."""
    ids = torch.arange(0, 200, 2)  # a subset of even ids; x tells the id
    data = rho.WithIndex(
        torch.utils.data.Subset(TensorDataset(torch.arange(200.0)[:, None]), ids.tolist())
    )
    il = torch.arange(200.0) * 10
    seen = []

    def tap(step, stats, chosen):
        assert torch.equal(stats.irreducible_loss, stats.index * 10.0)
        seen.append(sorted(stats.index.tolist()))

    def loss(model, batch):
        return model(batch)[:, 0]

    def epochs(select, steps):
        sampler = select.batch_sampler(data, batch_size=30)
        while steps:
            for index, x in DataLoader(data, batch_sampler=sampler, num_workers=0):
                chosen, value = select(nn.Identity(), (index, x))
                assert torch.equal(value[:, 0], chosen.float())
                steps -= 1
                if not steps:
                    break

    options = {"irreducible": il, "keep": 0.1, "loss": loss, "on_scores": [tap]}
    first = Selector("rho", **options)
    epochs(first, 8)
    for epoch in (seen[:4], seen[4:]):
        assert sorted(itertools.chain(*epoch)) == ids.tolist()
    assert seen[:4] != seen[4:]
    whole, seen[:] = list(seen), []
    cut = Selector("rho", **options)
    epochs(cut, 6)
    resumed = Selector("rho", **options)
    resumed.load_state_dict(cut.state_dict())
    epochs(resumed, 2)
    assert seen == whole


def test_a_step_is_counted_when_it_is_done(toy):
    """An error in the middle of a step leaves the selector where it was."""
    select, model = Selector("loss", keep=0.1), toy.model()
    run(select, toy, model, 1)
    index, x, y = toy.batch(1)
    with pytest.raises(RuntimeError):
        select(model, (index, x[:, :3], y))
    assert (select.step, select.ledger.steps, select.ledger.candidates) == (1, 1, 320)
    assert len(select(model, (index, x, y))[0]) == 32


def test_a_state_tells_what_the_choice_follows_from(toy):
    """Other losses, another share or other batches would be taken for the same run."""
    data = rho.WithIndex(TensorDataset(toy.x, toy.y))

    def make(il=toy.il, rows=data, batch_size=320, seed=0, loaded=None, **options):
        select = Selector("rho", irreducible=il, **{"keep": 0.1, **options})
        if loaded is not None:  # the sampler may be made before the state is loaded, or after
            select.load_state_dict(loaded)
        select.batch_sampler(rows, batch_size, seed=seed)
        return select

    state = make().state_dict()
    make().load_state_dict(state)
    make(loaded=state, schedule=rho.warm_up(3))
    other = {
        r"state\['keep'\] = 0.1, but now it is 0.2,.* Make it as it was; or, .*`del": {"keep": 0.2},
        r"state\['losses'\] = '3,200 losses with checksum .*', but now": {"il": toy.il + 1},
        r"state\['candidates'\]\['batch_size'\] = 320, but now it is 160": {"batch_size": 160},
        r"`del state\['candidates'\]\['seed'\]`": {"seed": 1},
        r"\['candidates'\]\['rows'\] = 3200, but now it is 3000": {
            "rows": torch.utils.data.Subset(data, range(3000))
        },
    }
    for message, given in other.items():
        for loads in (
            lambda given=given: make(loaded=state, **given),
            lambda given=given: make(**given).load_state_dict(state),
        ):
            with pytest.raises(RholossError, match=message):
                loads()
    older = {
        name: state[name] for name in state if name not in ("keep", "k", "losses", "candidates")
    }
    make(keep=0.2, batch_size=160, il=toy.il + 1, loaded=older)
    del state["candidates"]["seed"]
    make(seed=1, loaded=state)
    with pytest.raises(RholossError, match=r"state\['k'\] = 32, but now it is 16"):
        make(keep=None, k=16, loaded=make(keep=None, k=32).state_dict())
