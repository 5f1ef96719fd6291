"""Fitting and scoring: the right weights, the right model for each point, work that can be cut off."""

import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from rholoss import progress
from rholoss.data import WithIndex
from rholoss.errors import RholossError, StoreError
from rholoss.il import fit as fit_module
from rholoss.il.fit import fit_irreducible, score_irreducible
from rholoss.il.store import Irreducible


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


def test_randomness_is_its_own_and_the_seed_repeats_it():
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


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


def dicts(data, **more):
    return Items(
        [
            {"x": x, "labels": y, **{k: v[i] for k, v in more.items()}}
            for i, (x, y) in enumerate(data)
        ]
    )


def test_items_may_be_dicts():
    train, holdout = blobs(40, 0), blobs(40, 1)
    as_tuples = quick(small, holdout, score=train)
    as_dicts = quick(small, dicts(holdout), score=WithIndex(dicts(train)))
    assert torch.equal(as_tuples.dense, as_dicts.dense)


def test_dict_items_with_ids_of_their_own():
    keys = [f"k{i}" for i in range(40)]
    train = dicts(blobs(40, 0), index=keys)
    with pytest.raises(
        RholossError, match=r"carry an 'index' of their own \('k0' where the row is 0\)"
    ):
        quick(small, blobs(40, 1), score=train)
    il = quick(small, blobs(40, 1), score=WithIndex(train, ids=keys))
    by_row = quick(small, blobs(40, 1), score=blobs(40, 0)).dense
    assert torch.allclose(il.lookup(keys), by_row, atol=1e-5)  # other batches, other rounding
    with pytest.raises(
        RholossError, match=r"carry an 'index' of their own \(1 where the row is 0\)"
    ):
        quick(small, blobs(3, 1), score=dicts(blobs(3, 0), index=[1, 2, 0]))
    same = quick(small, blobs(40, 1), score=dicts(blobs(40, 0), index=list(range(40))))
    assert torch.equal(same.dense, by_row)


def test_items_may_be_bare_tensors_with_a_reconstruction_loss():
    def reconstruction(model, x):
        return (model(x) - x).square().mean(1)

    rows = Items(list(torch.randn(30, 3)))
    il = quick(lambda: nn.Linear(3, 3), rows, folds=2, loss=reconstruction)
    assert il.dense.isfinite().all()
    assert "reconstruction" in il.meta["loss"]


def test_collate_fn_is_used():
    def collate(items):
        return {
            "x": torch.stack([x for x, _ in items]),
            "labels": torch.stack([y for _, y in items]),
        }

    train, holdout = blobs(40, 0), blobs(40, 1)
    il = quick(small, holdout, score=train, collate_fn=collate)
    assert torch.equal(il.dense, quick(small, holdout, score=train).dense)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_number_of_workers_changes_nothing():
    data = blobs(40, 0)
    alone, helped = (quick(small, data, folds=2, epochs=2, num_workers=n) for n in (0, 1))
    assert torch.equal(alone.dense, helped.dense)


def test_a_last_batch_of_one_row_does_not_stop_batch_norm():
    il = quick(small, blobs(33, 0), score=blobs(33, 1), batch_size=32)
    assert il.dense.isfinite().all()


def test_string_keys_cross_fit():
    data = WithIndex(blobs(30, 0), ids=[f"k{i}" for i in range(30)])
    il = quick(small, data, folds=2)
    assert il.dense is None
    assert il.lookup([f"k{i}" for i in range(30)]).isfinite().all()


def test_labels_argument_is_kept_for_later_comparison():
    train = Items(list(blobs(30, 0)))
    il = quick(small, blobs(30, 1), score=train, labels=list(range(30)))
    il.compare(train, labels=list(range(30)))
    with pytest.raises(RholossError, match="2 of 30 differ"):
        il.compare(train, labels=[1, 0, *range(2, 30)])


