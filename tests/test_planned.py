"""Plans in a loop of one's own: what is left out, weights, resuming, ids, many processes."""

import math

import numpy as np
import pytest
import torch
from ranks_planned import PASSES, ROWS, high, passes
from ranks_run import launch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import rholoss as rho
from rholoss.demo.data import Digits, load
from rholoss.engine import Epoch, InfoBatch, Remembered
from rholoss.errors import RholossError


def go(rows):
    """A pass of which all is remembered."""
    order = list(rows)
    rows.remember(torch.tensor(order), torch.ones(len(order)))
    return order


def test_wrong_labels_are_left_out_of_a_plain_loop():
    """Real digits, a tenth of the labels wrong: what is left out is mostly wrong, and most that is wrong."""
    torch.manual_seed(0)
    split = load()["train"]
    wrong = torch.as_tensor(split.given != split.true)
    train = rho.WithIndex(Digits(split))
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = rho.Planned(train, Remembered(math.log(10)), passes=8)
    assert rows.wrong is None
    loader = DataLoader(train, batch_size=64, sampler=rows, drop_last=True)
    lengths = []
    for _ in range(8):
        trained = torch.zeros(len(wrong), dtype=torch.bool)
        for index, x, y in loader:
            rows.remember(index, F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained[index] = True
        lengths.append(len(rows))
    assert lengths[:4] == [len(wrong)] * 4  # nothing before four visits
    assert rows.left_out == len(wrong) - lengths[-1] > 0
    out = ~trained
    assert wrong[out].float().mean() > 0.9
    assert out[wrong].float().mean() > 0.7
    assert rows.wrong == pytest.approx(0.1, abs=0.04)


def test_what_a_plan_notes_is_there_in_the_next_pass_and_after_a_resume():
    def counting(s):
        s.notes["passes"] = s.notes.get("passes", 0) + 1
        return Epoch(torch.arange(len(s.seen)))

    rows = rho.Planned(range(8), counting, passes=4)
    go(rows), go(rows)
    resumed = rho.Planned(range(8), counting, passes=4)
    resumed.load_state_dict(rows.state_dict())
    go(resumed)
    assert (rows.memory.notes, resumed.memory.notes) == ({"passes": 2}, {"passes": 3})


def test_a_state_with_numbers_of_numpy_is_read_by_torch(tmp_path):
    """`np.log(10)` is one; `torch.load` unpickles none of them."""

    def rows():
        return rho.Planned(range(40), Remembered(np.log(10)), passes=8)

    first = rows()
    for _ in range(5):
        order = torch.tensor(list(first))
        first.remember(order, torch.where(order < 4, 3.0, 0.1))
    list(first)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = rows()
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.memory.notes == first.memory.notes
    assert first.memory.notes["bound"] == math.log(10)
    assert first.left_out == second.left_out == 4


@pytest.mark.parametrize("plan", [lambda s: Epoch(torch.arange(len(s.seen))), InfoBatch(prune=0.5)])
def test_remember_gives_the_loss_to_call_backward_on(plan):
    rows = rho.Planned(range(8), plan, passes=4)
    losses = torch.arange(8.0)
    for _ in range(2):
        index = torch.tensor(list(rows))
        weight = torch.ones(8) if rows.weight is None else rows.weight
        loss = losses.clone().requires_grad_()
        mean = rows.remember(index, loss[index])
        torch.testing.assert_close(mean.detach(), (losses * weight)[index].mean())
        mean.backward()
        torch.testing.assert_close(loss.grad[index], weight[index] / len(index))
    if isinstance(plan, InfoBatch):
        assert sorted(set(weight.tolist())) == [1, 2]  # rows below the mean that stay count twice


def test_each_pass_has_an_order_of_its_own_and_a_run_goes_on_from_its_state():
    def run(rows, num):
        found = []
        for _ in range(num):
            found.append(list(rows))
            index = torch.tensor(found[-1])
            rows.remember(index, (index * 7 % ROWS).float())
        return found

    whole = rho.Planned(range(ROWS), high, passes=4, seed=3)
    expected = run(whole, 4)
    assert sorted(expected[0]) == list(range(ROWS))
    assert expected[0] != sorted(expected[0])
    assert expected[1] != expected[2]
    assert len(expected[2]) < ROWS
    first, second = (rho.Planned(range(ROWS), high, passes=4, seed=3) for _ in range(2))
    run(first, 2)
    second.load_state_dict(first.state_dict())
    assert run(second, 2) == expected[2:]
    assert run(rho.Planned(range(ROWS), high, passes=4, seed=4), 1) != expected[:1]


def test_a_plan_knows_how_far_training_is():
    progress = []

    def plan(situation):
        progress.append(situation.progress)
        return Epoch(torch.arange(3))

    rows = rho.Planned(range(5), plan, passes=4)
    for _ in range(4):
        assert sorted(go(rows)) == [0, 1, 2]
    assert progress == [0, 0.25, 0.5, 0.75]
    assert rows.left_out == 2
    assert len(rows) == 3


@pytest.mark.parametrize(
    "dataset",
    [
        rho.WithIndex(list("abcde"), ids=["v", "w", "x", "y", "z"]),
        Subset(rho.WithIndex(list("abcdefgh")), [7, 5, 3, 1, 0]),
    ],
)
def test_ids_are_those_that_come_with_the_batch(dataset):
    rows = rho.Planned(
        dataset, lambda s: Epoch((s.last.nan_to_num(9) > 2).nonzero()[:, 0]), passes=2
    )
    position = list(rows)
    ids = [dataset[i][0] for i in position]
    index = torch.tensor(ids) if isinstance(ids[0], int) else ids
    rows.remember(index, torch.tensor(position).float())
    assert sorted(rows) == [3, 4]
    with pytest.raises(RholossError, match="`index` has 99, which is no id of the data set"):
        rows.remember([99], torch.zeros(1))


def test_what_is_wrong_is_told():
    everything = lambda s: Epoch(torch.arange(len(s.seen)))  # noqa: E731
    with pytest.raises(RholossError, match="`passes` is 0 and the data set has 3 rows"):
        rho.Planned(range(3), everything, passes=0)
    for plan in ("remembered", InfoBatch):
        with pytest.raises(RholossError, match=r"`plan` is .*InfoBatch\(\), or a function"):
            rho.Planned(range(3), plan, passes=1)
    rows = rho.Planned(range(3), everything, passes=1)
    with pytest.raises(RholossError, match=r"no pass was dealt.*Pass `sampler=`"):
        rows.remember(torch.arange(3), torch.ones(3))
    list(rows)
    with pytest.raises(RholossError, match=r"`loss_k` has shape \(\), .*reduction='none'"):
        rows.remember(torch.arange(3), torch.tensor(1.0))
    with pytest.raises(RholossError, match="of a mask take"):
        list(rho.Planned(range(3), lambda s: Epoch(s.seen > 0), passes=1))


def test_more_ranks_than_one_need_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    rows = rho.Planned(range(4), lambda s: Epoch(torch.arange(4)), passes=1)
    with pytest.raises(RholossError, match="2 ranks, but no process group"):
        list(rows)


def test_ranks_share_the_rows_and_what_they_remember(tmp_path):
    alone, memory = passes()
    found = launch("ranks_planned.py", 2, tmp_path)["planned"]
    for number in range(PASSES):
        parts = [visited[number] for visited, _ in found]
        assert len(parts[0]) == len(parts[1])  # or the longer one would wait for gradients
        assert [*parts[0], *parts[1]] == alone[number]
    for _, ours in found:
        assert torch.equal(ours["seen"], memory["seen"])
        torch.testing.assert_close(ours["recent"], memory["recent"], equal_nan=True, rtol=0, atol=0)


@pytest.mark.gpu
def test_remembering_on_a_gpu_waits_for_nothing(no_waiting):
    rows = rho.Planned(range(100), InfoBatch(), passes=4)
    losses = torch.rand(100, device="cuda")
    for _ in range(2):
        order = torch.tensor(list(rows))
        rows.remember(order[:1], losses[order[:1].cuda()])  # memory goes where the losses are
        index, loss_k = order[1:], losses[order[1:].cuda()]
        with no_waiting():
            rows.remember(index, loss_k)
    assert rows.memory.seen.device.type == "cuda"
    seen = torch.ones(100, dtype=torch.long)
    seen[order] = 2
    assert len(order) < 100  # the second pass does without some
    assert torch.equal(rows.memory.seen.cpu(), seen)


def everything(situation):
    return Epoch(torch.arange(len(situation.seen)))


def train(rows, loader, stop=None, seen=None):
    """Passes as a loop has them; returns the rows of each batch."""
    seen = [] if seen is None else seen
    for _ in range(rows.begun, rows.passes):
        for index in loader:
            rows.remember(index, (index % 7).float())
            seen.append(index.tolist())
            if len(seen) == stop:
                return seen
    return seen


@pytest.mark.parametrize("workers", [0, 2])  # workers run ahead, to the end of small data
@pytest.mark.parametrize("peek", [True, False])
def test_a_look_at_the_first_batch_costs_no_pass(peek, workers):
    rows = rho.Planned(range(20), everything, passes=3)
    loader = DataLoader(range(20), batch_size=4, sampler=rows, num_workers=workers)
    first = next(iter(loader)).tolist() if peek else None
    seen = train(rows, loader)
    assert len(seen) == 3 * 5
    assert rows.begun == 3
    assert first in (None, seen[0])
    assert rows.memory.seen.tolist() == [3] * 20


def test_more_passes_than_were_said_are_refused():
    rows = rho.Planned(range(4), everything, passes=2)
    go(rows), go(rows)
    with pytest.raises(RholossError, match=r"`passes` is 2, and so many are done.*Make `Planned`"):
        list(rows)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 5, 6, 8, 10, 12])
