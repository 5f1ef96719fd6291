import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rholoss as rho
from rholoss.engine import Resident, Trainer
from rholoss.errors import RholossError

CPU = torch.device("cpu")


def bytes_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_losses_are_those_of_the_model_in_eval_mode_and_change_nothing(toy):
    model = toy.model()
    expected = F.cross_entropy(
        copy.deepcopy(model).eval()(toy.x[:64]), toy.y[:64], reduction="none"
    )
    live = rho.LiveIrreducible(model)
    before, random = bytes_of(model), torch.get_rng_state()
    model.train()  # as a framework does to all modules it knows
    found = live.losses(torch.arange(64), (toy.x[:64], toy.y[:64]), CPU)
    assert torch.equal(found, expected)
    assert found.grad_fn is None
    assert equal(before, bytes_of(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module.training for module in model.modules())


def test_an_update_is_one_step_on_the_selected_points_and_moves_no_buffer(toy):
    """Check 22: the usual optimizer is AdamW at 0.01 x the target's rate."""
    model = toy.model()
    live = rho.LiveIrreducible(model, lambda p: torch.optim.AdamW(p, lr=0.01 * 1e-3))
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-5)
    F.cross_entropy(reference(toy.x[:32]), toy.y[:32]).backward()
    optimizer.step()
    live.update((toy.x[:32], toy.y[:32]))
    assert equal(bytes_of(model), bytes_of(reference))
    assert live.optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)


def test_with_statistics_of_the_batch_its_running_ones_move_along(toy):
    """As the authors' code does it, by our reading; dropout stays off all the same."""
    model = nn.Sequential(toy.model(), nn.Dropout(0.5))
    reference = copy.deepcopy(model).eval()
    for module in reference.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    live = rho.LiveIrreducible(model, lr=1e-3, batch_norm="train")
    for rows in (slice(0, 64), slice(64, 128)):
        x, y, before = toy.x[rows], toy.y[rows], bytes_of(model)
        with torch.no_grad():
            expected = F.cross_entropy(reference(x), y, reduction="none")
        assert torch.equal(live.losses(torch.arange(64), (x, y), CPU), expected)
        optimizer.zero_grad()
        F.cross_entropy(reference(x[:32]), y[:32]).backward()
        optimizer.step()
        live.update((x[:32], y[:32]))
        assert equal(bytes_of(model), bytes_of(reference))
        moved = [
            name
            for name, value in model.state_dict().items()
            if not torch.equal(value, before[name])
        ]
        assert any("running_mean" in name for name in moved)
    assert not any(module.training for module in model.modules())


def test_its_batch_norm_has_two_modes_and_the_moving_one_is_for_one_process(toy, monkeypatch):
    with pytest.raises(RholossError, match="`batch_norm` is 'batch'; use 'eval' or 'train'"):
        rho.LiveIrreducible(toy.model(), batch_norm="batch")
    live = rho.LiveIrreducible(toy.model(), batch_norm="train")
    monkeypatch.setattr("rholoss.il.live.place", lambda: (0, 2))
    with pytest.raises(RholossError, match="is for one process"):
        live.losses(torch.arange(8), (toy.x[:8], toy.y[:8]), CPU)


def test_only_selected_points_move_it(toy):
    """Check 22: a step of its own on the chosen rows alone gives the same weights, step by step."""
    target, model, reference = toy.model(), toy.model(width=8), toy.model(width=8)
    live, alone = (rho.LiveIrreducible(m, lr=0.01) for m in (model, reference))
    select = rho.Selector("rho", irreducible=live, keep=0.1)
    for step in range(3):
        before = bytes_of(model)
        chosen, _, _ = select(target, toy.batch(step))
        assert len(chosen) == 32
        alone.update((toy.x[chosen], toy.y[chosen]))
        assert equal(bytes_of(model), bytes_of(reference))
        assert not equal(bytes_of(model), before)


def test_it_stands_still_while_nothing_is_scored(toy):
    model = toy.model(width=8)
    live = rho.LiveIrreducible(model, lr=0.1)
    schedule = rho.window(2, 3)
    select = rho.Selector("rho", irreducible=live, keep=0.1, schedule=schedule)
    target, states = toy.model(), [bytes_of(model)]
    for step in range(4):
        select(target, toy.batch(step))
        states.append(bytes_of(model))
    moved = [not equal(a, b) for a, b in itertools.pairwise(states)]
    assert moved == [False, False, True, False]


