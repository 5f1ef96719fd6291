"""What a trainer saves: all that a run depends on, and nothing that it must not be taken over by."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.engine import (
    Gate,
    InfoBatch,
    Proxy,
    Recorded,
    Remembered,
    Resident,
    Reuse,
    Shortlist,
    Trainer,
)
from rholoss.errors import RholossError, TooFewFiniteScoresError

N, STEPS = 300, 30
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 20, generator=GENERATOR)
Y = torch.randint(0, 5, (N,), generator=GENERATOR)
IL = torch.rand(N, generator=GENERATOR)


def trainer(dropout=0.0, rows=N, width=16, bias=True, **options):
    torch.manual_seed(1)
    last = nn.Linear(width, 5, bias=bias)
    model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Dropout(dropout), last)
    options = {"total_steps": STEPS, "irreducible": IL, "candidates": 40, "keep": 0.2, **options}
    made = Trainer(model, Resident(X[:rows], Y[:rows], device="cpu"), **options)
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index))
    return made


def state_after(steps, **options):
    made = trainer(**options)
    made.train(steps)
    return made.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": rho.warm_up(np.int64(5))},
        {"schedule": rho.window(np.int64(5), np.int64(20))},
        {"schedule": rho.annealed(np.int64(STEPS), switch=np.float64(0.4), drop=np.float32(0.1))},
        {"seed": np.int64(3), "total_steps": np.int64(STEPS), "keep": np.float32(0.2)},
        {"method": "bald", "draws": np.int64(3)},
    ],
)
def test_a_state_of_a_run_made_with_numbers_of_numpy_is_read_by_torch(options, tmp_path):
    first = trainer(0.3, **options)
    first.train(11)
    first.change_length(np.int64(STEPS - 2), 1e-3)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = trainer(0.3, **options)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.total_steps == STEPS - 2


@pytest.mark.parametrize("method", ["rho", "bald"])
def test_a_model_with_dropout_goes_on_with_the_same_masks(method):
    whole = trainer(0.3, method=method)
    whole.train(STEPS)
    state = state_after(11, dropout=0.3, method=method)
    resumed = trainer(0.3, method=method)
    torch.manual_seed(99)  # whatever else has drawn since
    resumed.load_state_dict(state)
    resumed.train(STEPS - 11)
    assert torch.equal(torch.stack(whole.seen[11:]), torch.stack(resumed.seen))
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


def test_draws_that_are_all_alike_are_refused():
    with pytest.raises(RholossError, match="BALD needs dropout in the model"):
        trainer(0.0, method="bald").train(1)


def test_the_seed_is_that_of_the_run():
    whole = trainer(seed=3)
    whole.train(STEPS)
    resumed = trainer(seed=4)
    resumed.load_state_dict(state_after(11, seed=3))
    resumed.train(STEPS - 11)
    assert torch.equal(torch.stack(whole.seen[11:]), torch.stack(resumed.seen))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "loss"}, "has method 'rho', but this trainer has 'loss'"),
        ({"candidates": 80}, "has candidates 40, but this trainer has 80"),
        ({"keep": 0.4}, "has chosen rows 8, but this trainer has 16"),
        ({"rows": 200}, "has rows 300, but this trainer has 200"),
        ({"plan": InfoBatch()}, "has plan False, but this trainer has True"),
        ({"irreducible": IL + 1}, "has irreducible losses '300 losses with checksum"),
        ({"scoring": Reuse(0.5)}, "has no state of cheaper scoring"),
        (
            {"scoring": Gate(0.5)},
            r"has scoring .Cheaper\(\)., but this trainer has .Gate\(share=0.5, ",
        ),
        ({"overlap": True}, "has overlap False, but this trainer has True"),
        ({"overlap": "ahead"}, "has overlap False, but this trainer has 'ahead'"),
        ({"batch_norm": "eval"}, "has batch_norm 'train', but this trainer has 'eval'"),
        (
            {"schedule": rho.window(2, 9)},
            r"has start and drop of the schedule \(0, 0.0\), but .*\(2,",
        ),
        ({"optimizer": torch.optim.SGD}, "has optimizer of the model 'AdamW', but .* has 'SGD'"),
        ({"catch_up": True}, "has catch_up False, but this trainer has True"),
        ({"irreducible": rho.LiveIrreducible(nn.Linear(20, 5))}, "has no live model"),
        ({"loss": "tokens"}, "has loss 'classification', but this trainer has 'tokens'"),
        ({"width": 17}, r"model has shape \(16, 20\) for `0.weight`, but .* \(17, 20\)"),
        ({"bias": False}, r"model has shape \(5,\) for `3.bias`, but this trainer's has nothing"),
        (
            {"optimizer": lambda p: torch.optim.AdamW(list(p)[:2])},
            r"groups of \[4\] parameters, but this trainer's has \[2\]",
        ),
    ],
)
def test_what_was_made_otherwise_is_refused_before_anything_is_changed(options, says):
    state, other = state_after(5), trainer(**options)
    refuses(other, state, says)


def refuses(other, state, says):
    before = other.state_dict()
    with pytest.raises(RholossError, match=says):
        other.load_state_dict(state)
    assert same(before, other.state_dict())


def same(a, b):
    """Whether two states are one, tensor for tensor; but for times, and rates, which each step sets."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, dict):
        keys = [key for key in a if key != "lr" and "seconds" not in str(key)]
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in keys)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def small(width=8):
    return nn.Sequential(nn.Linear(20, width), nn.Linear(width, 5))


