"""Options of the scorer: precision, chunks, compilation; and the FLOPs it counts."""

import numpy as np
import pytest
import torch
from test_scoring import LOSS, MONTE_CARLO, NEEDS, candidates, everything, net, same
from torch import nn
from torch.nn import functional as F

from rholoss import scoring
from rholoss.errors import RholossError
from rholoss.losses import TASKS
from rholoss.scoring import Scorer
from rholoss.selector import Selector

# Precision.


def test_low_precision_runs_the_model_alone():
    x, y = candidates()
    seen = []
    model = net().eval()
    model[4].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    full, low = (
        Scorer(batch_norm="eval", precision=p).measure(model, (x, y), 24, NEEDS)
        for p in (None, "bf16")
    )
    assert seen == [torch.float32, torch.bfloat16]
    for name in NEEDS:
        assert low[name].dtype == torch.float32
        torch.testing.assert_close(low[name], full[name], atol=0.05, rtol=0.05)
    assert not torch.equal(low["loss"], full["loss"])


def test_precision_may_follow_or_overrule_the_users_autocast():
    seen = []
    model = net().eval()
    model[4].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for precision in (None, "fp32", torch.float16):
            Scorer(precision=precision).measure(model, candidates(), 24, LOSS)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
    assert seen == [torch.bfloat16, torch.float32, torch.float16]


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_gradients_of_a_step_in_the_same_autocast_block_are_whole(precision):
    """A weight that was cast under no_grad must not be found in autocast's cache by the step."""
    x, y = candidates()
    gradients = []
    for scored in (False, True):
        model = net().eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if scored:
                Scorer(batch_norm="eval", precision=precision).measure(model, (x, y), 24, LOSS)
            F.cross_entropy(model(x), y).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(gradient is not None for gradient in gradients[1])
    assert same(*gradients)


# Chunks (check 17).


def whole_numbers():
    """A model whose arithmetic is exact, so that chunks can be compared bit by bit."""
    model = nn.Linear(8, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-2, 3, (3, 8), generator=generator))
        model.bias.zero_()
    return model


@pytest.mark.parametrize("chunk", [1, 7, 24, 100])
def test_chunks_give_what_one_shot_gives(chunk):
    x, y = candidates()
    x = x.round()
    x[20:], y[20:] = x[:4], y[:4]  # ties
    model = nn.Sequential(whole_numbers(), nn.BatchNorm1d(3))
    whole, parts = (
        Scorer(batch_norm="eval", chunk=c).dry_run(model, (x, y), 24, NEEDS)[0]
        for c in (None, chunk)
    )
    for name in NEEDS:
        assert torch.equal(whole[name], parts[name])


def test_chunks_cut_what_has_rows_and_pass_on_the_rest():
    x, y = candidates()
    seen = []

    def loss(model, batch):
        seen.append([len(v) for v in (batch["x"]["a"], batch["n"], batch["names"], batch["w"])])
        assert batch["scale"] == 2.0
        return F.cross_entropy(model(batch["x"]["a"]), batch["y"], reduction="none")

    body = {
        "x": {"a": x},
        "y": y,
        "n": np.arange(24),
        "names": [str(i) for i in range(24)],
        "w": torch.ones(3),
        "scale": 2.0,
    }
    Scorer(loss, chunk=10, batch_norm="eval").measure(net(), body, 24, LOSS)
    assert seen == [[8, 8, 8, 3]] * 3  # alike, so that a compiled model sees one shape


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_chunks_do_not_cut_what_belongs_to_all_rows(kind):
    """A table that happens to have as many rows as the batch, and a list of as many."""
    (x, y), seen = candidates(), []
    names = ("index", "x", "table", "list", "y")
    parts = (torch.arange(24), x, torch.rand(24, 8), [torch.ones(2)] * 24, y)
    batch = dict(zip(names, parts, strict=True)) if kind is dict else kind(parts)
    shared = [f"batch[{place!r}]" for place in (("table", "list") if kind is dict else (2, 3))]

    def loss(model, body):
        x, table, pieces, y = body.values() if kind is dict else body
        seen.append([len(x), len(table), len(pieces)])
        return F.cross_entropy(model(x + table.mean()), y, reduction="none")

    select = Selector("loss", keep=0.25, loss=loss, chunk=12, shared=shared, batch_norm="eval")
    for _ in range(2):
        select(net(), batch)
    assert seen == [[12, 24, 24]] * 4


@pytest.mark.parametrize("batch_norm", ["train", "batch"])
def test_chunks_are_refused_where_batch_norm_would_see_each_alone(batch_norm):
    scorer = Scorer(batch_norm=batch_norm, chunk=10)
    with pytest.raises(
        RholossError, match=r"`chunk`=10 would .* all 24 candidates.*batch_norm='eval'"
    ):
        scorer.dry_run(net(), candidates(), 24, LOSS)
    frozen = net()
    frozen[1].eval()
    scorer.dry_run(frozen, candidates(), 24, LOSS)
    scorer.dry_run(net(), candidates(10), 10, LOSS)


# FLOPs and compiled models.


def test_flops_of_one_example_are_counted_once_whatever_the_draws():
    for needs in (LOSS, MONTE_CARLO):
        _, flops = Scorer(batch_norm="eval").dry_run(net(), candidates(), 24, needs)
        assert flops == 2 * (8 * 16 + 16 * 3)


