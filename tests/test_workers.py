"""Ranks that only score: who does what, what goes over the wire, and what happens when it breaks."""

import copy
import threading
import time

import pytest
import torch
from fixtures_workers import (
    CANDIDATES,
    WAIT,
    InThread,
    candidates_of,
    launch,
    network,
    parts,
    problem,
    settle,
    train,
    until,
)  # fmt: skip
from torch import nn
from torch.utils.data import DataLoader

import rholoss as rho
from rholoss.errors import RholossError
from rholoss.workers import wire
from rholoss.workers.crew import Counts
from rholoss.workers.ranks import Role

__all__ = ["launch"]  # a fixture


# Scoring.


@pytest.mark.parametrize("method", ["rho", rho.boltzmann("rho", temperature=0.3)])
def test_workers_choose_what_the_trainer_would_choose(launch, method):
    batches = launch(2, selector={"method": method})
    seen = []
    batches.select.on_scores = [lambda step, stats, chosen: seen.append((step, stats, chosen))]
    workers = [InThread(number, *parts(method=method)) for number in range(2)]
    assert batches.wait_for_workers(WAIT)
    chosen = train(batches, 25)
    select, model, loader = parts(method=method)
    expected = []
    while len(expected) < 25:
        expected += [select(model, batch)[0].tolist() for batch in loader]
    assert chosen == expected[:25]
    counts = batches.counts
    # The first is a dry run, and at the second no worker has weights yet.
    assert (counts.steps, counts.by_workers, counts.alone, counts.held) == (25, 23, 1, 1)
    assert 0 < counts.stale_max <= 2 * 8 + 4
    assert [step for step, *_ in seen] == list(range(25))
    _, stats, last = seen[-1]
    assert torch.allclose(last.score, (stats.loss - stats.irreducible_loss)[last.position])
    ledger = batches.select.ledger
    assert (ledger.steps, ledger.scored, ledger.trained) == (25, 25 * CANDIDATES, 25 * 4)
    assert "workers chose 23 of 25 scored steps; weights" in str(ledger)
    batches.close()
    for worker in workers:
        worker.join(WAIT)
    assert 23 <= sum(worker.done for worker in workers) <= 23 + 4  # no step was scored twice


def test_newer_weights_reach_the_workers(launch):
    batches = launch(1, every=2)
    InThread(0, *parts())
    assert batches.wait_for_workers(WAIT)
    measured = []
    batches.select.on_scores = [lambda step, stats, chosen: measured.append(stats.loss.mean())]
    losses = []
    for step, _ in zip(range(8), batches, strict=False):
        losses.append(float(measured[-1]))
        settle(batches)
        with torch.no_grad():
            batches.model[-1].bias[0] = 10.0 * (step + 1)  # the loss grows step by step
    assert batches.counts.by_workers == 6
    assert losses[-1] > 10
    assert batches.counts.stale_max <= 2 * 2 + 2


def test_running_statistics_move_as_if_the_trainer_had_scored(launch):
    batches = launch(1, selector={"norm": True})
    InThread(0, *parts(norm=True))
    assert batches.wait_for_workers(WAIT)
    train(batches, 6)
    assert batches.counts.by_workers == 4
    select, model, loader = parts(norm=True)
    for _, batch in zip(range(6), loader, strict=False):
        select(model, batch)
    for name, buffer in model.named_buffers():
        assert torch.allclose(batches.model.get_buffer(name), buffer, atol=1e-5), name


def test_steps_that_are_not_scored_are_not_given_away(launch):
    batches = launch(1, selector={"schedule": rho.warm_up(6)})
    InThread(0, *parts())
    assert batches.wait_for_workers(WAIT)
    assert len(train(batches, 10)) == 10
    assert (batches.counts.steps, batches.counts.by_workers) == (4, 4)


# What happens when it breaks.


