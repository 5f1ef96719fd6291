"""The engine on a GPU: captured, without the host, and choosing as the specification does."""

import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss import core
from rholoss.engine import CropFlip, Evaluator, Resident, Trainer, fit_resident
from rholoss.errors import RholossError, TooFewFiniteScoresError
from rholoss.sampler import EPOCHS

pytestmark = pytest.mark.gpu
N, B, K, STEPS = 2000, 320, 32, 24


@pytest.fixture(scope="module")
def toy():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 5, (N,), generator=generator)
    x = torch.randn(N, 20, generator=generator) + 2 * nn.functional.one_hot(y, 20)
    return x, y, torch.rand(N, generator=generator)


def make_model(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 5)
    )


def trainer(toy, model=None, **options):
    x, y, il = toy
    options = {"total_steps": STEPS, "irreducible": il, "seed": 3, **options}
    made = Trainer(model or make_model(), Resident(x, y, device="cuda"), **options)
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index))
    return made


def shares(toy, fast):
    """Share of the specification's choice that the engine made too, step by step, on its own weights."""
    x, y, il = (t.cuda() for t in toy)
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    rows = (
        row
        for epoch in range(9)
        for row in torch.randperm(N, generator=core.step_generator(3, EPOCHS + epoch))[
            : N // B * B
        ].view(-1, B)
    )
    for step, index in zip(range(STEPS), rows, strict=False):
        index = index.cuda()
        selection, _ = core.train_step(
            model, optimizer, (index, x[index], y[index]), rho.METHODS["rho"], K,
            core.step_generator(3, step), il,
        )  # fmt: skip
        chosen = set(index[selection.position].tolist())
        found.append(len(chosen & set(fast.seen[step].tolist())) / K)
    return found


@pytest.mark.filterwarnings("ignore")  # inductor warns of its own doings
@pytest.mark.parametrize("options", [{}, {"compile": True}])
def test_it_chooses_what_the_specification_chooses(toy, options):
    fast = trainer(toy, **options)
    fast.train(STEPS)
    fast.flush()
    assert fast.captured[True].graph is not None
    assert sum(shares(toy, fast)) / STEPS > 0.97  # the order of sums differs, and Adam amplifies it


def test_bfloat16_ranks_the_candidates_as_float32_does(toy):
    """At the same weights: the first step, before any update."""
    x, y, il = (t.cuda() for t in toy)
    fast = trainer(toy, precision="bf16")
    fast.train(1)
    fast.flush()
    index = torch.randperm(N, generator=core.step_generator(3, EPOCHS))[:B].cuda()
    exact = core.measure(make_model().cuda(), x[index], y[index], 1, 0)["loss"] - il[index]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rough = core.measure(make_model().cuda(), x[index], y[index], 1, 0)["loss"] - il[index]
    ranks = torch.stack([exact.argsort().argsort(), rough.argsort().argsort()]).float()
    assert torch.corrcoef(ranks)[0, 1] > 0.999
    best = set(index[exact.topk(K).indices].tolist())
    assert len(best & set(fast.seen[0].tolist())) >= 0.9 * K


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("uniform", {}), ("grad_norm_is", {}), ("bald", {}), ("negative_il", {}),
        ("rho", {"overlap": True}), ("rho", {"overlap": True, "precision": "bf16"}),
        ("rho", {"overlap": "ahead", "precision": "bf16"}),
        ("rho", {"batch_norm": "batch"}), ("rho", {"schedule": rho.annealed(300, switch=0.1, drop=0.1)}),
    ],
)  # fmt: skip
def test_every_kind_of_step_is_captured_and_learns_without_the_host(toy, no_waiting, name, options):
    fast = trainer(toy, make_model(0.2), method=name, total_steps=300, **options)
    fast.train(30)
    fast.flush()
    with no_waiting():
        fast.train(60)
    fast.train(210)
    fast.flush()
    assert any(captured.graph is not None for captured in fast.captured.values())
    assert not any(captured.why_eager for captured in fast.captured.values())
    x, y, _ = toy
    result = Evaluator(fast.model, Resident(x, y, device="cuda"), num_classes=5)()
    assert result.accuracy > 0.7  # from 0.2; no model gets over about 0.8
    assert torch.stack(fast.seen).unique().numel() > 100


@pytest.mark.parametrize(("batch_norm", "passes"), [("eval", 0), ("train", 200)])
def test_a_live_model_learns_inside_the_graph(toy, batch_norm, passes):
    live = rho.LiveIrreducible(
        make_model().cuda(), lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True),
        batch_norm=batch_norm,
    )  # fmt: skip
    fast = trainer(toy, irreducible=live, total_steps=100)
    before = live.model[0].weight.detach().clone()  # a graph on it would pin it to this stream
    fast.train(100)
    fast.flush()
    assert fast.captured[True].graph is not None
    assert (live.model[0].weight - before).abs().max() > 0.01
    assert live.model[1].num_batches_tracked == passes  # it scores and learns in each step