def test_what_cannot_be_counted_is_scored_all_the_same(monkeypatch):
    class Broken(scoring.FlopCounterMode):
        def __exit__(self, *error):
            super().__exit__(*error)
            raise NotImplementedError("not counted")

    monkeypatch.setattr(scoring, "FlopCounterMode", Broken)
    model = net()
    measured, flops = Scorer().dry_run(model, candidates(), 24, LOSS)
    assert flops is None
    assert torch.equal(measured["loss"], Scorer().measure(net(), candidates(), 24, LOSS)["loss"])
    assert model[1].num_batches_tracked.item() == 1


@pytest.fixture
def compiled(monkeypatch):
    """`torch.compile` without code generation, which takes a quarter of a minute; notes its work."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: original(f, **{**o, "backend": backend}))
    return graphs


def test_compiled_scoring_gives_the_same_and_is_compiled_at_the_dry_run(compiled):
    model, plain = net(), net()
    scorer = Scorer(compile=True)
    scorer.dry_run(model, candidates(), 24, LOSS)
    assert len(compiled) == 1
    assert model[1].num_batches_tracked.item() == 1
    Scorer().measure(plain, candidates(), 24, LOSS)
    for seed in (1, 2):
        before = everything(model)[2:]
        ours = scorer.measure(model, candidates(seed=seed), 24, LOSS)["loss"]
        theirs = Scorer().measure(plain, candidates(seed=seed), 24, LOSS)["loss"]
        torch.testing.assert_close(ours, theirs)
        assert same(before, everything(model)[2:])
    assert same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert len(compiled) == 1


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("how", ["wrapped", "in place", "inside"])
def test_a_model_that_the_user_compiled(compiled, how):
    inner = net()
    model = Around(inner)  # of a class of its own: torch leaves its own `Sequential` uncompiled
    if how == "wrapped":
        model = torch.compile(model)
    elif how == "in place":
        model.compile()
    else:
        model.inner = torch.compile(inner)
    flags = [module.training for module in inner.modules()]
    scorer = Scorer()
    measured, flops = scorer.dry_run(model, candidates(), 24, LOSS)
    assert len(compiled) == 0
    assert flops == 2 * (8 * 16 + 16 * 3) or (flops is None and how == "inside")
    again = scorer.measure(model, candidates(), 24, LOSS)
    assert len(compiled) == 1
    expected = Scorer().measure(net(), candidates(), 24, LOSS)
    for loss in (measured, again):
        torch.testing.assert_close(loss["loss"], expected["loss"])
    assert inner[1].num_batches_tracked.item() == 2
    assert [module.training for module in inner.modules()] == flags


# Arguments.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_norm": "paper"}, "`batch_norm` is 'paper'; choose one of train, batch, eval"),
        (
            {"draws": 0},
            "`draws` and `chunk` must be whole numbers of at least 1, but are 0 and None",
        ),
        ({"chunk": 2.5}, "`draws` and `chunk` must be whole .*, but are 10 and 2.5"),
        ({"draws": "3"}, "`draws` and `chunk` must be whole .*, but are '3' and None"),
        ({"chunk": 0}, "must be whole numbers of at least 1, but are 10 and 0; leave `chunk` out"),
        ({"precision": "int4"}, "`precision` is 'int4'; choose one of bf16"),
        (
            {"loss": "hinge"},
            f"`loss` is 'hinge', which is not known; choose one of {', '.join(TASKS)}",
        ),
    ],
)
def test_arguments_that_cannot_be_used(options, message):
    with pytest.raises(RholossError, match=message):
        Scorer(**options)


# TorchScript.


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("whole", [True, False])
def test_a_scripted_model_is_scored_without_dropout(whole):
    """Its flags lie elsewhere than those of other modules; its BatchNorm is in eval mode."""
    model = net()
    expected = Scorer(batch_norm="eval").measure(model, candidates(), 24, LOSS)["loss"]
    scripted = torch.jit.script(model) if whole else nn.Sequential(torch.jit.script(model))
    before = {name: value.clone() for name, value in scripted.state_dict().items()}
    scorer = Scorer()
    first = scorer.dry_run(scripted, candidates(), 24, LOSS)[0]["loss"]
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(scorer.measure(scripted, candidates(), 24, LOSS)["loss"], expected)
    drawn = Scorer(dropout=True).measure(scripted, candidates(), 24, LOSS)["loss"]
    assert not torch.equal(drawn, expected)
    assert all(module.training for module in scripted.modules())
    frozen = Scorer().measure(scripted.eval(), candidates(), 24, LOSS)["loss"]
    torch.testing.assert_close(frozen, expected)
    assert all(torch.equal(value, before[name]) for name, value in scripted.state_dict().items())


def test_layers_get_their_shapes_by_being_scored_unless_they_have_buffers():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    assert Scorer().dry_run(model, candidates(), 24, LOSS)[0]["loss"].shape == (24,)
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    with pytest.raises(RholossError, match=r"`model`: .*'1\.running_mean' has no shape yet.*once"):
        Scorer().dry_run(model, candidates(), 24, LOSS)
