"""Hugging Face: the pieces by themselves, and what is refused before a run."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fixtures_integrations import (
    recorded,
)

from rholoss.errors import RholossError

transformers = pytest.importorskip("transformers", reason="pip install 'rholoss[hf]'")


datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")

from rholoss.integrations.huggingface import KeepIds, RhoMixin, trimmed  # noqa: E402


def test_padding_that_no_selected_row_needs_is_cut():
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0]])
    tokens = torch.arange(16).view(2, 8)
    classes = torch.tensor([1, 2])
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": classes, "soft": mask.float()}
    cut = trimmed(batch)
    assert cut["input_ids"].tolist() == [[1, 2, 3], [9, 10, 11]]
    assert cut["labels"] is classes
    assert cut["soft"].shape == (2, 8)  # floats are features, whatever their shape
    assert trimmed(batch, multiple=4)["input_ids"].tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]
    counted = torch.full((2, 8), -100)
    counted[0, 5] = 7
    assert trimmed({**batch, "labels": counted})["labels"].shape == (2, 5)  # its column stays
    many = torch.ones(2, 8, dtype=torch.long)  # multi-label targets that happen to be as wide
    assert trimmed({**batch, "labels": many})["labels"].shape == (2, 8)
    assert trimmed({"x": tokens}) == {"x": tokens}


@pytest.mark.parametrize(
    ("name", "message"),
    [("cp_enabled", "context parallelism"), ("sp_enabled", "sequence parallelism")],
)
def test_parallelism_that_cuts_rows_is_refused(name, message):
    class Parent:
        def __init__(self):
            self.accelerator = SimpleNamespace(parallelism_config=SimpleNamespace(**{name: True}))
            self.args = SimpleNamespace()

    class Trainer(RhoMixin, Parent):
        pass

    with pytest.raises(RholossError, match=message):
        Trainer(selector=recorded()[0])


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        ("trainer", "is_fsdp_enabled", "scoring with sharded weights"),
        ("trainer", "is_deepspeed_enabled", "scoring with sharded weights"),
        ("args", "packing", "put several examples into one row"),
        ("args", "padding_free", "put several examples into one row"),
    ],
)
def test_what_was_not_tried_is_refused(owner, name, message):
    class Parent:
        def __init__(self):
            self.accelerator, self.args = SimpleNamespace(), SimpleNamespace()
            setattr(self if owner == "trainer" else self.args, name, True)

    class Trainer(RhoMixin, Parent):
        pass

    with pytest.raises(RholossError, match=message):
        Trainer(selector=recorded()[0])


def test_ids_are_put_beside_what_the_collator_made():
    made = KeepIds(lambda items: {"n": torch.tensor([len(items)])})([{"index": 3}, {"index": 4}])
    assert made["index"].tolist() == [3, 4]
    plain = KeepIds(lambda items: len(items))
    assert plain([{"x": 1}]) == 1


FRAMEWORK_FREE = """
import sys
import rholoss.integrations.huggingface, rholoss.integrations.lightning, rholoss.integrations.causal_lm
assert not {"transformers", "accelerate", "lightning", "pytorch_lightning", "datasets"} & set(sys.modules)
"""


def test_importing_the_integrations_imports_no_framework():
    subprocess.run([sys.executable, "-c", FRAMEWORK_FREE], check=True)


def test_it_says_which_extra_is_missing(monkeypatch):
    from rholoss.integrations import huggingface

    monkeypatch.delitem(vars(huggingface), "RhoTrainer", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RholossError, match=r"pip install 'rholoss\[hf\]'"):
        _ = huggingface.RhoTrainer