def test_a_state_of_the_middle_of_a_pass_goes_on_there(stop, workers):
    """Whatever the loader's workers have taken ahead: what was remembered counts."""

    def make():
        rows = rho.Planned(range(22), InfoBatch(), passes=3)
        options = {"sampler": rows, "drop_last": True, "num_workers": workers}
        return rows, DataLoader(range(22), batch_size=4, **options)

    rows, loader = make()
    whole = train(rows, loader)
    first, loader = make()
    seen = train(first, loader, stop=stop)
    resumed, loader = make()
    resumed.load_state_dict(first.state_dict())
    twice = rho.Planned(range(22), InfoBatch(), passes=3)
    twice.load_state_dict(resumed.state_dict())  # saved again before it went on
    assert torch.equal(torch.tensor(list(twice)), torch.tensor(list(resumed)))
    resumed.load_state_dict(first.state_dict())
    train(resumed, loader, seen=seen)
    assert seen == whole
    assert resumed.begun == 3


def test_a_last_batch_that_is_smaller_is_not_made_up_for():
    """A loader may leave it out, which the sampler cannot know."""
    rows = rho.Planned(range(10), everything, passes=2)
    seen = train(rows, DataLoader(range(10), batch_size=4, sampler=rows), stop=2)
    resumed = rho.Planned(range(10), everything, passes=2)
    resumed.load_state_dict(rows.state_dict())
    train(resumed, DataLoader(range(10), batch_size=4, sampler=resumed), seen=seen)
    assert [len(batch) for batch in seen] == [4, 4, 4, 4, 2]


