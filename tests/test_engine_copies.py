"""Many copies at once: each target gets its source, whatever the types and the memory order."""

import torch

from rholoss.engine.copies import Copies


def test_every_target_gets_its_source():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(shape, generator=generator)

    last = random(4, 3, 2, 2).to(memory_format=torch.channels_last)
    pairs = [
        (random(5), torch.zeros(5)),
        (random(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16)),
        (last, torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        (last, torch.zeros(4, 3, 2, 2)),  # another order
        (last, torch.zeros(4, 8, 2, 2)[:, :3]),  # a part of something wider
        (random(3, 2).T, torch.zeros(2, 3)),
        (torch.arange(3), torch.zeros(3, dtype=torch.long)),
    ]
    copies = Copies()
    copies.add(None, torch.zeros(1))
    for source, target in pairs:
        copies.add(source, target)
    for factor in (1, 2):  # and again when the sources have changed
        for source, _ in pairs:
            source.mul_(factor)
        copies.copy()
        for source, target in pairs:
            assert torch.equal(target, source.to(target.dtype))
