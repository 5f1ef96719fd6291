from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rholoss as rho
from rholoss import losses
from rholoss.errors import RholossError

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2] * 2)
EXPECTED = F.cross_entropy(X, Y, reduction="none")
classification = losses.TASKS["classification"]


class Answering(nn.Module):
    """Returns its input in the shape that a library would return it, and notes how it was called."""

    def __init__(self, answer=lambda logits: logits):
        super().__init__()
        self.answer = answer

    def forward(self, *args, **kwargs):
        self.called = (len(args), sorted(kwargs))
        return self.answer(args[0] if args else kwargs["input_ids"])


class Example(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


class Numbered(NamedTuple):
    index: torch.Tensor
    image: torch.Tensor
    label: torch.Tensor


# Batches.


@pytest.mark.parametrize(
    ("batch", "called"),
    [
        ((X, Y), (1, [])),
        ([X, Y], (1, [])),
        ((X, X, Y), (2, [])),
        (Example(X, Y), (1, [])),
        (Numbered(torch.arange(6), X, Y), (1, [])),  # a named tuple keeps its ids until here
        ({"image": X, "label": Y}, (1, [])),
        ({"x": X, "y": Y}, (1, [])),
        (UserDict(input_ids=X, labels=Y), (1, [])),
        ({"input_ids": X, "attention_mask": X, "labels": Y}, (0, ["attention_mask", "input_ids"])),
    ],
)
def test_inputs_and_targets_are_found(batch, called):
    model = Answering()
    assert torch.equal(classification(model, batch), EXPECTED)
    assert model.called == called


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        (X, "a Tensor"),
        ((X,), "a tuple of Tensor"),
        ((), "a tuple of "),
        ((X, Y, ["a.png"] * 6), "a tuple of Tensor, Tensor, list"),
        ({"image": X, "class": Y}, r"keys \['class', 'image'\]; a target is one of labels, label"),
        ({"labels": Y}, r"keys \['labels'\]"),
        ({"x": X, "labels": ["cat"] * 6}, r"keys \['labels', 'x'\]"),
        (SimpleNamespace(x=X, y=Y), "a SimpleNamespace"),
    ],
)
def test_batches_without_inputs_and_targets_are_told(batch, seen):
    with pytest.raises(
        RholossError, match=rf"No inputs and targets .* \({seen}.*pass `loss=`, a function"
    ):
        classification(Answering(), batch)


@pytest.mark.parametrize(
    "answer",
    [
        lambda logits: logits,
        lambda logits: logits.double(),
        lambda logits: SimpleNamespace(logits=logits, loss=None),
        lambda logits: OrderedDict(loss=torch.tensor(1.0), logits=logits),
        lambda logits: {"logits": logits},
        lambda logits: (logits, "hidden states"),
        lambda logits: [logits, None],
    ],
)
def test_outputs_are_found(answer):
    loss_B = classification(Answering(answer), (X, Y))
    torch.testing.assert_close(loss_B, EXPECTED)
    assert loss_B.dtype == torch.float32


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (lambda logits: {"hidden": logits}, "dict"),
        (lambda logits: SimpleNamespace(scores=logits), "SimpleNamespace"),
        (lambda logits: None, "NoneType"),
        (lambda logits: ("text", logits), "str"),
        (lambda logits: (), "tuple"),
    ],
)
def test_outputs_without_logits_are_told(answer, seen):
    with pytest.raises(
        RholossError, match=rf"returned a {seen} without `logits`. Pass `loss=`, a function"
    ):
        classification(Answering(answer), (X, Y))


def test_low_precision_output_is_lifted_before_the_loss():
    logits = X.bfloat16()
    loss_B = classification(Answering(lambda _: logits), (X, Y))
    assert loss_B.dtype == torch.float32
    assert torch.equal(loss_B, F.cross_entropy(logits.float(), Y, reduction="none"))


# Tasks.


@pytest.mark.parametrize(
    ("output", "target"),
    [(X[:, 0], Y), (X, Y.float()), (X, F.one_hot(Y, 4)), (X[:, None], Y)],
)
def test_classification_says_what_it_needs(output, target):
    with pytest.raises(
        RholossError, match=r"taken to be 'classification', which needs logits \[B, C"
    ):
        losses.classification(output, target)
    with pytest.raises(
        RholossError, match=r"loss='multi_label', 'regression', 'tokens' or 'causal_"
    ):
        losses.classification(output, target)


def test_multi_label_is_the_mean_over_labels():
    target = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1]])
    found = losses.multi_label(X[:2], target)
    by_hand = [
        [-F.logsigmoid(z if t else -z).item() for z, t in zip(zs, ts, strict=True)]
        for zs, ts in zip(X[:2], target, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(by_hand).mean(1))


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_one_binary_label_may_have_a_dimension_of_its_own_or_not(shape):
    output, target = X[:, 0], (Y > 0).long()
    expected = F.binary_cross_entropy_with_logits(output, target.float(), reduction="none")
    torch.testing.assert_close(losses.multi_label(output.reshape(shape), target), expected)


def test_regression_is_the_mean_square_over_each_example():
    output, target = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    assert losses.regression(output, target).tolist() == [2.0, 5.0]
    assert losses.regression(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 2])).tolist() == [4, 0]
    maps = torch.arange(24.0).reshape(2, 3, 2, 2)
    assert losses.regression(maps, torch.zeros(2, 3, 2, 2)).shape == (2,)


