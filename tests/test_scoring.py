import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rholoss import scoring
from rholoss.errors import RholossError
from rholoss.scoring import Scorer

LOSS = frozenset({"loss"})
NEEDS = frozenset({"loss", "grad_norm"})
MONTE_CARLO = frozenset({"entropy", "conditional_entropy"})


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
        )


def candidates(rows=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator)
    return x, torch.randint(3, (rows,), generator=generator)


def everything(model, optimizer=None):
    """Copies of all that scoring might change: weights, buffers, gradients, flags, random state."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    flags = {name: module.training for name, module in model.named_modules()}
    tracks = [m.track_running_stats for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    inside = copy.deepcopy(optimizer.state_dict()) if optimizer else None
    return state, grads, flags, tracks, inside, torch.get_rng_state()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def trained_a_little(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = candidates(8, seed=5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


# What is measured.


@pytest.mark.parametrize("needs", [LOSS, NEEDS, MONTE_CARLO, MONTE_CARLO | LOSS])
def test_measures_what_is_needed_and_no_more_in_float32_without_a_graph(needs):
    measured = Scorer(draws=3).measure(
        net().double(), (candidates()[0].double(), candidates()[1]), 24, needs
    )
    assert measured.keys() == needs
    for values in measured.values():
        assert values.dtype == torch.float32
        assert values.shape == (24,)
        assert values.grad_fn is None
        assert not values.requires_grad


@pytest.mark.parametrize("batch_norm", scoring.BATCH_NORM_MODES)
@pytest.mark.parametrize("options", [{}, {"dropout": True}, {"draws": 3, "precision": "bf16"}])
def test_everything_is_as_before(batch_norm, options):
    model = net()
    optimizer = trained_a_little(model)
    model[4].weight.grad = None
    before = everything(model, optimizer)
    scorer = Scorer(batch_norm=batch_norm, **options)
    scorer.dry_run(model, candidates(), 24, NEEDS)
    scorer.measure(model, candidates(), 24, NEEDS | MONTE_CARLO)
    after = everything(model, optimizer)
    if batch_norm == "train":
        for state in (before[0], after[0]):
            for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
                state.pop(name)
    assert same(before, after)


def test_an_error_leaves_everything_as_before_too():
    model = net()
    before = everything(model)

    def fails(model, batch):
        model(batch[0])
        raise RuntimeError("no such luck")

    scorer = Scorer(fails)
    for run in (scorer.dry_run, Scorer(fails, batch_norm="batch").measure):
        with pytest.raises(RuntimeError, match="no such luck"):
            run(model, candidates(), 24, LOSS)
    assert same(before, everything(model))


# BatchNorm: three modes (check 14).


@pytest.mark.parametrize(
    ("batch_norm", "depends"), [("train", True), ("batch", True), ("eval", False)]
)
def test_whether_a_score_depends_on_the_other_candidates(batch_norm, depends):
    x, y = candidates()
    others = torch.cat([x[:12], x[12:] + 3])
    scorer = Scorer(batch_norm=batch_norm)
    first, second = (scorer.measure(net(), (z, y), 24, LOSS)["loss"][:12] for z in (x, others))
    assert torch.equal(first, second) != depends


@pytest.mark.parametrize("batch_norm", ["train", "batch"])
def test_statistics_of_the_candidates_are_those_of_a_forward_pass_in_train_mode(batch_norm):
    model, reference = net(), net()
    x, y = candidates()
    reference[3].p = 0.0
    expected = F.cross_entropy(reference.train()(x), y, reduction="none")
    measured = Scorer(batch_norm=batch_norm).measure(model, (x, y), 24, LOSS)["loss"]
    torch.testing.assert_close(measured, expected)
    moved = reference if batch_norm == "train" else net()
    assert same(dict(model.named_buffers()), dict(moved.named_buffers()))


@pytest.mark.parametrize("batch_norm", scoring.BATCH_NORM_MODES)
def test_a_frozen_layer_stays_frozen(batch_norm):
    model = net()
    model[1].eval()
    before = everything(model)
    scorer = Scorer(batch_norm=batch_norm)
    x, y = candidates()
    measured, _ = scorer.dry_run(model, (x, y), 24, LOSS)
    again = scorer.measure(model, (x, y), 24, LOSS)
    assert same(before, everything(model))
    expected = F.cross_entropy(net().eval()(x), y, reduction="none")
    assert torch.equal(measured["loss"], expected)
    assert torch.equal(again["loss"], expected)


def test_a_model_that_was_left_in_eval_mode_is_scored_as_one_in_train_mode():
    measured = [Scorer().measure(m, candidates(), 24, LOSS)["loss"] for m in (net(), net().eval())]
    assert torch.equal(*measured)


# Dropout and randomness.


class Functional(nn.Module):
    """Dropout by function, and noise that no mode turns off."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.linear, self.noise = nn.Linear(8, 3), noise

    def forward(self, x):
        x = x + self.noise * torch.randn_like(x)
        return self.linear(F.dropout(x, 0.5, training=self.training))