def test_the_trainer_waits_no_longer_than_asked(launch):
    def slow(model, batch):
        if stop.is_set():
            go_on.wait(3 * WAIT)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    stop, go_on = threading.Event(), threading.Event()
    batches = launch(1)
    batches.wait = 0.05
    InThread(0, *parts(loss=slow))
    assert batches.wait_for_workers(WAIT)
    stop.set()
    with pytest.warns(UserWarning, match=r"worker 0 did not answer within 0\.05 s; this trainer"):
        chosen = train(batches, 8)
    counts = batches.counts
    assert counts.late >= 1
    assert 0.05 * counts.late <= counts.waited < WAIT / 2  # the worker has still not answered
    assert counts.late + counts.held + counts.alone == counts.steps == 8
    for step, rows in enumerate(chosen):
        assert set(rows) <= candidates_of(batches.loader, step)
    go_on.set()
    batches.wait = WAIT
    until(lambda: not batches.crew._links[0].tasks)
    train(batches, 5)  # who has answered, late as it was, is asked again
    assert counts.by_workers >= 4


@pytest.mark.filterwarnings("ignore:This pass over `select.batch_sampler` has 7 of 10")  # by steps
def test_what_a_dead_worker_had_in_hand_is_not_waited_for(launch):
    def stuck(model, batch):
        if stop.is_set():
            working.set()
            over.wait(WAIT)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    stop, working, over = threading.Event(), threading.Event(), threading.Event()
    batches = launch(1)
    worker = InThread(0, *parts(loss=stuck))
    assert batches.wait_for_workers(WAIT)
    stop.set()
    train(batches, 2)
    found = threading.Thread(target=lambda: (working.wait(WAIT), time.sleep(0.2), worker.die()))
    found.start()
    start = time.monotonic()
    with pytest.warns(UserWarning, match="none is left"):
        train(batches, 4)
    assert time.monotonic() - start < WAIT / 2
    assert (batches.counts.late, batches.counts.gone) == (0, 1)
    over.set()


def test_the_run_goes_on_with_the_workers_that_are_left_and_then_alone(launch):
    batches = launch(2)
    workers = [InThread(number, *parts()) for number in range(2)]
    assert batches.wait_for_workers(WAIT)
    chosen = train(batches, 5)
    workers[0].die()
    until(lambda: batches.crew.alive == 1)
    with pytest.warns(UserWarning, match=r"worker 0 is gone .*; 1 left"):
        chosen += train(batches, 5)
    assert batches.counts.by_workers >= 7
    workers[1].die()
    until(lambda: batches.crew.alive == 0)
    with pytest.warns(UserWarning, match="none is left, this trainer scores itself"):
        chosen += train(batches, 5)
    assert batches.counts.gone == 2
    assert batches.counts.alone == 1 + 5
    InThread(0, *parts())  # and one that comes again is welcome
    assert batches.crew.wait_for(1, WAIT)
    before = batches.counts.by_workers
    chosen += train(batches, 5)
    assert batches.counts.by_workers >= before + 3
    for step, rows in enumerate(chosen):
        assert len(set(rows)) == 4
        assert set(rows) <= candidates_of(batches.loader, step)


def test_a_trainer_that_goes_on_alone_within_an_epoch_is_not_told_that_it_left_it(launch):
    batches = launch(1)
    worker = InThread(0, *parts())
    assert batches.wait_for_workers(WAIT)
    train(batches, 5)
    worker.die()
    until(lambda: batches.crew.alive == 0)
    with pytest.warns(UserWarning, match="worker 0 is gone"):  # and no other: they are errors here
        train(batches, 5)
    assert batches.select.step == 10


def test_weights_that_do_not_get_through_bound_what_workers_do(launch, monkeypatch):
    batches = launch(1, max_stale=5)
    worker = InThread(0, *parts())
    assert batches.wait_for_workers(WAIT)
    train(batches, 2)
    monkeypatch.setattr("fixtures_workers.settle", lambda batches: None)
    for link in batches.crew._links:
        link.sending = True  # the last snapshot never ends
    train(batches, 20)
    counts = batches.counts
    assert counts.stale_max <= 5
    assert counts.overdue >= 10
    assert counts.held >= 10
    assert counts.by_workers + counts.held + counts.alone == counts.steps == 22
    batches.close()
    worker.join(WAIT)
    assert worker.done <= 6  # it was not given what would be too old


