"""Do these irreducible losses belong to this data? What is said where they do not, or where nobody knows."""

import warnings

import fixtures_task as task
import pytest
import torch
from fixtures_cli import one_line, rholoss_
from torch.utils.data import Subset

from rholoss.data import WithIndex
from rholoss.engine import Resident, fit_ladder, fit_resident
from rholoss.errors import IdentityMismatchError
from rholoss.il.store import Irreducible

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
