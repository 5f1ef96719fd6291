"""Table 1: ensembles as one computation, the chain of approximations, and how ranks are compared."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from experiments import records
from experiments.digits import __main__ as command
from experiments.digits import chain, page, table1
from experiments.digits.chain import (
    CHAIN,
    IrreducibleModels,
    Setting,
    candidate_batches,
    fit_irreducible_models,
    follow,
    overlap,
    shuffled_repeats,
    spearman,
)
from experiments.digits.data import Points
from experiments.digits.ensembles import (
    Fitter,
    Stack,
    accuracy,
    fit_lowest,
    losses,
    member_losses,
    predictive_loss,
)
from rholoss.errors import RholossError

WIDTHS = (6, 8, 8, 3)


@pytest.fixture
def blobs():
    """60 points of three classes in six dimensions."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = 2 * torch.eye(6)[y] + 0.5 * torch.randn(60, 6, generator=generator)
    return x, y


def alone(stack, member):
    """One member as an ordinary network."""
    layers = []
    for weight, bias in zip(stack.weights, stack.biases, strict=True):
        layer = nn.Linear(*weight.shape[1:])
        layer.weight.data, layer.bias.data = weight[member].T.clone(), bias[member, 0].clone()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_a_member_is_an_mlp_and_the_same_in_any_company(blobs):
    x, _ = blobs
    three, one = Stack(3, WIDTHS, seed=5), Stack(1, WIDTHS, seed=5)
    logits = three(x)
    assert logits.shape == (3, 60, 3)
    torch.testing.assert_close(logits[2], alone(three, 2)(x))
    torch.testing.assert_close(logits[:1], one(x))
    assert not torch.equal(logits[0], logits[1])
    bound = 1 / math.sqrt(6)
    assert three.weights[0].abs().max() <= bound
    assert three.weights[0].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)


def test_members_learn_as_if_each_were_alone(blobs):
    x, y = blobs
    stack = Stack(3, WIDTHS, seed=1)
    networks = [alone(stack, member) for member in range(3)]
    fitter = Fitter(stack, x, y, 10, 1e-2)
    rows = torch.stack([torch.randperm(60)[:10] for _ in range(15)]).view(5, 3, 10)
    for rows_MB in rows:
        fitter.step(rows_MB)
    for member, network in enumerate(networks):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        for rows_MB in rows:
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows_MB[member]]), y[rows_MB[member]]).backward()
            optimizer.step()
        torch.testing.assert_close(stack(x)[member], network(x), rtol=1e-4, atol=1e-5)


def test_the_loss_of_an_ensemble_is_that_of_its_mean_probability(blobs):
    x, y = blobs
    logits = Stack(4, WIDTHS, seed=2)(x)
    probability = logits.softmax(2).mean(0)[torch.arange(60), y]
    torch.testing.assert_close(predictive_loss(logits, y), -probability.log())
    torch.testing.assert_close(predictive_loss(logits[:1], y), member_losses(logits[:1], y)[0])
    assert (predictive_loss(logits, y) <= member_losses(logits, y).mean(0) + 1e-6).all()


def test_an_epoch_visits_each_row_once_in_each_members_own_order(blobs, monkeypatch):
    x, y = blobs
    fitter, seen = Fitter(Stack(2, WIDTHS, seed=0), x, y, 20, 1e-3), []
    monkeypatch.setattr(fitter, "step", lambda rows: seen.append(rows))
    fitter.epoch(torch.arange(59), torch.Generator().manual_seed(0))
    orders = torch.cat(seen, 1)
    assert orders.shape == (2, 40)  # 19 are left over
    assert all(len(order.unique()) == 40 for order in orders)
    assert not torch.equal(*orders)


