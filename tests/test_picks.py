import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rholoss import picks
from rholoss.picks import ImportanceSample, SoftmaxSample

WITHOUT_REPLACEMENT = [picks.top_k, picks.random_k, SoftmaxSample(), SoftmaxSample(1e-30)]
WITH_REPLACEMENT = [ImportanceSample(), SoftmaxSample(replacement=True)]
ALL = WITHOUT_REPLACEMENT + WITH_REPLACEMENT

finite = st.floats(-100, 100, width=32)
quarters = st.integers(-400, 400).map(lambda number: number / 4)


def named(pick):
    """For the id of a test: the same in every process."""
    return getattr(pick, "__name__", repr(pick))


@st.composite
def scored(draw, numbers=finite):
    """Scores, some of them -inf, and a number to pick that leaves those out."""
    score = draw(st.lists(numbers, min_size=1, max_size=40))
    k = draw(st.integers(1, len(score)))
    never = draw(st.sets(st.integers(0, len(score) - 1), max_size=len(score) - k))
    return torch.tensor([-torch.inf if i in never else s for i, s in enumerate(score)]), k


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("pick", WITHOUT_REPLACEMENT, ids=named)
@given(scored(), st.integers(0, 99))
def test_without_replacement_positions_are_distinct(pick, case, seed):
    score_B, k = case
    selection = pick(score_B, k, generator(seed))
    assert selection.weight is None
    assert selection.position.dtype == torch.int64
    assert len(set(selection.position.tolist())) == len(selection.position) == k


@pytest.mark.parametrize("pick", ALL, ids=named)
@given(scored(), st.integers(0, 99))
def test_minus_infinity_is_never_picked_while_there_are_others(pick, case, seed):
    score_B, k = case
    position = pick(score_B, k, generator(seed)).position
    assert len(position) == k
    assert score_B[position].isfinite().all()


@pytest.mark.parametrize("pick", ALL, ids=named)
def test_too_few_finite_scores_still_give_k_positions(pick):
    score_B = torch.tensor([-torch.inf, 1.0, -torch.inf, -torch.inf])
    position = pick(score_B, 3, generator()).position
    assert len(position) == 3
    assert 1 in position
    position = pick(torch.full((4,), -torch.inf), 2, generator()).position
    assert ((position >= 0) & (position < 4)).all()


@pytest.mark.parametrize("pick", ALL, ids=named)
@given(scored(), st.integers(0, 99))
def test_the_same_generator_gives_the_same_choice_and_no_other_is_touched(pick, case, seed):
    score_B, k = case
    before = torch.get_rng_state()
    one, two = (pick(score_B, k, generator(seed)) for _ in range(2))
    assert torch.equal(one.position, two.position)
    assert torch.equal(torch.get_rng_state(), before)


@given(scored(st.sampled_from([-1.0, 0.0, 0.5, 2.0])))
def test_top_k_are_the_highest_and_ties_go_to_the_earlier_position(case):
    score_B, k = case
    expected = sorted(range(len(score_B)), key=lambda i: (-score_B[i].item(), i))[:k]
    assert picks.top_k(score_B, k, generator()).position.tolist() == expected


@given(scored(quarters))
def test_a_low_temperature_is_the_hard_choice(case):
    score_B, k = case
    hard = picks.top_k(score_B, k, generator()).position
    soft = SoftmaxSample(1e-38)(score_B, k, generator()).position
    assert torch.equal(score_B[hard], score_B[soft])  # ties are broken at random
    drawn = SoftmaxSample(1e-38, replacement=True)(score_B, k, generator()).position
    assert (score_B[drawn] == score_B.max()).all()


def within(count, probability, draws, sigmas=4.5):
    spread = (draws * probability * (1 - probability)) ** 0.5
    return abs(count - draws * probability) <= sigmas * spread + 1e-9


def test_random_k_gives_every_pair_alike():
    draws, counts = 6000, dict.fromkeys(itertools.permutations(range(4), 2), 0)
    stream = generator()
    for _ in range(draws):
        counts[tuple(picks.random_k(torch.zeros(4), 2, stream).position.tolist())] += 1
    assert all(within(count, 1 / 12, draws) for count in counts.values())


def test_gumbel_top_k_draws_without_replacement_in_proportion_to_the_softmax():
    score_B, temperature = torch.tensor([0.0, 0.5, 1.0, -0.5]), 0.7
    p = (score_B / temperature).softmax(0).tolist()
    draws, counts = 12_000, dict.fromkeys(itertools.permutations(range(4), 2), 0)
    pick, stream = SoftmaxSample(temperature), generator()
    for _ in range(draws):
        counts[tuple(pick(score_B, 2, stream).position.tolist())] += 1
    for (i, j), count in counts.items():
        assert within(count, p[i] * p[j] / (1 - p[i]), draws), (i, j)


