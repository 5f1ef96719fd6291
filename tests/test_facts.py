"""Acceptance checks of the method as a whole, by their numbers; 23 to 25 on the calibrated toy."""

import copy
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import resume_task
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss.steplog import read_log


def state(model, optimizer):
    tensors = [*model.state_dict().values()]
    for values in optimizer.state.values():
        tensors += values.values()
    return [t.clone() for t in tensors]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


class Counting(nn.Module):
    """Notes how many rows each forward pass had, and whether for a gradient."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, []

    def forward(self, x):
        self.calls.append((len(x), torch.is_grad_enabled()))
        return self.inner(x)


# 6: keeping all is plain training.


def test_keeping_all_gives_the_gradient_of_plain_training(toy):
    index, x, y = toy.batch(0)
    gradients = []
    for select in (None, rho.Selector("rho", irreducible=toy.il, keep=1.0)):
        model = toy.model(dropout=0.0)
        _, x_b, y_b = (index, x, y) if select is None else select(model, (index, x, y))
        assert len(x_b) == 320
        F.cross_entropy(model(x_b), y_b).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, selected in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, selected, atol=1e-6, rtol=1e-4)


# 12: one epoch is one pass over the candidates.


def test_an_epoch_visits_every_point_once_and_trains_on_a_tenth():
    points, seen = 25_000, []
    data = rho.WithIndex(
        TensorDataset(torch.arange(float(points))[:, None], torch.zeros(points).long())
    )
    select = rho.Selector(
        "rho",
        irreducible=torch.zeros(points),
        keep=0.1,
        on_scores=[lambda step, stats, chosen: seen.append(stats.index)],
    )
    model, trained = nn.Linear(1, 2), 0
    for batch in DataLoader(data, batch_size=320, shuffle=True):
        trained += len(select(model, batch)[0])
    ledger = select.ledger
    assert torch.cat(seen).sort().values.tolist() == list(range(points))
    assert (select.step, ledger.steps, ledger.candidates) == (79, 79, 25_000)
    assert (ledger.scored, ledger.forwards, ledger.trained, trained) == (25_000, 25_000, 2500, 2500)


# 13: selecting changes no parameter, optimizer state or gradient, and builds no graph.


@pytest.mark.parametrize("method", [*rho.METHODS])
def test_selecting_changes_nothing_of_the_training(toy, method):
    model = toy.model()
    optimizer = torch.optim.AdamW(model.parameters())
    F.cross_entropy(model(toy.x[:32]), toy.y[:32]).backward()
    optimizer.step()
    before, grads = state(model, optimizer), [p.grad.clone() for p in model.parameters()]
    select = rho.Selector(method, irreducible=toy.il, keep=0.1, batch_norm="batch", draws=2)
    for step in range(2):
        chosen = select(model, toy.batch(step))
        assert not any(leaf.requires_grad for leaf in chosen)
        measured = [select.selection.score, select.weights]
        assert all(t is None or t.grad_fn is None for t in measured)
    assert same(before, state(model, optimizer))
    assert same(grads, [p.grad for p in model.parameters()])


# 15: a step is a plain step on the hand-picked b_t.


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bf16 scoring", "bf16 around all"])
def test_a_step_is_a_plain_step_on_the_hand_picked_points(toy, precision, accumulated):
    def autocast(*kinds):
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision in kinds)

    def by_hand(model, batch):
        index, x, y = batch
        scorer = copy.deepcopy(model)
        with torch.no_grad(), autocast("bf16 scoring", "bf16 around all"):
            score = F.cross_entropy(scorer(x).float(), y, reduction="none") - toy.il[index]
        chosen = score.argsort(descending=True)[:32]
        return index[chosen], x[chosen], y[chosen]

    scoring = "bf16" if precision == "bf16 scoring" else None
    select = rho.Selector(
        "rho", irreducible=toy.il, keep=0.1, batch_norm="batch", precision=scoring
    )
    ends = []
    for choose in (select, by_hand):
        model = toy.model(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2 * accumulated):
            with autocast("bf16 around all"):
                _, x, y = choose(model, toy.batch(step))
                (F.cross_entropy(model(x), y) / accumulated).backward()
            if (step + 1) % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(state(model, optimizer))
    assert same(*ends)


# 16: forward passes.


@pytest.mark.parametrize(
    ("method", "scored"),
    [("rho", [320]), ("grad_norm", [320]), ("uniform", []), ("negative_il", [])],
)
@pytest.mark.parametrize("chunk", [None, 160])
def test_forward_passes_of_a_step(toy, method, scored, chunk):
    irreducible = Counting(toy.model())
    with torch.no_grad():
        table = F.cross_entropy(irreducible(toy.x), toy.y, reduction="none")
    model = Counting(toy.model())
    options = {"batch_norm": "eval", "chunk": chunk} if chunk else {}
    select = rho.Selector(method, irreducible=table, keep=0.1, **options)
    for step in range(3):
        model.calls.clear()
        _, x, y = select(model, toy.batch(step))
        F.cross_entropy(model(x), y).backward()
        parts = [160, 160] if chunk and scored else scored
        assert model.calls == [*((rows, False) for rows in parts), (32, True)]
    assert len(irreducible.calls) == 1
    assert select.ledger.forwards == 3 * sum(scored)


def test_forward_passes_of_monte_carlo_draws(toy):
    model = Counting(toy.model())
    select = rho.Selector("bald", keep=0.1, draws=4)
    for step in range(2):
        select(model, toy.batch(step))
    assert model.calls == [(320, False)] * 8
    assert (select.ledger.scored, select.ledger.forwards) == (640, 2560)


# 17: chunks choose the same, ties included.


@pytest.mark.parametrize("chunk", [1, 48, 1000])
def test_chunks_choose_the_same(chunk):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (320, 4), generator=generator).float()  # many points are alike
    y = torch.randint(3, (320,), generator=generator)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-2, 3, (3, 4), generator=generator))
        model.bias.zero_()
    batch = (torch.arange(320), x, y)
    whole, parts = (
        rho.Selector("loss", keep=0.1, batch_norm="eval", chunk=c) for c in (None, chunk)
    )
    assert whole(model, batch)[0].tolist() == parts(model, batch)[0].tolist()
    assert len(whole.selection.score.unique()) < 32


# 19: resuming in a new process.


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Each run whole, and cut in two: the second half in another process, after a crash."""
    folder, whole = tmp_path_factory.mktemp("resumed"), {}
    other = tmp_path_factory.mktemp("whole")
    for kind in resume_task.KINDS:
        run = resume_task.Run(kind, other)
        chosen = run.train(200)
        whole[kind] = {**copy.deepcopy(run.state()), "chosen": chosen}
        cut = resume_task.Run(kind, folder)
        cut.train(100)
        torch.save(cut.state(), folder / f"{kind}.half.pt")
        cut.train(137)  # these steps were logged and are lost
    script = Path(resume_task.__file__)
    subprocess.run(
        [sys.executable, "-W", "error", str(script), str(folder)], check=True, timeout=300
    )
    return folder, other, whole