def test_each_member_keeps_its_epoch_of_lowest_loss(blobs):
    x, y = blobs
    wrong = (y + (torch.arange(60) < 15).long()) % 3  # judged by labels that are partly wrong
    options = {"batch_size": 20, "rate": 3e-2, "seed": 3}
    curves = []
    for epochs in range(1, 13):
        stack = Stack(2, WIDTHS, seed=4)
        assert (
            fit_lowest(stack, (x, y), (x, wrong), epochs=epochs, keep="last", **options)
            == [epochs] * 2
        )
        curves.append(member_losses(stack(x), wrong).mean(1).detach())
    curves = torch.stack(curves)
    stack = Stack(2, WIDTHS, seed=4)
    kept = fit_lowest(stack, (x, y), (x, wrong), epochs=12, **options)
    assert kept == (curves.argmin(0) + 1).tolist()
    assert max(kept) < 12  # there is something to be seen here
    torch.testing.assert_close(member_losses(stack(x), wrong).mean(1), curves.min(0).values)


def test_ranks_with_ties():
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: 9.5 / sqrt(4.5 x 5) / ...: worked out by hand.
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([10.0, 20, 30, 40])) == pytest.approx(
        4.5 / math.sqrt(4.5 * 5)
    )
    assert spearman(np.arange(9.0), np.arange(9.0) ** 3) == pytest.approx(1)
    assert spearman(np.arange(9.0), -np.arange(9.0)) == pytest.approx(-1)


def test_ranks_as_scipy_has_them():
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    rng = np.random.default_rng(0)
    for decimals in (0, 1, 9):  # many ties, some, none
        a, b = rng.normal(size=(2, 200)).round(decimals)
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_overlap_counts_the_highest():
    a, b = np.array([5.0, 4, 3, 2, 1]), np.array([5.0, 1, 4, 2, 3])
    assert overlap(a, b, 2) == 0.5
    assert overlap(a, a, 3) == 1


def test_candidates_are_dealt_without_replacement(monkeypatch):
    monkeypatch.setattr(chain, "CANDIDATES", 10)
    batches = candidate_batches(35, seed=1)
    assert batches.shape == (3, 10)
    assert len(batches.unique()) == 30
    dealt = shuffled_repeats(30, 15, seed=1)
    assert dealt.flatten().bincount().tolist() == [5] * 30


@pytest.fixture(scope="module")
def tiny():
    """Three batches of 60 candidates, k = 6, of real size otherwise; noise on every tenth label."""
    generator = torch.Generator().manual_seed(0)

    def draw(num, noisy):
        y = torch.randint(10, (num,), generator=generator)
        x = 3 * torch.eye(784)[y] + 0.3 * torch.randn(num, 784, generator=generator)
        corrupted = noisy & (np.arange(num) % 10 == 0)
        return Points(x, torch.where(torch.tensor(corrupted), (y + 1) % 10, y), corrupted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "CANDIDATES", 60)
        patch.setattr(table1, "CANDIDATES", 60)
        data = draw(180, True), draw(320, False), draw(100, False)
        il = fit_irreducible_models(data[1], data[0], Setting(il_epochs=4), seed=0)
        yield *data, il


def fingerprint(il: IrreducibleModels):
    return [
        float(p.detach().double().sum()) for s in (il.ensemble, il.small) for p in s.parameters()
    ]


