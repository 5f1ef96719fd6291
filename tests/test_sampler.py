import itertools
import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import rholoss as rho
from rholoss import core
from rholoss.distributed import Ranks
from rholoss.errors import RholossError
from rholoss.sampler import EPOCHS, CandidateBatches, uniform_choice

ROWS, BATCH = 3230, 320  # eleven candidate batches, the last of 30


@pytest.fixture(scope="module")
def dataset():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(ROWS, 8, generator=generator), torch.arange(ROWS) % 4
    return rho.WithIndex(TensorDataset(x, y))


@pytest.fixture(scope="module")
def il():
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(1))


def model():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def whole(dataset, select, **options):
    """The same candidates in the same order, loaded whole."""
    step, choose = (lambda: select.step), (lambda step, ids: None)
    return CandidateBatches(dataset, BATCH, step=step, choose=choose, **options)


def train(select, target, loader, steps=None):
    """Train for some steps; returns the ids chosen and the number of candidates loaded at each."""
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    chosen, loaded = [], []
    for batch in loader:
        loaded.append(len(batch[0]))
        index, x, y = select(target, batch)
        chosen.append(index)
        torch.manual_seed(select.step)  # dropout: the same whatever was loaded before
        optimizer.zero_grad()
        select.reduce(F.cross_entropy(target(x), y, reduction="none")).backward()
        optimizer.step()
        if steps is not None and len(chosen) == steps:
            break
    return chosen, loaded


