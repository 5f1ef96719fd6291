"""What rholoss has dealt to the ranks is not dealt once more by accelerate."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss.errors import RholossError

pytest.importorskip("accelerate", reason="pip install 'rholoss[hf]'")

from accelerate.data_loader import prepare_data_loader, skip_first_batches


def read(shard):
    return ({"name": shard * 4 + row, "x": 0.0} for row in range(4))


@pytest.fixture(params=["stream", "batches"])
def loader(request, monkeypatch):
    """Of the first of two ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if request.param == "stream":
        made = DataLoader(rho.Stream(range(4), read, key="name"), batch_size=4)
    else:
        train = rho.WithIndex(TensorDataset(torch.zeros(16, 1)))
        select = rho.Selector("loss", keep=0.5)
        made = DataLoader(train, batch_sampler=select.batch_sampler(train, 4))
    monkeypatch.delenv("WORLD_SIZE")  # accelerate would wait for the other one
    return made


REFUSED = (
    "was passed to `accelerator.prepare`, .* 1 of 2 rows .* Prepare the model and the optimizer"
)


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_second_dealing_is_refused(loader, dispatch):
    prepared = prepare_data_loader(
        loader, num_processes=2, process_index=0, put_on_device=True, dispatch_batches=dispatch
    )
    with pytest.raises(RholossError, match=REFUSED):
        list(prepared)
    if not dispatch:
        with pytest.raises(RholossError, match=REFUSED):
            list(skip_first_batches(prepared, 1))


def test_a_sampler_of_rows_can_tell_too(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rows = rho.Planned(range(8), rho.Remembered(1.0), passes=2)
    monkeypatch.delenv("WORLD_SIZE")
    loader = DataLoader(list(range(8)), batch_size=2, sampler=rows)
    with pytest.raises(RholossError, match=REFUSED):
        list(prepare_data_loader(loader, num_processes=2, process_index=0))


def test_what_only_moves_batches_and_what_is_not_prepared_is_left_alone(loader):
    moved = prepare_data_loader(loader, num_processes=1, process_index=0, dispatch_batches=False)
    assert len(list(moved)) == 2
    others = prepare_data_loader(DataLoader([1, 2, 3, 4]), num_processes=2, process_index=0)
    for _ in others:
        assert len(list(loader)) == 2
