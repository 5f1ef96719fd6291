"""Fitting and scoring: items of any kind, and what cannot be used."""

import pytest
import torch
from test_il_fingerprint import Items
from test_il_fit import Scripted, blobs, count_steps, fast, quick, sgd, small
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from rholoss import progress
from rholoss.errors import IdentityMismatchError, RholossError, StoreError
from rholoss.il.hashing import content_hash
from rholoss.il.score import score_irreducible
from rholoss.il.store import Irreducible
from rholoss.indexed import WithIndex, WithIrreducible


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
        ({"folds": 2, "optimizer": "sgd"}, "`optimizer` is 'sgd'; give a function"),
        ({"folds": 2, "labels": [1]}, "`labels` has 1 entries, but the data set has 30 rows"),
        ({"folds": 2, "labels": 7}, "`labels` is 7, but the data set has 30 rows; give one label"),
        (
            {"folds": 2, "seed": 2**70},
            "`seed` is 1180591620717411303424; give a whole number, of 64",
        ),
        ({"score": {"x": 1, "y": 2}}, "`score` is a dict of 'x', 'y', which has no rows to fetch"),
    ],
)
def test_arguments_that_cannot_be_used(options, message):
    with pytest.raises(RholossError, match=message):
        quick(small, blobs(30, 0), **options)


@pytest.mark.parametrize("argument", ["data", "score"])
def test_parts_with_ids_of_their_own_are_joined_before_they_get_ids(argument):
    part = blobs(30, 0)
    joined = ConcatDataset([WithIndex(part), WithIndex(Subset(part, range(10)))])
    sets = {"data": blobs(40, 1), "score": blobs(40, 2), argument: joined}
    with pytest.raises(RholossError, match=rf"`{argument}` is a `ConcatDataset`.* join them first"):
        quick(small, **sets)
    quick(small, WithIndex(ConcatDataset([part, part])), folds=2)
    quick(small, WithIrreducible(WithIndex(part), [0.1] * 30), folds=2)


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
    monkeypatch.setattr(progress, "LINE_SHARE", 0.0)  # on a busy machine a line would be left out
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


def test_a_folder_partial_that_is_not_ours_is_left_alone(tmp_path):
    mine = tmp_path / "partial" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(StoreError, match=r"holds other files \(partial\)"):
        score_irreducible(small(), blobs(40, 0), out=tmp_path, progress=False)
    assert mine.read_text() == "mine"
    with pytest.raises(StoreError, match=r"has no meta\.json"):  # nor is it called unfinished work
        Irreducible.load(tmp_path)


@pytest.mark.parametrize("folds", [None, 2])
def test_scoring_may_take_more_rows_at_a_time_than_training(folds, tmp_path):
    train, sizes = blobs(100, 0), set()

    def watched():
        model = small()
        model.register_forward_hook(lambda m, args, out: sizes.add((m.training, len(out))))
        return model

    given = {"score": WithIndex(train)} if folds is None else {"folds": folds}
    fits = [
        quick(watched, blobs(64, 1) if folds is None else train, optimizer=fast, **given, **sized)
        for sized in ({}, {"score_batch_size": 100, "out": tmp_path / "il"})
    ]
    assert torch.allclose(*(il.lookup(range(100)) for il in fits), atol=1e-6)
    assert {size for training, size in sizes if training} <= {32, 18}
    assert (False, 50 if folds else 100) in sizes
    with pytest.raises(RholossError, match=r"`score_batch_size` .* 0"):
        quick(small, train, folds=2, score_batch_size=0)


def test_two_rows_with_one_id_are_refused_and_one_row_drawn_twice_is_not():
    data = blobs(40, 0)
    names = [f"img{row % 20}.jpg" for row in range(40)]  # of two folders
    for call in (
        lambda both: score_irreducible(small(), both, progress=False),
        lambda both: quick(small, both, folds=2),
    ):
        with pytest.raises(RholossError, match=r"20 rows of .* another row has, too: 'img0.jpg'"):
            call(WithIndex(data, ids=names))
    twice = score_irreducible(small(), Subset(WithIndex(data), [0, 1, 1, 2]), progress=False)
    assert twice.lookup([0, 1, 2]).isfinite().all()


class Record:
    def __init__(self, x):
        self.x = x


def test_objects_are_told_apart_by_what_they_hold(tmp_path):
    def loss(model, batch):
        return batch

    def collated(items):
        return torch.stack([item["what"].x.sum() for item in items])

    own = {"loss": loss, "collate_fn": collated, "progress": False}
    values = torch.randn(30, 4)
    items = Items([{"what": Record(x), "file": tmp_path / str(i)} for i, x in enumerate(values)])
    il = score_irreducible(nn.Linear(1, 1), items, out=tmp_path / "il", **own)
    assert il.compare(items) == "content"
    for changed in (
        [{**item, "what": Record(item["what"].x + 1)} for item in items.items],
        [{**item, "file": tmp_path / "other"} for item in items.items],
    ):
        with pytest.raises(IdentityMismatchError):
            il.compare(Items(changed))
    moved = [{**item, "file": tmp_path / "moved" / item["file"].name} for item in items.items]
    assert il.compare(Items(moved)) == "content"

    class Fresh(Items):
        def __getitem__(self, row):
            return {"what": Record(torch.randn(4))}

    with pytest.raises(RholossError, match="augmented at random"):
        score_irreducible(nn.Linear(1, 1), Fresh(values), **own)


def test_an_object_that_holds_itself_has_a_hash():
    one, other = Record(1), Record(1)
    one.me, other.me = one, other
    assert content_hash(one) == content_hash(other)
    other.x = 2
    assert content_hash(one) != content_hash(other)


class Drawn(Items):
    """Items that draw random numbers when they are fetched, for nothing."""

    def __getitem__(self, row):
        torch.rand(1)
        return self.items[row]


def test_looking_for_shared_points_draws_nothing_and_names_the_callers_line():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    with pytest.warns(UserWarning, match="20 of the 20 points to be scored seem") as told:
        quick(small, Drawn(blobs(20, 0)), score=Drawn(blobs(20, 0)))
    assert torch.equal(before, torch.random.get_rng_state())
    assert any(w.filename == quick.__code__.co_filename for w in told)


def test_an_epoch_is_not_better_for_points_whose_loss_became_infinite():
    """Of those that are left the mean is lower then."""
    margins = [[1.0, 1.0, -2.0], [5.0, 5.0, -torch.inf], [5.0, 5.0, -torch.inf]]
    script = [torch.tensor([[margin, 0.0] for margin in row]) for row in margins]
    data, score = (TensorDataset(torch.zeros(3, 1), torch.zeros(3).long()) for _ in range(2))
    options = {"loss": count_steps, "optimizer": sgd, "epochs": 3}
    il = quick(lambda: Scripted(script), data, score=score, **options)
    assert il.meta["model"]["fits"][0]["epoch"] == 1
    assert il.dense.isfinite().all()


def test_layers_without_a_shape_are_told():
    def lazy():
        return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))

    says = r"`{}`: the Sequential has lazy layers .*'0\.weight' has no shape yet.*once on a batch"
    with pytest.raises(RholossError, match=says.format("make_model")):
        quick(lazy, blobs(40, 0), folds=2)
    with pytest.raises(RholossError, match=says.format("model")):
        score_irreducible(lazy(), blobs(40, 0), progress=False)
