"""What scoring costs, for the ledger, and how its clock stands to the device."""

import contextlib
import types

import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.engine import Folded, Gate, Resident, Shortlist, Trainer, clock
from rholoss.engine.cheaper import Cheaper
from rholoss.engine.clock import ScoringCost
from rholoss.errors import RholossError
from rholoss.ledger import Ledger
from rholoss.methods import by_name

N = 64
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(N, 3, 8, 8, generator=GENERATOR)
LABELS = torch.randint(0, 5, (N,), generator=GENERATOR)


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


def trainer(**options):
    options = {"irreducible": torch.zeros(N), "candidates": 32, "keep": 0.25, **options}
    data = Resident(IMAGES, LABELS, device="cpu")
    return Trainer(make_model(), data, total_steps=10, **options)


@pytest.mark.parametrize(("device", "waits"), [("cuda", 2), ("cpu", 0)])
def test_marks_and_pauses_wait_for_what_the_gpu_was_told(monkeypatch, device, waits):
    """Else the steps that are still queued would be done in the pause, and cost nothing."""
    where, waited = torch.device(device, 0), []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    step = types.SimpleNamespace(
        data=types.SimpleNamespace(device=where), method=by_name("rho"), runs_model=True,
        scoring=Cheaper(), order=types.SimpleNamespace(size=320), k=32, draws=1,
        timed=contextlib.nullcontext,
    )  # fmt: skip
    ledger = Ledger()
    ScoringCost(step, ledger, overlap=False)
    ledger.start()
    ledger.mark(0.5)
    with ledger.paused():
        pass
    assert waited == [where] * waits


def test_a_gpu_that_is_not_the_current_one_is_timed_on_its_own_stream(monkeypatch):
    """The time of another GPU would be next to nothing."""
    recorded = []

    class Event:
        def __init__(self, enable_timing=False):
            self.synchronize = lambda: None

        def record(self, stream=None):
            recorded.append(stream)

        def elapsed_time(self, end):
            return 1000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"that of {device}")
    assert clock._timed(lambda: None, torch.device("cuda", 1)) == 1.0
    assert recorded == ["that of cuda:1"] * 2


def test_timing_leaves_a_live_model_alone():
    live = rho.LiveIrreducible(make_model(), batch_norm="train")
    made = trainer(irreducible=live)
    made.train(5)
    before = {name: value.clone() for name, value in live.model.state_dict().items()}
    assert before["1.num_batches_tracked"] > 0
    made.time_scoring(repeats=2)
    assert all(torch.equal(value, before[name]) for name, value in live.model.state_dict().items())


@pytest.mark.parametrize("highest", [155, 156])
def test_a_byte_that_the_model_has_no_output_for_is_told(highest):
    """In a byte -100, the label of a token that does not count, would be 156."""
    bytes_NL = torch.randint(0, 100, (N, 6), dtype=torch.uint8, generator=GENERATOR)
    bytes_NL[-1, -1] = highest
    model = nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 156))
    data = Resident(bytes_NL, bytes_NL, dtype=torch.long, device="cpu")
    made = Trainer(model, data, total_steps=4, method="uniform", loss="tokens", candidates=32)
    if highest < 156:
        made.train(4)
        return
    with pytest.raises(RholossError, match="labels go from 0 to 156, but the model put out 156"):
        made.train(4)


@pytest.mark.parametrize(
    ("scoring", "scored", "forwards"),
    [
        (lambda: Folded(rows=12), 32, 44),
        (lambda: Gate(0.5, by=Folded(rows=12)), 16, 28),
        (lambda: Shortlist(0.5, by=Folded(rows=12)), 16, 28),
        (lambda: Gate(0.5), 16, 16),
    ],
)
def test_what_is_forwarded_twice_counts_twice(scoring, scored, forwards):
    made = trainer(scoring=scoring())
    made.train(10)
    assert (made.ledger.scored, made.ledger.forwards) == (10 * scored, 10 * forwards)
