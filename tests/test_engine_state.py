"""What a trainer saves: all that a run depends on, and nothing that it must not be taken over by."""

import copy

import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.engine import InfoBatch, Resident, Reuse, Trainer
from rholoss.errors import RholossError, TooFewFiniteScoresError

N, STEPS = 300, 30
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 20, generator=GENERATOR)
Y = torch.randint(0, 5, (N,), generator=GENERATOR)
IL = torch.rand(N, generator=GENERATOR)


def trainer(dropout=0.0, rows=N, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 5))
    options = {"total_steps": STEPS, "irreducible": IL, "candidates": 40, "keep": 0.2, **options}
    made = Trainer(model, Resident(X[:rows], Y[:rows], device="cpu"), **options)
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index))
    return made


def state_after(steps, **options):
    made = trainer(**options)
    made.train(steps)
    return copy.deepcopy(made.state_dict())


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
        ({"scoring": Reuse(0.5)}, "has no state of cheaper scoring"),
    ],
)
def test_what_was_made_otherwise_is_refused_before_anything_is_changed(options, says):
    state, other = state_after(5), trainer(**options)
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(RholossError, match=says):
        other.load_state_dict(state)
    assert other.step == 0
    assert all(map(torch.equal, before.values(), other.model.state_dict().values()))


def test_a_run_that_broke_can_be_taken_back():
    fast = trainer(total_steps=90)
    fast.train(20)
    state = copy.deepcopy(fast.state_dict())
    with torch.no_grad():
        fast.model[0].weight.fill_(torch.nan)
    fast.train(30)
    with pytest.raises(TooFewFiniteScoresError, match="30 step"):
        fast.flush()
    fast.load_state_dict(state)
    fast.train(70)
    assert fast.step == 90
    assert torch.cat(fast.losses)[-70:].isfinite().all()
    assert int(fast.counters.not_finite) == 0


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


def test_a_longer_run_has_its_own_rates_and_a_switch_stays_where_it_was():
    state = state_after(11, schedule=rho.window(0, 5))
    longer = trainer(
        total_steps=2 * STEPS, learning_rate=lambda step: 0.1 if step >= STEPS else 0.0
    )
    longer.load_state_dict(state)
    assert longer.schedule.stop == 5
    weights = longer.model[0].weight.detach().clone()
    longer.train(STEPS - 11)
    assert torch.equal(weights, longer.model[0].weight)
    longer.train(STEPS)
    assert not torch.equal(weights, longer.model[0].weight)
