import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import rholoss as rho
from rholoss.coreset import coreset
from rholoss.errors import RholossError, TooFewFiniteScoresError, UnmeasuredLossError


class Confidence(nn.Module):
    """Logits (x, 0): the predictive entropy falls with |x|."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(torch.stack([x * self.scale, torch.zeros_like(x)], 1))


@pytest.fixture
def points():
    x = torch.linspace(-60, 60, 101)[
        torch.randperm(101, generator=torch.Generator().manual_seed(0))
    ]
    return TensorDataset(x, torch.zeros(101, dtype=torch.long))


def test_svp_keeps_the_points_of_highest_entropy(points):
    """Also where p underflows to 0, which p log p would turn into NaN and rank first."""
    proxy = Confidence().train()
    chosen = coreset(proxy, points, keep=0.09, batch_size=17, progress=False)
    nearest = points.tensors[0].abs().argsort()[:9]
    assert sorted(chosen.ids) == sorted(nearest.tolist())
    assert proxy.training
    assert proxy.drop.training
    index, x, _ = chosen[0]
    assert points.tensors[0][index] == x


def test_ids_are_those_of_the_whole_data_set(points):
    even = Subset(points, range(0, 101, 2))
    chosen = coreset(Confidence(), even, keep=0.2, progress=False)
    assert len(chosen) == 10
    assert all(index % 2 == 0 for index in chosen.ids)
    assert all(points.tensors[0][index] == x for index, x, _ in chosen)


@pytest.mark.parametrize("given", [torch.tensor, rho.Irreducible.from_losses])
def test_any_method_can_choose_offline(points, given):
    losses = given(np.arange(101, dtype=np.float32))
    options = {"method": "negative_il", "irreducible": losses, "progress": False}
    chosen = coreset(Confidence(), points, keep=0.05, batch_size=30, **options)
    assert list(chosen.ids) == [0, 1, 2, 3, 4]


def test_points_without_irreducible_loss_are_told_and_not_left_out(points):
    values = torch.zeros(101)
    values[[7, 90]] = torch.nan
    for losses in (values, values[:90], rho.Irreducible.from_losses(torch.zeros(90))):
        with pytest.raises(UnmeasuredLossError, match=r"have no (finite|usable) irreducible loss"):
            coreset(Confidence(), points, method="rho", irreducible=losses, progress=False)
    with pytest.raises(RholossError, match="'rho' needs irreducible losses; pass `irreducible=`"):
        coreset(Confidence(), points, method="rho", progress=False)
    with pytest.raises(RholossError, match="`irreducible` is a dict; pass what `fit_irreducible`"):
        coreset(Confidence(), points, method="rho", irreducible={0: 0.1}, progress=False)


def test_losses_of_the_proxy_that_are_not_finite_are_not_chosen(points):
    proxy = Confidence()
    nn.init.constant_(proxy.scale, torch.nan)
    with pytest.raises(TooFewFiniteScoresError, match="Only 0 of 101 points have a finite score"):
        coreset(proxy, points, method="loss", progress=False)


@pytest.mark.parametrize("keep", [0, 1.5])
def test_bad_keep(points, keep):
    with pytest.raises(RholossError, match="`keep` must be in"):
        coreset(Confidence(), points, keep=keep, progress=False)


def test_empty_data_set():
    empty = TensorDataset(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    with pytest.raises(
        RholossError,
        match=r"`dataset` is empty, .* pass one that has rows",
    ):
        coreset(Confidence(), rho.WithIndex(empty), progress=False)


def test_methods_that_a_part_of_the_data_cannot_be_chosen_by():
    data, proxy = TensorDataset(torch.randn(40, 4), torch.zeros(40).long()), nn.Linear(4, 2)
    with pytest.raises(RholossError, match=r"'bald' compares the draws .* `draws` is 1"):
        rho.coreset(proxy, data, method="bald", progress=False)
    with pytest.raises(RholossError, match=r"'grad_norm_is' samples rows by importance"):
        rho.coreset(proxy, data, method="grad_norm_is", progress=False)


def test_losses_that_change_with_the_run_are_none_to_choose_by_once(points):
    ladder = rho.Ladder([torch.ones(101), torch.zeros(101)])
    for given in (ladder, rho.LiveIrreducible(Confidence())):
        with pytest.raises(
            RholossError, match=rf"`irreducible` is a {type(given).__name__}; losses are"
        ):
            coreset(Confidence(), points, method="rho", irreducible=given, progress=False)
