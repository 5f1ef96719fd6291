"""The selector beside the loader and the log: what is loaded, counted and written."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho
from rholoss import core, picks
from rholoss.errors import RholossError
from rholoss.steplog import read_log

ROWS = 1000


@pytest.fixture
def points():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 6, generator=generator)
    return rho.WithIndex(TensorDataset(x, torch.randint(0, 3, (ROWS,), generator=generator)))


def run(select, loader):
    model = nn.Linear(6, 3)
    return [select(model, batch)[0] for batch in loader]


def test_uniform_loads_only_what_it_trains_on_and_chooses_the_same(points):
    chosen = {}
    for sampled in (False, True):
        select = rho.Selector("uniform", keep=0.1, seed=5)
        # A method that scores loads whole batches, in the same order.
        owner = select if sampled else rho.Selector("loss", keep=0.1)
        loader = DataLoader(points, batch_sampler=owner.batch_sampler(points, 100))
        chosen[sampled] = torch.cat(run(select, loader)).tolist()
        ledger = select.ledger
        assert (ledger.candidates, ledger.trained, ledger.scored) == (1000, 100, 0)
        # The first batch is whole: the dry run looks at it.
        assert ledger.loaded == (100 + 9 * 10 if sampled else 1000)
    assert chosen[True] == chosen[False]


def test_a_log_of_another_run_is_not_written_behind(points, tmp_path):
    path = tmp_path / "chosen.jsonl"
    loader = DataLoader(points, batch_size=100)
    first = rho.Selector("loss", keep=0.1, log=path)
    run(first, loader)
    state = first.state_dict()
    written = path.read_text()
    with pytest.raises(
        RholossError, match=r"chosen.jsonl' holds the log of another run\. .* another path"
    ):
        run(rho.Selector("loss", keep=0.1, log=path), loader)
    assert path.read_text() == written
    resumed = rho.Selector("loss", keep=0.1, log=path)
    resumed.load_state_dict(state)
    run(resumed, loader)
    resumed.flush()
    assert len(path.read_text().splitlines()) == 20


def test_ids_from_a_function_that_does_not_look_at_the_rows(points):
    ids = torch.arange(500, 600)
    select = rho.Selector("loss", keep=0.1, index=lambda batch: ids)
    x, y = torch.randn(100, 6), torch.zeros(100, dtype=torch.long)
    taken, _ = select(nn.Linear(6, 3), (x, y))
    assert torch.equal(x[select.selection.position], taken)
    assert torch.equal(select.selection.index, ids[select.selection.position])


def test_a_live_model_takes_importance_weights_as_the_specification_does(points):
    def score(stats):
        return stats.loss + stats.irreducible_loss

    needs = frozenset({"loss", "irreducible_loss"})
    method = rho.Method("weighted", score, picks.ImportanceSample(), needs)
    torch.manual_seed(0)
    model, live = nn.Linear(6, 3), nn.Linear(6, 3)
    theirs, their_live = nn.Linear(6, 3), nn.Linear(6, 3)
    theirs.load_state_dict(model.state_dict())
    their_live.load_state_dict(live.state_dict())
    index = torch.arange(100)
    batch = (index, points.dataset.tensors[0][index], points.dataset.tensors[1][index])
    select = rho.Selector(
        method, irreducible=rho.LiveIrreducible(live, lambda p: torch.optim.SGD(p, 0.1)), k=10
    )
    _, x, y = select(model, batch)
    select.reduce(nn.functional.cross_entropy(model(x), y, reduction="none")).backward()
    core.train_step(
        theirs, torch.optim.SGD(theirs.parameters(), 0.1), batch, method, 10, core.step_generator(0, 0),
        live=(their_live, torch.optim.SGD(their_live.parameters(), 0.1)),
    )  # fmt: skip
    assert torch.equal(live.weight, their_live.weight)
    assert torch.equal(model.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("way", ["watch", "batch_sampler"])
@pytest.mark.parametrize(("method", "charged"), [("rho", 1000.0), ("loss", 0.0)])
def test_losses_that_come_with_the_batches_cost_what_they_cost(points, way, method, charged):
    il = rho.Irreducible.from_losses(torch.rand(ROWS), seconds=1000.0)
    data, select = rho.WithIrreducible(points, il), rho.Selector(method, keep=0.1)
    if way == "watch":
        loader = select.watch(DataLoader(data, batch_size=100))
    else:
        loader = DataLoader(data, batch_sampler=select.batch_sampler(data, 100))
    run(select, loader)
    assert select.ledger.il_seconds == charged


def test_so_do_those_that_a_stream_carries():
    il = rho.Irreducible.from_losses(torch.rand(4), seconds=1000.0)
    stream = rho.Stream([0], lambda _: ({"name": i} for i in range(4)), key="name", irreducible=il)
    select = rho.Selector("rho", keep=0.1)
    select.watch(DataLoader(stream, batch_size=2))
    assert select.ledger.il_seconds == 1000.0


def test_ids_may_be_arrays_in_the_log_too(points, tmp_path):
    path, model = tmp_path / "chosen.jsonl", nn.Linear(6, 3)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    select = rho.Selector("loss", keep=0.5, index=lambda b: b["id"].numpy(), log=path, loss=loss)
    for _ in range(2):
        select(model, {"id": torch.arange(4), "x": torch.randn(4, 6), "y": torch.zeros(4).long()})
    select.flush()
    steps = [line for line in read_log(path) if line["type"] == "step"]
    assert [len(line["index"]) for line in steps] == [2, 2]