@pytest.mark.parametrize("name", ["regression", "multi_label"])
@pytest.mark.parametrize(
    ("output", "target"),
    [((6, 4), (6,)), ((2, 3), (3, 2)), ((), ())],
    ids=["too many outputs", "rows and columns swapped", "no rows"],
)
def test_outputs_and_targets_that_do_not_fit(name, output, target):
    wanted = (
        rf"loss='{name}' needs as many outputs as targets .*put out \({', '.join(map(str, output))}"
    )
    with pytest.raises(RholossError, match=wanted):
        losses.TASKS[name].per_example(torch.zeros(output), torch.zeros(target))


def test_token_losses_are_averaged_over_the_tokens_that_count():
    generator = torch.Generator().manual_seed(1)
    output = torch.randn(3, 5, 7, generator=generator)
    target = torch.randint(7, (3, 5), generator=generator)
    target[0, 3:] = target[2] = losses.IGNORED
    found = losses.tokens(output, target)
    torch.testing.assert_close(found[0], F.cross_entropy(output[0, :3], target[0, :3]))
    torch.testing.assert_close(found[1], F.cross_entropy(output[1], target[1]))
    assert found[2] == 0  # no token counts


def test_causal_language_models_are_scored_on_the_next_token():
    generator = torch.Generator().manual_seed(1)
    output = torch.randn(2, 5, 7, generator=generator)
    target = torch.randint(7, (2, 5), generator=generator)
    target[1, :3] = losses.IGNORED  # a prompt
    found = losses.causal_lm(output, target)
    torch.testing.assert_close(found[0], F.cross_entropy(output[0, :-1], target[0, 1:]))
    torch.testing.assert_close(found[1], F.cross_entropy(output[1, 2:4], target[1, 3:]))
    assert losses.causal_lm(output[:, :1], target[:, :1]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("output", "target"),
    [((6, 4), (6,)), ((6, 5, 4), (6,)), ((6, 4, 5), (6, 5)), ((6, 5, 4), (6, 5, 1))],
)
def test_token_losses_say_what_they_need(output, target):
    with pytest.raises(RholossError, match=r"need logits \[B, L, C\] and integer targets \[B, L\]"):
        losses.tokens(torch.zeros(output), torch.zeros(target, dtype=torch.long))


def test_float_token_targets_are_told():
    with pytest.raises(RholossError, match=r"targets are \(2, 3\) torch.float32"):
        losses.tokens(torch.zeros(2, 3, 4), torch.zeros(2, 3))


# Names and checks.


def test_losses_by_name():
    assert list(losses.TASKS) == [
        "classification",
        "multi_label",
        "regression",
        "tokens",
        "causal_lm",
    ]
    assert losses.by_name("tokens") is losses.TASKS["tokens"]

    def own(model, batch):
        return model(batch[0]).sum(1)

    assert losses.by_name(own) is own
    with pytest.raises(
        RholossError, match=r"`loss` is 'mse'.*classification, multi_label.*function"
    ):
        losses.by_name("mse")
    with pytest.raises(
        RholossError, match="`loss` is cross_entropy, which is called with an output and a target"
    ):
        losses.by_name(torch.nn.functional.cross_entropy)


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (torch.tensor(0.3), r"shape \(\). It was reduced: use reduction='none'"),
        (torch.tensor([0.3]), r"shape \(1,\). It was reduced: use reduction='none'"),
        (torch.zeros(6, 5), r"shape \(6, 5\). Average over all other dimensions"),
        (torch.zeros(5), r"shape \(5,\). Average"),
        (0.3, "a float. Average"),
        (SimpleNamespace(loss=X), "a SimpleNamespace. Average"),
    ],
)
def test_a_loss_that_is_not_per_example_is_told(loss, seen):
    wanted = rf"`loss` must return one number for each of the 6 examples, .* but returned {seen}"
    with pytest.raises(RholossError, match=wanted):
        losses.check_per_example(loss, 6)


def test_a_loss_per_example_passes_and_another_argument_is_named():
    assert losses.check_per_example(EXPECTED, 6) is EXPECTED
    with pytest.raises(RholossError, match="`margin` must return one number"):
        losses.check_per_example(torch.tensor(1.0), 6, argument="margin")


def test_a_reduced_loss_fails_at_the_first_call(toy):
    def reduced(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    select = rho.Selector("loss", keep=0.1, loss=reduced)
    with pytest.raises(RholossError, match=r"each of the 320 examples.*use reduction='none'"):
        select(toy.model(), toy.batch(0))


def test_a_loss_of_ones_own_is_used(toy):
    model, (index, x, y) = toy.model(dropout=0.0), toy.batch(0)

    def smoothed(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=0.3)

    select = rho.Selector("loss", k=7, loss=smoothed, batch_norm="eval")
    chosen, *_ = select(model, (index, x, y))
    with torch.no_grad():
        expected = smoothed(model.eval(), (x, y)).topk(7).indices
    assert torch.equal(chosen, index[expected])
