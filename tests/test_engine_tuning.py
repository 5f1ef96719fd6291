"""Other ways to lay a step out: they compute the same."""

import argparse
import copy
import math

import pytest
import torch
from benchmarks import bench_step
from torch import nn

from rholoss.engine import Folded, Resident, Trainer, step
from rholoss.engine.fused import ProductConv, as_products
from rholoss.engine.sums import SumsNorm, as_sums
from rholoss.engine.tuning import FASTER, Tuning
from rholoss.errors import RholossError

N = 96
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(N, 3, 8, 8, generator=GENERATOR)
LABELS = torch.randint(0, 4, (N,), generator=GENERATOR)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1},
        {"padding": (2, 0), "stride": (1, 2), "bias": False},
        {"stride": 2, "kernel_size": (1, 3)},
    ],
)
def test_a_product_is_the_convolution_and_so_are_its_gradients(options):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, **{"kernel_size": 3, **options}, dtype=torch.float64)
    x = IMAGES.double().requires_grad_()
    expected = conv(x)
    over = torch.randn_like(expected)
    inputs = [x, *conv.parameters()]
    with as_products(conv):
        assert type(conv) is ProductConv
        out = conv(x)
    assert type(conv) is nn.Conv2d
    torch.testing.assert_close(out, expected)
    pairs = zip(
        *(torch.autograd.grad((o * over).sum(), inputs) for o in (out, expected)), strict=True
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(3, 4, 3, dilation=2),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    ],
)
def test_other_convolutions_are_left_alone(conv):
    with as_products(conv):
        assert type(conv) is nn.Conv2d


def test_a_layer_is_itself_again_after_an_error():
    conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 2"), as_products(conv):
        conv(torch.zeros(1, 2, 8, 8))
    assert type(conv) is nn.Conv2d
    with as_products(conv):
        assert conv(IMAGES[0]).shape == (4, 6, 6)  # one image, without a batch


def passed(norm, x, over, how):
    """What a layer gives, the gradients, and its statistics afterwards."""
    norm, x = copy.deepcopy(norm), x.clone().requires_grad_()
    with as_sums(norm, how):
        out = norm(x)
    weights = list(norm.parameters())
    found = torch.autograd.grad((out * over).sum(), [x, *weights])
    return [out, *found, *norm.buffers()]


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
)
@pytest.mark.parametrize("trains", [True, False])
def test_sums_give_what_batch_norm_gives(options, trains):
    generator = torch.Generator().manual_seed(1)
    x, over = torch.randn(2, 16, 3, 5, 5, generator=generator, dtype=torch.float64)
    x = (
        x * torch.tensor([1.0, 3.0, 0.1])[:, None, None]
        + torch.tensor([0.0, -20.0, 7.0])[:, None, None]
    )
    norm = nn.BatchNorm2d(3, **options).double().train(trains)
    norm(x)  # statistics, if they are kept
    for one, other in zip(passed(norm, x, over, True), passed(norm, x, over, False), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("running", [3000.5, 0.0, math.nan])  # of an earlier batch, if it broke
def test_sums_lose_nothing_where_a_mean_is_far_from_zero(running):
    x = IMAGES + 3000.0
    norm = nn.BatchNorm2d(3)
    norm.running_mean.fill_(running)
    with as_sums(norm):
        assert type(norm) is SumsNorm
        found = norm(x)
    assert type(norm) is nn.BatchNorm2d
    expected = nn.BatchNorm2d(3).double()(x.double()).float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_sums_leave_other_norms_to_themselves():
    other = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.GroupNorm(1, 3))
    with as_sums(other):
        assert [type(layer) for layer in other] == [nn.BatchNorm1d, nn.SyncBatchNorm, nn.GroupNorm]
    one = nn.BatchNorm2d(3)
    with as_sums(one), pytest.raises(ValueError, match="more than 1 value per channel"):
        one(torch.zeros(1, 3, 1, 1))


