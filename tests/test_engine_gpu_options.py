"""On a GPU: cheaper scoring and streamed data in graphs, and what a captured run must survive."""

import math

import pytest
import torch
from fixtures_images import IL, IMAGES, N, Y
from torch import nn

import rholoss as rho
from rholoss.engine import (
    CropFlip,
    Evaluator,
    Gate,
    LowerResolution,
    Proxy,
    Recorded,
    Resident,
    Reuse,
    Shortlist,
    Streamed,
    Trainer,
)
from rholoss.errors import RholossError, TooFewFiniteScoresError

pytestmark = pytest.mark.gpu
STEPS = 300
PIXELS = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "device": "cuda"}


def make_model(width=16):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 4),
    )  # fmt: skip


def trainer(kind=Resident, model=None, augment=None, **options):
    options = {"total_steps": STEPS, "irreducible": IL, "seed": 3, **options}
    made = Trainer(model or make_model(), kind(IMAGES, Y, augment=augment, **PIXELS), **options)
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index))
    return made


def shared(one, other):
    """Share of choices that two runs have in common, step by step."""
    pairs = zip(one.seen, other.seen, strict=True)
    return sum(len(set(a.tolist()) & set(b.tolist())) / len(a) for a, b in pairs) / len(one.seen)


OPTIONS = {
    "half resolution": lambda: LowerResolution(2),
    "proxy": lambda: Proxy(lambda: make_model(8)),
    "reuse": lambda: Reuse(0.5),
    "shortlist": lambda: Shortlist(0.5),
    "gate": lambda: Gate(0.5),
    "replay": lambda: Recorded((torch.arange(STEPS * 32) % N).view(STEPS, 32).tolist()),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", [Resident, Streamed])
def test_every_option_is_captured_and_learns_without_the_host(no_waiting, name, kind):
    fast = trainer(kind, augment=CropFlip(pad=1, flip=False), scoring=OPTIONS[name]())
    fast.train(30)
    fast.flush()
    with no_waiting():
        fast.train(3)  # within an epoch
    fast.train(STEPS - 33)
    fast.flush()
    used = fast.captured[name != "replay"]
    assert used.graph is not None
    assert used.why_eager == ""
    result = Evaluator(fast.model, Resident(IMAGES, Y, **PIXELS), num_classes=4)()
    assert result.accuracy > 0.8


def test_small_images_scored_beside_training_leave_the_statistics_to_it():
    """Weights stay, so that a choice that is a step old is that of now."""
    options = {"scoring": LowerResolution(2), "learning_rate": 0.0, "total_steps": 10}
    exact, beside = (trainer(overlap=overlap, **options) for overlap in (False, True))
    exact.train(10)
    beside.train(10)
    assert shared(exact, beside) > 0.95
    for name in ("running_mean", "running_var"):
        found, expected = (getattr(run.model[1], name) for run in (beside, exact))
        torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("method", ["rho", "uniform"])
def test_a_label_without_an_output_is_told_and_the_gpu_goes_on(method):
    data = Resident(IMAGES, torch.where(torch.arange(N) == N - 1, 4, Y), **PIXELS)
    made = Trainer(make_model(), data, total_steps=20, method=method, irreducible=IL)
    with pytest.raises(RholossError, match="labels go from 0 to 4, but the model put out 4 logits"):
        made.train(20)
    trainer(method=method, total_steps=20).train(20)


@pytest.mark.parametrize("overlap", [False, True])
def test_streamed_rows_are_the_rows(overlap):
    runs = [trainer(kind, overlap=overlap, total_steps=60) for kind in (Resident, Streamed)]
    for run in runs:
        run.train(60)
        run.flush()
    assert shared(*runs) > 0.9  # sums may come in another order, and Adam amplifies it
    assert torch.equal(runs[0].seen[0], runs[1].seen[0])


@pytest.mark.parametrize("name", ["exact", "proxy", "reuse"])
def test_a_resumed_run_goes_on_as_the_whole_one(tmp_path, name):
    def make():
        scoring = OPTIONS[name]() if name in OPTIONS else None
        return trainer(scoring=scoring, augment=CropFlip(pad=1), total_steps=60)

    whole, first, second = make(), make(), make()
    whole.train(60)
    whole.flush()
    first.train(25)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.train(7)
    second.flush()
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    second.seen = list(first.seen)
    second.train(35)
    second.flush()
    assert second.captured[True].graph is not None
    assert shared(whole, second) > 0.9
    assert torch.equal(whole.seen[25], second.seen[25]) or shared(whole, second) > 0.97


def test_scoring_is_timed_apart_and_changes_nothing():
    runs = [trainer(total_steps=60) for _ in range(2)]
    for run in runs:
        run.train(30)
        run.flush()
        assert math.isnan(run.ledger.scoring_seconds)
        if run is runs[1]:
            seconds = run.time_scoring()
        run.train(30)
        run.flush()
    assert 1e-6 < seconds < 0.1
    ledger = runs[1].ledger
    assert ledger.scoring_seconds == pytest.approx(60 * seconds)
    assert "of it selecting" in str(ledger)
    assert ledger.flops > 0
    assert shared(*runs) > 0.9


class Hungry(nn.Module):
    """Asks for 32 GiB when it has been called so often."""

    def __init__(self, calls):
        super().__init__()
        self.inner, self.calls = make_model(), calls

    def forward(self, x):
        self.calls -= 1
        if self.calls < 0:
            torch.empty(2**35, dtype=torch.uint8, device=x.device)
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:The step cannot be captured")  # then eagerly, with the same end
@pytest.mark.parametrize("calls", [1, 2, 7])  # in scoring, in training, in capture
def test_out_of_memory_says_what_to_reduce(calls):
    fast = trainer(model=Hungry(calls))
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        with pytest.raises(RholossError, match="Reduce `candidates` or `keep`"):
            fast.train(10)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_captured_run_that_breaks_in_the_middle_stops_within_100_steps_and_counts():
    fast = trainer(learning_rate=lambda step: 1e-3 if step < 130 else 1e38)
    fast.train(100)
    assert fast.captured[True].graph is not None
    with pytest.raises(TooFewFiniteScoresError) as caught:
        fast.train(200)
    broken = int((~torch.cat(fast.losses).isfinite()).sum())
    assert 60 < broken < 71
    assert f"Between step 100 and step 200, {broken} step(s) had a loss" in str(caught.value)
    assert fast.step == 200


def test_a_schedule_over_streamed_rows():
    fast = trainer(Streamed, schedule=rho.annealed(STEPS, switch=0.3, drop=0.1))
    fast.train(STEPS)
    fast.flush()
    assert all(captured.graph is not None for captured in fast.captured.values())
    late = torch.cat(fast.seen[90:])
    assert IL[late].max() <= IL.quantile(0.9)
