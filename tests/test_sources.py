import numpy as np
import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.errors import RholossError, UnmeasuredLossError
from rholoss.sources import DenseTable, FunctionSource, Source, TableSource, as_source

CPU = torch.device("cpu")
VALUES = [0.5, 0.25, torch.nan, torch.inf, 2.0]


def losses_of(irreducible, ids):
    return as_source(irreducible).losses(ids, None, CPU)


@pytest.mark.parametrize(
    "irreducible",
    [
        torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64),
        np.array([0.5, 0.25, 2.0], dtype=np.float16),
        [0.5, 0.25, 2],
        lambda ids: torch.tensor([0.5, 0.25, 2.0])[torch.as_tensor(ids, dtype=torch.long)],
        lambda ids: np.array([0.5, 0.25, 2.0])[np.asarray(ids)],
        DenseTable([0.5, 0.25, 2.0]),
    ],
)
@pytest.mark.parametrize(
    "ids", [torch.tensor([2, 0, 2]), torch.tensor([2, 0, 2], dtype=torch.int32), [2, 0, 2]]
)
def test_losses_come_by_id_in_float32(irreducible, ids):
    found = losses_of(irreducible, ids)
    assert found.tolist() == [2.0, 0.5, 2.0]
    assert found.dtype == torch.float32


def test_a_graph_behind_the_losses_is_left():
    """They may come from a pass without `no_grad`; a checkpoint of the run could not be made then."""
    values = 2 * torch.tensor([0.5, 0.25, 2.0], requires_grad=True)
    for irreducible in (values, lambda ids: values[ids]):
        assert not losses_of(irreducible, torch.tensor([2, 0])).requires_grad
    assert as_source(values).digest() == as_source(values.tolist()).digest()


def test_ids_of_one_byte_are_not_taken_for_a_mask():
    assert losses_of([5.0, 6.0, 7.0], torch.tensor([1, 1, 0], dtype=torch.uint8)).tolist() == [
        6,
        6,
        5,
    ]


def test_an_id_outside_the_table_has_no_loss():
    found = losses_of(VALUES, torch.tensor([-1, 0, 5, 2**40]))
    assert found.isnan().tolist() == [True, False, True, True]
    assert losses_of(torch.zeros(0), torch.tensor([0, 1])).isnan().all()


def test_a_check_names_what_cannot_be_used():
    source = as_source(VALUES)
    assert source.on_host(torch.tensor([0, 1, 4])).isfinite().all()
    message = (
        r"4 of 6 candidates .* ids 2, 3, 9, -1\. Measure them with `rholoss il score`, or leave"
    )
    with pytest.raises(UnmeasuredLossError, match=message):
        source.on_host(torch.tensor([0, 2, 1, 3, 9, -1]))
    with pytest.raises(UnmeasuredLossError, match=r"100 of 100 .* ids 5, 6, 7, 8, 9\. "):
        source.on_host(torch.arange(5, 105))


def test_string_ids_need_a_table_of_strings():
    message = (
        "by integer id, but the ids are strings, 'a' for instance; pass `Irreducible.from_losses"
    )
    with pytest.raises(RholossError, match=message):
        as_source([0.5]).on_host(["a", "b"])


def test_what_a_function_returns_is_checked_at_once():
    source = as_source(lambda ids: [0.1, torch.nan, torch.inf])
    assert isinstance(source, FunctionSource)
    with pytest.raises(UnmeasuredLossError, match=r"2 of 3 candidates .* ids b, c"):
        source.losses(["a", "b", "c"], None, CPU)
    with pytest.raises(
        RholossError, match=r"`irreducible` must return one number for each of the 3"
    ):
        as_source(lambda ids: torch.zeros(3, 1)).losses([1, 2, 3], None, CPU)


def test_a_table_needs_one_dimension():
    with pytest.raises(
        RholossError, match=r"one loss for each id, shape \[N\], but has shape \(2, 3\)"
    ):
        as_source(torch.zeros(2, 3))


@pytest.mark.parametrize("irreducible", ["il/mine", nn.Linear(1, 1), 3.0, {0: 1.0}])
def test_what_cannot_be_a_source(irreducible):
    message = (
        f"`irreducible` is a {type(irreducible).__name__}; pass what `fit_irreducible`.*LiveIrr"
    )
    with pytest.raises(RholossError, match=message):
        as_source(irreducible)


def test_what_is_a_source_already_stays_what_it_is():
    source = Source()
    assert as_source(source) is source
    assert as_source(None) is None
    assert source.on_host([1]) is None
    assert source.state_dict() is None
    assert source.update(None) is None


class Elsewhere(TableSource):
    """A device that is not there: counts how often it is asked whether the table fits."""

    fits = True

    def __init__(self, table):
        super().__init__(table)
        self.asked = 0

    def _fits(self, device):
        self.asked += 1
        return self.fits


class TooLarge(Elsewhere):
    fits = False


def test_a_dense_table_goes_to_the_device_once():
    device, source = torch.device("meta"), Elsewhere(DenseTable(torch.rand(10)))
    for _ in range(3):
        assert source.losses(torch.arange(4), None, device).device == device
        table = source._on_device
        assert table.device == device
        assert source.losses(torch.arange(4, device=device), None, device).shape == (4,)
        assert source._on_device is table
    assert source.asked == 1


def test_a_table_that_does_not_fit_stays_and_is_not_asked_about_again():
    device, source = torch.device("meta"), TooLarge(DenseTable(torch.rand(10)))
    for _ in range(3):
        assert source.losses(torch.arange(4), None, device).device == device
    assert source.asked == 1
    message = "do not fit the device and the ids are there already.*WithIrreducible"
    with pytest.raises(RholossError, match=message):
        source.losses(torch.arange(4, device=device), None, device)


def test_threshold_of_the_share_with_the_highest_losses():
    values = torch.arange(101.0)
    values[7] = torch.nan
    limit = as_source(values).threshold(0.1)
    assert ((values > limit).sum() / 100).item() == pytest.approx(0.1, abs=0.01)

    keyed = rho.Irreducible.from_losses({f"k{row}": float(row) for row in range(101)})
    assert as_source(keyed).threshold(0.1) == pytest.approx(90)

    class Asked:
        dense = None

        def lookup(self, ids):
            raise NotImplementedError

    with pytest.raises(RholossError, match=r"`drop`=0.1 needs all irreducible losses.*drop=0"):
        as_source(Asked()).threshold(0.1)
    with pytest.raises(RholossError, match=r"`drop`=0.05 needs a table of irreducible losses"):
        rho.Selector("rho", irreducible=Asked(), keep=0.1, schedule=rho.annealed(100))


def test_the_store_is_a_table():
    from rholoss.il.store import Irreducible

    source = as_source(Irreducible.from_losses([0.5, 0.25]))
    assert isinstance(source, TableSource)
    assert source.losses(torch.tensor([1, 0]), None, CPU).tolist() == [0.25, 0.5]
    with pytest.raises(UnmeasuredLossError, match="5"):
        source.on_host(torch.tensor([0, 5]))
    assert isinstance(as_source(rho.LiveIrreducible(nn.Linear(1, 1))), rho.LiveIrreducible)
