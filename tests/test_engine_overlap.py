"""Scoring beside training: nothing hangs on which of the two comes first."""

import copy
import math

import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.engine import (
    CropFlip,
    Folded,
    Gate,
    LowerResolution,
    Remembered,
    Resident,
    Reuse,
    Shortlist,
    Streamed,
    Trainer,
)
from rholoss.engine.ahead import REPEATED, Ahead
from rholoss.engine.overlap import OverlappedStep
from rholoss.engine.resident import Examples
from rholoss.errors import RholossError

N, STEPS = 480, 110  # more than one window of a hundred
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, 4, (N,), generator=GENERATOR)
IMAGES = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8, generator=GENERATOR)
PIXELS = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "augment": CropFlip(pad=1), "device": "cpu"}
COUNTERS = ("index", "score", "loss", "reducible", "row", "not_finite", "short", "broken")

KINDS = {
    "train": dict,
    "batch": lambda: {"batch_norm": "batch"},
    "sampled": lambda: {"method": "grad_norm_is"},
    "folded": lambda: {"batch_norm": "eval", "scoring": Folded()},
    "gate": lambda: {"batch_norm": "eval", "scoring": Gate(0.75, by=Folded())},
    "reuse": lambda: {"scoring": Reuse(0.5)},
    "shortlist": lambda: {"scoring": Shortlist(0.5)},
    "half resolution": lambda: {"scoring": LowerResolution(2)},
    "ahead": lambda: {"overlap": "ahead"},
    "ahead, folded": lambda: {"overlap": "ahead", "batch_norm": "eval", "scoring": Folded(0.8)},
    "streamed": lambda: {"kind": Streamed},
    "remembered": lambda: {"plan": Remembered(math.log(4)), "schedule": rho.window(0, 60)},
}


def late(self):
    """A step whose side stream does everything at the last moment that the events allow."""
    index, x, y, score, mean, *weight = self.waiting
    self.replica.refresh_statistics()
    optimizer, update = self.step.optimizer, self.step.optimizer.step
    optimizer.step = lambda: (self.refresh_weights(), update())
    try:
        self.step.learn(Examples(index, x, y), weight[0] if weight else None, score, mean)
    finally:
        del optimizer.step
    choice = self._choose_next()
    if self.step.scorer.batch_norm == "train":
        self.replica.move_statistics()
    self.deliver(self.waiting, choice)


def trained(kind=Resident, overlap=True, **options):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 4),
    )  # fmt: skip
    made = Trainer(
        model, kind(IMAGES, LABELS, **PIXELS), total_steps=STEPS, candidates=48, keep=0.25,
        irreducible=torch.linspace(0, 1, N), overlap=overlap, **options,
    )  # fmt: skip
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.append(index))
    made.train(STEPS)
    made.flush()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_matter_when_the_side_stream_runs(monkeypatch, kind):
    """On the CPU scoring comes first; on a GPU it may as well come last."""
    one = trained(**KINDS[kind]())
    monkeypatch.setattr(OverlappedStep, "__call__", late)
    other = trained(**KINDS[kind]())
    assert len(one.seen) == 2
    assert all(map(torch.equal, one.seen, other.seen))
    for name in COUNTERS:
        assert torch.equal(getattr(one.counters, name), getattr(other.counters, name)), name
    states = [run.model.state_dict().values() for run in (one, other)]
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize(
    "options",
    [{}, KINDS["folded"](), {"batch_norm": "batch"}, {"scoring": Folded(rows=48)}],
)
@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.AdamW, lambda weights: torch.optim.SGD(weights, momentum=0.9)],
)
def test_looking_ahead_scores_nearer_to_the_weights_after_the_step(monkeypatch, options, optimizer):
    """Than the weights before it; and moves nothing of the model's own."""
    errors = {}
    call = OverlappedStep.__call__
    for overlap in (True, "ahead"):
        found = errors.setdefault(overlap, [])

        def compare(self, found=found):
            call(self)  # what waits now was scored beside the update that is done now
            index, x, y, score, *_ = self.waiting
            view = copy.deepcopy(self.step.model).eval()
            for module in view.modules():
                if isinstance(module, nn.BatchNorm2d) and self.step.scorer.batch_norm != "eval":
                    module.train()
            order = torch.linspace(0, 1, N)[index]
            with torch.no_grad():
                loss = nn.functional.cross_entropy(view(x), y, reduction="none")
            found.append(float((score + order - loss).square().mean()))

        monkeypatch.setattr(OverlappedStep, "__call__", compare)
        trained(overlap=overlap, optimizer=optimizer, learning_rate=3e-3, **options)
    later = slice(20, None)  # momentum has gathered
    stale, ahead = (sum(errors[overlap][later]) for overlap in (True, "ahead"))
    assert ahead < 0.8 * stale


def test_small_images_are_scored_by_weights_that_are_looked_ahead_to():
    stale, ahead = (
        trained(overlap=overlap, scoring=LowerResolution(2)).seen for overlap in (True, "ahead")
    )
    assert not all(map(torch.equal, stale, ahead))


def test_looking_ahead_starts_anew_with_each_phase():
    """Not from the weights before the steps that did not score: here they do not move any more."""
    stale, ahead = (
        trained(
            overlap=overlap,
            schedule=rho.window(10, STEPS),
            learning_rate=lambda step: 0.1 * (step < 10),
        ).seen
        for overlap in (True, "ahead")
    )
    assert all(map(torch.equal, stale, ahead))


def test_what_is_not_trained_is_not_copied_to_look_ahead():
    """Weights may be whole numbers, too, if they are not trained."""
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    model[0].code = nn.Parameter(torch.arange(3), requires_grad=False)
    ahead = Ahead(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    ahead.look()
    names = {name for name, weight in model.named_parameters() if weight.requires_grad}
    for (name, now), moved in zip(model.named_parameters(), ahead.model.parameters(), strict=True):
        assert (moved is now) == (name not in names)
        torch.testing.assert_close(moved, now + REPEATED if name in names else now)
    assert all(a is b for a, b in zip(model.buffers(), ahead.model.buffers(), strict=True))


def test_a_state_of_a_run_that_trained_other_weights_is_refused():
    def made(frozen):
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 4))
        model[1].requires_grad_(not frozen)
        return Trainer(
            model, Resident(IMAGES, LABELS, device="cpu"), total_steps=9, candidates=48, overlap="ahead",
            irreducible=torch.zeros(N),
        )  # fmt: skip

    with pytest.raises(RholossError, match="looked ahead to 4, but this trainer has 2"):
        made(True).load_state_dict(made(False).state_dict())


class Named(nn.Module):
    """A BatchNorm layer that is in two places."""

    def __init__(self, twice):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.norms = nn.ModuleList([self.norm] if twice else [])

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def test_a_layer_in_two_places_is_moved_once():
    statistics = []
    for twice in (False, True):
        torch.manual_seed(1)
        model, x = Named(twice), torch.randn(N, 20, generator=torch.Generator().manual_seed(2))
        made = Trainer(
            model, Resident(x, LABELS, device="cpu"), total_steps=20, candidates=48,
            irreducible=torch.zeros(N), overlap=True,
        )  # fmt: skip
        made.train(20)
        statistics.append((model.norm.running_mean, model.norm.running_var))
    assert all(map(torch.equal, *statistics))
