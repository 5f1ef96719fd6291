"""Images, a model with all that can be folded in it, and short runs that score it folded."""

import torch
from torch import nn
from torch.nn import functional as F

from rholoss.engine import Resident, Trainer

N = 96
IMAGES = torch.randn(N, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Every shape of sum and ReLU that is fused, and some that are not."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=(2, 1), padding=(2, 1), bias=True)
        self.norm0 = nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, eps=1e-3)
        self.conv2, self.norm2 = (
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.BatchNorm2d(8, affine=False),
        )
        self.conv3, self.relu = nn.Conv2d(8, 8, 1), nn.ReLU()  # no BatchNorm
        self.conv4, self.norm4 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.last_norm = nn.BatchNorm2d(8)  # after no convolution
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.norm0(self.stem(x)).relu()
        x = F.relu(x + self.norm1(self.conv1(x)))
        inner = self.norm2(self.conv2(x))
        x = torch.relu(inner) + inner  # used twice: not fused
        x = F.relu(self.norm4(self.conv4(x)).relu() + x)  # the convolution has its ReLU already
        x = self.last_norm(self.relu(self.conv3(x)) + x)
        return self.head(x.mean((2, 3)))


def trained(model, seed=0):
    """Weights and statistics that are not those of the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.rand(parameter.shape, generator=generator) - 0.5) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith(("mean", "var")):
                buffer.add_(torch.rand(buffer.shape, generator=generator))
    return model


def run(scoring, images, steps=6, state=None, net=Net, **options):
    torch.manual_seed(0)
    trainer = Trainer(
        net(), Resident(images, torch.arange(N) % 5, device="cpu"), total_steps=6, learning_rate=0.05,
        irreducible=torch.linspace(0, 1, N), candidates=48, keep=0.25, scoring=scoring,
        **{"batch_norm": "eval", **options},
    )  # fmt: skip
    if state is not None:
        trainer.load_state_dict(state)
    ids = []
    trainer.on_flush.append(lambda step, index, losses: ids.append(index))
    trainer.train(steps)
    trainer.flush()
    return torch.cat(ids), trainer