def test_overlap_of_holdout_and_score_is_told():
    data = blobs(40, 0)
    with pytest.warns(
        UserWarning, match="10 of the 30 points to be scored are also in the holdout"
    ):
        quick(small, Subset(data, range(20)), score=WithIndex(Subset(data, range(10, 40))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"Neither `score` nor `folds` was given\. Pass `score=`"),
        ({"folds": 1}, "`folds` is 1; give a whole number of at least 2"),
        ({"folds": 31}, "`folds` is 31, but there are only 30 distinct ids"),
        ({"folds": 2, "epochs": 0}, "`epochs` is 0; give a whole number of at least 1"),
        ({"folds": 2, "batch_size": 1.5}, "`batch_size` is 1.5; give a whole number"),
        ({"folds": 2, "patience": 0}, "`patience` is 0; give a whole number"),
        ({"folds": 2, "check_rows": 0}, "`check_rows` is 0; give a whole number"),
        ({"folds": 2, "loss": "hinge"}, "`loss` is 'hinge', which is not known"),
        ({"score": Items([])}, "`score` is empty; pass a data set with at least one row"),
        ({"score": DataLoader(blobs(3, 0))}, "`score` is a DataLoader, which has no rows to fetch"),
        ({"folds": 2, "optimizer": list}, "`optimizer` returned a list; give a function"),
        ({"folds": 2, "labels": [1]}, "`labels` has 1 entries, but the data set has 30 rows"),
    ],
)
def test_arguments_that_cannot_be_used(options, message):
    with pytest.raises(RholossError, match=message):
        quick(small, blobs(30, 0), **options)


def test_an_empty_holdout_set():
    with pytest.raises(RholossError, match="`data` is empty"):
        quick(small, Items([]), score=blobs(3, 0))
    with pytest.raises(RholossError, match="`dataset` is empty"):
        score_irreducible(small(), Items([]), progress=False)


def test_factories_that_cannot_be_used():
    model = small()
    cases = {
        r"`make_model` is a Sequential; give a function that makes a new model": model,
        r"`make_model` is a NoneType": None,
        r"`make_model` returned a int": lambda: 3,
        r"has no parameters to train; .*score_irreducible": nn.Identity,
        r"`make_model` returned weights that it had returned before": lambda: model,
        r"weights that it had returned before,": lambda: nn.Sequential(model[0], nn.Linear(8, 3)),
    }
    for message, make in cases.items():
        with pytest.raises(RholossError, match=message):
            quick(make, blobs(30, 0), folds=2)


def test_a_frozen_part_may_be_shared_by_the_folds():
    backbone = nn.Linear(3, 8).requires_grad_(False)
    il = quick(lambda: nn.Sequential(backbone, nn.Linear(8, 3)), blobs(30, 0), folds=2)
    assert il.dense.isfinite().all()


