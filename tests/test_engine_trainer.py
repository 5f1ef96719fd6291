"""The engine on the CPU: the same choices and losses as the specification."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rholoss as rho
from rholoss import core
from rholoss.engine import Proxy, Resident, Reuse, Trainer
from rholoss.engine.ahead import REPEATED
from rholoss.errors import RholossError, TooFewFiniteScoresError, UnmeasuredLossError
from rholoss.sampler import EPOCHS

N, B, K, STEPS = 1700, 320, 32, 12
METHODS = [name for name in rho.METHODS if name != "uniform"]


@pytest.fixture(scope="module")
def toy():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 20, generator=generator)
    y = torch.randint(0, 5, (N,), generator=generator)
    return x, y, torch.rand(N, generator=generator)


def make_model(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 5)
    )


def trainer(toy, model=None, **options):
    x, y, il = toy
    options = {"total_steps": STEPS, "irreducible": il, "seed": 3, **options}
    made = Trainer(model or make_model(), Resident(x, y, device="cpu"), **options)
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index))
    return made


def candidates(seed=3):
    for epoch in range(9):
        order = torch.randperm(N, generator=core.step_generator(seed, EPOCHS + epoch))
        yield from order[: N // B * B].view(-1, B)


@pytest.mark.parametrize("name", METHODS)
def test_it_does_what_the_specification_does(toy, name):
    x, y, il = toy
    dropout = 0.3 if name == "bald" else 0.0  # without it all its draws are alike
    fast = trainer(toy, make_model(dropout), method=name)
    fast.train(STEPS)
    fast.flush()
    model = make_model(dropout)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step, index in zip(range(STEPS), candidates(), strict=False):
        selection, loss = core.train_step(
            model, optimizer, (index, x[index], y[index]), rho.METHODS[name], K,
            core.step_generator(3, step), il,
        )  # fmt: skip
        assert torch.equal(index[selection.position], fast.seen[step])
        losses.append(loss)
    assert torch.equal(torch.stack(losses), torch.cat(fast.losses))
    for ours, theirs in zip(
        model.state_dict().values(), fast.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_live_variant_is_that_of_the_specification(toy):
    x, y, _ = toy
    live = rho.LiveIrreducible(make_model())
    fast = trainer(toy, irreducible=live)
    fast.train(STEPS)
    fast.flush()
    model, other = make_model(), make_model()
    pair = (other, torch.optim.AdamW(other.parameters(), lr=1e-5))
    optimizer = torch.optim.AdamW(model.parameters())
    for step, index in zip(range(STEPS), candidates(), strict=False):
        selection, _ = core.train_step(
            model, optimizer, (index, x[index], y[index]), rho.METHODS["rho"], K,
            core.step_generator(3, step), live=pair,
        )  # fmt: skip
        assert torch.equal(index[selection.position], fast.seen[step])
    assert torch.equal(other[0].weight, live.model[0].weight)


def test_the_learning_rate_follows_its_function(toy):
    seen = []
    fast = trainer(toy, learning_rate=lambda step: 1e-3 * (1 - step / STEPS))
    fast.optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["lr"]))
    fast.train(STEPS)
    assert seen == pytest.approx([1e-3 * (1 - t / STEPS) for t in range(STEPS)], rel=1e-12)


def test_uniform_visits_each_row_once_an_epoch_and_scores_nothing(toy):
    fast = trainer(toy, method="uniform", total_steps=N // K)
    fast.train(N // K)
    fast.flush()
    assert torch.cat(fast.seen).unique().numel() == N // K * K
    assert (fast.ledger.scored, fast.ledger.trained) == (0, N // K * K)


def test_annealed_drops_the_highest_irreducible_losses_after_the_switch(toy):
    il = toy[2]
    fast = trainer(toy, total_steps=40, schedule=rho.annealed(40, switch=0.25, drop=0.2))
    fast.train(40)
    fast.flush()
    late = torch.cat(fast.seen[10:])
    assert il[late].max() <= il.quantile(0.8)
    assert (fast.ledger.steps, fast.ledger.scored, fast.ledger.trained) == (40, 10 * B, 40 * K)


@pytest.mark.parametrize("overlap", [True, "ahead"])
def test_overlapped_choices_are_one_step_stale(toy, overlap):
    """Scores agree with those of the weights before, or of these moved on as they last moved."""
    x, y, il = toy
    fast = trainer(toy, overlap=overlap, batch_norm="eval")
    fast.train(STEPS)
    fast.flush()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = list(zip(range(STEPS), candidates(), strict=False))
    shared, scored = [], torch.zeros(B)
    before = [weight.detach().clone() for weight in model.parameters()]
    for step, index in batches:
        if step:  # weights before the last update scored these candidates
            scores = scored - il[index]
            best = index[scores.topk(K).indices]
            shared.append(len(set(best.tolist()) & set(fast.seen[step].tolist())))
        if step + 1 < STEPS:
            following = batches[step + 1][1]
            scorer = copy.deepcopy(model).eval()
            with torch.no_grad():
                for old, now, moved in zip(
                    before, model.parameters(), scorer.parameters(), strict=True
                ):
                    moved += REPEATED * (now - old) if overlap == "ahead" else 0.0
                    old.copy_(now)
                scored = nn.functional.cross_entropy(
                    scorer(x[following]), y[following], reduction="none"
                )
        chosen = fast.seen[step]
        loss = nn.functional.cross_entropy(model.train()(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert shared == [K] * (STEPS - 1)
    assert torch.allclose(model[0].weight, fast.model[0].weight, atol=1e-6)


@pytest.mark.parametrize("batch_norm", ["train", "eval"])
def test_the_first_batch_of_a_later_phase_is_chosen_with_the_weights_of_then(toy, batch_norm):
    """Uniform steps before it have moved them since the copy that scores was made."""
    chosen = []
    for overlap in (False, True):
        late = {"schedule": rho.window(10, STEPS), "learning_rate": 0.1}
        fast = trainer(toy, overlap=overlap, batch_norm=batch_norm, **late)
        fast.train(12)
        fast.flush()
        chosen.append(fast.seen)
    assert all(map(torch.equal, chosen[0][:11], chosen[1][:11]))
    assert not torch.equal(chosen[0][11], chosen[1][11])  # one step stale


def test_overlapped_scoring_moves_the_running_statistics_as_the_mode_says(toy):
    moved = {}
    for mode in ("train", "batch"):
        fast = trainer(toy, overlap=True, batch_norm=mode)
        fast.train(STEPS)
        moved[mode] = fast.model[1].running_mean.clone()
        fast.flush()
        plain = trainer(toy, batch_norm=mode)
        plain.train(STEPS)
        assert torch.allclose(moved[mode], plain.model[1].running_mean, atol=0.05)
    assert not torch.allclose(moved["train"], moved["batch"], atol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"overlap": "ahead"}, {"schedule": rho.window(3, 8)}]
)
def test_a_resumed_run_makes_the_same_choices(toy, options, tmp_path):
    whole = trainer(toy, **options, log=tmp_path / "whole.jsonl")
    whole.train(STEPS)
    whole.flush()
    first = trainer(toy, **options, log=tmp_path / "parts.jsonl")
    first.train(5)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    first.train(2)  # what was done after the last save is done again
    first.flush()
    second = trainer(toy, nn.Sequential(*make_model()), **options, log=tmp_path / "parts.jsonl")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    second.train(STEPS - 5)
    second.flush()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            whole.model.state_dict().values(), second.model.state_dict().values(), strict=True
        )
    )
    logs = [
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("whole.jsonl", "parts.jsonl")
    ]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == list(range(STEPS))


def test_a_loss_that_is_not_finite_stops_the_run(toy):
    x, y, il = toy
    fast = trainer((x * float("inf"), y, il), total_steps=100)
    with pytest.raises(
        TooFewFiniteScoresError, match="100 had fewer finite scores than rows to select"
    ):
        fast.train(100)


def test_bad_arguments(toy):
    x, y, il = toy
    with pytest.raises(
        RholossError, match=r"`keep` must be in \(0, 1\] and `candidates` in 1..1700"
    ):
        trainer(toy, candidates=2000)
    with pytest.raises(RholossError, match="`steps` is 13, but must be in 0"):
        trainer(toy).train(13)
    with pytest.raises(
        UnmeasuredLossError, match="1 of 1700 candidates have no finite irreducible loss"
    ):
        trainer((x, y, torch.where(torch.arange(N) == 9, torch.nan, il)))
    with pytest.raises(RholossError, match="'rho' needs irreducible losses"):
        trainer((x, y, None))
    with pytest.raises(RholossError, match="`loss` must be a task's name"):
        trainer(toy, loss=lambda model, batch: batch)
    with pytest.raises(RholossError, match="`total_steps` must be at least 1, but is 0"):
        trainer(toy, total_steps=0)
    with pytest.raises(RholossError, match="`overlap` is 'before'; give True, False, or 'ahead'"):
        trainer(toy, overlap="before")
    with pytest.raises(RholossError, match="`steps` is -1, but must be"):
        trainer(toy).train(-1)
    with pytest.raises(RholossError, match=r"`data` is a TensorDataset; make a `Resident"):
        Trainer(make_model(), TensorDataset(x, y), total_steps=1)


def test_what_happened_is_read_after_the_last_step(toy, tmp_path):
    fast = trainer(toy, log=tmp_path / "log.jsonl")
    fast.train(STEPS - 1)
    assert not fast.losses
    fast.train(1)  # without a flush
    assert len(torch.cat(fast.losses)) == STEPS
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == STEPS
    x, y, il = toy
    with pytest.raises(
        TooFewFiniteScoresError, match=r"12 step\(s\) had a loss that is not finite"
    ):
        trainer((x * float("inf"), y, il)).train(STEPS)


def test_the_log_has_scores_only_of_steps_that_scored(toy, tmp_path):
    path = tmp_path / "chosen.jsonl"
    fast = trainer(toy, schedule=rho.window(3, 8), log=path)
    fast.train(STEPS)
    fast.flush()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["score" in line for line in lines] == [3 <= step < 8 for step in range(STEPS)]
    with pytest.raises(RholossError, match="holds the log of another run"):
        trainer(toy, log=path).train(1)


def test_the_ledger_runs_and_claims_no_time_that_was_not_measured(toy):
    beside = trainer(toy, overlap=True)  # scoring has no time of its own there
    beside.train(STEPS)
    beside.flush()
    assert beside.ledger.seconds > 0
    assert "selecting" not in str(beside.ledger)
    assert "pays if" not in str(beside.ledger)
    with pytest.raises(RholossError, match="time of scoring cannot be measured apart"):
        beside.time_scoring()
    fast = trainer(toy)
    fast.train(STEPS)
    fast.flush()
    assert 0 < fast.ledger.scoring_seconds < fast.ledger.seconds
    assert "of it selecting" in str(fast.ledger)


def test_what_is_read_stays_as_it_was_read(toy):
    fast = trainer(toy, total_steps=150)
    fast.train(100)
    before = [fast.seen[0].clone(), fast.losses[0].clone()]
    fast.train(50)
    fast.flush()
    assert torch.equal(before[0], fast.seen[0])
    assert torch.equal(before[1], fast.losses[0])
    assert len(torch.cat(fast.losses)) == 150


def test_the_ledger_agrees_with_the_one_of_the_selector(toy):
    x, y, il = toy
    for name in ("rho", "bald", "negative_il", "grad_norm_is"):
        dropout = 0.3 if name == "bald" else 0.0  # without it all its draws are alike
        fast = trainer(toy, make_model(dropout), method=name)
        fast.train(STEPS)
        fast.flush()
        model, select = make_model(dropout), rho.Selector(name, irreducible=il, keep=0.1, seed=3)
        optimizer = torch.optim.AdamW(model.parameters())
        for _, index in zip(range(STEPS), candidates(), strict=False):
            index, inputs, labels = select(model, (index, x[index], y[index]))
            losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            optimizer.zero_grad()
            select.reduce(losses).backward()
            optimizer.step()
        ours, theirs = fast.ledger, select.ledger
        for count in ("steps", "candidates", "loaded", "trained", "scored", "forwards", "flops"):
            assert getattr(ours, count) == getattr(theirs, count), (name, count)
        assert torch.equal(fast.model[0].weight, model[0].weight)
        assert ours.flops is None if name == "negative_il" else ours.flops > 0


def test_timing_the_scoring_counts_no_score_twice(toy):
    x, y, il = toy
    x = torch.where(torch.arange(N)[:, None] == 5, torch.nan, x)  # never chosen, and counted
    fast = trainer((x, y, il), nn.Linear(20, 5))
    fast.train(STEPS)
    before = int(fast.counters.not_finite)
    assert before > 0
    fast.time_scoring(repeats=2)
    assert int(fast.counters.not_finite) == before


def make_proxy():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))


@pytest.mark.parametrize(
    "options",
    [
        dict,
        lambda: {"method": "bald"},
        lambda: {"scoring": Reuse(0.5)},
        lambda: {"scoring": Proxy(make_proxy)},
    ],
    ids=["exact", "bald", "reuse", "proxy"],
)
def test_timing_the_scoring_changes_nothing(toy, options):
    runs = []
    for timed in (False, True):
        fast = trainer(toy, make_model(0.3), **options())
        torch.manual_seed(4)  # dropout in training draws from torch's own generator
        fast.train(5)
        assert not timed or 0 < fast.time_scoring(repeats=3) < 60
        fast.train(STEPS - 5)
        fast.flush()
        runs.append(fast)
    assert all(map(torch.equal, runs[0].seen, runs[1].seen))
    state = [list(fast.model.state_dict().values()) for fast in runs]
    assert all(map(torch.equal, *state))
    states = [fast.body.scoring.state_dict() or {} for fast in runs]
    kept = [[t.nan_to_num(-1) for t in state.get("model", state).values()] for state in states]
    assert all(map(torch.equal, *kept))
    assert runs[0].ledger.scored == runs[1].ledger.scored


def test_a_trainer_that_has_gone_on_can_be_taken_back(toy):
    fast = trainer(toy)
    fast.train(4)
    state = fast.state_dict()
    fast.train(5)
    fast.flush()
    first, fast.seen = fast.seen[4:], []
    for unread in (0, 3):
        fast.load_state_dict(state)
        fast.train(unread)  # not read before it is taken back
    fast.load_state_dict(state)
    fast.train(5)
    fast.flush()
    assert all(map(torch.equal, first, fast.seen))
    assert len(fast.seen) == 5


def test_what_a_live_model_cannot_do_is_refused(toy):
    refused = "`overlap`=True cannot be combined with a `LiveIrreducible`"
    drops = {"schedule": rho.annealed(STEPS, drop=0.1)}, "if the schedule drops nothing"
    for options, message in (({"overlap": True}, refused), drops):
        with pytest.raises(RholossError, match=message):
            trainer(toy, irreducible=rho.LiveIrreducible(make_model()), **options)
    with pytest.raises(RholossError, match="`precision` is 'fp8'; choose one of"):
        trainer(toy, precision="fp8")


def test_on_the_cpu_a_step_runs_eagerly_and_says_so(toy):
    fast = trainer(toy)
    assert fast.why_eager == "cpu has no CUDA graphs"
    fast.train(STEPS)
    assert not any(captured.graph for captured in fast.captured.values())