SCHEDULES = {
    "window": rho.window(3, 6),
    "annealed": rho.annealed(11, switch=0.4, drop=0.2),
    "warm-up": rho.warm_up(4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_what_is_used_is_loaded_and_the_choice_is_the_same(dataset, il, name):
    runs = []
    for sampled in (True, False):
        select = rho.Selector("rho", irreducible=il, keep=0.1, seed=5, schedule=SCHEDULES[name])
        sampler = select.batch_sampler(dataset, BATCH) if sampled else whole(dataset, select)
        target = model()
        chosen, loaded = train(select, target, DataLoader(dataset, batch_sampler=sampler))
        runs.append((chosen, loaded, target))
    (ours, loaded, one), (theirs, all_loaded, two) = runs
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs) == 11
    for weight, other in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(weight, other)
    scores = [SCHEDULES[name](step).score for step in range(11)]
    expected = [
        n if s else core.num_selected(n, 0.1) for n, s in zip(all_loaded, scores, strict=True)
    ]
    expected[0] = BATCH  # the dry run sees a whole batch
    assert loaded == expected
    assert all_loaded == [BATCH] * 10 + [30]


@given(st.integers(1, 60), st.integers(1, 70), st.booleans(), st.integers(0, 3), st.integers(0, 2))
def test_an_epoch_visits_every_row_once(rows, batch_size, drop_last, seed, epoch):
    data = TensorDataset(torch.zeros(rows))
    if drop_last and batch_size > rows:
        return
    sampler = CandidateBatches(
        data,
        batch_size,
        step=lambda: epoch * len(sampler),
        choose=lambda step, ids: None,
        drop_last=drop_last,
        seed=seed,
    )
    batches = list(sampler)
    assert len(batches) == len(sampler) == sampler_length(rows, batch_size, drop_last)
    seen = [row for batch in batches for row in batch]
    assert len(set(seen)) == len(seen)
    assert drop_last or sorted(seen) == list(range(rows))
    assert [len(batch) for batch in batches] == [sampler.rows_at(i) for i in range(len(sampler))]
    assert list(sampler) == batches  # the same (seed, epoch), the same order


def sampler_length(rows, batch_size, drop_last):
    return rows // batch_size if drop_last else math.ceil(rows / batch_size)


def test_orders_differ_between_epochs_and_seeds_and_are_kept_unshuffled_on_request():
    data, orders = TensorDataset(torch.zeros(50)), set()
    for seed in range(3):
        for step in range(3):
            sampler = CandidateBatches(
                data, 50, step=lambda step=step: step, choose=lambda step, ids: None, seed=seed
            )
            orders.add(tuple(next(iter(sampler))))
    assert len(orders) == 9
    plain = CandidateBatches(data, 20, step=lambda: 0, choose=lambda s, i: None, shuffle=False)
    assert [row for batch in plain for row in batch] == list(range(50))


def test_orders_are_drawn_apart_from_the_choices_of_any_step():
    # torch's CPU generator reads the lower 32 bits of a seed alone.
    orders, choices = (
        {
            tuple(torch.rand(3, generator=core.step_generator(seed, first + i)).tolist())
            for seed in range(4)
            for i in range(50)
        }
        for first in (EPOCHS, 0)
    )
    assert len(orders) == len(choices) == 200
    assert not orders & choices


def test_a_resumed_selector_goes_on_with_the_next_batch(dataset, il):
    def make():
        select = rho.Selector("rho", irreducible=il, keep=0.1, seed=5, schedule=rho.window(4, 9))
        sampler = select.batch_sampler(dataset, BATCH, seed=7)
        return select, DataLoader(dataset, batch_sampler=sampler)

    select, loader = make()
    target = model()
    straight = [train(select, target, loader)[0] for _ in range(2)]
    assert len(straight[0]) == len(straight[1]) == 11
    whole_run = [*straight[0], *straight[1]]

    for stop in (3, 6, 11, 14):  # in the warm-up, while scoring, between epochs, in the second
        select, loader = make()
        target = model()
        done = []
        while len(done) < stop:
            done += train(select, target, loader, steps=stop - len(done))[0]
        state = select.state_dict()
        resumed, loader = make()
        resumed.load_state_dict(state)
        while len(done) < 22:
            done += train(resumed, target, loader)[0]
        assert len(done) == 22
        assert all(map(torch.equal, done, whole_run)), stop


def test_each_candidate_is_visited_once_in_each_epoch(dataset, il):
    select = rho.Selector("rho", irreducible=il, keep=0.1)
    loader, seen = DataLoader(dataset, batch_sampler=select.batch_sampler(dataset, BATCH)), []
    target = model()
    for _ in range(2):
        epoch = []
        for batch in loader:
            epoch.append(batch[0])
            select(target, batch)
        seen.append(torch.cat(epoch))
    assert all(torch.equal(ids.sort().values, torch.arange(ROWS)) for ids in seen)
    assert not torch.equal(*seen)
    assert (select.ledger.steps, select.ledger.candidates) == (22, 2 * ROWS)


@pytest.mark.parametrize("left_out", ["a batch", "the end"])
def test_a_pass_that_is_shorter_because_of_the_last_one_is_told_of_once(dataset, left_out):
    select, target = rho.Selector("loss", keep=0.1), model()
    loader = DataLoader(dataset, batch_sampler=select.batch_sampler(dataset, BATCH))
    passes = []

    def one_pass():
        batches = 0
        for place, batch in enumerate(loader):
            batches += 1
            if not passes and place == 6:
                if left_out == "the end":
                    break
                continue
            select(target, batch)
        passes.append(batches)

    next(iter(loader))  # a look, from which nothing is selected
    one_pass()
    missing = {
        "a batch": "has 1 of 11 batches: .* stopped at 10",
        "the end": "has 5 of 11 .* at 6 of",
    }
    with pytest.warns(UserWarning, match=missing[left_out]):
        one_pass()
    one_pass()
    next(batch for batch in loader if select(target, batch))
    one_pass()  # short once more: said once
    assert passes[1:] == [1 if left_out == "a batch" else 5, 11, 10]


def test_workers_that_load_ahead_change_nothing(dataset, il):
    runs = []
    for num_workers in (0, 2):
        select = rho.Selector("rho", irreducible=il, keep=0.1, schedule=rho.window(2, 5))
        sampler = select.batch_sampler(dataset, BATCH)
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            prefetch_factor=3 if num_workers else None,
            persistent_workers=num_workers > 0,
        )
        target = model()
        runs.append([train(select, target, loader) for _ in range(2)])
    for (one, sizes), (two, their_sizes) in zip(*runs, strict=True):
        assert all(map(torch.equal, one, two))
        assert sizes == their_sizes


def test_batches_that_were_loaded_before_selection_was_turned_off_are_still_reduced(dataset, il):
    select = rho.Selector("rho", irreducible=il, keep=0.1, flush_every=4, auto_off=1e-9)
    sampler = select.batch_sampler(dataset, BATCH)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, prefetch_factor=2)
    with pytest.warns(UserWarning, match="auto_off: selecting cost"):
        chosen, loaded = train(select, model(), loader)
    assert select.off
    assert select.ledger.scored == 4 * BATCH
    assert [len(index) for index in chosen] == [32] * 10 + [3]
    assert loaded[:4] == [BATCH] * 4
    ahead = loaded[4:].count(BATCH)
    assert 0 < ahead < 7  # those that were on their way
    assert loaded[4 + ahead :] == [32] * (6 - ahead) + [3]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="auto_off")  # it is said once
        assert train(select, model(), loader)[1] == [32] * 10 + [3]