OPTIONS = {
    "reuse": lambda: {"scoring": Reuse(0.5)},
    "shortlist": lambda: {"scoring": Shortlist(0.6)},
    "proxy": lambda: {"scoring": Proxy(small, torch.optim.AdamW)},
    "live": lambda: {"irreducible": rho.LiveIrreducible(small())},
    "overlap": lambda: {"overlap": True},
    "plan": lambda: {"plan": InfoBatch(), "method": "uniform"},
}


def ladder():
    return rho.Ladder([rho.Irreducible.from_losses(rung) for rung in (IL + 1, IL)])


OTHERS = {
    **OPTIONS,
    "proxy of SGD": lambda: {"scoring": Proxy(small, torch.optim.SGD)},
    "reuse of 60 %": lambda: {"scoring": Reuse(0.6)},
    "shortlist of few": lambda: {"scoring": Shortlist(0.6, again=0.05)},
    "table": dict,
    "bald": lambda: {"method": "bald", "draws": 3, "dropout": 0.3},
    "bald of more draws": lambda: {"method": "bald", "draws": 4, "dropout": 0.3},
    "ladder": lambda: {"irreducible": ladder()},
    "another plan": lambda: {"plan": Remembered(1.6), "method": "uniform"},
}


@pytest.mark.parametrize(
    ("saved", "other", "says"),
    [
        (
            "reuse",
            "shortlist",
            "has loss, seen, now of .* `Shortlist`, which keeps loss, seen, now, m",
        ),
        ("shortlist", "reuse", "`scoring` as it was"),
        ("proxy", "reuse", "has model, optimizer of cheaper scoring"),
        (
            "live",
            "table",
            "has irreducible losses \"a live model's\", but this trainer has '300 los",
        ),
        (
            "live",
            "ladder",
            "has irreducible losses \"a live model's\", but this trainer has '300 lo",
        ),
        ("ladder", "live", "has no live model"),
        ("bald", "bald of more draws", "has draws 3, but this trainer has 4"),
        ("proxy", "proxy of SGD", "has optimizer of the proxy 'AdamW', but this trainer has 'SGD'"),
        ("reuse", "reuse of 60 %", r"scoring .Reuse\(share=0.5, .* has .Reuse\(share=0.6, "),
        ("shortlist", "shortlist of few", "again=0.*again=0.05"),
        (
            "plan",
            "another plan",
            "has rule of the plan 'InfoBatch.* but this trainer has 'Remembered",
        ),
    ],
)
def test_the_state_of_another_option_is_refused(saved, other, says):
    refuses(trainer(**OTHERS[other]()), state_after(5, **OTHERS[saved]()), says)


def test_other_recorded_choices_are_refused():
    def recorded(seed):
        order = torch.Generator().manual_seed(seed)
        index = torch.stack([torch.randperm(N, generator=order)[:8] for _ in range(STEPS)])
        return Recorded(index)

    refuses(
        trainer(scoring=recorded(1)),
        state_after(5, scoring=recorded(0)),
        r"has recorded choices \d+, but this trainer has \d+",
    )


