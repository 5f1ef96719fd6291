"""Every method x every contract: a new row of the table is held to all of them."""

import inspect
import pickle

import numpy as np
import pytest
import torch

import rholoss as rho
from rholoss import core
from rholoss.core import MONTE_CARLO, Stats
from rholoss.errors import TooFewFiniteScoresError, UnmeasuredLossError

B, K, C, k = 40, 4, 6, 8
SOFT = [
    rho.boltzmann("rho", temperature=0.5),
    rho.boltzmann("bald", temperature=0.1, replacement=True),
    rho.boltzmann("uniform"),
]
CASES = [*rho.METHODS.values(), *SOFT]
every_method = pytest.mark.parametrize("method", CASES, ids=lambda method: method.name)
READS_IL = [method for method in CASES if "irreducible_loss" in method.needs]
HARD = [method for method in CASES if method.pick is rho.METHODS["rho"].pick]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def logits_KBC():
    return 2 * torch.randn(K, B, C, generator=generator())


@pytest.fixture(scope="module")
def target_B():
    return torch.randint(C, (B,), generator=generator(1))


@pytest.fixture(scope="module")
def il_B():
    return torch.rand(B, generator=generator(2))


@pytest.fixture(scope="module")
def stats(logits_KBC, target_B, il_B):
    """What was measured of B candidates, by float64 arithmetic written from the equations."""
    measured = {name: torch.tensor(value).float() for name, value in exact(logits_KBC, target_B)}
    return Stats(torch.arange(B) * 10, {**measured, "irreducible_loss": il_B})


def exact(logits_KBC, target_B):
    z, y = logits_KBC.double().numpy(), target_B.numpy()
    p_KBC = np.exp(z) / np.exp(z).sum(2, keepdims=True)
    p_BC = p_KBC.mean(0)
    yield "loss", -np.log(p_KBC[:, np.arange(B), y]).mean(0)
    yield "grad_norm", np.sqrt(((p_BC - np.eye(C)[y]) ** 2).sum(1))
    yield "entropy", -(p_BC * np.log(p_BC)).sum(1)
    yield "conditional_entropy", -(p_KBC * np.log(p_KBC)).sum(2).mean(0)


EQUATIONS = {
    "uniform": lambda m: 0 * m["irreducible_loss"],
    "loss": lambda m: m["loss"],
    "grad_norm": lambda m: m["grad_norm"],
    "grad_norm_is": lambda m: m["grad_norm"],
    "negative_il": lambda m: -m["irreducible_loss"],
    "rho": lambda m: m["loss"] - m["irreducible_loss"],
    "entropy": lambda m: m["entropy"],
    "conditional_entropy": lambda m: m["conditional_entropy"],
    "bald": lambda m: m["entropy"] - m["conditional_entropy"],
    "loss_minus_conditional_entropy": lambda m: m["loss"] - m["conditional_entropy"],
}


def permuted(stats, order):
    return Stats(stats.index[order], {name: v[order] for name, v in stats.measured.items()})


@every_method
def test_scores_are_one_float32_number_for_each_candidate(method, stats):
    _, score_B = core.choose(method, stats, k, generator())
    assert score_B.shape == (B,)
    assert score_B.dtype == torch.float32


@every_method
def test_scores_agree_with_the_equation_in_float64(method, stats, logits_KBC, target_B, il_B):
    measured = {**dict(exact(logits_KBC, target_B)), "irreducible_loss": il_B.double().numpy()}
    expected = EQUATIONS[method.name.removeprefix("boltzmann_")](measured)
    np.testing.assert_allclose(method.score(stats).numpy(), expected, atol=1e-5)


@every_method
def test_the_specification_measures_what_the_equation_needs(method, logits_KBC, target_B, il_B):
    class Replay(torch.nn.Module):
        """Gives one draw of the logits after the other, as dropout would."""

        def __init__(self):
            super().__init__()
            self.draws = iter(logits_KBC)

        def forward(self, x):
            return next(self.draws)

    draws = K if method.needs & MONTE_CARLO else 1
    measured = core.measure(Replay(), torch.zeros(B), target_B, draws, seed=0)
    expected = dict(exact(logits_KBC[:draws], target_B))
    for name in method.needs - {"irreducible_loss"}:
        np.testing.assert_allclose(measured[name].numpy(), expected[name], atol=1e-5)


@every_method
def test_k_positions_distinct_unless_drawn_with_replacement(method, stats):
    selection, _ = core.choose(method, stats, k, generator())
    position = selection.position
    assert position.shape == (k,)
    assert position.dtype == torch.int64
    assert ((position >= 0) & (position < B)).all()
    if not getattr(method.pick, "replacement", False):
        assert len(set(position.tolist())) == k


@every_method
def test_weights_only_where_candidates_are_sampled_by_importance(method, stats):
    selection, _ = core.choose(method, stats, k, generator())
    if method.name != "grad_norm_is":
        assert selection.weight is None
        return
    assert selection.weight.shape == (k,)
    assert selection.weight.dtype == torch.float32
    assert (selection.weight.isfinite() & (selection.weight > 0)).all()


@every_method
def test_permuting_the_candidates_permutes_the_scores(method, stats):
    order = torch.randperm(B, generator=generator(5))
    score_B, permuted_B = method.score(stats), method.score(permuted(stats, order))
    assert torch.equal(permuted_B, score_B[order])


