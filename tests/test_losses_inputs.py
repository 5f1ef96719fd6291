"""What a model is called with, and what is said where it does not fit."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import rholoss as rho
from rholoss.errors import RholossError
from rholoss.losses import TASKS

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Images(Dataset):
    """Dict items with a column that is not for the model."""

    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        return {"x": X[row], "label": int(Y[row]), "path": f"{row}.jpg"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 2)

    def forward(self, x, mask=None):
        return self.net(x)


class Anything(Model):
    def forward(self, **inputs):
        assert sorted(inputs) == ["path", "x"]
        return self.net(inputs["x"])


class Broken(Model):
    def forward(self, x):
        return None + x


def sequential():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def batch(dataset=None, rows=40):
    return next(iter(DataLoader(rho.WithIndex(dataset or Images()), batch_size=rows)))


@pytest.mark.parametrize(
    "make",
    [
        Model,
        Anything,
        lambda: torch.compile(Model(), backend="eager"),
        lambda: nn.DataParallel(Model()),
        lambda: torch.compile(nn.DataParallel(Model()), backend="eager"),
    ],
)
def test_a_model_gets_the_entries_that_it_takes(make):
    select = rho.Selector("loss", keep=0.1)
    chosen = select(make(), batch())
    loss_B = F.cross_entropy(Model()(X), Y, reduction="none")
    assert chosen["index"].tolist() == loss_B.argsort(descending=True)[:4].tolist()
    assert chosen["path"] == [f"{row}.jpg" for row in chosen["index"]]


def test_irreducible_losses_are_fitted_from_the_same_items():
    il = rho.fit_irreducible(Model, Images(), folds=2, epochs=1, progress=False)
    assert il.values.isfinite().all()


UNKNOWN = (
    r"The batch has the keys x, label, path, but `forward` of Sequential takes input \(.*\)\. Name them "
    r"alike, drop what it does not take in the collator, or pass `loss=`"
)


def test_entries_that_no_model_takes_are_told():
    with pytest.raises(RholossError, match=UNKNOWN):
        rho.Selector("loss", keep=0.1)(sequential(), batch())
    with pytest.raises(RholossError, match=UNKNOWN):
        rho.fit_irreducible(sequential, Images(), folds=2, epochs=1, progress=False)


def test_a_model_that_needs_its_labels_is_told():
    class Own(nn.Linear):
        def forward(self, x, label):
            return F.cross_entropy(super().forward(x), label)

    with pytest.raises(
        RholossError, match=r"'label' is kept back .* do without \(label=None\), or"
    ):
        rho.Selector("loss", keep=0.1)(Own(8, 3), batch())


def test_a_tuple_with_too_many_entries_is_told():
    select = rho.Selector("loss", keep=0.1, index=lambda batch: batch[2])
    message = (
        r"is a tuple of 3, the last of which is the target, but `forward` of Sequential takes input"
    )
    with pytest.raises(RholossError, match=message):
        select(sequential(), (X, Y, torch.arange(40)))


def test_an_error_of_the_model_itself_stays_what_it_is():
    with pytest.raises(TypeError, match="unsupported operand"):
        TASKS["classification"](Broken(), (X, Y))


# Labels and shapes.


def test_one_logit_is_no_classification():
    message = r"put out one logit, \(40, 1\).*loss='multi_label' for a yes or no, or 'regression'"
    with pytest.raises(RholossError, match=message):
        rho.Selector("loss", keep=0.1)(nn.Linear(8, 1), batch(TensorDataset(X, Y)))
    chosen = rho.Selector("loss", keep=0.1, loss="multi_label")(
        nn.Linear(8, 1), batch(TensorDataset(X, Y))
    )
    assert len(chosen[0]) == 4


@pytest.mark.parametrize(
    ("labels", "said"),
    [(Y + 1, "from 1 to 2, but the model put out 2 logits"), (Y - 1, "from -1 to 0, but")],
)
def test_labels_that_are_no_classes_are_told_at_the_first_call(labels, said):
    with pytest.raises(RholossError, match=f"The labels go {said}.*number the labels from 0"):
        rho.Selector("loss", keep=0.1)(Model(), batch(TensorDataset(X, labels)))


KINDS = [torch.int32, torch.uint8, torch.int16, torch.bool, torch.uint16, torch.uint32]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["loss", "grad_norm"])
def test_labels_may_be_whole_numbers_of_any_width(kind, method):
    model = Model()
    expected = rho.Selector(method, keep=0.1)(model, batch(TensorDataset(X, Y)))
    chosen = rho.Selector(method, keep=0.1)(model, batch(TensorDataset(X, Y.to(kind))))
    assert torch.equal(chosen[0], expected[0])
    assert chosen[2].dtype == kind  # as the loop knows them


def test_targets_may_be_complex():
    def loss(model, batch):
        return (model(batch[0])[:, 0] - batch[1]).abs()

    complex_Y = Y.to(torch.complex64)
    chosen = rho.Selector("loss", keep=0.1, loss=loss)(Model(), batch(TensorDataset(X, complex_Y)))
    assert chosen[2].dtype == torch.complex64


def test_class_156_of_a_byte_is_none_that_does_not_count():
    byte = torch.tensor([[156, 3]], dtype=torch.uint8)
    mean = TASKS["tokens"](lambda x: torch.zeros(1, 2, 200), (X, byte))
    assert torch.allclose(mean, torch.tensor(200.0).log())


def test_maps_of_classes_are_told_by_their_shapes():
    maps = TensorDataset(torch.randn(40, 3, 4, 4), torch.randint(0, 9, (40, 4, 4)))
    message = r"needs logits \[B, C\].*put out \(40, 9, 4, 4\) and the targets are \(40, 4, 4\)"
    with pytest.raises(RholossError, match=message):
        rho.Selector("loss", keep=0.1)(nn.Conv2d(3, 9, 1), batch(maps))


def test_labels_that_do_not_count_are_fine():
    ignored = torch.where(torch.arange(40) < 3, -100, Y)
    assert len(rho.Selector("loss", keep=0.1)(Model(), batch(TensorDataset(X, ignored)))[0]) == 4


def test_labels_are_looked_at_once(monkeypatch):
    looks = []
    monkeypatch.setattr("rholoss.losses.check_classes", lambda *given: looks.append(given))
    select = rho.Selector("loss", keep=0.1)
    for _ in range(3):
        select(Model(), batch(TensorDataset(X, Y)))
    assert len(looks) == 1


def test_a_loss_that_was_broadcast_is_told_as_such():
    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square()  # [B, 1] and [B]

    message = r"returned shape \(40, 40\)\. Each output was compared with each target.*squeeze\(1\)"
    with pytest.raises(RholossError, match=message):
        rho.Selector("loss", keep=0.1, loss=loss)(nn.Linear(8, 1), batch(TensorDataset(X, Y)))


def test_as_many_losses_as_rows_but_not_as_ids_are_told_as_such():
    with pytest.raises(
        RholossError, match=r"of the 30 examples.* \(40,\)\. .* 40 rows, give it 40 ids"
    ):
        rho.Selector("loss", keep=0.1)(sequential(), (torch.arange(30), X, Y))


def test_a_model_is_a_module():
    message = r"`model` is a function; pass the torch.nn.Module.*is the selector's `loss`"
    with pytest.raises(RholossError, match=message):
        rho.Selector("loss", keep=0.1)(lambda x: x, batch(TensorDataset(X, Y)))


@pytest.mark.parametrize("precision", [16, "16-mixed", True, torch.float64])
def test_a_precision_has_a_name(precision):
    with pytest.raises(RholossError, match=f"`precision` is {precision!r}; choose one of bf16"):
        rho.Selector("loss", keep=0.1, precision=precision)


# Draws that are all alike.


def test_bald_needs_dropout():
    message = r"all `draws` \(10\) gave the same output.*needs dropout.*use the method 'entropy'"
    with pytest.raises(RholossError, match=message):
        rho.Selector("bald", keep=0.1)(Model(), batch(TensorDataset(X, Y)))
    model = nn.Sequential(nn.Dropout(0.5), Model())
    with pytest.raises(RholossError, match=r"all `draws` \(1\) gave the same output"):
        rho.Selector("bald", keep=0.1, draws=1)(model, batch(TensorDataset(X, Y)))
    assert len(rho.Selector("bald", keep=0.1)(model, batch(TensorDataset(X, Y)))[0]) == 4
    for method in ("entropy", "conditional_entropy"):  # mean something without
        rho.Selector(method, keep=0.1)(Model(), batch(TensorDataset(X, Y)))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, text=None, image=None):
        return self.text(text) if image is None else self.image(image)


def test_one_input_goes_by_its_name_where_the_model_has_it():
    model = Two()
    by_name = TASKS["classification"](model, {"image": X, "labels": Y})
    expected = F.cross_entropy(model.image(X), Y, reduction="none")
    torch.testing.assert_close(by_name, expected)
    other = TASKS["classification"](model, {"pixels": X, "labels": Y})  # no name of the model's
    torch.testing.assert_close(other, F.cross_entropy(model.text(X), Y, reduction="none"))


@pytest.mark.parametrize("method", ["loss", "rho", "grad_norm", "entropy"])
def test_a_row_without_a_label_is_not_chosen(method):
    """Nothing is asked of it: its loss is 0, which is more than -1."""
    labels = Y.clone()
    labels[:20] = -100
    il = torch.full((40,), 1.0)
    il[:20] = 0.0
    select = rho.Selector(method, keep=0.5, irreducible=il)
    index, *_ = select(Model(), (torch.arange(40), X, labels))
    assert (index >= 20).all()
    with pytest.raises(RholossError, match=r"no label of the rows counts \(all are -100\)"):
        rho.Selector(method, keep=0.6, irreducible=il)(Model(), (torch.arange(40), X, labels))


@pytest.mark.parametrize(("loss", "first"), [("tokens", 0), ("causal_lm", 1)])
def test_a_text_of_which_no_token_counts_is_not_chosen(loss, first):
    tokens = torch.randint(0, 8, (12, 6))
    labels = tokens.clone()
    labels[:4, first:] = -100
    labels[5, 2:] = -100  # some do
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    index, *_ = rho.Selector("rho", keep=8 / 12, irreducible=torch.full((12,), 9.0), loss=loss)(
        model, (torch.arange(12), tokens, labels)
    )
    assert sorted(index.tolist()) == list(range(4, 12))


def test_an_error_within_the_model_says_how_it_was_called():
    note = r"rholoss called model\(torch.float32 \(40, 8\)\) to get losses.*pass `loss=`"

    class TakesTheBatch(Model):
        def forward(self, batch):
            return self.net(batch["x"])

    one_input = [{"x": x, "label": y} for x, y in zip(X, Y, strict=True)]
    for model, data in ((TakesTheBatch(), one_input), (Model().bfloat16(), TensorDataset(X, Y))):
        with pytest.raises((TypeError, IndexError, RuntimeError)) as caught:
            rho.Selector("loss", keep=0.5)(model, batch(data))
        assert re.search(note, "\n".join(caught.value.__notes__))


def test_soft_labels_are_told_from_several_labels():
    message = "If these are soft labels, pass F.cross_entropy.* as a function"
    with pytest.raises(RholossError, match=message):
        rho.Selector("loss", keep=0.5)(Model(), batch(TensorDataset(X, torch.rand(40, 2))))
