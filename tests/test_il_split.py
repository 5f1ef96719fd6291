"""Folds go by id; each id is scored by a model that was not trained on it."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from rholoss.errors import RholossError
from rholoss.il import split
from rholoss.il.points import points_of
from rholoss.indexed import WithIndex


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=4), st.integers(2, 4), st.integers(0, 5))
def test_one_id_one_fold_and_folds_are_balanced(ids, num, seed):
    distinct = len(set(ids))
    if distinct < num:
        return
    fold = split.folds(ids, num, seed)
    by_id = {}
    for id_, number in zip(ids, fold, strict=True):
        assert by_id.setdefault(id_, number) == number
    sizes = np.bincount(list(by_id.values()), minlength=num)
    assert sizes.max() - sizes.min() <= 1
    # neither the order nor the kind of container matters
    backwards = split.folds(torch.tensor(ids[::-1]), num, seed)
    assert (backwards[::-1] == fold).all()


def test_strings_and_numpy_integers_are_ids_too():
    assert sorted(split.folds(["a", "b", "c", "d"], 2).tolist()) == [0, 0, 1, 1]
    assert len(split.folds(list(np.arange(6)), 3)) == 6


def test_the_seed_decides_and_the_global_random_state_does_not():
    np.random.seed(1)
    state, first = np.random.get_state()[1].copy(), split.folds(range(100), 2, 0)
    np.random.seed(2)
    assert (split.folds(range(100), 2, 0) == first).all()
    assert (split.folds(range(100), 2, 1) != first).any()
    np.random.seed(1)
    split.folds(range(10), 2)
    assert (np.random.get_state()[1] == state).all()


@pytest.mark.parametrize("num", [1, 0, -2, 2.0, True])
def test_too_few_folds(num):
    with pytest.raises(RholossError, match=r"`folds` is .*at least 2"):
        split.folds(range(10), num)


def test_more_folds_than_ids():
    with pytest.raises(RholossError, match=r"`folds` is 5, but there are only 3 distinct ids"):
        split.folds([7, 7, 8, 9], 5)


def test_ids_of_another_kind():
    for ids in (
        [1.5, 2.0],
        [True, False],
        [1, "a"],
        [[1], [2]],
        torch.zeros(2, 2, dtype=torch.int),
        3,
    ):
        with pytest.raises(RholossError, match="`ids` must be whole numbers or strings"):
            split.folds(ids, 2)


def test_members_train_on_the_other_folds_by_id():
    data = TensorDataset(torch.arange(12.0)[:, None], torch.zeros(12, dtype=torch.long))
    view = Subset(data, [8, 0, 4, 2, 4, 10])  # 4 stands twice
    points = points_of(WithIndex(view), "score")
    members = split.cross_fit(view, points, 2, seed=3)
    ids = np.array([8, 0, 4, 2, 4, 10])
    scored = []
    for member in members:
        here = set(np.asarray(points.ids)[member.score].tolist())
        assert not here & set(ids[member.train].tolist())
        scored += sorted(here)
    assert sorted(scored) == [0, 2, 4, 8, 10]


def test_cross_fit_refuses_points_that_the_data_does_not_have():
    data = TensorDataset(torch.zeros(10, 1), torch.zeros(10, dtype=torch.long))
    points = points_of(data, "score")
    with pytest.raises(
        RholossError, match=r"`score` has 5 ids that `data` does not have \(5, 6, 7"
    ):
        split.cross_fit(Subset(data, range(5)), points, 2, 0)
    keyed = points_of(WithIndex(data, ids=list("abcdefghij")), "score")
    with pytest.raises(
        RholossError, match=r"`score` has 10 ids that `data` does not have \('a', 'b'"
    ):
        split.cross_fit(data, keyed, 2, 0)


def test_overlap_of_holdout_and_score_is_a_warning_only_for_views_of_one_data_set():
    data = TensorDataset(torch.zeros(10, 1), torch.zeros(10, dtype=torch.long))
    other = TensorDataset(torch.zeros(10, 1), torch.zeros(10, dtype=torch.long))
    points = points_of(WithIndex(Subset(data, [0, 1, 2, 3])), "score")
    with pytest.warns(UserWarning, match=r"2 of the 4 points to be scored are also in the holdout"):
        split.holdout(Subset(data, [2, 3, 4]), points, 0)
    split.holdout(Subset(data, [5, 6]), points, 0)  # no warning: they are errors in these tests
    (member,) = split.holdout(Subset(other, [2, 3, 4]), points, 0)
    assert member.train.tolist() == [0, 1, 2]
    assert member.score.tolist() == [0, 1, 2, 3]


def test_rows_that_holdout_and_training_set_share_are_found_if_each_was_made_anew():
    def made(rows, seed=0):
        x = torch.randn(60, 2, generator=torch.Generator().manual_seed(seed))
        return Subset(TensorDataset(x, torch.arange(60) % 3), rows)

    class Folder(list):
        """Augments its items at random."""

        def __init__(self, name):
            super().__init__(range(60))
            self.samples = [(f"{name}/{row}.png", 0) for row in range(60)]

        def __getitem__(self, row):
            return torch.randn(2), 0

    with pytest.warns(
        UserWarning, match=r"20 of the 40 points .* seem to be .* also in the holdout"
    ):
        split.holdout(made(range(20, 60)), points_of(made(range(40)), "score"), 0)
    with pytest.warns(UserWarning, match=r"60 of the 60 points"):
        split.holdout(Folder("train"), points_of(Folder("train"), "score"), 0)
    others = [made(range(20, 60), seed=1), made(range(40, 60)), Folder("train")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in others:  # the labels of the first are the same
            split.holdout(other, points_of(made(range(40)), "score"), 0)
        split.holdout(Folder("valid"), points_of(Folder("train"), "score"), 0)


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_seeds_that_are_none(seed):
    with pytest.raises(RholossError, match="`seed` is"):
        split.folds([1, 2, 3], 2, seed)