@pytest.mark.parametrize("method", HARD, ids=lambda method: method.name)
def test_permuting_the_candidates_leaves_the_hard_choice(method, stats):
    order = torch.randperm(B, generator=generator(5))
    one, _ = core.choose(method, stats, k, generator())
    two, _ = core.choose(method, permuted(stats, order), k, generator())
    assert torch.equal(stats.index[one.position], stats.index[order][two.position])


@pytest.mark.parametrize(
    "method", [m for m in CASES if m not in HARD], ids=lambda method: method.name
)
def test_how_often_a_candidate_is_sampled_does_not_depend_on_its_position(method, stats):
    reverse, draws = torch.arange(B).flip(0), 1500
    counts = []
    for seen in (stats, permuted(stats, reverse)):
        stream = generator(7)
        drawn = [core.choose(method, seen, k, stream)[0].position for _ in range(draws)]
        counts.append(torch.cat(drawn).bincount(minlength=B).double())
    one, two = counts[0], counts[1][reverse]
    assert ((one - two).abs() <= 5 * (one + two + 1).sqrt()).all()


@every_method
def test_the_same_generator_gives_the_same_choice(method, stats):
    before = torch.get_rng_state()
    one, two = (core.choose(method, stats, k, generator(3))[0] for _ in range(2))
    assert torch.equal(one.position, two.position)
    others = [core.choose(method, stats, k, generator(seed))[0].position for seed in range(10)]
    varies = any(not torch.equal(other, others[0]) for other in others)
    assert varies == (method not in HARD)
    assert torch.equal(torch.get_rng_state(), before)  # the global state is not touched


@every_method
def test_it_pickles(method, stats):
    again = pickle.loads(pickle.dumps(method))
    assert again == method
    one, two = (core.choose(m, stats, k, generator())[0].position for m in (method, again))
    assert torch.equal(one, two)


@every_method
def test_it_reads_what_it_names_and_no_more(method, stats):
    read = set()

    class Watched(dict):
        def __getitem__(self, name):
            read.add(name)
            return super().__getitem__(name)

    method.score(Stats(stats.index, Watched(stats.measured)))
    assert read == method.needs


@every_method
def test_a_missing_quantity_is_named(method, stats):
    for name in method.needs:
        rest = {key: value for key, value in stats.measured.items() if key != name}
        with pytest.raises(AttributeError, match=rf"`{name}` was not measured: name it in `needs`"):
            method.score(Stats(stats.index, rest))


@every_method
def test_what_is_not_finite_is_never_chosen(method, stats):
    bad = torch.tensor([True, False] * (B // 2))
    for value in (torch.nan, torch.inf, -torch.inf):
        measured = {name: torch.where(bad, value, v) for name, v in stats.measured.items()}
        for seed in range(5):
            seen = Stats(stats.index, measured)
            selection, _ = core.choose(method, seen, k, generator(seed))
            if method.needs:  # uniform looks at nothing
                assert not bad[selection.position].any()


@pytest.mark.parametrize("method", READS_IL, ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("broken", "named"),
    [(torch.nan, "330"), (torch.inf, "330"), (-torch.inf, "330"), ("unknown", "3200")],
)
def test_an_unusable_irreducible_loss_is_an_error(method, toy, broken, named):
    """Check 8: never selected silently, at the first call or later."""
    il, (index, x, y) = toy.il.clone(), toy.batch(1)
    if broken == "unknown":
        index[10] = 3200
    else:
        il[330] = broken
    select, model = rho.Selector(method, irreducible=il, keep=0.1), toy.model()
    for attempt in ("first call", "later call"):
        with pytest.raises(UnmeasuredLossError, match=rf"ids {named}\b.*rholoss il score"):
            select(model, (index, x, y))
        if attempt == "first call":
            select(model, toy.batch(0))
    assert select.step == 1


@pytest.mark.parametrize(
    "method", [m for m in CASES if "loss" in m.needs], ids=lambda method: method.name
)
def test_too_few_finite_losses_are_an_error_and_some_are_passed_over(method, toy):
    index, x, y = toy.batch(0)
    x = x.clone()
    x[:100] = torch.nan
    select = rho.Selector(method, irreducible=toy.il, keep=0.1, batch_norm="eval")
    chosen, *_ = select(toy.model(), (index, x, y))
    assert (chosen >= 100).all()
    assert select.guard.not_finite == 100
    x[:300] = torch.nan
    with pytest.raises(TooFewFiniteScoresError, match="fewer candidates had a finite score"):
        select(toy.model(), (index, x, y))


@every_method
def test_the_documentation_of_its_score_is_there(method):
    assert inspect.getdoc(method.score)


@pytest.mark.gpu
@every_method
def test_a_gpu_chooses_the_same_without_waiting(method, stats, no_waiting):
    there = Stats(stats.index.cuda(), {name: v.cuda() for name, v in stats.measured.items()})
    core.choose(method, there, k, generator())  # sets the library up
    with no_waiting():
        selection, _ = core.choose(method, there, k, generator())
    expected, _ = core.choose(method, stats, k, generator())
    assert torch.equal(selection.position.cpu(), expected.position)
