"""Irreducible losses of several ages: which of them a run reads, and when it goes on to the next."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rholoss as rho
from rholoss.core import Stats
from rholoss.distributed import Ranks
from rholoss.engine import Resident, Trainer
from rholoss.errors import RholossError
from rholoss.steplog import Chosen

N = 256
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 8, generator=GENERATOR)
Y = (X[:, 0] > 0).long()
# The target starts at a loss of about 0.7 and comes down to 0.05.
RUNGS = [base + 0.01 * torch.rand(N, generator=GENERATOR) for base in (0.5, 0.3, 0.02)]


def make_model():
    torch.manual_seed(0)
    return nn.Linear(8, 2)


def selected(select, steps, model=None):
    """The rungs on which each step stood, and what it chose."""
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    stood, chosen = [], []
    for step in range(select.step, select.step + steps):
        rows = torch.randperm(N, generator=torch.Generator().manual_seed(step))[:64]
        stood.append(select.source.rung)
        index, x, y = select(model, (rows, X[rows], Y[rows]))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        chosen.append(index)
    return stood, torch.stack(chosen), model


def scored(reducible_B):
    """What a tap is told of a step whose candidates have these reducible losses."""
    measured = {"loss": reducible_B + 1, "irreducible_loss": torch.ones_like(reducible_B)}
    return Stats(None, measured), Chosen(torch.zeros(1), torch.zeros(1), None, reducible_B)


def weighted(weight):
    """A method of one's own."""
    return rho.Method(
        "weighted",
        lambda stats: stats.loss - weight * stats.irreducible_loss,
        rho.METHODS["rho"].pick,
        frozenset({"loss", "irreducible_loss"}),
    )


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_it_climbs_by_losses_whatever_a_method_makes_of_them(weight):
    """At a loss of log 2 = 0.69 the first rung, 0.5, is not passed yet."""
    select = rho.Selector(weighted(weight), irreducible=rho.Ladder(RUNGS), keep=0.25)
    model = make_model()
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    for _ in range(100):
        select(model, (torch.arange(64), X[:64], Y[:64]))
    assert select.source.rung == 0


def test_a_run_climbs_as_it_learns_and_reads_the_losses_of_its_rung():
    ladder = rho.Ladder(RUNGS)
    seen = []

    def tap(step, stats, chosen):
        rung = RUNGS[select.source.rung]
        seen.append((stats.measured["irreducible_loss"], rung[stats.index]))

    select = rho.Selector("rho", irreducible=ladder, keep=0.25, on_scores=[tap])
    stood, _, _ = selected(select, 400)
    assert stood[:100] == [0] * 100  # at a hundred steps it looks first
    assert set(stood) == {0, 2}  # it learns fast, and passes two rungs at once
    assert stood == sorted(stood)  # never down
    assert all(step % 100 == 0 for step in range(1, 400) if stood[step] != stood[step - 1])
    for given, expected in seen:
        assert torch.equal(given, expected)
    assert ladder.rung == 0  # each run climbs by itself
    assert rho.Selector("rho", irreducible=select.source, keep=0.25).source.rung == 0


@pytest.mark.parametrize(
    ("reducible", "rung"),
    [
        (0.30, 0),  # a loss of 0.8, of which 0.8 are 0.64: the first rung has 0.5
        (0.13, 0),
        (0.11, 1),  # 0.8 * 0.61 is below 0.5
        (-0.12, 1),
        (-0.13, 2),  # 0.8 * 0.37 is below 0.3 as well
        (-0.49, 2),  # there is nothing above the last
    ],
)
def test_it_climbs_when_the_target_comes_near(reducible, rung):
    ladder = rho.Ladder([torch.full((4,), mean) for mean in (0.5, 0.3, 0.1)])
    assert ladder.climb(reducible) == (rung > 0)
    assert ladder.rung == rung
    assert ladder.losses(torch.arange(4), None, torch.device("cpu"))[0] == ladder.means[rung]
    early = rho.Ladder([torch.full((4,), mean) for mean in (0.5, 0.3, 0.1)], ahead=0.5)
    early.climb(reducible)
    assert early.rung >= rung


def test_a_resumed_run_chooses_the_same():
    first = rho.Selector("rho", irreducible=rho.Ladder(RUNGS), keep=0.25)
    _, whole, _ = selected(first, 300)
    before = rho.Selector("rho", irreducible=rho.Ladder(RUNGS), keep=0.25)
    _, head, model = selected(before, 150)
    state = before.state_dict()
    after = rho.Selector("rho", irreducible=rho.Ladder(RUNGS), keep=0.25)
    after.load_state_dict(state)
    assert after.source.state_dict() == before.source.state_dict()
    assert (after.source.rung > 0, after.source.state_dict()["steps"]) == (True, 50)
    _, tail, _ = selected(after, 150, model)
    assert torch.equal(torch.cat([head, tail]), whole)
    short = rho.Selector("rho", irreducible=rho.Ladder(RUNGS[:1]), keep=0.25)
    with pytest.raises(RholossError, match=r"stood on rung \d, but there are 1"):
        short.load_state_dict({**state, "losses": None})


def engine(learning_rate=0.02, **options):
    return Trainer(
        make_model(), Resident(X, Y, device="cpu"), total_steps=400, learning_rate=learning_rate,
        candidates=64, keep=0.25, irreducible=rho.Ladder(RUNGS), **options,
    )  # fmt: skip


