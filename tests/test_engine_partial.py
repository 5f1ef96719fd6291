"""A share of the candidates is forwarded: what was measured stands, whatever was expected."""

import pytest
import torch
from torch import nn

from rholoss.engine import Gate, Resident, Reuse, Shortlist, Trainer

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