def test_a_reduced_loss_is_caught():
    def reduced(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(RholossError, match="It was reduced: use reduction='none'"):
        quick(small, blobs(30, 0), folds=2, loss=reduced)


def test_a_training_loss_that_is_not_finite():
    data = blobs(64, 0)
    data.tensors[0][5] = torch.nan
    with pytest.raises(
        RholossError, match=r"training loss .* is nan in epoch 1.*Lower the learning rate"
    ):
        quick(small, data, score=blobs(10, 1))


def test_points_without_a_finite_loss():
    score = blobs(30, 1)
    score.tensors[0][[3, 8]] = torch.nan
    with pytest.warns(UserWarning, match=r"2 of 30 points have no finite loss .*\(ids 3, 8\)"):
        il = quick(small, blobs(64, 0), score=score)
    with pytest.raises(RholossError, match=r"3, 8 \(not measured\)"):
        il.check(range(30))
    score.tensors[0][:] = torch.nan
    with pytest.raises(
        RholossError, match="never had a finite loss on the points to be scored in 3"
    ):
        quick(small, blobs(64, 0), score=score)
    with pytest.raises(RholossError, match="No point has a finite loss under the model"):
        score_irreducible(small(), score, progress=False)


def test_progress_shows_loss_and_time_left(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    quick(small, blobs(40, 0), folds=2, progress=True)
    lines = capsys.readouterr().err
    assert "fitting model 1 of 2: " in lines
    assert "scoring with model 2 of 2: 100 %, loss " in lines
    assert "lowest" in lines
    assert " left" in lines
    quick(small, blobs(40, 0), folds=2, progress=False)
    assert capsys.readouterr().err == ""


def test_one_store_serves_later_runs(tmp_path):
    train = blobs(40, 0)
    il = quick(small, blobs(40, 1), score=WithIndex(train), out=tmp_path / "il")
    again = Irreducible.load(tmp_path / "il", train)
    assert torch.equal(again.dense, il.dense)
    assert again.path == il.path == tmp_path / "il"
    assert not (tmp_path / "il" / "partial").exists()
    model = small()
    model.load_state_dict(again.weights())
    more = score_irreducible(model, train, out=tmp_path / "more", batch_size=32, progress=False)
    assert torch.equal(more.dense, il.dense)
    again.save(tmp_path / "copy")  # with its weights
    assert Irreducible.load(tmp_path / "copy").weights().keys() == il.weights().keys()
    bare = quick(small, blobs(40, 1), score=train, out=tmp_path / "bare", keep_weights=False)
    assert set(bare.meta["files"]) == {"loss", "labels"}


def test_the_place_to_save_is_looked_at_first(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    def make():
        raise AssertionError("too late")

    with pytest.raises(StoreError, match=r"holds other files \(notes.txt\)"):
        quick(make, blobs(40, 0), folds=2, out=tmp_path)
    with pytest.raises(StoreError, match=r"holds other files \(notes.txt\)"):
        score_irreducible(small(), blobs(40, 0), out=tmp_path, progress=False)


class Watched:
    """Cross-entropy that counts the points it is asked for and may break off."""

    def __repr__(self):
        return "watched"  # the name of the loss is part of what makes a run the same run

    def __init__(self, stop_after=None):
        self.stop_after, self.trained, self.scored = stop_after, 0, 0

    def __call__(self, model, batch):
        if model.training:
            self.trained += len(batch[1])
        else:
            self.scored += len(batch[1])
            if self.stop_after is not None and self.scored > self.stop_after:
                raise KeyboardInterrupt
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# Two folds of 40 points each in batches of 8; two epochs with a check of 40 points each, then scoring.
RESUMED = {"folds": 2, "epochs": 2, "batch_size": 8}


@pytest.mark.parametrize(
    ("stop_after", "trained", "scored"),
    [
        (40, 2 * 80, 2 * 120),  # during the first fit: all over again
        (80 + 16, 80, 24 + 120),  # the first fit and 16 scores are kept
        (120 + 80 + 32, 0, 8),  # the first fold and the second fit are kept
    ],
)
def test_work_that_was_cut_off_goes_on(tmp_path, stop_after, trained, scored):
    data = blobs(80, 0)
    expected = quick(small, data, loss=Watched(), **RESUMED)
    with pytest.raises(KeyboardInterrupt):
        quick(small, data, loss=Watched(stop_after), out=tmp_path / "il", **RESUMED)
    with pytest.raises(StoreError, match="Run the same command again"):
        Irreducible.load(tmp_path / "il")
    second = Watched()
    il = quick(small, data, loss=second, out=tmp_path / "il", **RESUMED)
    assert (second.trained, second.scored) == (trained, scored)
    assert il.dense.numpy().tobytes() == expected.dense.numpy().tobytes()
    assert torch.equal(il.weights(1)["4.weight"], expected.weights(1)["4.weight"])
    assert sorted(p.name.split("-")[0] for p in il.path.iterdir()) == [
        "labels",
        "loss",
        "meta.json",
        "weights",
    ]


def test_a_record_that_never_reached_the_disk_is_measured_again(tmp_path):
    data = blobs(80, 0)
    expected = quick(small, data, loss=Watched(), **RESUMED)
    with pytest.raises(KeyboardInterrupt):
        quick(small, data, loss=Watched(80 + 24), out=tmp_path / "il", **RESUMED)
    records = tmp_path / "il" / "partial" / "fold-0.scored"
    size = records.stat().st_size // 3
    whole = records.read_bytes()
    records.write_bytes(whole[:size] + bytes(size) + whole[2 * size :])  # a hole after a power cut
    with pytest.raises(KeyboardInterrupt):  # cut off a second time, in the middle of a record
        quick(small, data, loss=Watched(8), out=tmp_path / "il", **RESUMED)
    assert records.stat().st_size == 2 * size
    records.write_bytes(records.read_bytes() + b"half")
    with pytest.raises(KeyboardInterrupt):
        quick(small, data, loss=Watched(8), out=tmp_path / "il", **RESUMED)
    second = Watched()
    il = quick(small, data, loss=second, out=tmp_path / "il", **RESUMED)
    assert second.scored == 16 + 120
    assert il.dense.numpy().tobytes() == expected.dense.numpy().tobytes()


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"epochs": 3},
        {"batch_size": 9},
        {"optimizer": sgd},
        {"make_model": lambda: nn.Linear(3, 3)},
        {"data": blobs(80, 7)},
    ],
)
def test_other_work_starts_afresh(tmp_path, other):
    first = {"make_model": small, "data": blobs(80, 0), **RESUMED}
    with pytest.raises(KeyboardInterrupt):
        quick(**first, loss=Watched(80 + 16), out=tmp_path / "il")
    counter = Watched()
    il = quick(**{**first, **other}, loss=counter, out=tmp_path / "il")
    assert counter.trained == 80 * {**first, **other}["epochs"]
    expected = quick(**{**first, **other}, loss=Watched())
    assert torch.equal(il.dense, expected.dense)