@pytest.mark.parametrize("make", [net, Functional])
def test_dropout_is_off_unless_asked_for(make):
    off, on = Scorer(), Scorer(dropout=True)
    x, y = candidates()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    losses = [off.measure(model, (x, y), 24, LOSS, seed=s)["loss"] for s in (1, 2)]
    assert torch.equal(*losses)
    drawn = [on.measure(model, (x, y), 24, LOSS, seed=s)["loss"] for s in (1, 2, 1)]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], losses[0])


def test_randomness_of_the_model_itself_leaves_the_random_state_alone():
    model, before = Functional(noise=1.0), torch.get_rng_state()
    Scorer().measure(model, candidates(), 24, LOSS)
    assert torch.equal(before, torch.get_rng_state())


def test_monte_carlo_draws_average_probabilities_over_dropout():
    model, (x, y) = net().eval(), candidates()
    measured = Scorer(draws=4, batch_norm="eval").measure(
        model, (x, y), 24, MONTE_CARLO | LOSS, seed=7
    )
    model[3].train()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        logits = torch.stack([model(x) for _ in range(4)])
    probs = logits.softmax(2)
    entropy = -(probs.mean(0) * probs.mean(0).log()).sum(1)
    torch.testing.assert_close(measured["entropy"], entropy)
    torch.testing.assert_close(
        measured["conditional_entropy"], -(probs * probs.log()).sum(2).mean(0)
    )
    loss = torch.stack([F.cross_entropy(z, y, reduction="none") for z in logits]).mean(0)
    torch.testing.assert_close(measured["loss"], loss)


# Buffers that the modes do not cover.


