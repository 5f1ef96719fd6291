"""What a trainer looks at before it trains: rates, precision, labels, and the mode of each layer."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.engine import (
    Evaluator,
    Folded,
    InfoBatch,
    Proxy,
    Recorded,
    Remembered,
    Resident,
    Reuse,
    Shortlist,
    Streamed,
    Trainer,
    fit_resident,
    one_cycle,
)
from rholoss.engine.resident import memory_needed
from rholoss.errors import RholossError

N = 200
X = torch.randn(N, 20, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (N,), generator=torch.Generator().manual_seed(1))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 5))


def trainer(model=None, targets=Y, **options):
    options = {"total_steps": 30, "irreducible": torch.zeros(N), "candidates": 40, **options}
    return Trainer(model or make_model(), Resident(X, targets, device="cpu"), **options)


@pytest.mark.parametrize(
    ("rate", "says"),
    [
        (lambda step: 0.1 - 0.01 * step, r"is -0.01 at step 11 of `total_steps`=30"),
        (lambda step: math.nan if step == 7 else 0.1, "is nan at step 7 of"),
        (math.inf, "is inf at step 0 of"),
        (-1e-3, "is -0.001 at step 0 of"),
    ],
)
def test_a_rate_is_finite_and_not_negative(rate, says):
    with pytest.raises(RholossError, match=f"`learning_rate` {says}.*another number of steps"):
        trainer(learning_rate=rate)
    made = trainer(learning_rate=0.0)
    with pytest.raises(RholossError, match="`learning_rate` is"):
        made.change_length(20, rate)
    assert made.total_steps == 30


def test_a_cycle_for_fewer_steps_than_the_run_has_is_refused():
    assert one_cycle(0.1, 10)(10) == 0
    with pytest.raises(RholossError, match=r"`one_cycle` was made for .*=10, .* step 11"):
        trainer(learning_rate=one_cycle(0.1, 10))


@pytest.mark.parametrize("precision", ["fp16", "float16", torch.float16])
def test_nothing_is_trained_in_half_precision_without_scaling(precision):
    says = "`precision` is .*float16|fp16.*does not scale it; use 'bf16'"
    with pytest.raises(RholossError, match=says):
        trainer(precision=precision)
    with pytest.raises(RholossError, match=says):
        fit_resident(make_model, Resident(X, Y, device="cpu"), folds=2, precision=precision)
    Evaluator(make_model(), Resident(X, Y, device="cpu"), num_classes=5, precision="fp16")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("kind", [Resident, Streamed])
def test_labels_are_whole_numbers_of_any_kind(kind, dtype):
    data, few = (kind(X, labels, device="cpu") for labels in (Y, Y.to(dtype)))
    few = few.with_targets(Y.to(dtype))
    ends = []
    for each in (data, few):
        made = Trainer(make_model(), each, total_steps=5, method="grad_norm", candidates=40)
        made.train(5)
        ends.append(made.model[0].weight)
    assert torch.equal(*ends)
    assert torch.equal(few.targets, Y)
    evaluations = [Evaluator(make_model(), each, num_classes=5)() for each in (data, few)]
    assert evaluations[0] == evaluations[1]
    assert memory_needed(X, Y.to(dtype), None) == memory_needed(X, Y, None)


def test_bytes_of_many_labels_a_row_stay_small():
    many = Resident(X, torch.zeros(N, 7, dtype=torch.uint8), device="cpu")
    assert many.targets.dtype == torch.uint8
    assert many.bytes == N * (20 * 4 + 7 + 8)


@pytest.mark.parametrize("label", [-1, -100])
def test_a_label_below_0_is_no_class(label):
    targets = torch.where(torch.arange(N) % 50 == 3, label, Y)
    data = Resident(X, targets, device="cpu")
    says = rf"`targets` hold {label}, .* 4 labels are below 0, the first in row 3. Leave rows"
    with pytest.raises(RholossError, match=says):
        trainer(targets=targets)
    with pytest.raises(RholossError, match=says):
        fit_resident(make_model, Resident(X, Y, device="cpu"), score=data)
    with pytest.raises(RholossError, match=says):
        Evaluator(make_model(), data, num_classes=5)


@pytest.mark.parametrize(("loss", "counts"), [("tokens", 0), ("causal_lm", 1)])
def test_a_row_of_tokens_has_a_label_that_counts(loss, counts):
    """It would win as soon as others are learnt; `Selector` does not choose it."""
    targets = torch.full((N, 3), -100)
    targets[:, counts] = 1
    targets[7] = -100
    targets[9] = torch.tensor([0, -100, -100] if loss == "causal_lm" else [-100, -100, -100])
    data = Resident(X, targets, device="cpu")
    with pytest.raises(
        RholossError, match=r"No label of 2 rows counts .*the first of which is row 7"
    ):
        Trainer(make_model(), data, total_steps=5, loss=loss, method="loss", candidates=40)
    with pytest.raises(RholossError, match=r"Leave them out \(`data.take\(rows\)`\)"):
        fit_resident(make_model, data, folds=2, loss=loss)
    few = data.take((targets[:, counts] == 1).nonzero().flatten())
    Trainer(make_model(), few, total_steps=5, loss=loss, method="loss", candidates=40)


@pytest.mark.parametrize("method", ["loss", "uniform"])
@pytest.mark.parametrize("label", [5, 500])
def test_a_label_that_the_model_has_no_output_for_is_found_before_the_first_step(method, label):
    """A GPU would stop for good at it, some steps later, and not say why."""
    targets = torch.where(torch.arange(N) == N - 1, label, Y)
    made = trainer(targets=targets, method=method)
    with pytest.raises(
        RholossError, match=rf"labels go from 0 to {label}, but the model put out 5"
    ):
        made.train(1)
    assert made.step == 0


def test_a_token_may_be_left_out_but_is_a_class_otherwise():
    targets = torch.full((N, 3), -100)
    targets[:, 1] = 1
    targets[50, 1] = -2
    data = Resident(torch.zeros(N, 3), targets, device="cpu", dtype=torch.long)
    model = nn.Embedding(1, 2)
    made = Trainer(model, data, total_steps=5, loss="tokens", method="uniform", candidates=40)
    with pytest.raises(
        RholossError, match="labels go from -2 to 1, but the model put out 2 logits"
    ):
        made.train(1)


def test_other_losses_have_targets_of_their_own():
    data = Resident(X, torch.full((N, 1), -100), device="cpu")
    made = Trainer(
        nn.Linear(20, 1), data, total_steps=5, loss="regression", method="loss", candidates=40
    )
    made.train(5)


def test_a_frozen_layer_stays_frozen():
    model = make_model().train()
    model[1].eval()
    proxy = make_model()
    proxy[1].eval()
    trainer(model, scoring=Proxy(lambda: proxy)).train(30)
    for each in (model, proxy):
        assert each.training
        assert each[2].training
        assert not each[1].training
        assert each[1].num_batches_tracked == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_who_evaluates_in_between_changes_nothing(overlap):
    ends = []
    for frozen in (False, True):
        for evaluates in (False, True):
            model = make_model()
            model[1].train(not frozen)
            made = trainer(model, overlap=overlap)
            made.train(10)
            if evaluates:
                model.eval()
            made.train(10)
            if evaluates:
                model.eval()
                model.train()  # would unfreeze
            made.train(10)
            ends.append(list(model.state_dict().values()))
    assert all(map(torch.equal, ends[0], ends[1]))
    assert all(map(torch.equal, ends[2], ends[3]))
    assert not torch.equal(ends[0][0], ends[2][0])


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_in_eval_mode_is_trained_in_train_mode(inside):
    """A pretrained one comes in eval mode, and may be inside another, which is not."""
    model = make_model().eval()
    trainer(nn.Sequential(model) if inside else model, method="uniform").train(30)
    assert model[1].num_batches_tracked == 30
    assert model[2].training


@pytest.mark.parametrize("overlap", [True, "ahead"])
def test_what_does_not_go_with_overlap_is_told_with_its_value(overlap):
    for options in (
        {"scoring": Proxy(make_model)},
        {"irreducible": rho.LiveIrreducible(make_model())},
    ):
        with pytest.raises(RholossError, match=f"`overlap`={overlap!r} cannot be combined with"):
            trainer(overlap=overlap, **options)
    with pytest.raises(RholossError, match=f"'rho' and overlap={overlap!r}"):
        trainer(overlap=overlap).time_scoring()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": make_model}, "`model` is a function; pass the torch.nn.Module itself"),
        ({"total_steps": 30.0}, "`total_steps` must be a whole number, but is 30.0"),
        ({"candidates": "40"}, "`candidates` must be a whole number, but is '40'"),
        ({"seed": 1.5}, "`seed` must be a whole number, but is 1.5"),
        ({"keep": "0.1"}, r"`keep` must be in \(0, 1\] .* but are 0.1 and 40"),
        ({"schedule": "annealed"}, "`schedule` is 'annealed'; pass a schedule, for instance"),
        ({"schedule": rho.annealed}, "`schedule` is <function annealed.*; pass a schedule"),
        ({"plan": "infobatch"}, r"`plan` is 'infobatch'; pass .* for example InfoBatch\(\)"),
        ({"plan": InfoBatch}, "`plan` is <class .*InfoBatch'>; pass an instance"),
        ({"learning_rate": [0.1] * 30}, r"`learning_rate` is a list; give a number, or a function"),
        ({"learning_rate": "cosine"}, "`learning_rate` is a str; give a number, or a function"),
    ],
)
def test_arguments_of_another_kind_are_told_before_anything_is_made(options, says):
    with pytest.raises(RholossError, match=says):
        trainer(**options)
    assert trainer(total_steps=np.int64(3), candidates=np.int32(40), seed=np.int64(1)).k == 4


def test_choices_of_rows_that_have_names_cannot_be_replayed():
    says = r"`log` holds ids that are not whole numbers \('a.png'.*whole numbers"
    with pytest.raises(RholossError, match=says):
        Recorded([["a.png", "b.png"]])


@pytest.fixture
def float64():
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "ahead", "plan": InfoBatch()},
        {"scoring": lambda: Reuse(0.5), "plan": Remembered(math.log(5))},
        {"scoring": lambda: Shortlist(0.6, by=Folded(0.8)), "batch_norm": "eval"},
        {"scoring": lambda: Folded(0.5, means=8), "batch_norm": "eval"},
    ],
)
def test_another_default_type_of_floats_changes_nothing(float64, options):
    """`torch.set_default_dtype`, as scripts do that compute in double precision elsewhere."""
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(24, 5)
    options, first = dict(options), nn.Sequential(nn.Unflatten(1, (1, 4, 5)), *layers)
    make_scoring = options.pop("scoring", lambda: None)
    data = Resident(X, Y, device="cpu")

    def run():
        torch.manual_seed(3)
        schedule, model = rho.window(0, 20), copy.deepcopy(first)
        made = trainer(model, schedule=schedule, scoring=make_scoring(), **options)
        made.train(30)
        fit = {"folds": 2, "epochs": 2, "batch_size": 50}
        il = fit_resident(lambda: copy.deepcopy(first), data, **fit)
        return [*made.model.state_dict().values(), il.values]

    usual = run()
    float64()
    assert all(map(torch.equal, usual, run()))


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 5))


def test_layers_without_a_shape_are_told():
    says = r"`{}`: the Sequential has lazy layers.*'1\.running_mean' has no shape.*once on a batch"
    data = Resident(X, Y, device="cpu")
    with pytest.raises(RholossError, match=says.format("model")):
        trainer(lazy())
    with pytest.raises(RholossError, match=says.format("make_model")):
        trainer(scoring=Proxy(lazy))
    with pytest.raises(RholossError, match=says.format("make_model")):
        fit_resident(lazy, data, folds=2)
    seen = lazy()
    seen(X)
    trainer(seen).train(2)


def test_a_copy_that_scores_in_less_precision_than_the_model_is_refused():
    data = Resident(X, Y, device="cpu", dtype=torch.float64)
    options = {"total_steps": 3, "irreducible": torch.zeros(N), "candidates": 40}
    for overlap in (True, "ahead"):
        with pytest.raises(
            RholossError, match=r"in torch\.float64, but `overlap`.*in torch.float32"
        ):
            Trainer(make_model().double(), data, overlap=overlap, **options)
    Trainer(make_model().double(), data, **options).train(3)
