import numpy as np
import pytest
import torch
from torch import nn

from rholoss.engine import Resident, fit_ladder, fit_resident, losses_of, one_cycle
from rholoss.errors import RholossError
from rholoss.il.split import folds


def make_model():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))


@pytest.fixture(scope="module")
def points():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 6, generator=generator)
    y = x[:, :3].argmax(1)
    wrong = torch.rand(3000, generator=generator) < 0.1
    return x, torch.where(wrong, (y + 1) % 3, y), wrong


def test_the_rate_rises_and_falls_to_nearly_zero():
    rate = one_cycle(2.0, 100)
    rates = [rate(step) for step in range(100)]
    assert max(rates) == 2.0
    assert rates.index(2.0) == 19
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(2 / 80)


def test_numbers_may_be_numpys(points):
    data = Resident(points[0][:200], points[1][:200], device="cpu")
    numbers = {"epochs": 2, "batch_size": 20, "seed": 1, "evaluations": 1}
    one = fit_resident(make_model, data, folds=2, **numbers)
    other = fit_resident(make_model, data, folds=2, **{k: np.int64(v) for k, v in numbers.items()})
    assert torch.equal(one.values, other.values)


def test_wrong_labels_have_the_higher_irreducible_loss(points):
    x, y, wrong = points
    even, odd = torch.arange(0, 3000, 2), torch.arange(1, 3000, 2)
    holdout = Resident(x[odd], y[odd], ids=odd, device="cpu")
    score = Resident(x[even], y[even], ids=even, device="cpu")
    state = torch.get_rng_state()
    il = fit_resident(make_model, holdout, score=score, batch_size=64)
    assert torch.equal(torch.get_rng_state(), state)
    measured = il.lookup(even)
    assert measured[wrong[even]].median() > 5 * measured[~wrong[even]].median()
    assert il.lookup(odd[:-1]).isnan().all()
    assert il.seconds > 0


def test_with_folds_each_point_is_scored_by_a_model_that_never_saw_it(points):
    """A network that can learn its points by heart gives a wrong label away only if it did not see it."""
    x, y, wrong = points
    x, y, wrong = x[:400], y[:400], wrong[:400]

    options = {"epochs": 60, "batch_size": 32, "evaluations": 1, "learning_rate": 5e-3}
    data = Resident(x, y, device="cpu")
    crossed = fit_resident(large, data, folds=2, **options).lookup(torch.arange(400))
    with pytest.warns(UserWarning, match=r"`score` is `data` itself.*`folds=2`"):
        il = fit_resident(large, data, score=data, **options)
    by_heart = il.lookup(torch.arange(400))
    assert crossed.isfinite().all()
    assert crossed[wrong].median() > 2 > by_heart[wrong].median()


def large():
    return nn.Sequential(nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 3))


def test_the_lowest_of_the_last_losses_counts(points):
    """A model that learns 200 points by heart gets worse on others: the earlier weights are kept."""
    x, y, _ = points
    holdout = Resident(x[:200], y[:200], device="cpu")
    score = Resident(x[200:], y[200:], device="cpu")
    options = {"epochs": 60, "batch_size": 32, "learning_rate": 5e-3}
    last, lowest = (
        fit_resident(large, holdout, score=score, evaluations=n, **options).lookup(
            torch.arange(2800)
        )
        for n in (1, 60)
    )
    assert lowest.mean() < 0.9 * last.mean()


def test_losses_are_those_of_a_plain_forward_pass_and_change_nothing(points):
    x, y, _ = points
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    ).train()
    losses = losses_of(model, Resident(x, y, device="cpu"), batch_size=700)
    assert model[2].training
    assert model[1].num_batches_tracked == 0
    expected = nn.functional.cross_entropy(model.eval()(x), y, reduction="none")
    assert torch.allclose(losses, expected, atol=1e-6)


def test_score_or_folds(points):
    data = Resident(points[0], points[1], device="cpu")
    with pytest.raises(
        RholossError, match="Pass either `score`, the points to be scored, or `folds`"
    ):
        fit_resident(make_model, data)


def test_what_gives_no_losses_is_refused(points):
    data = Resident(points[0], points[1], device="cpu")
    for none in ("epochs", "batch_size", "evaluations"):
        with pytest.raises(RholossError, match="`evaluations` must be at least 1, but are"):
            fit_resident(make_model, data, folds=2, **{none: 0})
    with pytest.raises(RholossError, match="`loss` is 'tokenz'"):
        losses_of(make_model(), data, loss="tokenz")
    with pytest.raises(RholossError, match="`precision` is 'int8'; choose one of"):
        losses_of(make_model(), data, precision="int8")