def test_an_old_store_serves_while_the_new_one_is_made(tmp_path):
    data = blobs(80, 0)
    old = quick(small, data, loss=Watched(), out=tmp_path / "il", **RESUMED)
    with pytest.raises(KeyboardInterrupt):
        quick(small, data, loss=Watched(96), out=tmp_path / "il", seed=1, **RESUMED)
    assert torch.equal(Irreducible.load(tmp_path / "il", data).dense, old.dense)
    new = quick(small, data, loss=Watched(), out=tmp_path / "il", seed=1, **RESUMED)
    assert not torch.equal(new.dense, old.dense)


def test_scoring_alone_goes_on_where_it_stopped(tmp_path):
    data, model = blobs(80, 0), small()
    options = {"batch_size": 8, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        score_irreducible(model, data, loss=Watched(30), out=tmp_path / "il", **options)
    counter = Watched()
    il = score_irreducible(model, data, loss=counter, out=tmp_path / "il", seconds=100.0, **options)
    assert counter.scored == 80 - 24
    assert il.seconds > 100
    assert torch.equal(il.dense, score_irreducible(model, data, **options).dense)
    with pytest.raises(KeyboardInterrupt):
        score_irreducible(model, data, loss=Watched(30), out=tmp_path / "il", **options)
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    counter = Watched()
    score_irreducible(model, data, loss=counter, out=tmp_path / "il", **options)
    assert counter.scored == 80  # it is another model now


def test_a_full_disk_keeps_what_was_scored(tmp_path, monkeypatch):
    data, model, real = blobs(80, 0), small(), open
    written = []

    def full(path, mode="r", *args, **kwargs):
        if str(path).endswith(".scored") and mode == "ab":
            written.append(path)
            if len(written) > 3:
                raise OSError(28, "No space left on device")
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(
        StoreError, match=r"No space left on device\. Free some space and run the same"
    ):
        score_irreducible(model, data, batch_size=8, out=tmp_path / "il", progress=False)
    monkeypatch.undo()
    counter = Watched()
    il = score_irreducible(model, data, batch_size=8, out=tmp_path / "il", progress=False)
    again = score_irreducible(model, data, loss=counter, batch_size=8, progress=False)
    assert torch.equal(il.dense, again.dense)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(int(sys.argv[3]))  # the same number gives the same sums
import test_il_fit as t

class Deadly(t.Watched):
    def __call__(self, model, batch):
        try:
            return super().__call__(model, batch)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGKILL)

t.quick(t.small, t.blobs(80, 0), loss=Deadly(120 + 80 + 8), out=sys.argv[2], **t.RESUMED)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_run_that_was_killed_goes_on(tmp_path):
    here, out = os.path.dirname(__file__), tmp_path / "il"
    result = subprocess.run(
        [sys.executable, "-c", KILLED, here, str(out), str(torch.get_num_threads())],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    data, counter = blobs(80, 0), Watched()
    il = quick(small, data, loss=counter, out=out, **RESUMED)
    assert (counter.trained, counter.scored) == (0, 32)
    assert torch.equal(il.dense, quick(small, data, loss=Watched(), **RESUMED).dense)
    assert not (out / "partial").exists()


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


def test_both_functions_are_to_be_found_in_one_place():
    assert fit_module.score_irreducible is score_irreducible
