"""Fitting and scoring: the right weights, the right model for each point, work that can be cut off."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

from rholoss.errors import RholossError, StoreError
from rholoss.il.fit import fit_irreducible
from rholoss.il.score import score_irreducible
from rholoss.indexed import WithIndex


def blobs(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (rows,), generator=generator)
    x = torch.eye(3)[y] * 2 + torch.randn(rows, 3, generator=generator)
    return TensorDataset(x, y)


def small():
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def fast(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def quick(make_model, data, **options):
    defaults = {"epochs": 3, "batch_size": 32, "progress": False, "device": "cpu"}
    return fit_irreducible(make_model, data, **{**defaults, **options})


def test_holdout_fit_scores_each_training_point_in_eval_mode():
    train, holdout = blobs(100, 0), blobs(150, 1)
    il = quick(small, holdout, score=WithIndex(train), epochs=8, optimizer=fast)
    model = small()
    model.load_state_dict(il.weights())
    with torch.no_grad():
        expected = F.cross_entropy(
            model.eval()(train.tensors[0]), train.tensors[1], reduction="none"
        )
    assert torch.allclose(il.lookup(range(100)), expected, atol=1e-6)
    assert expected.mean() < 0.9  # it has learnt something: chance is 1.1
    assert il.seconds > 0
    assert il.meta["loss"] == "classification"
    assert il.meta["model"]["class"] == "Sequential"
    assert il.meta["model"]["parameters"] == 75
    assert il.meta["split"] == {
        "kind": "holdout",
        "folds": None,
        "seed": 0,
        "trained_on": [150],
        "scored": [100],
    }
    il.compare(train)


class Scripted(nn.Module):
    """Counts its training steps in a parameter; in eval mode it puts out what the script says."""

    def __init__(self, script):
        super().__init__()
        self.steps, self.script = nn.Parameter(torch.zeros(())), script

    def forward(self, x):
        if self.training:
            return -self.steps * torch.tensor([[1.0, 0.0]]) + torch.zeros(len(x), 2)
        return self.script[min(int(self.steps.round()), len(self.script)) - 1].expand(len(x), 2)


def count_steps(model, batch):
    """Under SGD with rate 1 each step adds one."""
    if model.training:
        return -model.steps.expand(len(batch[0]))
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def test_the_checkpoint_of_lowest_loss_is_kept_though_accuracy_peaks_later():
    right_by = [  # the margin of the true class for each of 4 points, epoch by epoch
        [1.0, 1.0, 1.0, -2.0],
        [5.0, 5.0, 5.0, -0.5],  # lowest loss, accuracy 0.75
        [0.1, 0.1, 0.1, 0.1],  # accuracy 1, higher loss
        [0.1, 0.1, 0.1, 0.1],
    ]
    script = [torch.tensor([[m, 0.0] for m in row]) for row in right_by]
    data = TensorDataset(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    score = TensorDataset(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    il = quick(
        lambda: Scripted(script),
        data,
        score=score,
        loss=count_steps,
        optimizer=sgd,
        epochs=9,
        patience=2,
    )
    expected = F.cross_entropy(script[1], torch.zeros(4, dtype=torch.long), reduction="none")
    assert torch.equal(il.dense, expected)
    (fit,) = il.meta["model"]["fits"]
    assert (fit["epoch"], fit["epochs"]) == (2, 4)
    assert fit["loss"] == pytest.approx(float(expected.mean()))
    assert float(il.weights()["steps"]) == 2.0


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (3, 5), (None, 7), (50, 7)])
def test_early_stop(patience, epochs):
    script = [torch.tensor([[margin, 0.0]]) for margin in (1.0, 2.0, 1.5, 1.4, 1.3, 1.2, 1.1)]
    data = TensorDataset(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    score = TensorDataset(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long))
    il = quick(
        lambda: Scripted(script),
        data,
        score=score,
        loss=count_steps,
        optimizer=sgd,
        epochs=7,
        patience=patience,
    )
    (fit,) = il.meta["model"]["fits"]
    assert (fit["epoch"], fit["epochs"]) == (2, epochs)


def test_check_rows_decides_on_a_strided_sample():
    seen = []

    def loss(model, batch):
        if not model.training:
            seen.append(batch[1].tolist())
        return model(batch[0]).square().mean(1)

    score = TensorDataset(torch.randn(11, 3), torch.arange(11))
    il = quick(small, blobs(64, 0), score=score, loss=loss, epochs=2, check_rows=3)
    assert seen == [[0, 5, 10], [0, 5, 10], list(range(11))]
    assert il.dense.isfinite().all()


def test_randomness_is_its_own_and_the_seed_repeats_it(tmp_path):
    data = blobs(64, 0)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = quick(small, data, folds=2)
    after = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(6)
    assert torch.equal(quick(small, data, folds=2).dense, first.dense)
    assert not torch.equal(quick(small, data, folds=2, seed=1).dense, first.dense)
    again = quick(small, data, folds=2, seed=np.int64(0), out=tmp_path / "il")  # numpy's, too
    assert torch.equal(again.dense, first.dense)
    with pytest.raises(RholossError, match="`seed` is None; give a whole number"):
        quick(small, data, folds=2, seed=None)


def test_each_fold_has_a_model_and_a_seed_of_its_own():
    made = []

    def make():
        made.append(small())
        return made[-1]

    starts = []

    def loss(model, batch):
        if model.training and all(model is not known for known, _ in starts):
            starts.append((model, model[0].weight.detach().clone()))
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    il = quick(make, blobs(60, 0), folds=3, loss=loss)
    assert len(made) == 3
    weights = [weight for _, weight in starts]
    assert not torch.equal(weights[0], weights[1])
    assert il.meta["split"]["kind"] == "folds"
    assert il.meta["split"]["scored"] == [20, 20, 20]
    assert il.meta["split"]["trained_on"] == [40, 40, 40]
    assert len(il.meta["model"]["fits"]) == 3
    assert not torch.equal(il.weights(0)["0.weight"], il.weights(2)["0.weight"])
    with pytest.raises(StoreError, match="no weights of member 3: 3 models were kept"):
        il.weights(3)


class Numbered(Dataset):
    """Items are their row number."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        return torch.tensor([float(row)])


