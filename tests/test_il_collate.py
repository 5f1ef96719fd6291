"""Fitting and scoring items that a collate function of the user's makes into batches."""

import pytest
import torch
from test_il_fingerprint import Items
from test_il_fit import blobs, quick, small
from test_il_items import dicts

from rholoss.errors import RholossError
from rholoss.il.score import score_irreducible


def test_collate_fn_is_used():
    def collate(items):
        return {
            "x": torch.stack([x for x, _ in items]),
            "labels": torch.stack([y for _, y in items]),
        }

    train, holdout = blobs(40, 0), blobs(40, 1)
    il = quick(small, holdout, score=train, collate_fn=collate)
    assert torch.equal(il.dense, quick(small, holdout, score=train).dense)


def test_sparse_items_and_an_entry_that_is_called_index():
    data = blobs(20, 0)
    sparse = Items([(x.to_sparse(), y) for x, y in data])

    def dense(items):
        return torch.stack([x.to_dense() for x, _ in items]), torch.stack([y for _, y in items])

    model = small()
    found = score_irreducible(model, sparse, collate_fn=dense, progress=False)
    assert torch.equal(found.dense, score_irreducible(model, data, progress=False).dense)
    with pytest.raises(RholossError, match="carry an 'index' of their own"):
        score_irreducible(model, dicts(data, index=torch.zeros(20, 2)), progress=False)


def test_a_collate_function_that_is_random_is_told_of():
    def noisy(items):
        x, y = torch.utils.data.default_collate(items)
        return x + torch.rand(()), y

    message = "another batch of the same items of `{}` each time: it masks or augments at random"
    with pytest.warns(UserWarning, match=message.format("score")):
        quick(small, blobs(40, 1), score=blobs(40, 0), collate_fn=noisy)
    with pytest.warns(UserWarning, match=message.format("dataset")):
        score_irreducible(small(), blobs(40, 0), collate_fn=noisy, progress=False)


def test_a_collate_function_may_take_labels_out_of_the_items():
    def popping(items):
        labels = torch.stack([item.pop("labels") for item in items])
        return {"x": torch.stack([item["x"] for item in items]), "labels": labels}

    same = score_irreducible(small(), dicts(blobs(40, 0)), collate_fn=popping, progress=False)
    assert same.dense.isfinite().all()


def test_items_that_cannot_be_stacked_ask_for_a_collate_function():
    ragged = Items([{"x": torch.zeros(3 + i % 2), "labels": torch.tensor(0)} for i in range(8)])
    message = (
        r"items of `dataset` cannot be made into a batch \(RuntimeError: .*\)\. Pass `collate_fn="
    )
    with pytest.raises(RholossError, match=message):
        score_irreducible(small(), ragged, progress=False)
