import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rholoss.errors import RholossError
from rholoss.noise import AUTHORS_PAIRS, structured_noise, uniform_noise

LABELS = np.arange(1000) % 10


def test_ten_percent_of_a_thousand_is_exactly_a_hundred():
    other, any_ = (uniform_noise(LABELS, 10, 0.1, mode=mode) for mode in ("other", "any"))
    assert other.corrupted.sum() == any_.corrupted.sum() == 100
    assert (other.labels != LABELS).sum() == 100
    # The authors' way redraws the old label for about a tenth of them.
    assert 75 < (any_.labels != LABELS).sum() < 100


@given(st.integers(2, 12), st.integers(0, 300), st.floats(0, 1), st.integers(0, 9), st.randoms())
def test_mode_other_flags_exactly_what_it_changed(num_classes, rows, p, seed, random):
    labels = np.array([random.randrange(num_classes) for _ in range(rows)], dtype=np.int64)
    noisy = uniform_noise(labels, num_classes, p, seed=seed)
    np.testing.assert_array_equal(noisy.corrupted, noisy.labels != labels)
    assert abs(noisy.corrupted.sum() - p * rows) <= 0.5
    assert rows == 0 or (noisy.labels.min() >= 0 and noisy.labels.max() < num_classes)


def test_new_labels_are_drawn_evenly():
    noisy = uniform_noise(np.zeros(90_000, dtype=np.int64), 10, 1.0)
    counts = np.bincount(noisy.labels, minlength=10)
    assert counts[0] == 0
    assert np.abs(counts[1:] - 10_000).max() < 500  # five standard deviations
    counts = np.bincount(uniform_noise(np.zeros(100_000, int), 10, 1.0, mode="any").labels)
    assert np.abs(counts - 10_000).max() < 500


def test_count_is_rounded_not_truncated():
    assert int(100 * 0.29) == 28  # what truncation gives
    assert uniform_noise(np.zeros(100, int), 2, 0.29).corrupted.sum() == 29
    assert structured_noise(np.zeros(100, int), [(0, 1)], 0.29).corrupted.sum() == 29


@pytest.mark.parametrize("choose", ["first", "random"])
def test_same_seed_same_noise_whatever_else_is_random(choose):
    first = uniform_noise(LABELS, 10, seed=3), structured_noise(LABELS, choose=choose, seed=3)
    np.random.seed(123)
    torch.manual_seed(5)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    again = uniform_noise(LABELS, 10, seed=3), structured_noise(LABELS, choose=choose, seed=3)
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.labels, two.labels)
        np.testing.assert_array_equal(one.corrupted, two.corrupted)
    np.testing.assert_array_equal(before[0], np.random.get_state()[1])
    assert torch.equal(before[1], torch.get_rng_state())
    assert (uniform_noise(LABELS, 10, seed=4).corrupted != first[0].corrupted).any()


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor, list])
def test_any_kind_of_labels_and_the_input_stays_as_it_was(make):
    labels = make(LABELS)
    for noisy in (uniform_noise(labels, 10), structured_noise(labels)):
        assert isinstance(noisy.labels, np.ndarray)
        np.testing.assert_array_equal(np.asarray(labels), LABELS)
    assert uniform_noise(LABELS.astype(np.uint8), 10).labels.dtype == np.uint8


def test_structured_pairs_take_the_first_half_of_the_class_as_the_authors_do():
    labels = np.random.default_rng(0).integers(10, size=2001)
    noisy = structured_noise(labels)
    for source, target in AUTHORS_PAIRS:
        rows = np.flatnonzero(labels == source)
        half = int(len(rows) * 0.5)
        assert (noisy.labels[rows[:half]] == target).all()
        assert (noisy.labels[rows[half:]] == source).all()
    np.testing.assert_array_equal(noisy.corrupted, noisy.labels != labels)


def test_structured_random_half_has_the_same_counts_elsewhere():
    labels = np.random.default_rng(0).integers(10, size=2001)
    first, random = structured_noise(labels), structured_noise(labels, choose="random", seed=1)
    np.testing.assert_array_equal(np.bincount(first.labels), np.bincount(random.labels))
    assert (first.corrupted != random.corrupted).any()
    np.testing.assert_array_equal(random.corrupted, random.labels != labels)


def test_no_row_is_flipped_twice():
    labels = np.repeat([1, 2], 10)
    noisy = structured_noise(labels, [(1, 2), (2, 3)], p=1.0)
    np.testing.assert_array_equal(noisy.labels, np.repeat([2, 3], 10))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform_noise(LABELS, 10, 1.5), "`p` is 1.5; give the share"),
        (lambda: uniform_noise(LABELS, 10, float("nan")), "`p` is nan"),
        (lambda: structured_noise(LABELS, p=-0.1), "`p` is -0.1"),
        (lambda: uniform_noise([0, 0], 1), "`num_classes` is 1, so there is no other label"),
        (lambda: uniform_noise(LABELS, 7), r"`labels` run from 0 to 9, outside 0 \.\. 6"),
        (lambda: uniform_noise([-1, 2], 3), "`labels` run from -1 to 2"),
        (lambda: uniform_noise([0.5, 1.0], 3), "float64; give one whole number for each row"),
        (lambda: uniform_noise([[0, 1]], 3), r"`labels` is \(1, 2\)"),
        (lambda: uniform_noise(LABELS, 10, mode="all"), "`mode` is 'all'; use 'other'"),
        (lambda: structured_noise(LABELS, choose="last"), "`choose` is 'last'; use 'first'"),
        (lambda: structured_noise(LABELS, [(3, 3)]), "class 3 must go to one other class"),
        (lambda: structured_noise(LABELS, [(3, 5), (3, 6)]), "name it once"),
        (lambda: structured_noise(LABELS, [(11, 5)]), "none of the 1000 labels is 11"),
        (
            lambda: structured_noise(LABELS.astype(np.uint8), [(3, 300)]),
            "flips class 3 to 300, which labels of type uint8 cannot hold",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(RholossError, match=message):
        call()