class Remembers(nn.Module):
    """Remembers what it was trained on; its loss of a point is 1 if it saw it, else 0."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(())), set()


def memory_loss(model, batch):
    rows = batch[:, 0].tolist()
    if model.training:
        model.seen.update(rows)
    return model.weight * 0 + torch.tensor([float(row in model.seen) for row in rows])


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("folds", [2, 3])
def test_no_point_is_scored_by_a_model_that_saw_it(folds, wrapped):
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)) * 2  # ids 0, 2, 4, ...
    view = Subset(Numbered(100), order.tolist())
    il = quick(
        Remembers, WithIndex(view) if wrapped else view, folds=folds, loss=memory_loss, batch_size=7
    )
    assert il.lookup(range(0, 100, 2)).tolist() == [0.0] * 50  # 0 violations
    assert il.lookup(range(1, 100, 2)).isnan().all()
    members = []
    quick(lambda: members.append(Remembers()) or members[-1], view, folds=folds, loss=memory_loss)
    for member in members:  # and each was trained on all the rest
        assert abs(len(member.seen) - 50 * (folds - 1) / folds) < 1


def test_points_that_occur_twice_stay_in_one_fold():
    view = Subset(Numbered(20), [3, 5, 3, 7, 5, 9, 3, 11])
    il = quick(Remembers, WithIndex(view), folds=2, loss=memory_loss, batch_size=3)
    assert il.lookup([3, 5, 7, 9, 11]).tolist() == [0.0] * 5


def test_folds_without_points_to_score_are_not_fitted():
    made = []
    data = Numbered(30)
    il = quick(
        lambda: made.append(Remembers()) or made[-1],
        data,
        folds=3,
        score=Subset(data, [7]),
        loss=memory_loss,
    )
    assert il.lookup([7]).tolist() == [0.0]
    assert len(made) == 1


def test_rows_are_fetched_many_at_a_time_where_the_data_set_can():
    class Columns(Numbered):
        calls = 0

        def __getitems__(self, rows):
            Columns.calls += 1
            return [self[row] for row in rows]

    il = score_irreducible(
        Remembers(), Columns(30), loss=memory_loss, batch_size=10, progress=False
    )
    assert Columns.calls == 3
    assert il.meta["measured"] == 30


class Augmented(Dataset):
    """Adds noise from the given source at each fetch."""

    def __init__(self, data, noise=lambda: float(torch.rand(()))):
        self.data, self.noise, self.targets = data, noise, data.tensors[1]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        x, y = self.data[row]
        return x + self.noise(), y


@pytest.mark.parametrize("noise", [lambda: float(torch.rand(())), np.random.rand, random.random])
def test_augmented_points_are_refused_and_an_unaugmented_view_is_taken(noise):
    data = blobs(64, 0)
    message = (
        r"fetched twice and differs.*pass a view of the same rows without augmentation as `score`"
    )
    with pytest.raises(RholossError, match=message):
        quick(small, Augmented(data, noise), folds=2)
    with pytest.raises(RholossError, match=message):
        quick(small, blobs(64, 1), score=WithIndex(Augmented(data, noise)))
    with pytest.raises(RholossError, match="without augmentation as `dataset`"):
        score_irreducible(small(), Augmented(data, noise), progress=False)
    il = quick(small, WithIndex(Augmented(data, noise)), folds=2, score=data)
    assert il.dense.isfinite().all()
    il.compare(WithIndex(Augmented(data, noise)))  # the labels are those that were scored


class Counted(Dataset):
    def __init__(self, data):
        self.data, self.fetched, self.targets = data, [], data.tensors[1]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        self.fetched.append(row)
        return self.data[row]


def test_each_id_is_scored_once_whatever_the_view():
    data = Counted(blobs(50, 0))
    view = Subset(data, [9, 3, 9, 4, 40, 3, 11, 12, 13, 14, 15])
    seen = []

    def loss(model, batch):
        assert not torch.is_grad_enabled()
        assert not model.training
        seen.append(len(batch[1]))
        return torch.zeros(len(batch[1]))

    il = score_irreducible(small(), WithIndex(view), loss=loss, batch_size=4, progress=False)
    assert seen == [4, 4, 1]
    assert len(data.fetched) == 9 + 2 * 8  # once, and eight of them twice more to compare
    assert il.meta["measured"] == 9


def test_scoring_leaves_modes_buffers_grads_and_random_state_alone():
    data, model = blobs(50, 0), small()
    model.train()
    model[1].eval()  # a frozen layer
    F.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    flags, before = [m.training for m in model.modules()], torch.random.get_rng_state()
    il = score_irreducible(model, data, progress=False)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.random.get_rng_state(), before)
    expected = F.cross_entropy(model.eval()(data.tensors[0]), data.tensors[1], reduction="none")
    assert torch.allclose(il.dense, expected.detach(), atol=1e-6)
    assert not il.dense.requires_grad
    assert il.meta["split"] == {"kind": "given model"}


def test_the_fit_leaves_the_scored_models_buffers_as_fitted():
    il = quick(small, blobs(64, 0), score=blobs(40, 1), epochs=1)
    # two batches of one epoch: scoring and checking have not moved the running statistics
    assert int(il.weights()["1.num_batches_tracked"]) == 2


def test_ids_are_taken_off_wherever_they_were_put_on():
    data, holdout = blobs(40, 0), blobs(40, 1)
    expected = quick(small, holdout, score=data).dense
    il = quick(
        small, Subset(WithIndex(holdout), range(40)), score=Subset(WithIndex(data), range(40))
    )
    assert torch.equal(il.dense, expected)


def test_a_subset_that_changes_items_is_left_to_do_so():
    class Doubled(Subset):
        def __getitem__(self, place):
            x, y = super().__getitem__(place)
            return 2 * x, y

        def __getitems__(self, places):
            return [self[place] for place in places]

    data, model = blobs(40, 0), small()
    doubled = TensorDataset(2 * data.tensors[0], data.tensors[1])
    il = score_irreducible(model, WithIndex(Doubled(data, range(40))), progress=False)
    assert torch.equal(il.dense, score_irreducible(model, doubled, progress=False).dense)


@pytest.mark.gpu
def test_a_gpu_is_used_if_there_is_one_and_the_result_is_on_the_cpu():
    data, devices = blobs(80, 0), set()

    def loss(model, batch):
        devices.update((batch[0].device.type, next(model.parameters()).device.type))
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    before = torch.cuda.get_rng_state()
    il = quick(small, data, folds=2, loss=loss, device=None)
    assert devices == {"cuda"}
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert il.dense.device.type == "cpu"
    assert {value.device.type for value in il.weights(1).values()} == {"cpu"}
    model = small().cuda()
    on_gpu = score_irreducible(model, data, progress=False)
    on_cpu = score_irreducible(model, data, device="cpu", progress=False)
    assert torch.allclose(on_gpu.dense, on_cpu.dense, atol=1e-5)
    assert next(model.parameters()).device.type == "cuda"  # it was taken back