def test_who_remembers_nothing_is_told():
    rows = rho.Planned(range(4), everything, passes=2)
    first = list(rows)
    with pytest.warns(UserWarning, match="nothing was remembered of it"):
        assert list(rows) == first


def test_a_state_is_a_snapshot_and_belongs_to_its_rows():
    rows = rho.Planned(range(4), everything, passes=3)
    go(rows)
    state = rows.state_dict()
    go(rows)
    assert state["memory"]["seen"].tolist() == [1] * 4
    others = [range(5), Subset(rho.WithIndex(range(9)), [1, 2, 3, 8])]
    for other in others:
        with pytest.raises(RholossError, match=r"The state is of a data set of 4 rows"):
            rho.Planned(other, everything, passes=3).load_state_dict(state)


@pytest.mark.parametrize("stop", [2, 3])
def test_a_pass_that_was_begun_is_not_dealt_to_other_ranks(monkeypatch, stop):
    """Each of them would pass over as many of its rows as the only one had done."""
    rows = rho.Planned(range(12), everything, passes=3)
    train(rows, DataLoader(range(12), batch_size=4, sampler=rows), stop=stop)
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = rho.Planned(range(12), everything, passes=3)
    if stop == 2:
        with pytest.raises(
            RholossError, match="the middle of a pass, with 1 rank, and now there are 2"
        ):
            other.load_state_dict(rows.state_dict())
    else:  # between two passes
        other.load_state_dict(rows.state_dict())
        assert other.begun == 1


def test_rows_that_share_an_id_are_refused():
    data = rho.WithIndex(range(4), ids=["a", "b", "a", "b"])
    with pytest.raises(RholossError, match="4 rows of the data set have 2 different ids"):
        rho.Planned(data, everything, passes=1)


def test_lightning_leaves_it_alone():
    rows = rho.Planned(range(4), everything, passes=1)
    assert isinstance(rows, torch.utils.data.DistributedSampler)
    rows.set_epoch(3)  # as it does with one
    assert len(go(rows)) == 4
