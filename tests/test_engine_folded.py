"""Scoring with BatchNorm folded in: the scores of eval mode, whatever the weights have become."""

import pytest
import torch
from fixtures_folded import IMAGES, N, Net, run, trained
from fixtures_gpu import pretended_gpu  # noqa: F401
from torch import nn
from torch.nn import functional as F

from experiments.models import ResNet18
from rholoss.engine import Folded, Gate, Proxy, Resident, Reuse, Shortlist, Trainer
from rholoss.engine.folded import FoldedCopy
from rholoss.engine.fused import FusedConv
from rholoss.errors import RholossError


@pytest.fixture
def images():
    return IMAGES.clone()


@pytest.mark.parametrize("make", [Net, ResNet18])
def test_it_gives_what_the_model_gives_in_eval_mode(make, images):
    model = trained(make())
    folded = FoldedCopy(model, torch.float32)
    for seed in (1, 2):  # and follows the model
        trained(model, seed).eval()
        folded.refresh_statistics()
        folded.refresh_weights()
        with torch.no_grad():
            expected = model(images[:16])
            torch.testing.assert_close(folded.model(images[:16]), expected, rtol=1e-4, atol=1e-4)


def test_what_can_be_fused_is(images):
    folded = FoldedCopy(Net(), torch.float32)
    convs = {n: m.relu for n, m in folded.model.named_modules() if isinstance(m, FusedConv)}
    assert convs == {"stem": True, "conv1": True, "conv2": False, "conv4": True}
    functions = [n.target for n in folded.model.graph.nodes if n.op == "call_function"]
    assert functions.count(F.relu) == 1


class Mixed(nn.Module):
    """Sums of two shapes, and a part that is in float32 whatever the rest is in."""

    def __init__(self):
        super().__init__()
        self.conv0, self.norm0 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, dilation=2), nn.BatchNorm2d(8)
        self.conv3, self.norm3 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.norm0(self.conv0(x)))
        context = x.mean((2, 3), keepdim=True)
        x = F.relu(self.norm1(self.conv1(context)) + x)
        x = F.relu(self.norm2(self.conv2(x)) + context)
        x = x.float().square()
        return self.head(F.relu(self.norm3(self.conv3(x)) + x).mean((2, 3)))


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_sums_and_types_that_cudnn_does_not_fuse_are_left_to_torch(images, precision):
    found = []
    for device in ("cpu", "cuda:0"):
        torch.manual_seed(0)
        trainer = Trainer(
            trained(Mixed()), Resident(images, torch.arange(N) % 5, device=device), total_steps=1,
            irreducible=torch.linspace(0, 1, N), candidates=48, batch_norm="eval", scoring=Folded(),
            precision=precision,
        )  # fmt: skip
        trainer.on_flush.append(lambda step, index, losses: found.append(index.tolist()))
        trainer.train(1)
    assert found[0] == found[1]


def test_a_layer_that_is_called_twice_is_left_alone(images):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.a, self.b = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.last, self.c = nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)

        def forward(self, x):
            x = self.b(self.conv(F.relu(self.a(self.conv(x)))))
            return F.relu(self.c(self.last(x))).mean((2, 3))

    model = trained(Twice()).eval()
    folded = FoldedCopy(model, torch.float32)
    folded.refresh_statistics()
    folded.refresh_weights()
    with torch.no_grad():
        torch.testing.assert_close(folded.model(images), model(images), rtol=1e-4, atol=1e-4)


def test_a_bias_is_added_once_where_two_convolutions_are(images):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.norm0 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            self.long, self.norm1 = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5)
            self.short, self.norm2 = nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5)

        def forward(self, x):
            x = F.relu(self.norm0(self.before(x)))
            return F.relu(self.norm1(self.long(x)) + self.norm2(self.short(x))).mean((2, 3))

    model = Sum().eval()
    for norm, bias in ((model.norm1, 1.0), (model.norm2, 2.0)):
        nn.init.constant_(norm.bias, bias)
    folded = FoldedCopy(model, torch.float32)
    assert [fused.gives_bias_to is not None for fused, _, _ in folded.pairs].count(True) == 1
    for _ in range(2):  # not a second time when it is refreshed
        folded.refresh_statistics()
        folded.refresh_weights()
        with torch.no_grad():
            assert model(images).min() > 1
            torch.testing.assert_close(folded.model(images), model(images), rtol=1e-4, atol=1e-4)


