"""Cheaper scoring: each option chooses what its definition says, written out by hand here."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rholoss as rho
from rholoss import core
from rholoss.engine import (
    Cheaper,
    Gate,
    LowerResolution,
    Proxy,
    Recorded,
    Resident,
    Reuse,
    Shortlist,
    Trainer,
    adamw,
)
from rholoss.errors import RholossError
from rholoss.sampler import EPOCHS

N, B, K, STEPS = 500, 80, 8, 20
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, 8, 8, generator=GENERATOR)
Y = torch.randint(0, 4, (N,), generator=GENERATOR)
IL = torch.rand(N, generator=GENERATOR)


def make_model(norm=False):
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))


def make_proxy():
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))


def trainer(scoring=None, model=None, **options):
    options = {
        "total_steps": STEPS, "irreducible": IL, "candidates": B, "seed": 3, "scoring": scoring, **options
    }  # fmt: skip
    made = Trainer(model or make_model(), Resident(X, Y, device="cpu"), **options)
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index))
    return made


def run(*args, **options):
    made = trainer(*args, **options)
    made.train(STEPS)
    made.flush()
    return made


def candidates():
    for epoch in range(9):
        order = torch.randperm(N, generator=core.step_generator(3, EPOCHS + epoch))
        yield from order[: N // B * B].view(-1, B)


def losses(model, x, y):
    with torch.no_grad():
        return F.cross_entropy(model(x), y, reduction="none")


def by_hand(score, after=lambda index: None):
    """Ids chosen by the K highest of `score(model, index)`; NaN is never chosen."""
    model = make_model()
    optimizer, chosen = torch.optim.AdamW(model.parameters()), []
    for _, index in zip(range(STEPS), candidates(), strict=False):
        score_B = score(model, index).nan_to_num(nan=-torch.inf)
        best = index[score_B.sort(descending=True, stable=True).indices[:K]]
        chosen.append(best)
        after(best)
        optimizer.zero_grad()
        F.cross_entropy(model(X[best]), Y[best]).backward()
        optimizer.step()
    return chosen


def same(one, other):
    return len(one) == len(other) == STEPS and all(map(torch.equal, one, other))


def test_lower_resolution_scores_small_images():
    def score(model, index):
        return (
            losses(model, X[index].unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5)), Y[index])
            - IL[index]
        )

    exact = run().seen
    assert same(run(LowerResolution(2)).seen, by_hand(score))
    assert not same(run(LowerResolution(2)).seen, exact)


@pytest.mark.parametrize("mode", ["train", "batch"])
def test_lower_resolution_leaves_the_running_statistics_to_training(mode):
    made = run(LowerResolution(2), make_model(norm=True), batch_norm=mode)
    assert made.model[1].num_batches_tracked == STEPS
    assert run(None, make_model(norm=True)).model[1].num_batches_tracked == 2 * STEPS


@pytest.mark.parametrize("scoring", [LowerResolution(2), Gate(0.5, by=LowerResolution(2))])
def test_lower_resolution_beside_training_leaves_them_too(scoring):
    made = trainer(scoring, make_model(norm=True), overlap=True, learning_rate=0.0)
    made.train(1)
    made.flush()
    expected = make_model(norm=True)
    expected(X[made.seen[0]])
    for name, value in expected[1].state_dict().items():
        torch.testing.assert_close(made.model[1].state_dict()[name], value)  # up to rounding


def test_a_proxy_scores_and_learns_from_what_was_chosen():
    proxy = make_proxy()
    optimizer = torch.optim.AdamW(proxy.parameters())

    def after(best):
        optimizer.zero_grad()
        F.cross_entropy(proxy(X[best]), Y[best]).backward()
        optimizer.step()

    made = run(Proxy(make_proxy))
    expected = by_hand(lambda model, index: losses(proxy, X[index], Y[index]) - IL[index], after)
    assert same(made.seen, expected)
    assert torch.equal(made.body.scoring.model[1].weight, proxy[1].weight)
    assert not torch.equal(proxy[1].weight, make_proxy()[1].weight)


def test_reuse_forwards_the_oldest_and_remembers_the_others():
    last, seen, now = torch.full((N,), torch.nan), torch.full((N,), -1), 0

    def score(model, index):
        nonlocal now
        oldest = sorted(range(B), key=lambda i: (int(seen[index[i]]), i))[: B // 2]
        rows = index[oldest]
        last[rows], seen[rows] = losses(model, X[rows], Y[rows]), now
        now += 1
        return last[index] - IL[index]

    made = run(Reuse(0.5))
    assert same(made.seen, by_hand(score))
    assert (made.ledger.scored, made.ledger.forwards) == (STEPS * B // 2, STEPS * B // 2)
    assert made.counters.not_finite == 0  # never forwarded is not the same as not finite
    assert (seen == -1).sum() == 0  # by now each row has a loss


def test_a_shortlist_forwards_what_promises_most_and_some_of_what_was_left_out_for_longest():
    last, seen, now, mean = torch.full((N,), torch.nan), torch.full((N,), -1), 0, 0.0

    def score(model, index):
        nonlocal now, mean
        value = (last[index].nan_to_num(nan=mean) - IL[index]).tolist()
        order = sorted(range(B), key=lambda i: (-value[i], i))
        oldest = sorted(order[30:], key=lambda i: int(seen[index[i]]))[:10]  # a quarter of the half
        part = order[:30] + oldest
        rows = index[part]
        last[rows], seen[rows] = losses(model, X[rows], Y[rows]), now
        now, mean = now + 1, last[rows].mean().item()
        score_B = torch.full((B,), torch.nan)  # who is not forwarded is not chosen
        score_B[part] = last[rows] - IL[rows]
        return score_B

    made = run(Shortlist(0.5, again=0.25))
    assert same(made.seen, by_hand(score))
    option = made.body.scoring
    assert torch.equal(option.seen, seen)
    assert torch.allclose(option.loss, last, equal_nan=True)
    assert (made.ledger.scored, made.ledger.forwards) == (STEPS * B // 2, STEPS * B // 2)
    assert made.counters.not_finite == made.counters.short == 0
    waiting = seen == -1  # unknown rows of high irreducible loss promise least
    assert IL[waiting].mean() > IL[~waiting].mean() + 0.2


def test_a_shortlist_is_by_the_scores_of_the_method():
    """Irreducible losses may be there for another reason: rows that are dropped once nothing is scored."""
    dropping = rho.annealed(STEPS, switch=0.5, drop=0.1)
    made = trainer(Shortlist(0.5), method="loss", schedule=dropping)
    option, first = made.body.scoring, next(candidates())
    option.loss[first] = torch.arange(80.0) * 1e-3  # by far less than irreducible losses differ
    made.train(1)
    assert (option.seen[first[44:]] == 0).all()  # the 36 highest losses


def test_what_is_left_out_is_not_chosen_however_high_its_last_loss():
    made = trainer(Shortlist(0.5))
    option, first = made.body.scoring, next(candidates())
    option.loss[first] = 9.0  # higher than any is by now
    made.train(1)
    made.flush()
    assert (option.seen[made.seen[0]] == 0).all()


def test_what_is_expected_of_those_left_out_counts_in_the_mean_of_the_candidates():
    made = trainer(Shortlist(0.5))
    option, first = made.body.scoring, next(candidates())
    known = first[:20]
    option.loss[known] = 1.0
    made.train(1)
    made.flush()
    forwarded = option.seen[first] == 0
    assert forwarded.sum() == B // 2
    expected = option.loss[first].nan_to_num(nan=option.mean.item())
    assert option.mean == pytest.approx(option.loss[first][forwarded].mean().item())
    assert (expected[:20][~forwarded[:20]] == 1.0).all()
    assert made.reducible.item() == pytest.approx((expected - IL[first]).mean().item(), abs=1e-6)


def test_the_gate_lets_the_lowest_irreducible_losses_pass():
    def score(model, index):
        lowest = IL[index].topk(B // 4, largest=False).indices
        score_B = torch.full((B,), torch.nan)
        score_B[lowest] = losses(model, X[index[lowest]], Y[index[lowest]]) - IL[index[lowest]]
        return score_B

    made = run(Gate(0.25))
    assert same(made.seen, by_hand(score))
    assert (made.ledger.candidates, made.ledger.scored) == (STEPS * B, STEPS * B // 4)
    assert made.counters.not_finite == 0


def test_an_option_that_leaves_nothing_out_is_exact():
    exact = run().seen
    assert same(run(Cheaper()).seen, exact)
    for option in (Gate(1.0), Reuse(1.0)):  # rows are forwarded in another order: other last digits
        pairs = zip(run(option).seen, exact, strict=True)
        shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in pairs]
        assert sum(shared) >= 0.99 * STEPS * K


@pytest.mark.parametrize("name", ["grad_norm_is", "bald", "loss"])
def test_other_methods_take_a_proxy_and_smaller_images(name):
    dropout = nn.Dropout(0.2 if name == "bald" else 0.0)  # without it all its draws are alike

    def with_dropout():
        return nn.Sequential(dropout, *make_proxy())

    for option in (Proxy(with_dropout), LowerResolution(2)):
        made = run(option, nn.Sequential(dropout, make_model()), method=name)
        assert torch.isfinite(torch.cat(made.losses)).all()
        assert len(torch.stack(made.seen).unique()) > K


def test_replayed_choices_give_the_same_weights(tmp_path):
    log = tmp_path / "chosen.jsonl"
    exact = run(log=log)
    made = run(Recorded(log), candidates=1, keep=0.5)
    assert same(made.seen, exact.seen)
    for ours, theirs in zip(exact.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (made.ledger.scored, made.ledger.trained, made.ledger.candidates) == (
        0, STEPS * K, STEPS * K,
    )  # fmt: skip
    lists = [json.loads(line)["index"] for line in log.read_text().splitlines()]
    assert same(run(Recorded(lists)).seen, exact.seen)


def test_a_replay_longer_than_the_buffer_goes_on_and_maps_ids_to_rows():
    ids = torch.arange(N).flip(0) * 3
    steps = 2 * (N // 100) + 3
    lists = torch.randint(0, N, (steps, 100), generator=torch.Generator().manual_seed(4)) * 3
    made = Trainer(
        make_model(), Resident(X, Y, ids=ids, device="cpu"), total_steps=steps,
        scoring=Recorded(lists.tolist()),
    )  # fmt: skip
    seen = []
    made.on_flush.append(lambda step, index, losses: seen.extend(index))
    made.train(steps)
    made.flush()
    assert torch.equal(torch.stack(seen), lists)


def test_replay_refuses_what_does_not_fit(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"type": "step", "step": 5, "index": [1, 2]}\n')
    for make, message in (
        (lambda: Recorded(tmp_path / "log.jsonl"), "does not hold every step from 0 on"),
        (lambda: Recorded([[1, 2], [3]]), r"has 2 steps with \[1, 2\] rows"),
        (lambda: Recorded([]), r"has 0 steps with \[\] rows"),
        (lambda: trainer(Recorded([[1, 2]])), "`total_steps`=20, but only 1 steps were recorded"),
        (
            lambda: trainer(Recorded([[1, 900]] * 20)),
            "20 recorded choices have ids .* instance 900",
        ),
        (
            lambda: Recorded([[1, 2]] * 20).rows(torch.tensor([2, 1, 5, 2]), 20),
            "1 rows of the data have the id of another, for instance 2",
        ),
        (lambda: trainer(Recorded([[1, 2]] * 20), overlap=True), "must be left out"),
        (lambda: trainer(Recorded([[1, 2]] * 20), schedule=rho.window(1, 2)), "must be left out"),
    ):
        with pytest.raises(RholossError, match=message):
            make()


OPTIONS = {
    "lower resolution": lambda: LowerResolution(2),
    "proxy": lambda: Proxy(make_proxy),
    "reuse": lambda: Reuse(0.5),
    "shortlist": lambda: Shortlist(0.5),
    "gate": lambda: Gate(0.5),
    "replay": lambda: Recorded(torch.arange(STEPS * K).view(STEPS, K).tolist()),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_makes_the_same_choices(name, tmp_path):
    whole = run(OPTIONS[name](), make_model(norm=True))
    first = trainer(OPTIONS[name](), make_model(norm=True))
    first.train(7)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    first.train(2)  # lost
    second = trainer(OPTIONS[name](), nn.Sequential(*make_model(norm=True)))
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    second.train(STEPS - 7)
    second.flush()
    assert same(first.seen[:7] + second.seen, whole.seen)
    pairs = zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_options_work_beside_training_too():
    for option in (LowerResolution(2), Reuse(0.5), Shortlist(0.5), Gate(0.5)):
        made = run(option, overlap=True)
        assert torch.isfinite(torch.cat(made.losses)).all()
        assert len(made.seen) == STEPS


def test_a_proxy_may_share_what_nobody_trains():
    flat = make_proxy().requires_grad_(False)
    made = run(
        Proxy(lambda: nn.Sequential(flat, nn.Linear(4, 4))), nn.Sequential(flat, nn.Linear(4, 4))
    )
    assert torch.isfinite(torch.cat(made.losses)).all()


def test_what_makes_no_sense_is_refused():
    live = rho.LiveIrreducible(make_model())
    flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    used = Reuse()
    trainer(used)
    saved = trainer(Reuse()).state_dict()
    for make, message in (
        (lambda: LowerResolution(1), "`factor` must be at least 2, but is 1"),
        (lambda: Gate(0), r"`share` of `Gate` must be in \(0, 1\], but is 0"),
        (lambda: trainer(Reuse(0.05)), "forwards 4 of 80 candidates, but 8 are chosen"),
        (lambda: Shortlist(0.5, again=1), r"`again` of `Shortlist` must be in \(0, 1\), but is 1"),
        (lambda: trainer(Shortlist(0.1)), r"takes 7 candidates by score, but 8 are chosen"),
        (
            lambda: trainer(Shortlist(), irreducible=live),
            "they come from a live model; use a table",
        ),
        (lambda: trainer(LowerResolution(3)), "sides are multiples of 3, but the inputs are"),
        (lambda: trainer(LowerResolution(2), flat), "does not take images of size .4, 4."),
        (lambda: trainer(LowerResolution(), method="negative_il"), "'negative_il' runs no model"),
        (lambda: trainer(Proxy(make_proxy), method="uniform"), "'uniform' runs no model to score"),
        (
            lambda: trainer(Proxy(make_proxy), overlap=True),
            "`overlap`=True cannot be combined with `Proxy`",
        ),
        (
            lambda: trainer(Reuse(), method="bald"),
            "`Reuse` keeps training losses, but the method 'bald'",
        ),
        (lambda: trainer(Gate(), irreducible=live), "'rho' has a live model"),
        (lambda: trainer(Gate(), method="loss"), "'loss' reads none"),
        (lambda: trainer(Proxy(lambda: flat), flat), r"has 2 parameter\(s\) of the target"),
        (
            lambda: trainer(Proxy(make_proxy, torch.optim.SGD(flat.parameters()))),
            "`optimizer` is a SGD; give a function",
        ),
        (
            lambda: trainer(optimizer=torch.optim.SGD(flat.parameters())),
            "`optimizer` is a SGD; give a function",
        ),
        (lambda: trainer(used), "belongs to another trainer"),
        (lambda: trainer("gate"), "`scoring` is 'gate'; pass an option"),
        (lambda: trainer().load_state_dict(saved), "pass `scoring` as it was"),
    ):
        with pytest.raises(RholossError, match=message):
            make()


def test_flops_are_those_of_the_passes_that_were_made():
    exact = run().ledger
    model = 2 * (36 * 8 * 27 + 32 * 4)  # a convolution at 6 x 6 places, a last layer
    small = 2 * (4 * 8 * 27 + 32 * 4)  # at 2 x 2 places
    proxy = 2 * 192 * 4
    trained = 3 * STEPS * K * model
    assert exact.flops == STEPS * B * model + trained
    assert run(Gate(0.25)).ledger.flops == STEPS * B // 4 * model + trained
    assert run(LowerResolution(2)).ledger.flops == STEPS * B * small + trained
    assert run(Proxy(make_proxy, adamw)).ledger.flops == STEPS * (B + 3 * K) * proxy + trained