def test_a_silent_worker_counts_as_lost(launch):
    stop, over = threading.Event(), threading.Event()

    def stuck(model, batch):
        if stop.is_set():
            over.wait(3 * WAIT)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    batches = launch(1, silence=WAIT)
    InThread(0, *parts(loss=stuck))
    assert batches.wait_for_workers(WAIT)
    train(batches, 3)
    assert batches.counts.by_workers == 1
    stop.set()
    batches.wait, batches.crew.silence = 0.1, 0.3
    with pytest.warns(UserWarning, match="did not answer|no answer") as said:
        until(lambda: train(batches, 1) and not batches.crew.alive)
    assert any("no answer for 0.3 s" in str(warning.message) for warning in said)
    over.set()


def test_a_step_that_a_worker_cannot_do_is_done_here(launch):
    def broken(model, batch):
        if fails:
            raise RuntimeError("no memory left")
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    fails = []
    batches = launch(1)
    InThread(0, *parts(loss=broken))
    assert batches.wait_for_workers(WAIT)
    fails.append(True)
    with pytest.warns(UserWarning, match="worker 0 failed: RuntimeError: no memory left"):
        assert len(train(batches, 4)) == 4
    assert batches.counts.failed == 2


def test_a_worker_with_other_arguments_is_turned_away(launch):
    batches = launch(1)
    worker = InThread(0, *parts(keep=0.2))
    worker.join(WAIT)
    assert "differ in `keep` and `k`; make the selector" in str(worker.error)
    with pytest.warns(UserWarning, match="turned away: `keep` and `k` differ"):
        assert len(train(batches, 3)) == 3
    assert batches.counts.by_workers == 0


def test_without_workers_it_is_the_loader_and_the_selector():
    select, model, loader = parts()
    batches = rho.ScoringWorkers(0).batches(select, model, loader)
    chosen = train(batches, 12)
    select, model, loader = parts()
    expected = [select(model, batch)[0].tolist() for _ in range(2) for batch in loader]
    assert chosen == expected[:12]
    assert batches.counts == Counts()
    assert select.ledger.notes == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choice": "global"}, "`choice` is 'global'.* pass choice='local'"),
        ({"irreducible": "live"}, "live model"),
        ({"loader": True}, r"the batch sampler BatchSampler.*select\.batch_sampler"),
        ({"every": 0}, "`every` is 0; it must be at least 1"),
        ({"wait": -1.0}, r"`wait` is -1\.0"),
    ],
)
def test_what_workers_cannot_do_is_told(change, message):
    options = {name: change.pop(name) for name in ("every", "wait") if name in change}
    if change.pop("irreducible", None):
        change["irreducible"] = rho.LiveIrreducible(
            copy.deepcopy(network()), torch.optim.SGD, lr=0.1
        )
    plain = change.pop("loader", False)
    select, model, loader = parts(**change)
    if plain:
        loader = DataLoader(problem()[0], batch_size=CANDIDATES)
    with pytest.raises(RholossError, match=message):
        rho.ScoringWorkers(0).batches(select, model, loader, **options)


def test_a_sampler_that_was_made_too_early_is_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    select, model, loader = parts()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(
        RholossError, match=r"for rank 0 of 4, .* 0 of 1; make `ScoringWorkers\(\.\.\.\)`"
    ):
        rho.ScoringWorkers(0).batches(select, model, loader)


def test_a_worker_that_does_not_reach_its_trainer_says_so_in_a_line(launch, monkeypatch):
    def refused(*_):
        raise ConnectionRefusedError

    launch(1)  # sets what torchrun would
    monkeypatch.setattr(wire, "find", refused)
    ranks = rho.ScoringWorkers(0)
    ranks.role = Role(0, 1, 1, 0)
    with pytest.raises(SystemExit, match=r"worker 0 did not reach its trainer \(ConnectionRefused"):
        ranks.batches(*parts())


def test_without_torchrun_the_next_step_is_told(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RholossError, match=r"MASTER_ADDR.* is not set.*torchrun"):
        wire.meeting_place()
