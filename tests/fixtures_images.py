"""Small images of four classes that can be learnt, with irreducible losses made at random."""

import torch

N = 2000
GENERATOR = torch.Generator().manual_seed(0)
Y = torch.randint(0, 4, (N,), generator=GENERATOR)
IMAGES = torch.randint(0, 100, (N, 3, 8, 8), dtype=torch.uint8, generator=GENERATOR)
for label in range(4):
    IMAGES[label == Y, label % 3, 2 * label : 2 * label + 2] += 100
IL = torch.rand(N, generator=GENERATOR)