def trained(tuning, **options):
    torch.manual_seed(1)
    # No bias before BatchNorm: its gradient is nothing but rounding, which Adam makes much of.
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 4),
    )  # fmt: skip
    made = Trainer(
        model, Resident(IMAGES, LABELS, device="cpu"), total_steps=8, candidates=48, keep=0.25,
        irreducible=torch.linspace(0, 1, N), tuning=tuning, **options,
    )  # fmt: skip
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.append(index))
    made.train(8)
    made.flush()
    return made


@pytest.mark.parametrize("ways", bench_step.WAYS)
@pytest.mark.parametrize("options", [{}, {"batch_norm": "eval", "scoring": Folded}])
@pytest.mark.parametrize("overlap", [False, True])
def test_each_way_chooses_and_learns_the_same(ways, options, overlap):
    runs = []
    for tuning in (None, bench_step.tuning(ways)):
        made = {name: v() if isinstance(v, type) else v for name, v in options.items()}
        runs.append(trained(tuning, overlap=overlap, **made))
    usual, other = runs
    assert torch.equal(usual.seen[0], other.seen[0])
    for one, two in zip(usual.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_options_go_to_the_pass_that_they_are_for(monkeypatch):
    given = {}

    def compiled(part, **options):
        given[part.__name__] = options
        return part

    monkeypatch.setattr(step, "compiled", compiled)
    scoring, training = {"max_autotune": True}, {"combo_kernels": True}
    trained(Tuning(scoring, training, compiled_sort=True), compile=True)
    assert given.pop("score_candidates") == scoring
    assert given.pop("train_loss") == training
    assert "top_k" in given
    assert not any(given.values())
    given.clear()
    following = {"batch_norm": "eval", "scoring": Folded(0.5, means=8)}
    trained(Tuning(scoring, training), compile=True, **following)  # folding is a part of scoring
    assert [given[part] for part in ("fold", "remember_less", "follow")] == [scoring] * 3
    given.clear()
    trained(None, compile=True)
    assert "top_k" not in given
    assert not any(given.values())


@pytest.mark.parametrize(("name", "layer"), [("products", ProductConv), ("sums", SumsNorm)])
@pytest.mark.parametrize("wanted", ["none", "scoring", "all"])
def test_which_passes_compute_otherwise(monkeypatch, name, layer, wanted):
    passes = set()
    forward = layer.forward

    def seen(self, x):
        passes.add("all" if torch.is_grad_enabled() else "scoring")
        return forward(self, x)

    monkeypatch.setattr(layer, "forward", seen)
    trained(Tuning(**{name: wanted}))
    expected = {"none": set(), "scoring": {"scoring"}, "all": {"scoring", "all"}}
    assert passes == expected[wanted]


def test_the_faster_way_is_the_one_that_was_timed():
    assert bench_step.tuning("products, combined") == FASTER


@pytest.mark.parametrize("name", ["products", "sums"])
def test_passes_are_of_a_known_kind(name):
    with pytest.raises(RholossError, match=f"`{name}` is 'some'; choose one of none, scoring, all"):
        Tuning(**{name: "some"})


@pytest.mark.parametrize("algorithms", [-1, 2.5, None])
def test_algorithms_are_counted(algorithms):
    with pytest.raises(RholossError, match=f"`algorithms` is {algorithms}; give a whole number"):
        Tuning(algorithms=algorithms)


def test_the_bench_knows_its_rows():
    for base, ways in bench_step.TRIED.items():
        assert [bench_step.row(name) for name in (base, *(f"{base}; {w}" for w in ways))]
        assert all(isinstance(bench_step.tuning(way), Tuning) for way in ways)
    both = bench_step.tuning("combined, stepped in scoring, side first")
    assert both.scoring == {"combo_kernels": True, "coordinate_descent_tuning": True}
    assert both.training == {"combo_kernels": True}
    assert both.side_priority == -2
    for name in ("uniform 33", "uniform 32; faster", "uniform 32; products, faster"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not known; choose among"):
            bench_step.row(name)
