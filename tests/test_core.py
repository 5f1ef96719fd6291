import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss import core
from rholoss.core import Method, Selection, Stats
from rholoss.picks import top_k

METHODS = [*rho.METHODS.values(), rho.boltzmann("rho", temperature=0.5), rho.boltzmann("uniform")]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def choose(name, worked, k, **changed):
    measured = {"loss": worked.loss, "irreducible_loss": worked.il, "grad_norm": worked.grad_norm}
    stats = Stats(torch.arange(6), {**measured, **changed})
    return core.choose(rho.METHODS[name], stats, k, core.step_generator(0, 0))


class Counting(nn.Module):
    """Notes how many rows each forward pass had."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.rows = inner, []

    def forward(self, x):
        self.rows.append(len(x))
        return self.inner(x)


# The worked example (checks 1 to 3, 6, 7).


def test_measures_the_worked_losses_and_gradient_norms(fixture_a):
    measured = core.measure(nn.Identity(), fixture_a.logits, fixture_a.labels, draws=1, seed=0)
    torch.testing.assert_close(measured["loss"], fixture_a.loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(measured["grad_norm"], fixture_a.grad_norm, atol=1e-5, rtol=0)
    torch.testing.assert_close(measured["entropy"], measured["conditional_entropy"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("rho", [3, 4]), ("loss", [3, 2]), ("negative_il", [4, 0]), ("grad_norm", [2, 3])],
)
def test_chooses_the_worked_candidates_best_first(fixture_a, name, expected):
    selection, _ = choose(name, fixture_a, 2)
    assert selection.position.tolist() == expected
    assert selection.weight is None


def test_rho_scores_and_its_refusal_of_the_noisy_row(fixture_a):
    selection, score_B = choose("rho", fixture_a, 2)
    torch.testing.assert_close(score_B, fixture_a.rho, atol=1e-5, rtol=0)
    assert fixture_a.loss.topk(2).indices.tolist() == [3, 2]  # row 2 has a high loss, ...
    assert 2 not in selection.position  # ... but an irreducible loss that is higher still


def test_a_constant_added_to_all_irreducible_losses_changes_nothing(fixture_a):
    plain, _ = choose("rho", fixture_a, 3)
    shifted, _ = choose("rho", fixture_a, 3, irreducible_loss=fixture_a.il + 7.0)
    assert torch.equal(plain.position, shifted.position)


def test_without_irreducible_loss_rho_is_loss_and_without_loss_it_is_negative_il(fixture_a):
    no_il, _ = choose("rho", fixture_a, 4, irreducible_loss=torch.zeros(6))
    assert torch.equal(no_il.position, choose("loss", fixture_a, 4)[0].position)
    no_loss, _ = choose("rho", fixture_a, 4, loss=torch.full((6,), 2.5))
    assert torch.equal(no_loss.position, choose("negative_il", fixture_a, 4)[0].position)


def test_negative_scores_are_chosen_too(fixture_a):
    selection, score_B = choose("rho", fixture_a, 4, irreducible_loss=fixture_a.il + 9.0)
    assert (score_B < 0).all()
    assert len(selection.position) == len(set(selection.position.tolist())) == 4


def test_a_score_that_is_not_finite_is_never_picked(fixture_a):
    loss = fixture_a.loss.clone()
    loss[3], loss[4], loss[0] = torch.nan, torch.inf, -torch.inf
    selection, score_B = choose("rho", fixture_a, 3, loss=loss)
    assert score_B[[0, 3, 4]].tolist() == [-torch.inf] * 3
    assert sorted(selection.position.tolist()) == [1, 2, 5]


# Counting (checks 9 and 12).


@pytest.mark.parametrize(
    ("rows", "keep", "expected"),
    [(320, 0.1, 32), (640, 0.1, 64), (216, 0.15, 32), (100, 0.29, 29), (40, 0.1, 4), (3, 0.1, 1)],
)
def test_number_selected(rows, keep, expected):
    assert core.num_selected(rows, keep) == expected


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_min=True))
def test_number_selected_is_the_nearest_whole_number_from_one_to_all(rows, keep):
    number = core.num_selected(rows, keep)
    assert 1 <= number <= rows
    assert number == 1 or abs(number - rows * keep) <= 0.5


def test_one_epoch_visits_every_point_once_as_a_candidate_and_trains_on_a_tenth():
    rows = torch.arange(25_000)
    loader = DataLoader(rho.WithIndex(TensorDataset(rows, rows)), batch_size=320, shuffle=True)
    select, model, seen = rho.Selector("uniform", keep=0.1), nn.Identity(), []
    sizes = []
    for batch in loader:
        seen.append(batch[0])
        index, x, _ = select(model, batch)
        assert torch.equal(index, x)
        sizes.append(len(index))
    assert torch.equal(torch.cat(seen).sort().values, rows)
    ledger = select.ledger
    assert (ledger.steps, ledger.candidates, ledger.trained) == (79, 25_000, 2_500)
    assert (ledger.scored, ledger.forwards) == (0, 0)  # uniform looks at nothing
    assert sizes == [32] * 78 + [4]  # the tail of 40 follows


# Records.


def test_stats_say_what_was_not_measured():
    stats = Stats(torch.arange(2), {"loss": torch.zeros(2)})
    assert torch.equal(stats.loss, torch.zeros(2))
    with pytest.raises(AttributeError, match=r"`entropy` was not measured: name it in `needs`"):
        _ = stats.entropy


def test_stats_and_selections_can_be_pickled_and_copied():
    stats = Stats(["a", "b"], {"loss": torch.ones(2)})
    for again in (pickle.loads(pickle.dumps(stats)), copy.deepcopy(stats), copy.copy(stats)):
        assert again.index == ["a", "b"]
        assert torch.equal(again.loss, stats.loss)
    selection = pickle.loads(pickle.dumps(Selection(torch.tensor([1]), torch.tensor([2.0]))))
    assert selection.weight.item() == 2.0


def test_randomness_of_a_step_depends_on_seed_and_step_alone():
    before = torch.get_rng_state()
    drawn = {
        (seed, step): tuple(torch.rand(4, generator=core.step_generator(seed, step)).tolist())
        for seed in range(5)
        for step in range(50)
    }
    assert len(set(drawn.values())) == len(drawn)
    again = torch.rand(4, generator=core.step_generator(3, 17))
    assert tuple(again.tolist()) == drawn[3, 17]
    assert torch.equal(torch.get_rng_state(), before)
    core.step_generator(-1, 0)  # any whole number is a seed


# Measuring.


def test_scoring_mode_turns_on_batch_norm_alone_and_leaves_what_is_frozen(toy):
    model = nn.Sequential(toy.model(), toy.model())
    frozen = model[1][1].eval()
    before = [module.training for module in model.modules()]
    with core.scoring_mode(model, dropout=False):
        assert [module for module in model.modules() if module.training] == [model[0][1]]
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ZeroDivisionError), core.scoring_mode(model, dropout=False):
        _ = 1 / 0
    assert [module.training for module in model.modules()] == before  # after an error too
    with core.scoring_mode(model, dropout=True):
        assert model[0][3].training
        assert not frozen.training
    with core.scoring_mode(model.eval(), dropout=False):
        assert frozen.training  # in a model in eval mode no layer is frozen apart from the others


@pytest.mark.parametrize("draws", [1, 3])
def test_measuring_leaves_weights_gradients_and_random_state_alone(toy, draws):
    model, (_, x, y) = toy.model(), toy.batch(0)
    F.cross_entropy(model(x), y).backward()
    kept = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    running, random = model[1].running_mean.clone(), torch.get_rng_state()
    measured = core.measure(model, x, y, draws, seed=5)
    assert all(not value.requires_grad and value.shape == (320,) for value in measured.values())
    for parameter, (weight, grad) in zip(model.parameters(), kept, strict=True):
        assert torch.equal(parameter, weight)
        assert torch.equal(parameter.grad, grad)
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.equal(model[1].running_mean, running)  # as the paper does it
    # Dropout is on if there are several draws, and then a function of the seed.
    again, other = (core.measure(model, x, y, draws, seed=s)["loss"] for s in (5, 6))
    assert torch.equal(again, measured["loss"])
    assert torch.equal(other, measured["loss"]) == (draws == 1)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("uniform", [32]), ("negative_il", [32]), ("rho", [320, 32]), ("bald", [320] * 3 + [32])],
)
def test_a_step_runs_the_model_on_what_it_needs_and_no_more(toy, name, rows):
    model = Counting(toy.model())
    core.train_step(
        model,
        adamw(model),
        toy.batch(0),
        rho.METHODS[name],
        32,
        core.step_generator(0, 0),
        toy.il,
        draws=3,
    )
    assert model.rows == rows


# Training.


def test_a_step_is_a_plain_step_on_the_points_that_were_chosen(toy):
    ours, plain = (toy.model(dropout=0.0) for _ in range(2))
    steps, plain_steps = adamw(ours), adamw(plain)
    index, x, y = toy.batch(0)
    selection, loss = core.train_step(
        ours, steps, (index, x, y), rho.METHODS["rho"], 32, core.step_generator(0, 0), toy.il
    )
    plain.train()
    with torch.no_grad():
        reducible = F.cross_entropy(plain(x), y, reduction="none") - toy.il[index]
    b = reducible.topk(32).indices
    assert torch.equal(b, selection.position)
    expected = F.cross_entropy(plain(x[b]), y[b])
    expected.backward()
    plain_steps.step()
    torch.testing.assert_close(loss, expected.detach())
    for (name, one), two in zip(
        ours.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, two, msg=name)


def test_keeping_all_is_plain_training(toy):
    ours, plain = (toy.model(dropout=0.0) for _ in range(2))
    index, x, y = toy.batch(0)
    selection, loss = core.train_step(
        ours,
        torch.optim.SGD(ours.parameters(), lr=0.1),
        (index, x, y),
        rho.METHODS["rho"],
        320,
        core.step_generator(0, 0),
        toy.il,
    )
    assert sorted(selection.position.tolist()) == list(range(320))
    whole = F.cross_entropy(plain(x), y)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, atol=1e-6, rtol=1e-4)


def test_importance_weights_enter_the_step(toy):
    model, (index, x, y) = toy.model(dropout=0.0), toy.batch(0)
    before = copy.deepcopy(model)
    method = rho.METHODS["grad_norm_is"]
    selection, loss = core.train_step(
        model, adamw(model), (index, x, y), method, 32, core.step_generator(0, 0)
    )
    b = selection.position
    loss_k = F.cross_entropy(before(x[b]), y[b], reduction="none")
    torch.testing.assert_close(loss, (selection.weight * loss_k).mean().detach())
    assert not torch.allclose(loss, loss_k.mean())


def test_a_live_irreducible_model_learns_from_the_selected_points_alone(toy):
    live = toy.model(dropout=0.0).eval()
    by_hand = copy.deepcopy(live)
    model, (index, x, y) = toy.model(), toy.batch(0)
    selection, _ = core.train_step(
        model,
        adamw(model),
        (index, x, y),
        rho.METHODS["rho"],
        32,
        core.step_generator(0, 0),
        live=(live, torch.optim.SGD(live.parameters(), lr=0.1)),
    )
    F.cross_entropy(by_hand(x[selection.position]), y[selection.position]).backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.1).step()
    for (name, one), two in zip(
        live.state_dict().items(), by_hand.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, two, msg=name)  # buffers too: it stays in eval mode


def test_selection_avoids_wrong_labels_while_the_target_is_behind(toy):
    wrong = torch.arange(3200) % 10 == 0
    y = torch.where(wrong, (toy.y + 1) % 5, toy.y)
    teacher = toy.model(dropout=0.0)
    optimizer = adamw(teacher)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(teacher(toy.x), toy.y).backward()
        optimizer.step()
    with torch.no_grad():
        il = F.cross_entropy(teacher.eval()(toy.x), y, reduction="none")
    share = {}
    for name in ("rho", "loss", "uniform"):
        model, chosen = toy.model(dropout=0.0), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(30):
            index, x, _ = toy.batch(step % 10)
            generator = core.step_generator(0, step)
            selection, _ = core.train_step(
                model, optimizer, (index, x, y[index]), rho.METHODS[name], 32, generator, il
            )
            chosen.append(index[selection.position])
        share[name] = wrong[torch.cat(chosen)].float().mean().item()
    assert share["rho"] <= 0.02
    assert share["loss"] >= 0.25
    assert 0.04 < share["uniform"] < 0.16


# The selector against the specification.


def run_both(toy, spec, ours, method, select, **given):
    """Ten steps of each from the same random state: same ids, same losses."""
    spec_steps, our_steps = adamw(spec), adamw(ours)
    random = torch.get_rng_state()
    for step in range(10):
        batch, generator = toy.batch(step), core.step_generator(3, step)
        torch.set_rng_state(random)  # dropout of the training step
        selection, loss = core.train_step(spec, spec_steps, batch, method, 32, generator, **given)
        torch.set_rng_state(random)
        index, x, y = select(ours, batch)
        our_loss = select.reduce(F.cross_entropy(ours(x), y, reduction="none"))
        our_steps.zero_grad()
        our_loss.backward()
        our_steps.step()
        random = torch.get_rng_state()
        assert torch.equal(index, batch[0][selection.position])
        assert torch.equal(our_loss.detach(), loss)


def assert_same_state(one, two):
    for (name, value), other in zip(
        one.state_dict().items(), two.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_selector_does_what_the_specification_does(toy, method):
    spec, ours = toy.model(), toy.model()
    select = rho.Selector(method, irreducible=toy.il, keep=0.1, seed=3)
    run_both(toy, spec, ours, method, select, irreducible_loss=toy.il)
    assert_same_state(spec, ours)


def test_the_selector_leaves_frozen_layers_as_the_specification_does(toy):
    spec, ours = toy.model(), toy.model()
    spec[1].eval()
    ours[1].eval()
    select = rho.Selector("rho", irreducible=toy.il, keep=0.1, seed=3)
    run_both(toy, spec, ours, rho.METHODS["rho"], select, irreducible_loss=toy.il)
    assert_same_state(spec, ours)
    assert torch.equal(spec[1].running_mean, torch.zeros(32))


def test_a_live_irreducible_model_does_what_the_specification_does(toy):
    spec, ours = toy.model(), toy.model()
    spec_il, our_il = (toy.model(width=16, dropout=0.0) for _ in range(2))
    small = {"lr": 1e-4}  # 0.01 x the target's
    live = (spec_il, torch.optim.AdamW(spec_il.parameters(), **small))
    select = rho.Selector("rho", irreducible=rho.LiveIrreducible(our_il, **small), keep=0.1, seed=3)
    before = copy.deepcopy(our_il.state_dict())
    run_both(toy, spec, ours, rho.METHODS["rho"], select, live=live)
    assert_same_state(spec, ours)
    assert_same_state(spec_il, our_il)
    assert not torch.equal(before["4.weight"], our_il.state_dict()["4.weight"])
    assert torch.equal(before["1.running_mean"], our_il.state_dict()["1.running_mean"])


def test_a_method_of_ones_own_is_a_row(toy):
    def margin(stats):
        return stats.loss - 2 * stats.irreducible_loss

    mine = Method("cautious", margin, top_k, frozenset({"loss", "irreducible_loss"}))
    batch, model = toy.batch(0), toy.model()
    loss = core.measure(copy.deepcopy(model), *batch[1:], draws=1, seed=0)["loss"]
    index, *_ = rho.Selector(mine, irreducible=toy.il, k=5)(model, batch)
    assert torch.equal(index, (loss - 2 * toy.il[batch[0]]).topk(5).indices)