@pytest.mark.parametrize(
    ("saved", "other", "says"),
    [
        ("proxy", {"scoring": Proxy(lambda: small(9))}, "state's proxy has shape"),
        ("live", {"irreducible": rho.LiveIrreducible(small(9))}, "state's live model has shape"),
    ],
)
def test_models_beside_the_model_are_looked_at_too(saved, other, says):
    refuses(trainer(**other), state_after(5, **OPTIONS[saved]()), says)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_state_stays_what_it_was(kind):
    """While the run that saved it goes on, and while another goes on from it."""
    whole = trainer(**OPTIONS[kind]())
    whole.train(11)
    state = whole.state_dict()
    kept = copy.deepcopy(state)
    whole.train(STEPS - 11)
    assert same(state, kept)
    others = [whole, trainer(**OPTIONS[kind]())]
    ends = [whole.state_dict()]
    for other in others:
        other.load_state_dict(state)
        assert same(other.state_dict(), kept)
        other.train(STEPS - 11)
        assert same(state, kept)
        ends.append(other.state_dict())
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def test_a_run_that_broke_can_be_taken_back():
    fast = trainer(total_steps=90)
    fast.train(20)
    state = fast.state_dict()
    with torch.no_grad():
        fast.model[0].weight.fill_(torch.nan)
    fast.train(30)
    with pytest.raises(TooFewFiniteScoresError, match="30 step"):
        fast.flush()
    fast.load_state_dict(state)
    fast.train(70)
    assert fast.step == 90
    losses = torch.cat(fast.losses)  # those of the steps that were given up are not among them
    assert len(losses) == 70
    assert losses.isfinite().all()
    assert int(fast.counters.not_finite) == 0
    assert fast.state_dict()["step"] == 90


def test_an_optimizer_runs_as_its_device_needs_it():
    state = state_after(11)
    for group in state["optimizer"]["param_groups"]:  # as a GPU's would be
        group.update(capturable=True, foreach=True)
    state["generator"] = torch.zeros(16, dtype=torch.uint8)
    whole, resumed = trainer(), trainer()
    whole.train(STEPS)
    resumed.load_state_dict(state)
    resumed.train(STEPS - 11)
    assert torch.equal(torch.stack(whole.seen[11:]), torch.stack(resumed.seen))
    assert not resumed.optimizer.param_groups[0]["capturable"]


@pytest.mark.parametrize(("kind", "part"), [("proxy", "scoring"), ("live", "irreducible")])
def test_so_do_the_optimizers_of_models_beside_it(kind, part):
    state = state_after(11, **OPTIONS[kind]())
    for group in state[part]["optimizer"]["param_groups"]:  # as a GPU's would be
        group["capturable"] = True
    resumed = trainer(**OPTIONS[kind]())
    resumed.load_state_dict(state)
    resumed.train(STEPS - 11)
    assert resumed.step == STEPS


def test_a_longer_run_has_its_own_rates_and_a_switch_stays_where_it_was():
    state = state_after(11, schedule=rho.window(0, 5))
    longer = trainer(
        total_steps=2 * STEPS, learning_rate=lambda step: 0.1 if step >= STEPS else 0.0
    )
    with pytest.warns(UserWarning, match="scores up to step 5, that of this trainer") as told:
        longer.load_state_dict(state)
    assert told[0].filename == __file__
    assert longer.schedule.stop == 5
    weights = longer.model[0].weight.detach().clone()
    longer.train(STEPS - 11)
    assert torch.equal(weights, longer.model[0].weight)
    longer.train(STEPS)
    assert not torch.equal(weights, longer.model[0].weight)


def test_a_schedule_of_a_longer_run_is_told():
    told_of = r"stops scoring at step 50, but `total_steps` is 30"
    with pytest.warns(UserWarning, match=told_of) as told:
        trainer(schedule=rho.window(0, 50))
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(schedule=rho.annealed(STEPS))
        trainer()  # one that scores to the end


def test_a_state_that_broke_is_not_saved_however_often_one_asks():
    fast = trainer(total_steps=90)
    with torch.no_grad():
        fast.model[0].weight.fill_(torch.nan)
    fast.train(30)
    for _ in range(2):
        with pytest.raises(TooFewFiniteScoresError, match="30 step"):
            fast.state_dict()


def test_a_step_that_was_cut_in_its_middle_is_not_gone_on_with():
    fast = trainer()
    fast.train(5)
    state = fast.state_dict()
    broken = fast.model[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fast.train(1)
    broken.remove()
    for go_on in (lambda: fast.train(1), fast.state_dict):
        with pytest.raises(RholossError, match="Step 5 was interrupted in the middle"):
            go_on()
    fast.load_state_dict(state)
    fast.train(STEPS - 5)
    assert fast.step == STEPS
