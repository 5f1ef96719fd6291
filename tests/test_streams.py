"""Streams: stable keys, shards for each reader, irreducible losses joined, going on in the middle."""

import gc
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from rholoss.errors import RholossError, UnmeasuredLossError

SHARDS, ROWS = 6, 20


def read(shard):
    """20 items of a shard; item i of all 120 has the key k<i>."""
    for row in range(shard * ROWS, (shard + 1) * ROWS):
        x = torch.randn(5, generator=torch.Generator().manual_seed(row))
        yield {"name": f"k{row}", "x": x, "y": int(x[0] > 0)}


def stream(**options):
    return rho.Stream(range(SHARDS), read, **{"key": "name", **options})


@pytest.fixture
def il():
    return rho.Irreducible.from_losses({f"k{i}": i / 100 for i in range(SHARDS * ROWS)})


def keys(loader):
    return [key for batch in loader for key in batch["index"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_item_comes_once_with_its_key(workers):
    found = keys(DataLoader(stream(), batch_size=7, num_workers=workers))
    assert sorted(found) == sorted(f"k{i}" for i in range(120))


def test_each_rank_reads_shards_of_its_own(monkeypatch):
    found = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        found.append(keys(DataLoader(stream(), batch_size=8, num_workers=2)))
    assert [len(own) for own in found] == [40, 40, 40]
    assert len(set(itertools.chain(*found))) == 120
    with pytest.raises(RholossError, match="`shards` has 2 entries for 3 ranks"):
        rho.Stream([0, 1], read, key="name")


def test_the_order_of_shards_is_drawn_for_each_epoch():
    first = [item["index"] for item in stream(shuffle=True, seed=1)]
    again = stream(shuffle=True, seed=1)
    assert [item["index"] for item in again] == first
    assert sorted(first) == sorted(f"k{i}" for i in range(120))
    again.epoch = 1
    assert [item["index"] for item in again] != first
    endless = itertools.islice(stream(shuffle=True, seed=1, repeat=True), 240)
    both = [item["index"] for item in endless]
    assert both[:120] == first
    assert both[120:] == [item["index"] for item in again]


def test_losses_are_joined_in_the_loader(il):
    loader = DataLoader(stream(irreducible=il), batch_size=30)
    for batch in loader:
        expected = torch.tensor([int(key[1:]) / 100 for key in batch["index"]])
        torch.testing.assert_close(batch["irreducible_loss"].float(), expected)
    few = rho.Irreducible.from_losses({"k0": 1.0})
    with pytest.raises(
        UnmeasuredLossError, match="no finite irreducible loss, for instance ids k1,"
    ):
        list(stream(irreducible=few))


def test_the_cost_of_losses_that_a_stream_carries_is_counted():
    losses = {f"k{i}": 0.5 for i in range(SHARDS * ROWS)}
    dear = rho.Irreducible.from_losses(losses, seconds=7.0)
    select = rho.Selector("rho", keep=0.5)
    select.watch(DataLoader(stream(irreducible=dear), batch_size=8))
    assert select.ledger.il_seconds == 7.0


def test_losses_of_whole_numbers_may_be_a_tensor():
    items = {"key": lambda item: int(item["name"][1:]), "irreducible": torch.arange(120.0)}
    assert next(iter(stream(**items)))["irreducible_loss"] == 0.0
    with pytest.raises(
        RholossError, match="`irreducible` is a function; losses are looked up by id"
    ):
        stream(irreducible=lambda keys: torch.zeros(len(keys)))


def test_selection_from_a_stream_within_an_epoch(il):
    loader = DataLoader(stream(irreducible=il), batch_size=30)
    select = rho.Selector("negative_il", keep=0.1)
    for step, batch in enumerate(itertools.islice(loader, 3)):
        chosen = select(nn.Linear(5, 2), batch)
        assert set(chosen) == {"index", "x", "y"}
        assert chosen["index"] == [f"k{step * 30 + i}" for i in range(3)]
    plain = rho.Selector("negative_il", irreducible=il, keep=0.1)  # looked up by the selector
    assert plain(nn.Linear(5, 2), next(iter(DataLoader(stream(), batch_size=30))))["index"] == [
        "k0",
        "k1",
        "k2",
    ]


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def run(il, steps, state=None, workers=0):
    """Train on an endless stream; returns what was chosen and the state at the end."""
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = stream(irreducible=il, repeat=True, shuffle=True)
    select = rho.Selector("rho", keep=0.25, loss=cross_entropy)
    if state is not None:
        model.load_state_dict(state["model"])
        select.load_state_dict(state["select"])
        data.resume(select.step, 16)
    chosen = []
    for batch in DataLoader(data, batch_size=16, num_workers=workers):
        if select.step == steps:
            break
        small = select(model, batch)
        optimizer.zero_grad()
        F.cross_entropy(model(small["x"]), small["y"]).backward()
        optimizer.step()
        chosen.append(small["index"])
    return chosen, {"model": model.state_dict(), "select": select.state_dict()}


@pytest.mark.parametrize(("workers", "steps"), [(0, 10), (1, 10), (2, 10), (2, 11)])
def test_a_run_goes_on_in_the_middle_of_a_stream(il, workers, steps):
    whole, end = run(il, 17, workers=workers)
    first, half = run(il, steps, workers=workers)
    second, again = run(il, 17, half, workers=workers)
    assert first + second == whole
    assert torch.equal(end["model"]["weight"], again["model"]["weight"])


def test_a_stream_that_ends_cannot_go_on_with_several_workers():
    data = stream()
    data.resume(2, 10)
    assert len(list(data)) == 100
    assert len(keys(DataLoader(data, batch_size=10, num_workers=1))) == 100
    with pytest.raises(RholossError, match=r"with 2 workers.*Pass repeat=True"):
        list(DataLoader(data, batch_size=10, num_workers=2))


def test_a_resumed_epoch_is_the_only_one_that_begins_in_its_middle():
    data = stream(shuffle=True)
    data.epoch = 1
    whole = [item["index"] for item in data]
    data.resume(2, 10)
    assert [item["index"] for item in data] == whole[20:]
    data.epoch = 2
    assert len(list(data)) == len(keys(DataLoader(data, batch_size=10, num_workers=2))) == 120


def test_workers_that_outlive_an_epoch_know_the_next_one():
    data = stream(shuffle=True)
    loader = DataLoader(data, batch_size=10, num_workers=1, persistent_workers=True)
    expected = []
    for epoch in range(3):
        data.set_epoch(epoch)
        expected.append([item["index"] for item in data])
    for data.epoch in range(3):
        assert keys(loader) == expected[data.epoch]
    assert expected[0] != expected[1] != expected[2]
    data.epoch = 1
    data.resume(4, 10)
    assert keys(loader) == expected[1][40:]
    data.epoch = 2
    assert keys(loader) == expected[2]


def test_batches_of_earlier_epochs_are_not_taken_for_some_of_this_one():
    data = stream()
    data.resume(12, 10)
    assert list(data) == []  # this epoch was done
    data.resume(13, 10)
    with pytest.raises(RholossError, match=r"`resume` was told of 13 batches of 10 .* has 120"):
        list(data)
    data.resume(12, 11)  # the last batch of an epoch may have fewer rows
    with pytest.raises(RholossError, match="set `epoch`, and give the batches of that epoch alone"):
        list(DataLoader(data, batch_size=11, num_workers=1))
    data.resume(11, 11)
    assert list(data) == []


def test_kinds_of_keys_and_items(il):
    pairs = rho.Stream([0], lambda _: [(torch.ones(2), 3)], key=lambda item: "a")
    assert next(iter(pairs))[0] == "a"
    numbered = rho.Stream([0], lambda _: [{"index": torch.tensor(7), "x": 1.0}], key="index")
    assert next(iter(numbered)) == {"index": 7, "x": 1.0}
    numbered = rho.Stream([0], lambda _: [{"index": np.int64(7), "x": 1.0}], key="index")
    assert next(iter(numbered)) == {"index": 7, "x": 1.0}
    for wrong in ("shards/*.tar", 5):
        with pytest.raises(RholossError, match=r"`shards` is .*; give a list of shards"):
            rho.Stream(wrong, read, key="name")
    joined = rho.Stream([0], lambda _: [{"index": "k5", "x": 1.0}], key="index", irreducible=il)
    assert next(iter(joined)) == {"index": "k5", "x": 1.0, "irreducible_loss": pytest.approx(0.05)}
    for wrong in ("nothing", lambda item: 1.5, lambda item: True):
        with pytest.raises(
            RholossError, match=r"An item of shard 0 has the key .* must give a string"
        ):
            next(iter(stream(key=wrong)))


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_of_webdataset(num_workers, tmp_path):
    """As the documentation has it: shards are dealt by `Stream`, so WebDataset must not deal them again."""
    wds = pytest.importorskip("webdataset", reason="needs the package webdataset")
    urls = [str(tmp_path / f"{shard}.tar") for shard in range(4)]
    for shard, url in enumerate(urls):
        with wds.TarWriter(url) as writer:
            for row in range(3):
                writer.write({"__key__": f"{shard}-{row}", "cls": row, "txt": f"word {row}"})

    def read(url):
        own = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None}
        return wds.WebDataset(url, **own).decode()

    data = rho.Stream(urls, read, key="__key__")
    loader = DataLoader(data, batch_size=None, num_workers=num_workers)
    found = sorted((item["index"], item["cls"], item["txt"]) for item in loader)
    gc.collect()  # WebDataset leaves its files open; better told here than in another test
    assert found == [(f"{s}-{r}", r, f"word {r}") for s in range(4) for r in range(3)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_streaming_data_set_of_hugging_face(num_workers):
    """It deals its rows to the workers of a loader, and leaves out those of the others."""
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")

    def rows(shards):
        for shard in shards:
            for row in range(4):
                yield {"id": f"{shard}/{row}", "x": float(row)}

    source = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2]})
    count = source.num_shards
    assert count == 3
    data = rho.Stream(range(count), lambda i: source.shard(count, i), key="id")
    loader = DataLoader(data, batch_size=None, num_workers=num_workers)
    found = sorted((item["index"], item["x"]) for item in loader)
    assert found == [(f"{s}/{r}", float(r)) for s in range(3) for r in range(4)]


