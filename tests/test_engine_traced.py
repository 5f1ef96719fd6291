"""What `Folded` traces: a scoring pass, of layers whose weights it can follow."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from rholoss.engine import Folded, Resident, Trainer
from rholoss.engine.folded import FoldedCopy
from rholoss.engine.resident import Examples
from rholoss.errors import RholossError

N = 64
IMAGES = torch.randn(N, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 5, (N,), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Asks for its mode in its own code."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.between = nn.Identity()

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        x = F.dropout(self.between(x), 0.5, self.training)
        if self.training:
            x = 2 * x
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(
    "options", [{"batch_norm": "eval"}, {"batch_norm": "batch"}], ids=["running", "candidates"]
)
def test_code_that_asks_for_its_mode_is_scored_in_eval_mode(options):
    torch.manual_seed(0)
    scoring = Folded(rows=None if options["batch_norm"] == "eval" else N)
    data = Resident(IMAGES, LABELS, device="cpu")
    made = Trainer(
        Net(),
        data,
        total_steps=9,
        irreducible=torch.zeros(N),
        candidates=N,
        scoring=scoring,
        **options,
    )
    made.train(9)
    everything = Examples(data.ids, *data.batch(data.ids))
    generator = torch.Generator()
    folded, _ = made.body.scoring.measure(made.body, made.model, everything, generator)
    exact = made.body.measure(made.model, everything.x, everything.y, generator)
    torch.testing.assert_close(folded["loss"], exact["loss"], rtol=1e-4, atol=1e-4)
    assert made.model.training
    assert made.model.norm.training


def with_layer(**layers):
    model = Net()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


def old_style(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


class Attention(Net):
    def forward(self, x):
        x = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(self.between(x, x, x)[0].mean(1))


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (lambda: with_layer(conv=parametrizations.weight_norm(nn.Conv2d(3, 8, 3))), "conv"),
        (lambda: with_layer(conv=parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))), "conv"),
        (lambda: with_layer(conv=old_style(nn.Conv2d(3, 8, 3))), "conv"),
        (lambda: with_layer(head=parametrizations.weight_norm(nn.Linear(8, 5))), "head"),
        (lambda: with_layer(head=old_style(nn.Linear(8, 5))), "head"),
    ],
    ids=["weight norm", "spectral norm", "old weight norm", "of the head", "old, of the head"],
)
def test_weights_that_are_computed_anew_are_refused(make, layer):
    """They would stay those of the first step."""
    with pytest.raises(
        RholossError, match=f"does not know how to copy `{layer}`, a .*parametrized"
    ):
        FoldedCopy(make(), torch.float32)


def test_layers_with_others_inside_are_refused():
    model = Attention()
    model.between = nn.MultiheadAttention(8, 2, batch_first=True)
    with pytest.raises(
        RholossError, match=r"copy `between`, a MultiheadAttention .* leave `scoring`"
    ):
        FoldedCopy(model, torch.float32)
