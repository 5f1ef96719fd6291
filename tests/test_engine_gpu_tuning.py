"""On a GPU: each way to lay a step out is captured, compiles without breaks, and chooses as the usual one."""

import pytest
import torch
from benchmarks import bench_step
from fixtures_images import IL, IMAGES, Y
from torch import nn
from torch._dynamo.utils import counters

from rholoss.engine import CropFlip, Folded, Resident, Trainer

pytestmark = pytest.mark.gpu
STEPS = 24
WAYS = [
    "books beside", "products", "sums", "combined", "stepped", "sort compiled", "side first",
    "all algorithms",
]  # fmt: skip
KINDS = {
    "exact": dict,
    "overlapped": lambda: {"overlap": True},
    "folded": lambda: {"overlap": True, "batch_norm": "eval", "scoring": Folded()},
    "ahead": lambda: {"overlap": "ahead", "batch_norm": "eval", "scoring": Folded(0.5, means=8)},
}


def trained(kind, ways=None):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    pixels = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "augment": CropFlip(1), "device": "cuda"}
    made = Trainer(
        model.to(memory_format=torch.channels_last), Resident(IMAGES, Y, **pixels), total_steps=STEPS,
        irreducible=IL, candidates=320, seed=3, compile=True,
        tuning=bench_step.tuning(ways) if ways else None, **KINDS[kind](),
    )  # fmt: skip
    seen = []
    made.on_flush.append(lambda step, index, losses: seen.extend(index))
    made.train(STEPS)
    made.flush()
    assert made.captured[True].graph is not None
    return [set(index.tolist()) for index in seen]


@pytest.fixture(scope="module")
def usual():
    return {kind: trained(kind) for kind in KINDS}


@pytest.mark.filterwarnings("ignore")  # inductor warns of its own doings
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ways", WAYS)
def test_each_way_is_captured_and_chooses_the_same(usual, kind, ways):
    torch._dynamo.reset()  # or the limit of recompilations is reached
    breaks = sum(counters["graph_break"].values())
    chosen = trained(kind, ways)
    assert sum(counters["graph_break"].values()) == breaks
    pairs = zip(chosen, usual[kind], strict=True)
    shares = [len(one & other) / 32 for one, other in pairs]
    assert shares[0] >= 0.97  # at the same weights: rounding alone
    assert sum(shares) / STEPS > 0.9  # Adam amplifies it
