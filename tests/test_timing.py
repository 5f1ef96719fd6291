"""Timing with the user's own model and data: what is run, what is left alone, what is refused."""

from __future__ import annotations

import time

import fixtures_task as task
import pytest
import torch
from torch import Tensor, nn

from rholoss import timing
from rholoss.advise import advice, costs
from rholoss.errors import RholossError
from rholoss.timing import KS, measure


class Counting(nn.Module):
    """Notes each forward pass: rows, and whether a graph is built."""

    seen: list[tuple[int, bool]] = []  # noqa: RUF012 - shared with the copy that is measured

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(task.FEATURES, task.CLASSES)
        self.norm = nn.BatchNorm1d(task.FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((len(x), torch.is_grad_enabled()))
        return self.layer(self.norm(x))


def test_measure_scores_candidates_and_trains_on_a_batch() -> None:
    Counting.seen.clear()
    found = measure(Counting(), task.train, batch=8, seconds=0, progress=False)
    assert {rows for rows, graph in Counting.seen if graph} == {8}
    assert {rows for rows, graph in Counting.seen if not graph} == {8 * k for k in KS}
    assert found.rounds == timing.MIN_ROUNDS
    assert set(found.scoring) == set(KS)
    assert set(found.loading) == {1, *KS}
    assert all(value > 0 for value in [found.training, *found.scoring.values()])
    assert found.parameters == sum(p.numel() for p in Counting().parameters())


def test_measure_leaves_model_and_random_state_as_they_were() -> None:
    model = task.target().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    measure(model, task.train, batch=4, ks=(2,), seconds=0, progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


NAP = 3e-3  # seconds a row; only lower bounds are sure on a busy machine


class Slow(task.Points):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(NAP)
        return super().__getitem__(index)


def test_slow_data_shows_as_the_bottleneck() -> None:
    found = measure(task.small(), Slow(), batch=4, seconds=0.5, progress=False)
    assert found.loading[1] > 4 * NAP
    assert found.loading[10] > 40 * NAP
    assert "Loading, not the model" in " ".join(advice(found, costs(found)))


class AtOnce(task.Points):
    """Rows that are slow one by one, and fast together: a Hugging Face data set."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise AssertionError("a loader would fetch the whole batch")

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, int]]:
        return [super(AtOnce, self).__getitem__(row) for row in rows]


def test_rows_are_fetched_as_a_loader_fetches_them() -> None:
    timings = measure(task.small(), AtOnce(), batch=4, ks=(2,), seconds=0, progress=False)
    assert timings.loading[2] > 0


def test_measure_takes_batches_of_any_kind() -> None:
    found = measure(task.small(), task.unlabelled, batch=4, ks=(2,), seconds=0, progress=False)
    assert found.training > 0
    found = measure(
        task.target(),
        task.keyed,
        loss=task.per_example,
        collate_fn=task.collate,
        batch=4,
        ks=(2, 3),
        precision="bf16",
        train_precision="bf16",
        seconds=0,
        progress=False,
    )
    assert set(found.scoring) == {2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "`batch` is 0; give a whole number of at least 1"),
        ({"ks": (1,)}, "`ks` is 1; give a whole number of at least 2"),
        ({"precision": "int8"}, "`precision` is 'int8'; choose one of bf16"),
        ({"train_precision": "int8"}, "`train_precision` is 'int8'; choose one of bf16"),
        ({"loss": task.reduced}, "It was reduced: use reduction='none'"),
    ],
)
def test_measure_refuses(options: dict, message: str) -> None:
    with pytest.raises(RholossError, match=message):
        measure(task.small(), task.train, seconds=0, progress=False, **options)


def test_measure_refuses_a_frozen_model_and_an_empty_data_set() -> None:
    with pytest.raises(RholossError, match="no parameters that need gradients"):
        measure(task.frozen(), task.train, seconds=0, progress=False)
    with pytest.raises(RholossError, match="`data` is empty"):
        measure(task.small(), [], seconds=0, progress=False)


def test_out_of_memory_says_what_to_make_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timing.Scorer, "measure", measured)
    with pytest.raises(
        RholossError, match=r"`batch`=4 and 40 candidates; pass `chunk` \(--chunk\)"
    ):
        measure(task.small(), task.train, batch=4, seconds=0, progress=False)


@pytest.mark.gpu
def test_measure_on_a_gpu() -> None:
    wide = nn.Sequential(nn.Linear(task.FEATURES, 4096), nn.ReLU(), nn.Linear(4096, task.CLASSES))
    found = measure(wide, task.train, batch=64, precision="bf16", seconds=1, progress=False)
    assert found.device == torch.cuda.get_device_name()
    assert 0 < found.training < 1
    assert all(0 < value < 1 for value in found.scoring.values())
    assert next(wide.parameters()).device.type == "cpu"