@pytest.mark.parametrize("reading", ["A", "between", "B"])
def test_the_chain(tiny, reading, monkeypatch):
    train, holdout, test, il = tiny
    setting, before = Setting(reading=reading, il_epochs=4), fingerprint(il)
    steps = []
    step = Fitter.step

    def counted(self, rows):
        steps.append((self.stack.members, self.stack.weights[0].shape[2], id(self), rows.shape[-1]))
        step(self, rows)

    monkeypatch.setattr(Fitter, "step", counted)
    counts = {}
    runs = {}
    for link in CHAIN:
        steps.clear()
        runs[link.name] = follow(link, setting, train, holdout, test, il, seed=3)
        counts[link.name] = [
            len(list(g)) for _, g in itertools.groupby(sorted(s[2] for s in steps))
        ]
    batches = candidate_batches(180, seed=3)
    for link in CHAIN:
        run = runs[link.name]
        assert len(run.score) == 3
        assert len(run.acquired) == (3 if link.retrains else 15)
        # Each acquires by its own score: at the compared steps we have it.
        every = 1 if link.retrains else 5
        for t, score in enumerate(run.score):
            best = batches[t][score.argsort(descending=True)[:6]]
            assert set(best.tolist()) == set(run.acquired[t * every].tolist())
            assert set(run.acquired[t * every].tolist()) <= set(batches[t].tolist())
    # Single models start from the same weights and the same IL model.
    for name in ("1b", "2"):
        assert torch.equal(runs["1a"].score[0], runs[name].score[0])
    assert not torch.equal(runs["1a"].score[0], runs["0"].score[0])
    assert not torch.equal(runs["2"].score[0], runs["3"].score[0])
    assert not torch.equal(runs["1b"].score[1], runs["2"].score[1])  # its IL model has moved
    # 15 gradient steps of the target in all, whoever takes them; 1b's IL model takes as many.
    assert sorted(counts["1b"]) == [15, 15]
    assert counts["2"] == counts["3"] == [15]
    if reading == "A":
        assert counts["0"] == counts["1a"] == [15, 15]
    else:  # five epochs over 1, 2 and 3 acquired batches; and in B over the holdout set and these
        assert sorted(counts["0"]) == sorted([30, 15])
    assert fingerprint(il) == before  # what was fitted on the holdout set is never changed


def test_shuffled_repeats_offer_other_candidates(tiny):
    train, holdout, test, il = tiny
    link = CHAIN[3]
    in_place, shuffled = (
        follow(link, Setting(repeats=repeats, il_epochs=4), train, holdout, test, il, seed=3)
        for repeats in ("in place", "shuffled")
    )
    assert torch.equal(in_place.score[0], shuffled.score[0])  # the same candidates are compared
    batches = candidate_batches(180, seed=3)
    assert not set(shuffled.acquired[0].tolist()) <= set(batches[0].tolist())


def test_unknown_settings_are_told():
    with pytest.raises(RholossError, match="`reading` is 'C'; choose one of A, between, B"):
        Setting(reading="C")
    with pytest.raises(RholossError, match="`repeats` is 'twice'"):
        Setting(repeats="twice")


def test_the_study_writes_lines_once_and_a_page(tiny, tmp_path, monkeypatch, capsys):
    train, holdout, test, _ = tiny
    loads = []

    def load(setting, root, device):
        loads.append(setting)
        return train, holdout, test

    monkeypatch.setattr(table1, "load", load)
    settings = {
        "A": Setting(il_epochs=1),
        "A, repeats shuffled": Setting(repeats="shuffled", il_epochs=1),
    }
    monkeypatch.setattr(page, "SETTINGS", settings)
    out = tmp_path / "runs.jsonl"
    for _ in range(2):
        table1.run(list(settings), [0], out=out, device="cpu", settings=settings)
    lines = list(records.read(out))
    assert len(lines) == len(loads) == 2  # the second time nothing was left to do
    elsewhere = tmp_path / "elsewhere" / "runs.jsonl"
    given = {"out": elsewhere, "device": "cpu", "settings": settings}
    monkeypatch.setattr(table1, "RUNS", out)
    table1.run(list(settings), [0], **given)  # nor is what is known run again elsewhere,
    table1.run(list(settings), [1], seconds=-1.0, **given)  # nor anything when time is up
    monkeypatch.setattr(table1, "SETTINGS", settings)
    command.main(["table1", "--settings", "all", "--seeds", "0", "--out", str(elsewhere)])
    assert len(loads) == 2
    assert not elsewhere.exists()  # and no page of nothing is made
    assert f"{elsewhere} has no runs" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no runs, so there is no page"):
        command.main(["report", "--settings", "all", "--out", str(elsewhere)])
    with pytest.raises(SystemExit):
        command.main(["table1", "--settings", "all", "--again", "--out", str(out)])
    assert "--again needs --out" in capsys.readouterr().err
    (tmp_path / "README.md").write_text("of something else")
    words = ["table1", "--settings", "all", "--seeds", "0", "--again"]
    for _ in range(2):  # what is committed is made again, once
        command.main([*words, "--out", str(tmp_path / "again.jsonl")])
    again = list(records.read(tmp_path / "again.jsonl"))
    assert [line["chain"] for line in again] == [line["chain"] for line in lines]
    assert (tmp_path / "README.md").read_text() == "of something else"
    assert (tmp_path / "again.md").read_text().startswith("# Table 1")
    chain_of = lines[0]["chain"]
    assert chain_of["0"]["spearman"] == chain_of["0"]["overlap"] == 1.0
    for result in chain_of.values():
        assert len(result["by_batch"]) == 3
        assert result["spearman"] == pytest.approx(np.mean(result["by_batch"]), abs=1e-4)
    assert lines[0]["chain"]["1a"] == lines[1]["chain"]["1a"]  # one fit serves both settings
    text = page.write(out).read_text()
    assert f"| A | {chain_of['1a']['spearman']:.2f} |" in text
    assert "| **paper** | **0.75** | **0.76** | **0.63** | **0.51** | 3 |" in text