@pytest.mark.parametrize("kind", resume_task.KINDS)
def test_a_run_that_is_resumed_in_a_new_process_ends_as_the_whole_one(halves, kind):
    folder, other, whole = halves
    end = torch.load(folder / f"{kind}.end.pt", weights_only=True)
    assert end["chosen"] == whole[kind]["chosen"][100:]
    for part in ("model", "optimizer"):
        assert _leaves(end[part]) == _leaves(whole[kind][part])
    assert _leaves(end["select"]["irreducible"]) == _leaves(whole[kind]["select"]["irreducible"])
    assert torch.equal(end["random"], whole[kind]["random"])
    ours, theirs = (list(read_log(where / f"{kind}.jsonl")) for where in (folder, other))
    assert ours == theirs
    assert [line["step"] for line in ours] == list(range(200))
    for count in ("steps", "candidates", "trained", "scored", "forwards"):
        assert end["select"]["ledger"][count] == whole[kind]["select"]["ledger"][count]


def _leaves(tree):
    if isinstance(tree, dict):
        return {key: _leaves(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_leaves(value) for value in tree]
    return tree.numpy().tobytes() if isinstance(tree, torch.Tensor) else tree


# 23 to 25: 10 Gaussian classes in 20-D, 10 % of the labels flipped to other labels.

EPOCHS = {"uniform": 8, "rho": 5, "loss": 5, "grad_norm": 5, "negative_il": 3}


def mlp(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
        return nn.Sequential(*layers)


def gaussians(generator, means, rows, noise):
    y = torch.randint(10, (rows,), generator=generator)
    x = means[y] + torch.randn(rows, 20, generator=generator)
    flipped = torch.zeros(rows, dtype=torch.bool)
    flipped[torch.randperm(rows, generator=generator)[: int(rows * noise)]] = True
    other = (y + torch.randint(1, 10, (rows,), generator=generator)) % 10
    return x, torch.where(flipped, other, y), flipped


def fitted(x_ho, y_ho, x, y, generator):
    """Irreducible losses of a model trained on the holdout set, of the epoch of lowest loss."""
    model, best = mlp(100), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        for rows in torch.randperm(len(x_ho), generator=generator).split(320):
            optimizer.zero_grad()
            F.cross_entropy(model(x_ho[rows]), y_ho[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y, reduction="none")
        best = loss if best is None or loss.mean() < best.mean() else best
    return best


@pytest.fixture(scope="module")
def picks():
    """By method and epoch: share of wrong labels chosen, share known already, accuracy after it."""
    generator = torch.Generator().manual_seed(4)
    means = 0.8 * torch.randn(10, 20, generator=generator)
    x, y, flipped = gaussians(generator, means, 20_000, 0.1)
    x_ho, y_ho, _ = gaussians(generator, means, 20_000, 0.1)
    x_test, y_test, _ = gaussians(generator, means, 5000, 0.0)
    il = fitted(x_ho, y_ho, x, y, generator)
    seen = {}
    for method, epochs in EPOCHS.items():
        model, order = mlp(1), torch.Generator().manual_seed(7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        select = rho.Selector(method, irreducible=il, keep=0.1)
        seen[method] = []
        for _ in range(epochs):
            wrong, known = [], []
            for rows in torch.randperm(20_000, generator=order).split(320):
                index, x_b, y_b = select(model, (rows, x[rows], y[rows]))
                logits = model(x_b)
                optimizer.zero_grad()
                F.cross_entropy(logits, y_b).backward()
                optimizer.step()
                wrong.append(flipped[index].float())
                known.append((logits.argmax(1) == y_b).float())
            with torch.no_grad():
                accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
            seen[method].append(
                (torch.cat(wrong).mean().item(), torch.cat(known).mean().item(), accuracy)
            )
    return seen


def test_wrong_labels_among_the_chosen(picks):
    """23: while the target is behind, RHO-LOSS avoids them; later it stays far below the loss."""
    wrong = {method: [epoch[0] for epoch in epochs] for method, epochs in picks.items()}
    assert wrong["rho"][0] <= 0.02
    assert wrong["loss"][0] >= 0.40
    assert wrong["grad_norm"][0] >= 0.40
    assert 0.08 <= wrong["uniform"][0] <= 0.12
    for ours, theirs in itertools.islice(zip(wrong["rho"], wrong["loss"], strict=True), 2, None):
        assert ours <= 0.5 * theirs


def test_epochs_to_the_accuracy_of_uniform(picks):
    """24: at most half of what uniform needs; training loss and gradient norm never get there."""
    accuracy = {method: [epoch[2] for epoch in epochs] for method, epochs in picks.items()}
    target = accuracy["uniform"][-1]

    def needed(method):
        return next((i for i, value in enumerate(accuracy[method], 1) if value >= target), None)

    assert needed("rho") is not None
    assert needed("rho") <= needed("uniform") / 2
    assert needed("loss") is None
    assert needed("grad_norm") is None


def test_points_that_were_known_already(picks):
    """25: loss < RHO < uniform < negative IL, after the first epoch, when there is something known."""
    known = {m: sum(e[1] for e in epochs[1:]) / (len(epochs) - 1) for m, epochs in picks.items()}
    assert known["loss"] < known["rho"] < known["uniform"] < known["negative_il"]
