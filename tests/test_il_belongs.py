"""Do these irreducible losses belong to this data? What is said where they do not, or where nobody knows."""

import functools
import re
import types
import warnings

import fixtures_task as task
import pytest
import torch
from fixtures_cli import one_line, rholoss_
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from rholoss import Ladder, Selector
from rholoss.engine import Resident, Trainer, fit_ladder, fit_resident
from rholoss.errors import IdentityMismatchError
from rholoss.il.fit import fit_irreducible
from rholoss.il.score import score_irreducible
from rholoss.il.store import Irreducible
from rholoss.indexed import WithIndex
from rholoss.losses import TASKS
from rholoss.naming import code_hash, named

Y = torch.tensor(task.train.targets)


@pytest.mark.parametrize("fit", [fit_resident, fit_ladder])
def test_losses_of_resident_data_know_their_rows_and_labels(tmp_path, fit):
    made = fit(task.small, Resident(task.train.x, Y, device="cpu"), folds=2, batch_size=40)
    il = made if isinstance(made, Irreducible) else made.tables[-1]
    il.save(tmp_path / "il")
    assert il.compare(task.train) == "labels"
    Irreducible.load(tmp_path / "il", WithIndex(Subset(task.train, [3, 200])))
    with pytest.raises(IdentityMismatchError, match="of 240 rows, but this one has 200"):
        Irreducible.load(tmp_path / "il", task.other)
    with pytest.raises(IdentityMismatchError, match="other labels: 1 of 240 differ"):
        Irreducible.load(tmp_path / "il", task.changed())
    said = one_line(rholoss_(f"il check {tmp_path / 'il'} --data fixtures_task:other"))
    assert "was made for a data set of 240 rows, but this one has 200" in said


def test_a_part_of_resident_data_is_compared_by_its_labels():
    """Of a data set with ids of its own nobody knows how many rows there were in all."""
    rows = torch.arange(1, 240, 2)
    part = Resident(task.train.x, Y, device="cpu").take(rows)
    il = fit_resident(task.small, part, folds=2, batch_size=40)
    assert il.compare(Subset(task.train, rows.tolist())) == "labels"
    with pytest.raises(IdentityMismatchError, match="other labels"):
        il.compare(Subset(task.changed(), rows.tolist()))


def test_where_nothing_is_known_that_is_said(tmp_path):
    Irreducible.from_losses(torch.rand(200)).save(tmp_path / "il")
    nothing = rf"nothing to compare: {tmp_path / 'il'} does not say .* `Irreducible.from_losses"
    for check in ("full", "size"):
        with pytest.warns(UserWarning, match=nothing):
            Irreducible.load(tmp_path / "il", task.other, check=check)
        line = f"il check {tmp_path / 'il'} --data fixtures_task:other --check {check}"
        assert "There is nothing to compare" in one_line(rholoss_(line))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Irreducible.load(tmp_path / "il", task.other, check="none")
        Irreducible.load(tmp_path / "il")


@pytest.mark.parametrize("check", ["full", "size"])
def test_losses_of_rows_that_the_data_does_not_have(tmp_path, check):
    Irreducible.from_losses(torch.rand(240)).save(tmp_path / "il")
    with pytest.raises(
        IdentityMismatchError, match=r"ids up to 239, but this data set has 200 rows"
    ):
        Irreducible.load(tmp_path / "il", task.other, check=check)
    line = f"il check {tmp_path / 'il'} --data fixtures_task:other --check {check}"
    assert "ids up to 239, but this data set has 200 rows" in one_line(rholoss_(line))


def test_string_keys_name_their_points(tmp_path):
    names = [f"file{i}.png" for i in range(240)]
    Irreducible.from_losses(torch.rand(240), names).save(tmp_path / "il")
    Irreducible.load(tmp_path / "il", task.keyed)
    result = rholoss_(f"il check {tmp_path / 'il'} --data fixtures_task:keyed")
    assert result.exit_code == 0
    assert "240 rows, ids compared" in result.stdout
    line = f"il check {tmp_path / 'il'} --data fixtures_task:keyed --check size"
    assert one_line(rholoss_(line)).endswith("Or leave out --check size.")


def test_other_content_is_no_comparison():
    """None of the rows whose content was kept is in this view."""
    plain = list(task.train.x)
    il = Irreducible.from_losses(torch.rand(240), dataset=plain)
    assert il.compare(plain) == "content"
    il.meta["identity"]["content"] = il.meta["identity"]["content"][:1]
    assert il.compare(Subset(plain, [5])) == "number"


X = task.train.x
ORDER = torch.randperm(240, generator=torch.Generator().manual_seed(0))


def measured(labels=Y, **options):
    return Irreducible.from_losses(torch.rand(240), dataset=TensorDataset(X, labels), **options)


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def step(il, data, loss="classification", **options):
    """The first two steps of a run; what was warned of."""
    select = Selector("rho", irreducible=il, keep=0.25, loss=loss, **options)
    model = task.small()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in DataLoader(WithIndex(data), batch_size=60, drop_last=True):
            select(model, batch)
    return [str(warning.message) for warning in said]


@pytest.mark.parametrize("loss", ["classification", ce])
def test_the_first_step_finds_rows_that_were_numbered_anew(loss):
    said = step(measured(), TensorDataset(X[ORDER], Y[ORDER]), loss)
    assert len(said) == 1  # of four steps
    assert re.match(
        r"\d\d of 60 points have another label than when .* \(id \d+ had \d, has \d;", said[0]
    )
    assert "a column 'index'" in said[0]
    filtered = torch.arange(240) != 7
    assert len(step(measured(), TensorDataset(X[filtered], Y[filtered]), loss)) == 1
    assert step(measured(), TensorDataset(X, Y), loss) == []
    assert step(measured(), TensorDataset(X[:120], Y[:120]), loss) == []