def test_ids_of_views_reach_the_table(il):
    """In the phase that drops, the sampler looks losses up by id, not by position."""
    rows = list(range(ROWS - 1, ROWS - 801, -1))
    view = rho.WithIndex(Subset(TensorDataset(torch.zeros(ROWS, 8), torch.arange(ROWS) % 4), rows))
    schedule = rho.annealed(2, switch=0.0, drop=0.5)
    select = rho.Selector("rho", irreducible=il, keep=0.3, schedule=schedule)
    loader = DataLoader(view, batch_sampler=select.batch_sampler(view, 400))
    chosen, loaded = train(select, model(), loader)
    assert loaded == [400, 120]
    assert (il[torch.cat(chosen)] <= il.quantile(0.5)).all()


def test_a_range_of_ids_and_string_ids_can_be_sampled():
    data = TensorDataset(torch.zeros(10, 8), torch.zeros(10, dtype=torch.long))
    for ids in (range(100, 110), tuple("abcdefghij")):
        view = rho.WithIndex(data, ids)
        select = rho.Selector("loss", k=2, schedule=rho.warm_up(100))
        loader = DataLoader(view, batch_sampler=select.batch_sampler(view, 5))
        chosen, loaded = train(select, model(), loader)
        assert loaded == [5, 2]
        assert all(i in ids for index in chosen for i in index)


@pytest.mark.parametrize(
    ("rows", "batch_size", "drop_last"), [(0, 4, False), (3, 4, True), (3, 0, False), (3, -2, True)]
)
def test_a_sampler_without_batches_is_told(rows, batch_size, drop_last):
    select, data = rho.Selector("uniform", k=1), TensorDataset(torch.zeros(rows))
    message = rf"`batch_size` is {batch_size} and the data set has {rows} rows, which gives no cand"
    with pytest.raises(RholossError, match=message):
        select.batch_sampler(data, batch_size, drop_last=drop_last)


def test_a_uniform_choice_passes_over_high_losses_unless_there_are_too_few_others():
    loss_B = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3])
    for step in range(20):
        few = uniform_choice(5, 3, core.step_generator(0, step), loss_B, 0.5)
        assert set(few.tolist()) == {0, 2, 4}
        more = uniform_choice(5, 4, core.step_generator(0, step), loss_B, 0.5)
        assert set(more.tolist()[:3]) == {0, 2, 4}
    assert uniform_choice(5, 5, core.step_generator(0, 0), loss_B, 0.5).tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def elsewhere():
    """A default device that is not the CPU, where `torch.set_default_device("cuda")` has the GPU."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("method", ["rho", "uniform", "grad_norm_is", "negative_il"])
def test_choices_do_not_depend_on_the_default_device(method, elsewhere):
    with torch.device("cpu"):
        network, x, y, il = model(), torch.randn(40, 8), torch.arange(40) % 2, torch.rand(40)
    chosen = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            schedule = rho.annealed(8, switch=0.5, drop=0.1)
            select = rho.Selector(method, irreducible=il, keep=0.25, schedule=schedule)
            batches = select.batch_sampler(range(40), 10)
            for rows in itertools.chain.from_iterable(batches for _ in range(2)):
                ids = torch.tensor(rows, device="cpu")
                index, *_ = select(network, (ids, x[ids], y[ids]))
                chosen.append((index.tolist(), str(select.weights)))
    assert chosen[: len(chosen) // 2] == chosen[len(chosen) // 2 :]


@pytest.mark.parametrize("ranks", [False, True])
def test_losses_do_not_depend_on_the_default_device(ranks, elsewhere, tmp_path, monkeypatch):
    if ranks:  # as several processes do it, here by one
        monkeypatch.setattr("rholoss.il.score.Ranks", lambda **_: Ranks(alone=True))
    with torch.device("cpu"):
        network, data = model(), TensorDataset(torch.randn(40, 8), torch.arange(40) % 2)
        kind = {"progress": False, "ranks": ranks}
        expected = rho.score_irreducible(network, data, out=tmp_path / "a", **kind)
        # Not AdamW: in older versions of torch it counts its steps on the default device.
        fit = {"optimizer": partial(torch.optim.SGD, lr=0.1), "epochs": 2, "progress": False}
        fitted = rho.fit_irreducible(model, data, folds=2, **fit)
    found = rho.score_irreducible(network, data, out=tmp_path / "b", **kind)
    assert torch.equal(found.values, expected.values)

    def make():
        with torch.device("cpu"):
            return model()

    again = rho.fit_irreducible(make, data, folds=2, device="cpu", **fit)
    assert torch.equal(again.values, fitted.values)