def test_a_table_never_changes(toy):
    """Check 22: the default variant leaves the irreducible losses' bytes as they are."""
    table = toy.il.clone()
    select = rho.Selector("rho", irreducible=table, keep=0.1)
    model = toy.model()
    for step in range(3):
        select(model, toy.batch(step))
    assert torch.equal(table, toy.il)
    assert select.source.table.dense.data_ptr() == table.data_ptr()


def test_an_optimizer_may_be_given_made_or_left_out(toy):
    model = toy.model()
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    assert rho.LiveIrreducible(model, made).optimizer is made
    assert isinstance(rho.LiveIrreducible(model, torch.optim.SGD).optimizer, torch.optim.SGD)
    default = rho.LiveIrreducible(model, lr=2e-5).optimizer
    assert isinstance(default, torch.optim.AdamW)
    assert default.param_groups[0]["lr"] == 2e-5


def test_an_optimizer_of_another_model_is_refused(toy):
    target, model = toy.model(), toy.model()
    for others in (target.parameters(), [*model.parameters(), *target.parameters()]):
        optimizer = torch.optim.AdamW(others)
        with pytest.raises(RholossError, match=r"`optimizer` has \d+ parameter\(s\) that are not"):
            rho.LiveIrreducible(model, optimizer)


def test_state_is_whole(toy):
    batch = (toy.x[:32], toy.y[:32])
    first, second = (rho.LiveIrreducible(toy.model(), lr=0.01) for _ in range(2))
    first.update(batch)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for live in (first, second):
        live.update(batch)
    assert equal(bytes_of(first.model), bytes_of(second.model))


def test_a_step_in_the_users_autocast_block_is_in_full_precision(toy):
    models = []
    for enabled in (False, True):
        live = rho.LiveIrreducible(toy.model(), lr=0.01)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            live.losses(torch.arange(32), (toy.x[:32], toy.y[:32]), CPU)
            live.update((toy.x[:32], toy.y[:32]))
        models.append(bytes_of(live.model))
    assert equal(*models)


def test_a_loss_of_ones_own_and_a_reduced_one(toy):
    live = rho.LiveIrreducible(nn.Linear(20, 5), loss=lambda m, b: m(b["x"]).square().mean(1))
    batch = {"x": toy.x[:8]}
    expected = live.model(toy.x[:8]).square().mean(1)
    assert torch.equal(live.losses(torch.arange(8), batch, CPU), expected)
    reduced = rho.LiveIrreducible(nn.Linear(20, 5), loss=lambda m, b: m(b["x"]).mean())
    with pytest.raises(RholossError, match="It was reduced: use reduction='none'"):
        reduced.losses(torch.arange(8), batch, CPU)


def test_what_makes_a_model_is_no_model():
    with pytest.raises(RholossError, match=r"`model` is a function; pass the torch\.nn\.Module"):
        rho.LiveIrreducible(lambda: nn.Linear(2, 2))


def test_a_model_that_cannot_learn_is_refused():
    for model in (nn.Linear(2, 2).requires_grad_(False), nn.Flatten()):
        with pytest.raises(RholossError, match=r"no parameters that learn.*`rholoss\.score_irred"):
            rho.LiveIrreducible(model)


def test_the_target_itself_is_refused_before_anything_is_learnt(toy):
    model = toy.model()
    live = rho.LiveIrreducible(nn.Sequential(model))
    batch = (torch.arange(64), toy.x[:64], toy.y[:64])
    before = bytes_of(model)
    with pytest.raises(RholossError, match=r"'0\.\S+' for one.*copy\.deepcopy\(model\)"):
        rho.Selector("rho", irreducible=live, keep=0.5)(model, batch)
    data = Resident(toy.x, toy.y, device="cpu")
    with pytest.raises(RholossError, match="that the target trains"):
        Trainer(model, data, irreducible=live, candidates=32, keep=0.5, total_steps=2)
    assert equal(before, bytes_of(model))
    rho.Selector("rho", irreducible=rho.LiveIrreducible(copy.deepcopy(model)), keep=0.5)(
        model, batch
    )


def test_a_part_that_nobody_trains_may_be_shared(toy):
    model = nn.Sequential(nn.Linear(toy.x.shape[1], toy.x.shape[1]), toy.model())
    model[0].requires_grad_(False)
    live = rho.LiveIrreducible(nn.Sequential(model[0], toy.model()))
    selector = rho.Selector("rho", irreducible=live, keep=0.5)
    assert len(selector(model, (torch.arange(64), toy.x[:64], toy.y[:64]))[0]) == 32