def test_a_look_at_some_points_does_not_stand_for_the_whole(tiny, tmp_path, monkeypatch):
    train, holdout, test, _ = tiny
    monkeypatch.setattr(table1, "load", lambda *_: (train, holdout, test))
    monkeypatch.setattr(chain, "IL_BATCH", 60)
    settings, out = {"A": Setting(il_epochs=1)}, tmp_path / "runs.jsonl"
    given = {"device": "cpu", "settings": settings}
    for limit in (60, 60, None, None):
        table1.run(["A"], [0], out=out, limit=limit, **given)
    assert [line["rows"] for line in records.read(out)] == [60, 180]
    monkeypatch.setattr(table1, "RUNS", out)
    with pytest.raises(RholossError, match="`limit` is 60, for a look; give another file than "):
        table1.run(["A"], [1], out=out, limit=60, **given)
    assert len(list(records.read(out))) == 2


def test_pages_take_the_last_line_of_a_seed_and_the_mean_of_seeds():
    def line(seed, value):
        result = {"spearman": value, "overlap": 0.5, "corrupted": 0.01, "test_accuracy": 0.9,
                  "il_accuracy": 0.9, "by_batch": [value] * 3}  # fmt: skip
        return {"seed": seed, **Setting().__dict__, "chain": {link.name: result for link in CHAIN}}

    found = page.by_setting([line(0, 0.1), line(1, 0.4), line(0, 0.2)])
    assert [entry["chain"]["2"]["spearman"] for entry in found["A"]] == [0.2, 0.4]
    assert page.over(found["A"], "2", page.spearman_of) == "0.30 (0.20-0.40)"
    short = line(0, 0.9)
    short["chain"] = {
        name: {**result, "by_batch": [0.9]} for name, result in short["chain"].items()
    }
    assert (
        page.over_time({"A": [short]})[-1] == "| A |  |  |  |"
    )  # of one batch there are no thirds
    look, larger = ({**line(0, 0.9), "limit": limit} for limit in (60, 80))
    assert page.by_setting([line(1, 0.4), look])["A"] == [line(1, 0.4)]  # no look stands beside it
    assert page.by_setting([larger, {**look, "seed": 1}])["A"] == [larger]


def test_accuracy_and_losses_of_many_points_come_in_parts(blobs, monkeypatch):
    from experiments.digits import ensembles

    x, y = blobs
    stack = copy.deepcopy(Stack(2, WIDTHS, seed=0))
    whole = losses(stack, x, y), accuracy(stack, x, y)
    monkeypatch.setattr(ensembles, "SCORED_AT_ONCE", 7)
    torch.testing.assert_close(losses(stack, x, y), whole[0])
    assert accuracy(stack, x, y) == whole[1]
