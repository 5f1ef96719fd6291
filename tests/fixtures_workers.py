"""What the tests of scoring workers share."""

import torch
from torch import nn

WAIT = 20.0  # seconds, for what should come at once


def network(norm=False):
    """The same one each time, whatever workers in threads do to torch's own generator meanwhile."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                for parameter in layer.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)
        for parameter in model.parameters():  # so that nothing is lost on the way
            parameter.copy_(parameter.bfloat16())
    return model