def test_softmax_sampling_with_replacement_follows_the_softmax():
    score_B = torch.tensor([0.0, 2.0, -torch.inf, 1.0, -1.0])
    position = SoftmaxSample(0.5, replacement=True)(score_B, 50_000, generator()).position
    counts = position.bincount(minlength=5).tolist()
    for count, p in zip(counts, (score_B / 0.5).softmax(0).tolist(), strict=True):
        assert within(count, p, 50_000)


# Gradient-norm importance sampling (check 4).


def test_importance_weights_of_the_worked_example(fixture_a):
    selection = ImportanceSample()(fixture_a.grad_norm, 50_000, generator())
    counts = selection.position.bincount(minlength=6).tolist()
    for count, p in zip(counts, fixture_a.probability.tolist(), strict=True):
        assert within(count, p, 50_000)
    expected = fixture_a.weight[selection.position]
    # The last weight, 15.08, comes from a score known to six digits only.
    torch.testing.assert_close(selection.weight, expected, atol=1e-5, rtol=2e-5)
    pw = fixture_a.probability * fixture_a.weight
    assert pw.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert (pw * fixture_a.loss).sum().item() == pytest.approx(1.404684, abs=1e-5)
    assert fixture_a.loss.mean().item() == pytest.approx(1.404684, abs=1e-5)


def test_the_sampled_gradient_has_the_mean_gradient_as_its_expectation(fixture_a):
    # Gradients of the losses with respect to a bias that all examples share, [6, 3].
    grad = fixture_a.logits.softmax(1) - torch.eye(3)[fixture_a.labels]
    selection = ImportanceSample()(grad.norm(dim=1), 10_000, generator())
    drawn = selection.weight[:, None] * grad[selection.position]
    sigma = drawn.std(0) / 100
    assert ((drawn.mean(0) - grad.mean(0)).abs() <= 3 * sigma).all()
    # Without the weights the same draw is far off.
    unweighted = grad[selection.position]
    assert ((unweighted.mean(0) - grad.mean(0)).abs() > 10 * unweighted.std(0) / 100).any()


@given(scored(st.floats(1 / 64, 10, width=32)), st.integers(0, 99))
def test_importance_weights_are_one_over_b_times_p(case, seed):
    score_B, k = case
    selection = ImportanceSample()(score_B, k, generator(seed))
    valid = score_B.isfinite()
    p = score_B[selection.position] / score_B[valid].sum()
    torch.testing.assert_close(selection.weight, 1 / (valid.sum() * p), rtol=1e-4, atol=0)


def test_zero_scores_are_never_drawn_unless_all_are_zero():
    score_B = torch.tensor([0.0, 1.0, 0.0, 0.0, 3.0, 0.0])
    position = ImportanceSample()(score_B, 10_000, generator()).position
    assert set(position.tolist()) == {1, 4}
    alike = ImportanceSample()(torch.tensor([0.0, 0.0, -torch.inf, 0.0]), 9_000, generator())
    assert torch.equal(alike.weight, torch.ones(9_000))
    counts = alike.position.bincount(minlength=4).tolist()
    assert counts[2] == 0
    assert all(within(counts[i], 1 / 3, 9_000) for i in (0, 1, 3))


def test_a_negative_score_counts_as_zero_for_importance_sampling():
    position = ImportanceSample()(torch.tensor([-5.0, 2.0]), 100, generator()).position
    assert set(position.tolist()) == {1}


def test_a_draw_of_exactly_zero_does_no_harm(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda num, **_: torch.zeros(num))
    score_B = torch.tensor([0.0, 1.0, -torch.inf])
    assert ImportanceSample()(score_B, 2, generator()).position.tolist() == [1, 1]
    for pick in (picks.random_k, SoftmaxSample()):
        assert 2 not in pick(score_B, 2, generator()).position


def test_picks_say_whether_they_repeat_candidates():
    assert [getattr(pick, "replacement", False) for pick in ALL] == [False] * 4 + [True] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("pick", ALL, ids=named)
def test_a_gpu_picks_the_same_without_waiting(pick, no_waiting):
    score_B = torch.rand(320, generator=generator(1))
    on_gpu = score_B.cuda()
    pick(on_gpu, 32, generator(2))  # sets the library up
    with no_waiting():
        selection = pick(on_gpu, 32, generator(3))
    expected = pick(score_B, 32, generator(3))
    assert torch.equal(selection.position.cpu(), expected.position)
    if expected.weight is not None:
        torch.testing.assert_close(selection.weight.cpu(), expected.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pick", ALL, ids=named)
def test_draws_do_not_follow_the_default_type(pick, dtype):
    """Frameworks change it; 16 bits would make many draws alike, and the earlier positions win."""
    score_B = torch.rand(3200, generator=generator(1))
    expected = pick(score_B, 320, generator()).position
    torch.set_default_dtype(dtype)
    try:
        found = pick(score_B, 320, generator()).position
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
