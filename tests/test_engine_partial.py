"""A share of the candidates is forwarded: what was measured stands, whatever was expected."""

import pytest
import torch
from torch import nn

from rholoss import core
from rholoss.engine import Cheaper, Gate, Resident, Reuse, Shortlist, Trainer
from rholoss.sampler import EPOCHS

N, BROKEN = 200, 7
X = torch.randn(N, 20, generator=torch.Generator().manual_seed(0))
X[BROKEN] = torch.nan
Y = torch.randint(0, 5, (N,), generator=torch.Generator().manual_seed(1))
# The row that has no finite loss looks the most worth while.
IL = torch.zeros(N).index_fill(0, torch.tensor([BROKEN]), -1.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: None, *(lambda k=k: k(0.6) for k in (Reuse, Gate, Shortlist))]
)
def test_a_row_without_a_finite_loss_is_not_chosen(make, overlap):
    torch.manual_seed(0)
    made = Trainer(
        nn.Linear(20, 5), Resident(X, Y, device="cpu"), total_steps=40, irreducible=IL, candidates=40,
        scoring=make(), overlap=overlap,
    )  # fmt: skip
    chosen = []
    made.on_flush.append(lambda step, index, losses: chosen.append(index))
    made.train(40)
    assert made.counters.not_finite > 0  # it was looked at
    assert not (torch.cat(chosen) == BROKEN).any()
    assert made.model.weight.isfinite().all()


@pytest.mark.parametrize("option", [Gate, Reuse, Shortlist])
def test_what_is_forwarded_comes_in_the_order_of_the_candidates(option):
    """Which is random: not the easiest first, of which some ways to score take the statistics."""
    seen = []

    class Sees(Cheaper):
        def measure(self, step, model, candidates, generator):
            seen.append(candidates.index.tolist())
            return super().measure(step, model, candidates, generator)

    torch.manual_seed(0)
    made = Trainer(
        nn.Linear(20, 5), Resident(X.nan_to_num(), Y, device="cpu"), total_steps=5, candidates=40,
        irreducible=torch.rand(N), scoring=option(0.5, by=Sees()),
    )  # fmt: skip
    made.train(5)
    order = torch.randperm(N, generator=core.step_generator(0, EPOCHS))
    for candidates, part in zip(order.view(5, 40).tolist(), seen, strict=True):
        assert len(part) == 20
        assert part == [row for row in candidates if row in part]