def trained(trainer, *parts):
    chosen, stood = [], []
    trainer.on_flush.append(lambda step, index, losses: chosen.append(index))
    for steps in parts:
        for _ in range(steps):
            stood.append(trainer.source.rung)
            trainer.train(1)
    trainer.flush()
    return stood, torch.cat(chosen)


def test_the_engine_climbs_and_resumes_too():
    whole = engine()
    stood, chosen = trained(whole, 400)
    assert stood[99] == 0 < stood[-1]
    assert stood == sorted(stood)
    assert torch.equal(whole.body.irreducible, RUNGS[whole.source.rung])
    before = engine()
    _, head = trained(before, 250)
    after = engine()
    after.load_state_dict(before.state_dict())
    assert torch.equal(after.body.irreducible, RUNGS[stood[250]])
    _, tail = trained(after, 150)
    assert torch.equal(torch.cat([head, tail]), chosen)


def test_the_engine_climbs_by_losses_whatever_a_method_makes_of_them():
    trainer = engine(method=weighted(2.0), learning_rate=0.0)
    torch.nn.init.zeros_(trainer.model.weight), torch.nn.init.zeros_(trainer.model.bias)
    trainer.train(100)
    trainer.flush()
    assert trainer.source.rung == 0


def test_the_selector_climbs_at_the_steps_at_which_the_engine_does():
    trainer, ladder = engine(), rho.Ladder(RUNGS)
    watch, rungs = ladder.watcher(Ranks("local")), set()
    for step in range(300):
        assert ladder.rung == trainer.source.rung
        rungs.add(ladder.rung)
        trainer.train(1)
        score = trainer.counters.reducible[step % 100]  # mean of the candidates
        watch(step, *scored(score[None]))
    assert len(rungs) > 1


@pytest.mark.parametrize(("others", "rung"), [(0.0, 1), (0.6, 0), (float("nan"), 1)])
def test_all_ranks_climb_or_none(others, rung):
    """This one's target is near, with a mean score of 0.1; the others have a word in it."""
    ranks = SimpleNamespace(exchange=lambda said: [said, others])
    ladder = rho.Ladder(RUNGS)
    watch = ladder.watcher(ranks)
    for step in range(100):
        assert ladder.rung == 0
        watch(step, *scored(torch.tensor([0.05, 0.15])))
    assert ladder.rung == rung


def test_what_is_left_out_afterwards_has_the_highest_loss_of_the_rung_it_stands_on():
    last = torch.linspace(0.0, 0.04, N)
    ladder = rho.Ladder([*RUNGS[:2], last])
    trainer = Trainer(
        make_model(), Resident(X, Y, device="cpu"), total_steps=400, learning_rate=0.02, candidates=64,
        keep=0.25, irreducible=ladder, schedule=rho.annealed(400, switch=0.75, drop=0.25),
    )  # fmt: skip
    _, chosen = trained(trainer, 400)
    assert trainer.source.rung == 2
    assert chosen[300:].max() < 0.75 * N  # whose losses lie in the order of the ids


def test_what_cannot_be_a_ladder_is_told():
    tables = [torch.ones(4), torch.zeros(4)]
    with pytest.raises(RholossError, match="mean losses of `rungs` must fall"):
        rho.Ladder(tables[::-1])
    with pytest.raises(RholossError, match="`rungs` must be tables"):
        rho.Ladder([])
    with pytest.raises(RholossError, match="`rungs` must be tables"):
        rho.Ladder([tables[0], lambda ids: ids])
    with pytest.raises(RholossError, match=r"`ahead` must be in \(0, 1\], but is 0"):
        rho.Ladder(tables, ahead=0)
    with pytest.raises(RholossError, match="'negative_il' does not need both"):
        rho.Selector("negative_il", irreducible=rho.Ladder(tables), keep=0.5)
    with pytest.raises(RholossError, match=r"`Ladder` compares losses .* 'negative_il'"):
        Trainer(
            make_model(), Resident(X, Y, device="cpu"), total_steps=1, candidates=8,
            method="negative_il", irreducible=rho.Ladder(RUNGS),
        )  # fmt: skip


def test_the_cost_of_all_rungs_is_counted():
    made = [rho.Irreducible.from_losses(rung, torch.arange(N), seconds=2.0) for rung in RUNGS]
    select = rho.Selector("rho", irreducible=rho.Ladder(made), keep=0.5)
    assert select.ledger.il_seconds == 6.0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_the_engine_chooses_follows_the_rung(device, overlap):
    """In a graph, too, which goes on reading the table that it was recorded with."""
    low = torch.arange(N) < N // 2
    ladder = rho.Ladder([torch.where(low, 1.0, 100.0), torch.where(low, 50.0, 1.0)])
    trainer = Trainer(
        make_model(), Resident(X, Y, device=device), total_steps=200, candidates=64, keep=0.25,
        irreducible=ladder, overlap=overlap,
    )  # fmt: skip
    _, chosen = trained(trainer, 200)
    assert low[chosen[:100]].all()
    assert not low[chosen[101:]].any()  # what was overlapped had been chosen before
    assert low[chosen[100]].all() == overlap


def test_what_is_dropped_goes_by_the_rung_that_it_stands_on():
    young = torch.rand(1000) * 10 + 5
    ladder = rho.Ladder([young, young - 5])
    before = ladder.threshold(0.3)
    assert ladder.climb(-4.0)
    assert ladder.threshold(0.3) == pytest.approx(before - 5, abs=1e-4)