def test_what_a_fit_is_made_of_is_looked_at(points):
    x, y, _ = points
    data, model = Resident(x[:600], y[:600], device="cpu"), make_model()
    raw = torch.utils.data.TensorDataset(x, y)
    for make, given, says in (
        (
            lambda: model,
            {"data": data, "folds": 2},
            "`make_model` returned weights that it had ret",
        ),
        (model, {"data": data, "folds": 2}, "`make_model` is a Sequential itself; give a function"),
        (make_model, {"data": raw, "folds": 2}, "`data` is a TensorDataset; make a `Resident"),
        (make_model, {"data": data, "score": raw}, "`score` is a TensorDataset; make a `Resident"),
    ):
        with pytest.raises(RholossError, match=says):
            fit_resident(make, epochs=4, **given)


def test_the_seed_is_that_of_dropout_too_and_the_callers_stays(points):
    x, y, _ = points
    data = Resident(x[:600], y[:600], device="cpu")

    def with_dropout():
        return nn.Sequential(make_model()[0], nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3))

    found = []
    for number, seed in enumerate((3, 3, 4)):
        torch.manual_seed(number)
        state = torch.get_rng_state()
        il = fit_resident(with_dropout, data, folds=2, epochs=4, batch_size=32, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(il.lookup(data.ids))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_folds_that_are_fitted_side_by_side_are_what_each_would_be_alone(points):
    x, y, _ = points
    data = Resident(x[:600], y[:600], device="cpu")
    crossed = fit_resident(make_model, data, folds=3, seed=5, epochs=4, batch_size=16)
    fold = torch.as_tensor(folds(data.ids.numpy(), 3, 5))
    for number in range(3):
        rows, others = ((fold == number).nonzero()[:, 0], (fold != number).nonzero()[:, 0])
        alone = fit_resident(
            make_model,
            data.take(others),
            score=data.take(rows),
            seed=5 + number,
            epochs=4,
            batch_size=16,
        )
        assert torch.equal(alone.lookup(rows), crossed.lookup(rows))


@pytest.mark.parametrize("kind", ["folds", "holdout"])
def test_the_store_tells_the_model_and_the_split_as_that_of_fit_irreducible(points, kind, tmp_path):
    data = Resident(points[0][:200], points[1][:200], device="cpu")
    rest = {"folds": 2} if kind == "folds" else {"score": data.take(torch.arange(50))}
    il = fit_resident(make_model, data, epochs=2, batch_size=20, **rest)
    assert il.meta["split"] == {"kind": kind, "folds": rest.get("folds"), "seed": 0}
    assert il.meta["model"] == {"class": "Sequential", "parameters": 323}
    assert "classification loss of Sequential" in repr(il)


def test_a_ladder_has_the_losses_of_young_models_and_those_of_a_whole_fit(points):
    x, y, _ = points
    data = Resident(x[:600], y[:600], device="cpu")
    options = {"folds": 2, "epochs": 6, "batch_size": 16, "evaluations": 2}
    ladder = fit_ladder(make_model, data, rungs=(1, 3), **options)
    assert len(ladder.tables) == 3
    assert ladder.means == sorted(ladder.means, reverse=True)
    whole = fit_resident(make_model, data, **options)
    assert torch.equal(ladder.tables[-1].lookup(data.ids), whole.lookup(data.ids))
    assert [table.seconds > 0 for table in ladder.tables] == [False, False, True]  # one fit
    # A rate at which nothing is learnt: what does not fall is left out.
    still = fit_ladder(make_model, data, rungs=(1, 3), learning_rate=0.0, **options)
    assert len(still.tables) == 1
    for rungs in ((3, 1), (0, 1), (1, 5), (1, 1)):
        with pytest.raises(
            RholossError, match=r"`rungs` must be epochs in rising order, from 1 to 4"
        ):
            fit_ladder(make_model, data, rungs=rungs, **options)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_without_a_finite_loss_leaves_the_others_as_they_are(points, broken):
    x, y, _ = points
    holdout, options = Resident(x[:600], y[:600], device="cpu"), {"epochs": 6, "batch_size": 32}
    whole, spoilt = x[600:1000], x[600:1000].clone()
    spoilt[3] = broken
    options["evaluations"] = 6  # of which the first are far from the best
    score, part = (Resident(inputs, y[600:1000], device="cpu") for inputs in (whole, spoilt))
    expected = fit_resident(make_model, holdout, score=score, **options)
    with pytest.warns(UserWarning, match=r"1 of 400 points have no finite loss .*\(ids 3\)"):
        found = fit_resident(make_model, holdout, score=part, **options)
    others = torch.arange(400) != 3
    assert torch.equal(found.values[others], expected.values[others])
    with pytest.warns(UserWarning, match="1 of 400 points"):
        ladder = fit_ladder(make_model, holdout, score=part, rungs=(1,), epochs=6, batch_size=32)
    assert len(ladder.tables) == 2


def test_no_finite_loss_at_all_is_an_error(points):
    x, y, _ = points
    holdout = Resident(x[:600], y[:600], device="cpu")
    score = Resident(x[600:] * torch.nan, y[600:], device="cpu")
    with pytest.raises(RholossError, match="No point has a finite loss under the model"):
        fit_resident(make_model, holdout, score=score, epochs=3, batch_size=64)