def test_the_learning_rate_of_each_step_reaches_the_optimizer(toy):
    fast = trainer(toy, learning_rate=lambda step: 1e-3 if step < 10 else 0.0)
    fast.train(10)
    weights = fast.model[0].weight.detach().clone()
    fast.train(14)
    fast.flush()
    assert torch.equal(fast.model[0].weight, weights)
    assert not torch.equal(weights, make_model()[0].weight.cuda())


@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)],
    ids=["AdamW", "SGD"],
)
def test_optimizers_of_torch_are_captured_with_a_rate_that_changes(toy, make):
    fast = trainer(
        toy, optimizer=make, total_steps=30, learning_rate=lambda step: 1e-2 if step < 20 else 0.0
    )
    fast.train(20)
    weights = fast.model[0].weight.detach().clone()
    fast.train(10)
    assert fast.captured[True].graph is not None
    assert torch.equal(fast.model[0].weight, weights)
    assert not torch.equal(weights, make_model()[0].weight.cuda())


def test_a_live_model_is_captured_with_its_usual_optimizer(toy):
    live = rho.LiveIrreducible(make_model(), lr=1e-2)
    fast = trainer(toy, irreducible=live, total_steps=30)
    fast.train(30)
    assert fast.captured[True].graph is not None
    assert (live.model[0].weight - make_model()[0].weight.cuda()).abs().max() > 0.01


class Breaks(nn.Module):
    """Asks the device for a number in the middle of the step, or only where it is scored."""

    def __init__(self, trains=True):
        super().__init__()
        self.inner, self.dropout, self.trains = nn.Linear(20, 5), nn.Dropout(0.1), trains

    def forward(self, x):
        asks = self.trains or not self.training
        return self.inner(self.dropout(x)) * (1.5 if asks and x.sum().item() > 0 else 1.0)


@pytest.mark.parametrize("name", ["rho", "grad_norm_is"])  # the latter draws from its generator
def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_why(toy, name):
    fast = trainer(toy, Breaks(), method=name)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph and runs eagerly"):
        fast.train(STEPS)
    fast.flush()
    assert fast.captured[True].eager
    assert len(fast.seen) == STEPS
    assert torch.cuda.current_stream() == stream
    assert torch.rand(9, device="cuda").unique().numel() > 1  # which a failed capture forbids


def test_a_graph_goes_on_after_another_could_not_be_made(toy):
    fast = trainer(toy, Breaks(trains=False), schedule=rho.window(8, 16))
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph and runs eagerly"):
        fast.train(STEPS)
    fast.flush()
    assert fast.captured[True].eager
    assert fast.captured[False].graph is not None
    assert len(fast.seen) == STEPS


def test_a_loss_that_is_not_finite_stops_within_100_steps(toy):
    x, y, il = toy
    fast = trainer((x * float("inf"), y, il), total_steps=200)
    with pytest.raises(TooFewFiniteScoresError, match="fewer finite scores than rows to select"):
        fast.train(200)
    assert fast.step == 100


def test_data_that_does_not_fit_is_refused_before_it_is_taken(toy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**16, 2**30))
    with pytest.raises(
        RholossError, match=r"The data needs 0\.00 GiB on cuda.*`rholoss\.engine\.Streamed`"
    ):
        Resident(toy[0], toy[1], device="cuda")


def test_irreducible_losses_of_images_in_graphs():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (1200,), generator=generator)
    images = torch.randint(0, 60, (1200, 3, 16, 16), dtype=torch.uint8, generator=generator)
    for label in range(4):
        images[y == label, label % 3, 4 * label : 4 * label + 4] += 150
    wrong = torch.rand(1200, generator=generator) < 0.1
    given = torch.where(wrong, (y + 1) % 4, y)
    data = Resident(
        images, given, mean=(0.5,) * 3, std=(0.5,) * 3, augment=CropFlip(1), dtype=torch.bfloat16
    )

    def make():
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 4)
        )

    il = fit_resident(make, data, folds=2, precision="bf16", epochs=15, batch_size=64)
    losses = il.lookup(torch.arange(1200))
    assert losses[wrong].median() > 3 * losses[~wrong].median()


def test_the_device_of_the_data_is_that_of_its_tensors(toy):
    x, y, _ = toy
    data = Resident(x, y, device="cuda")
    assert data.device == data.inputs.device