def test_labels_that_were_changed_are_told_unless_the_caller_knows(tmp_path):
    measured().save(tmp_path / "il")
    changed = TensorDataset(X, torch.where(torch.arange(240) == 5, (Y + 1) % 3, Y))
    said = step(Irreducible.load(tmp_path / "il"), changed)
    assert said[0].startswith("1 of 60 points have another label")
    assert said[0].endswith("load them with check='size'.")
    assert step(Irreducible.load(tmp_path / "il", changed, check="size"), changed) == []
    assert step(Irreducible.load(tmp_path / "il", check="none"), changed) == []


MOVED = TensorDataset(X[ORDER], Y[ORDER])


@pytest.mark.parametrize(
    ("il", "data", "loss"),
    [
        (measured(), TensorDataset(X, (Y + 1) % 3), "classification"),  # a `target_transform`
        (measured(), TensorDataset(X, (Y > 0).long()), "classification"),  # classes put together
        (measured((Y > 0).long()), TensorDataset(X, Y), "classification"),
        (measured(), TensorDataset(X, F.one_hot(Y, 3).float()), "multi_label"),
        (measured(), TensorDataset(X, F.one_hot(Y, 3)), "multi_label"),
        (measured(), TensorDataset(X, X[:, :3]), "regression"),
        (measured(), TensorDataset(X, Y, 1 - Y), lambda model, batch: ce(model, batch)),
        (measured(Y.float()), MOVED, "classification"),  # nothing is known of these
        (measured(F.one_hot(Y, 3)), MOVED, "classification"),
        (Irreducible.from_losses(torch.rand(240)), MOVED, "classification"),
        (torch.rand(240), MOVED, "classification"),
        (lambda ids: torch.rand(len(ids)), MOVED, "classification"),
    ],
)
def test_where_labels_say_nothing_nothing_is_said(il, data, loss):
    assert step(il, data, loss) == []


def test_names_given_as_labels_are_not_compared_with_classes():
    names = [f"file{i}.png" for i in range(240)]
    il = Irreducible.from_losses(torch.rand(240), dataset=TensorDataset(X, Y), labels=names)
    assert step(il, MOVED) == []


def test_methods_that_read_no_irreducible_losses_compare_none():
    select = Selector("loss", irreducible=measured(), keep=0.25)
    batch = next(iter(DataLoader(WithIndex(MOVED), batch_size=60)))
    select(task.small(), batch)


def test_the_engine_compares_all_rows_when_it_is_made():
    il = fit_resident(task.small, Resident(X, Y, device="cpu"), folds=2, batch_size=40)
    options = {"total_steps": 1, "irreducible": il, "candidates": 40}
    moved = Resident(X[ORDER], Y[ORDER], device="cpu")
    with pytest.warns(UserWarning, match=r"of 240 points have another label than when") as said:
        Trainer(task.small(), moved, **options)
    assert said[0].filename == __file__
    kept = Resident(X[ORDER], Y[ORDER], ids=ORDER, device="cpu")
    Trainer(task.small(), kept, **options)
    with pytest.warns(
        UserWarning, match=r"measured with loss='classification', but .*'regression'"
    ):
        Trainer(task.small(), kept, loss="regression", **options)
    Trainer(task.small(), moved, **{**options, "method": "loss"}, loss="classification")


def other_ce(model, batch):
    return 2 * ce(model, batch)


same_ce = types.FunctionType(ce.__code__, ce.__globals__, "same_ce")


@pytest.mark.parametrize(
    ("fitted", "scored", "differ"),
    [
        ("classification", "classification", False),
        ("classification", TASKS["classification"], False),
        (ce, ce, False),
        (ce, same_ce, False),  # the same source under another name
        (ce, "classification", True),
        ("classification", ce, True),
        (ce, other_ce, True),
        (lambda model, batch: ce(model, batch), lambda model, batch: 2 * ce(model, batch), True),
        ("classification", "regression", True),
        (functools.partial(ce), functools.partial(ce), False),
        (torch.nn.Identity(), "classification", False),  # nobody knows
        ("classification", torch.nn.Identity(), False),
    ],
)
def test_losses_of_another_kind_are_told(fitted, scored, differ):
    meta = {"loss": named(fitted), "loss_code": code_hash(fitted)}
    il = Irreducible.from_losses(torch.rand(240), **meta)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Selector("rho", irreducible=il, keep=0.1, loss=scored)
        Selector("rho", irreducible=Ladder([il]), keep=0.1, loss=scored)
        Selector("negative_il", irreducible=il, keep=0.1, loss=scored)  # compares no losses
    assert len(said) == (2 if differ else 0)
    if differ:
        assert f"measured with loss={named(fitted)!r}, but" in str(said[0].message)
        assert f"scored with loss={named(scored)!r}" in str(said[0].message)
        assert said[0].filename == __file__


def test_a_fit_says_what_its_loss_was():
    options = {"epochs": 1, "batch_size": 80, "progress": False, "device": "cpu"}
    for il in (
        fit_irreducible(task.small, task.train, folds=2, loss=ce, **options),
        score_irreducible(task.small(), task.train, loss=ce, progress=False),
    ):
        assert (il.meta["loss"], il.meta["loss_code"]) == (named(ce), code_hash(ce))
        with pytest.warns(UserWarning, match="Pass the same `loss=` to both"):
            Selector("rho", irreducible=il, keep=0.1)
    Selector("rho", irreducible=Irreducible.from_losses(torch.rand(9)), keep=0.1, loss=ce)
    Selector("rho", irreducible=Irreducible.from_losses(torch.rand(9), loss="mine"), keep=0.1)