class Counts(nn.Module):
    """Counts its forward passes in a buffer: in place, or by a new one."""

    def __init__(self, in_place):
        super().__init__()
        self.linear, self.in_place = nn.Linear(8, 3), in_place
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x):
        if self.in_place:
            self.passes += 1
        else:
            self.passes = self.passes + 1
        if not hasattr(self, "cache"):
            self.register_buffer("cache", x.mean(0))
        return self.linear(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_of_odd_modules_are_protected_from_the_dry_run_on(in_place):
    model = nn.Sequential(Counts(in_place), nn.BatchNorm1d(3))
    buffer, scorer = model[0].passes, Scorer()
    scorer.dry_run(model, candidates(), 24, LOSS)
    for step in range(1, 4):
        assert model[0].passes is buffer
        assert model[0].passes.item() == 0
        assert model[1].num_batches_tracked.item() == step
        scorer.measure(model, candidates(), 24, LOSS)
    model(candidates()[0])
    assert model[0].passes.item() == 1


@pytest.mark.parametrize("batch_norm", scoring.BATCH_NORM_MODES)
def test_a_forward_pass_from_before_can_go_backward(batch_norm):
    model, scorer = net(), Scorer(batch_norm=batch_norm)
    for run in (scorer.dry_run, scorer.measure):
        loss = model(candidates()[0]).sum()
        run(model, candidates(), 24, LOSS)
        loss.backward()


def test_another_model_is_told_from_the_first():
    scorer = Scorer()
    scorer.dry_run(nn.Sequential(Counts(True), nn.BatchNorm1d(3)), candidates(), 24, LOSS)
    with pytest.raises(RholossError, match=r"not the one of the first call.*a selector \(or a `Sc"):
        scorer.measure(net(), candidates(), 24, LOSS)


def test_a_look_ahead_restores_the_running_statistics():
    model = net()
    before = everything(model)
    scorer = Scorer()
    scorer.dry_run(model, candidates(), 24, LOSS, discard=True)
    assert same(before, everything(model))
    scorer.measure(model, candidates(), 24, LOSS)
    assert model[1].num_batches_tracked.item() == 1


# Losses.


def test_a_loss_of_ones_own():
    x, y = candidates()

    def squares(model, batch):
        return (model(batch["a"]) - F.one_hot(batch["b"], 3)).square().sum(1).to(torch.bfloat16)

    measured = Scorer(squares, batch_norm="eval").measure(net(), {"a": x, "b": y}, 24, LOSS)["loss"]
    assert measured.dtype == torch.float32
    expected = (net().eval()(x) - F.one_hot(y, 3)).square().sum(1).to(torch.bfloat16).float()
    assert torch.equal(measured, expected)


@pytest.mark.parametrize(
    ("loss", "needs", "message"),
    [
        (
            lambda m, b: F.cross_entropy(m(b[0]), b[1]),
            LOSS,
            r"shape \(24,\), but returned shape \(\). It was reduced: use reduction='none'",
        ),
        (
            lambda m, b: m(b[0]),
            LOSS,
            r"returned shape \(24, 3\). Average over all other dimensions",
        ),
        (lambda m, b: 1.5, LOSS, "returned a float"),
        (
            lambda m, b: m(b[0]).mean(1),
            NEEDS,
            "needs grad_norm, which is read off the model's output, but `loss` is a function",
        ),
        (
            "classification",
            frozenset({"margin"}),
            "needs margin, which cannot be measured; known are loss, irreducible_loss, grad_norm",
        ),
        (
            "regression",
            MONTE_CARLO,
            r"needs conditional_entropy, entropy, which is defined for logits \[B, C\]",
        ),
        ("classification", LOSS, r"needs logits \[B, C\]"),
    ],
)
def test_losses_and_quantities_that_cannot_be_used(loss, needs, message):
    x, y = candidates()
    if isinstance(loss, str) and needs != frozenset({"margin"}):
        y = torch.randn(24, 3)
    with pytest.raises(RholossError, match=message):
        Scorer(loss).dry_run(net(), (x, y), 24, needs)


def test_a_quantity_of_ones_own():
    def margin(logits_KBC, target_B):
        top = logits_KBC.mean(0).topk(2).values
        return top[:, 0] - top[:, 1]

    x, y = candidates()
    scorer = Scorer(quantities={"margin": margin}, batch_norm="eval")
    measured, _ = scorer.dry_run(net(), (x, y), 24, frozenset({"margin"}))
    top = net().eval()(x).topk(2).values
    torch.testing.assert_close(measured["margin"], (top[:, 0] - top[:, 1]).detach())
    wrong = Scorer(quantities={"margin": lambda logits, target: logits.sum()})
    with pytest.raises(RholossError, match="`margin` must return one number for each of the 24"):
        wrong.dry_run(net(), (x, y), 24, frozenset({"margin"}))


def test_a_model_in_eval_mode_keeps_its_statistics():
    """Fine-tuning with all of BatchNorm frozen; the candidates' own statistics are read all the same."""
    model, (x, y) = net().eval(), candidates()
    before = [buffer.clone() for buffer in model.buffers()]
    found = Scorer(batch_norm="train").measure(model, (x, y), 24, LOSS)["loss"]
    assert all(torch.equal(*pair) for pair in zip(before, model.buffers(), strict=True))
    expected = Scorer(batch_norm="batch").measure(net(), (x, y), 24, LOSS)["loss"]
    torch.testing.assert_close(found, expected)
