"""The parts of a step that are compiled: whole, once, and the same as when they are not.

On a GPU the fourth step of a kind is captured, and nothing can be compiled in a capture. Traced here and
not turned into machine code, so that no compiler is needed and the numbers are those of eager steps.
"""

import functools
import math

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import rholoss as rho
from rholoss.engine import (
    CropFlip,
    Folded,
    Gate,
    Proxy,
    Remembered,
    Resident,
    Reuse,
    Shortlist,
    Trainer,
    step,
)
from rholoss.engine.counters import Counters
from rholoss.engine.tuning import Tuning

N, STEPS = 160, 8
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, 4, (N,), generator=GENERATOR)
IMAGES = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8, generator=GENERATOR)
STEPPED = {"coordinate_descent_tuning": True}
PIXELS = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "augment": CropFlip(pad=1), "device": "cpu"}


def make_model(width=8):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(4 * width, 4),
    )  # fmt: skip


KINDS = {
    "exact": dict,
    "overlapped": lambda: {"overlap": True},
    "ahead": lambda: {"overlap": "ahead", "batch_norm": "eval", "scoring": Folded(0.5, means=8)},
    "sampled": lambda: {"method": "grad_norm_is"},
    "proxy": lambda: {"scoring": Proxy(lambda: make_model(4))},
    "reuse": lambda: {"scoring": Reuse(0.5), "overlap": True},
    "shortlist": lambda: {"batch_norm": "eval", "scoring": Shortlist(0.5, by=Folded(0.8))},
    "gate": lambda: {
        "batch_norm": "eval", "scoring": Gate(0.75, by=Folded()), "overlap": True,
    },
    "tuned": lambda: {"tuning": Tuning(STEPPED, STEPPED, "all", compiled_sort=True, books_beside=True)},
    "remembered": lambda: {"method": "uniform", "plan": Remembered(math.log(4))},
}  # fmt: skip


@pytest.fixture
def traced(monkeypatch):
    """Compiling without a compiler; a part that breaks in two is an error."""

    @functools.cache
    def compiled(part, **options):
        return torch.compile(part, dynamic=False, fullgraph=True, backend="aot_eager")

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(step, "compiled", compiled)
    yield
    torch._dynamo.reset()


def train(**options):
    """A run, and how many graphs had been compiled after each step."""
    made = Trainer(
        make_model(), Resident(IMAGES, LABELS, **PIXELS), total_steps=STEPS, candidates=32,
        irreducible=torch.linspace(0, 1, N), keep=0.25, **options,
    )  # fmt: skip
    made.seen, graphs = [], []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index))
    for _ in range(STEPS):
        made.train(1)
        graphs.append(counters["stats"]["unique_graphs"])
    made.flush()
    return made, graphs


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_compiled_in_the_first_step_and_chooses_the_same(traced, kind):
    plain, none = train(**KINDS[kind]())
    made, graphs = train(compile=True, **KINDS[kind]())
    assert set(none) == {0}
    assert graphs == [graphs[0]] * STEPS
    assert graphs[0] >= 4  # rows, gathering, loss, book-keeping
    assert all(map(torch.equal, plain.seen, made.seen))
    for one, other in zip(plain.model.parameters(), made.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_the_next_phase_is_compiled_in_its_first_step(traced):
    _, graphs = train(compile=True, schedule=rho.window(0, 4))
    assert graphs == [graphs[0]] * 4 + [graphs[4]] * 4
    assert graphs[0] < graphs[4]


def test_the_rate_of_a_step_is_set_on_the_device(traced):
    """What a GPU does where the CPU writes numbers into the optimizer."""
    note, rates = step.compiled(step.note), torch.tensor([0.3, 0.2, 0.1])
    lr, number = torch.zeros(()), torch.zeros(1, dtype=torch.long)
    noted, index = Counters.empty(3, 2, torch.device("cpu")), torch.tensor([5, 6])
    for rate in rates:
        note(noted, (lr, rates, number), index, None, rate * 10)
        assert lr == rate
    assert number == noted.row == 3
    assert torch.equal(noted.index, index.expand(3, 2))
    assert torch.equal(noted.loss, rates * 10)