def test_a_stream_is_scored_shard_by_shard(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    found = rho.score_irreducible(
        model, stream(), loss=cross_entropy, batch_size=8, out=tmp_path / "il", progress=False
    )
    assert found.meta["measured"] == found.meta["identity"]["points"] == 120
    items = list(stream())
    with torch.no_grad():
        expected = [F.cross_entropy(model(i["x"]), torch.tensor(i["y"])).item() for i in items]
    np.testing.assert_allclose(found.lookup([i["index"] for i in items]), expected, atol=1e-6)
    workers = rho.score_irreducible(
        model,
        stream(),
        loss=cross_entropy,
        batch_size=8,
        out=tmp_path / "b",
        num_workers=2,
        progress=False,
    )
    assert torch.equal(workers.values, found.values)
    with pytest.raises(RholossError, match="`out` was not given"):
        rho.score_irreducible(model, stream(), loss=cross_entropy, progress=False)


def test_a_named_loss_takes_items_of_a_stream(tmp_path):
    """Their key is not one more input of the model."""
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    il = rho.score_irreducible(model, stream(), out=tmp_path / "il", progress=False)
    batch = next(iter(DataLoader(stream(irreducible=il), batch_size=30)))
    chosen = rho.Selector("rho", keep=0.1)(model, batch)
    assert len(chosen["index"]) == 3
    assert stream(key=lambda item: item["name"]).items(0).__next__()[1].keys() == {"name", "x", "y"}


def test_scoring_goes_on_only_with_items_that_are_read_in_the_same_way(tmp_path, capsys):
    """What was measured under other keys, or of other items, is measured anew."""
    model, out, broken = nn.Linear(5, 2), tmp_path / "il", {"shard": 2}

    def cut_off(shard):
        if shard == broken.get("shard"):
            raise KeyboardInterrupt
        return read(shard)

    def halved(shard):
        return ({**item, "x": item["x"] / 2} for item in cut_off(shard))

    def scored(read=cut_off, key="name"):
        items = rho.Stream(range(SHARDS), read, key=key)
        return rho.score_irreducible(model, items, loss=cross_entropy, out=out, progress=False)

    def number(item):
        return int(item["name"][1:])

    for other, key in [(cut_off, "name"), (halved, "name"), (cut_off, number)]:
        broken["shard"] = 2
        with pytest.raises(KeyboardInterrupt):
            scored()
        broken.clear()
        il = scored(other, key)
        goes_on = (other, key) == (cut_off, "name")
        assert capsys.readouterr().err.startswith("Going on" if goes_on else "Starting over")
        il.check(range(120) if key is number else [f"k{i}" for i in range(120)])


def test_two_items_with_one_key_are_told(tmp_path):
    def files(shard):  # those of each folder are numbered from 0
        return ({**item, "name": f"{i}.png"} for i, item in enumerate(read(shard)))

    items = rho.Stream(range(SHARDS), files, key="name")
    with pytest.warns(
        UserWarning, match="100 of 120 items have a key that another item has"
    ) as told:
        rho.score_irreducible(nn.Linear(5, 2), items, out=tmp_path / "il", progress=False)
    assert any(w.filename == __file__ for w in told)