class InADict(nn.Module):
    """As models of some libraries do."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, x):
        return {"logits": self.inner(x)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("net", [Net, InADict])
def test_the_trainer_chooses_what_eval_mode_chooses(images, net, overlap):
    folded, plain = (
        run(scoring, images, net=net, overlap=overlap)[0] for scoring in (Folded(), None)
    )
    assert torch.equal(folded.sort(1).values, plain.sort(1).values)


def batch_statistics(model, x):
    """Mean and variance of what the first BatchNorm of the model is given."""
    with torch.no_grad():
        inside = model.stem(x)
    return torch.stack([inside.mean((0, 2, 3)), inside.var((0, 2, 3))])


def test_statistics_of_its_own_forget_sooner(images):
    model = trained(Net()).train()
    folded = FoldedCopy(model, torch.float32, momentum=0.8)

    def own():
        folded.refresh_statistics()
        return folded.own_state()["statistics"][:, :8].clone()

    expected = torch.stack([model.norm0.running_mean, model.norm0.running_var])
    torch.testing.assert_close(own(), expected)  # at first
    for batch in images.split(16):
        with torch.no_grad():
            model.stem.weight.mul_(1.1)  # weights move, too
        model(batch)
        expected = expected.lerp(batch_statistics(model, batch), 0.8)
        torch.testing.assert_close(own(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own(), expected, rtol=1e-4, atol=1e-4)  # no pass, no change
    for batch in images.split(16)[:2]:  # two passes before it looks again
        model(batch)
    first, second = (batch_statistics(model, batch) for batch in images.split(16)[:2])
    expected = expected.lerp((0.09 * first + 0.1 * second) / 0.19, 1 - 0.2**2)
    torch.testing.assert_close(own(), expected, rtol=1e-4, atol=1e-4)
    model.norm0.eval()  # frozen from now on
    model(images)
    torch.testing.assert_close(own(), expected, rtol=1e-4, atol=1e-4)
    model.load_state_dict(trained(Net(), 5).state_dict())
    torch.testing.assert_close(own()[0], model.norm0.running_mean)


@pytest.mark.parametrize("overlap", [False, True])
def test_with_the_momentum_of_the_model_they_are_its_running_ones(images, overlap):
    exact, own, quick = (
        run(Folded(momentum), images, overlap=overlap)[0].sort(1).values
        for momentum in (None, 0.1, 1.0)
    )
    assert torch.equal(own, exact)
    assert not torch.equal(quick, exact)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("means", [None, 16])
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda f: f,
        lambda f: Gate(0.75, by=f),
        lambda f: Reuse(0.75, by=f),
        lambda f: Shortlist(0.75, by=f),
    ],
)
def test_a_resumed_run_has_its_statistics(images, wrapped, means, overlap):
    def scoring():
        return wrapped(Folded(0.8, means=means))

    whole, _ = run(scoring(), images, overlap=overlap)
    first, half = run(scoring(), images, steps=3, overlap=overlap)
    second, _ = run(scoring(), images, 3, half.state_dict(), overlap=overlap)
    assert torch.equal(torch.cat([first, second]), whole)
    with pytest.raises(RholossError, match="pass `scoring` as it was"):
        run(Folded(), images, 3, half.state_dict(), overlap=overlap)
    with pytest.raises(RholossError, match=r"momentum=0\.8.* has .*momentum=0\.5"):
        run(wrapped(Folded(0.5, means=means)), images, 3, half.state_dict(), overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["train", "batch"])
@pytest.mark.parametrize("net", [Net, InADict])
def test_statistics_of_all_candidates_choose_as_exact_scoring_does(images, net, mode, overlap):
    (folded, one), (exact, two) = (
        run(scoring, images, net=net, batch_norm=mode, overlap=overlap)
        for scoring in (Folded(rows=48), None)
    )
    assert torch.equal(folded.sort(1).values, exact.sort(1).values)
    for (name, ours), theirs in zip(
        one.model.named_buffers(), two.model.buffers(), strict=True
    ):  # in train mode the candidates move the running statistics, too
        if not name.endswith("tracked"):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert one.ledger.scored == two.ledger.scored
    assert one.ledger.forwards == 2 * two.ledger.forwards


def test_statistics_of_some_candidates_are_nearer_than_running_ones(images):
    def shared(scoring, **options):
        return len(set(run(scoring, images, steps=1, **options)[0][0].tolist()) & exact)

    exact = set(run(None, images, steps=1, batch_norm="train")[0][0].tolist())
    assert shared(Folded(rows=24), batch_norm="train") > shared(Folded())


@pytest.mark.parametrize("overlap", [False, True])
def test_statistics_of_frozen_layers_are_those_of_the_state(images, overlap):
    class Frozen(Net):
        def train(self, mode=True):
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
            return self

    def pretrained():
        net = Frozen()
        with torch.no_grad():
            for name, buffer in net.named_buffers():
                if name.endswith(("mean", "var")):
                    buffer.add_(torch.linspace(0, 3, len(buffer)))
        return net

    options = {"batch_norm": "train", "overlap": overlap}
    chosen = []
    for scoring in (Folded(rows=8), None):
        _, first = run(scoring, images, 1, net=pretrained, **options)
        chosen.append(run(scoring, images, 5, first.state_dict(), net=Frozen, **options)[0])
    assert torch.equal(chosen[0].sort(1).values, chosen[1].sort(1).values)


@pytest.mark.parametrize(
    ("scoring", "mode"),
    [
        (lambda: Folded(), "eval"),
        (lambda: Folded(0.8), "eval"),
        (lambda: Folded(means=16), "eval"),
        (lambda: Gate(0.75, by=Folded(means=16)), "eval"),
        (lambda: Reuse(0.75, by=Folded(means=16)), "eval"),
        (lambda: Folded(rows=8), "train"),
    ],
)
def test_timing_the_scoring_changes_nothing(images, scoring, mode):
    whole, _ = run(scoring(), images, batch_norm=mode)
    first, again = run(scoring(), images, steps=3, batch_norm=mode)
    assert again.time_scoring(repeats=2) > 0
    seen = []
    again.on_flush.append(lambda step, index, losses: seen.append(index))
    again.train(3)
    again.flush()
    assert torch.equal(torch.cat([first, *seen]), whole)


@pytest.mark.parametrize("momentum", [0.0, 1.5, -0.1])
def test_a_momentum_is_a_share(momentum):
    with pytest.raises(RholossError, match=f"`momentum` must be in .* but is {momentum}"):
        Folded(momentum)


@pytest.mark.parametrize("options", [{"rows": 0}, {"rows": 8, "momentum": 0.8}])
def test_statistics_are_of_one_kind(options):
    with pytest.raises(RholossError, match=f"`rows` is {options['rows']} and `momentum`"):
        Folded(**options)
    with pytest.raises(RholossError, match="`means` is 0 and `rows` None"):
        Folded(means=0)
    with pytest.raises(RholossError, match="`means` is 8 and `rows` 8"):
        Folded(rows=8, means=8)


@pytest.mark.parametrize(
    ("scoring", "options", "says"),
    [
        (Folded(), {}, r"batch_norm='eval', but it is 'train'.*rows=32"),
        (Folded(rows=8), {"batch_norm": "eval"}, r"rows=8.*batch_norm is 'eval'"),
        (Folded(), {"batch_norm": "eval", "method": "bald"}, "dropout"),
    ],
)
def test_it_refuses_what_cannot_be_folded(images, scoring, options, says):
    with pytest.raises(RholossError, match=says):
        Trainer(
            Net(), Resident(images, torch.arange(N) % 5, device="cpu"), total_steps=1,
            irreducible=torch.zeros(N), candidates=48, scoring=scoring, **options,
        )  # fmt: skip


def test_a_model_that_cannot_be_folded_is_told():
    with pytest.raises(RholossError, match="found no BatchNorm2d"):
        FoldedCopy(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.float32)

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(RholossError, match="cannot trace Branches"):
        FoldedCopy(Branches(), torch.float32)

    class OwnParameter(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.scale

    with pytest.raises(RholossError, match="scale"):
        FoldedCopy(OwnParameter(), torch.float32)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [Gate, Reuse, Shortlist])
def test_what_is_forwarded_in_part_can_be_folded_too(images, kind, overlap):
    chosen = []
    for by in (Folded(), None):
        ids, trainer = run(kind(0.75, by=by), images, overlap=overlap)
        assert trainer.ledger.scored == 6 * 36
        chosen.append(ids.sort(1).values)
    assert torch.equal(*chosen)


@pytest.mark.parametrize("by", [Proxy(Net), Gate(0.5)])
def test_a_part_is_not_forwarded_by_what_learns_or_leaves_out(by):
    with pytest.raises(RholossError, match=f"`by` of `Gate` is a `{type(by).__name__}`"):
        Gate(0.75, by=by)
