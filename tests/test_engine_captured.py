"""What a GPU replays is what eager steps do, and what is captured does not wait for the host.

On a GPU that is pretended (`fixtures_gpu`): a graph that is replayed sees tensors alone, and none of what
Python did since it was recorded.
"""

import gc
import math
import weakref

import pytest
import torch
import torch._dynamo  # else the first trainer imports it, and Python then keeps that trainer for a while
from fixtures_gpu import Generator, pretended_gpu  # noqa: F401
from fixtures_images import IL, IMAGES, Y
from torch import nn

import rholoss as rho
from rholoss.engine import (
    CropFlip,
    Evaluator,
    Folded,
    Gate,
    InfoBatch,
    LowerResolution,
    Proxy,
    RandomShare,
    Recorded,
    Remembered,
    Resident,
    Reuse,
    Shortlist,
    Streamed,
    Trainer,
    capture,
    fit_resident,
    one_cycle,
)
from rholoss.engine.tuning import Tuning
from rholoss.errors import RholossError

N, STEPS = 200, 24
THERE = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "augment": CropFlip(pad=1), "device": "cuda:0"}
pytestmark = pytest.mark.usefixtures("pretended_gpu")


def make_model(width=8):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(4 * width, 4),
    )  # fmt: skip


def live(**options):
    return {"irreducible": rho.LiveIrreducible(make_model(4), lr=1e-2, **options)}


def folded(**options):
    return {"batch_norm": "eval", "scoring": Folded(0.8), **options}


PROBATION = Remembered(math.log(4), skip=0.5)
OPTIONS = {
    "boltzmann": lambda: {"method": rho.boltzmann("rho")},
    "bf16": lambda: {"precision": "bf16"},
    "batch": lambda: {"batch_norm": "batch"},
    "eval": lambda: {"batch_norm": "eval"},
    "overlapped": lambda: {"overlap": True, "precision": "bf16"},
    "overlapped, sampled": lambda: {"overlap": True, "method": "grad_norm_is"},
    "ahead": lambda: {"overlap": "ahead", "precision": "bf16"},
    "ahead, folded": lambda: folded(overlap="ahead"),
    "following means": lambda: folded(scoring=Folded(0.5, means=8)),
    "following means, ahead": lambda: folded(scoring=Folded(0.5, means=8), overlap="ahead"),
    "live": live,
    "live, train": lambda: live(batch_norm="train"),
    "folded": folded,
    "folded, overlapped": lambda: folded(overlap=True),
    "folded by rows": lambda: {"scoring": Folded(rows=8)},
    "folded by rows, overlapped": lambda: {"scoring": Folded(rows=8), "overlap": True},
    "half resolution": lambda: {"scoring": LowerResolution(2)},
    "half resolution, overlapped": lambda: {"scoring": LowerResolution(2), "overlap": True},
    "proxy": lambda: {"scoring": Proxy(lambda: make_model(4))},
    "reuse": lambda: {"scoring": Reuse(0.5), "overlap": True},
    "shortlist": lambda: folded(scoring=Shortlist(0.5, by=Folded(0.8))),
    "gate": lambda: {"scoring": Gate(0.5)},
    "replay": lambda: {"scoring": Recorded((torch.arange(STEPS * 8) % N).view(STEPS, 8).tolist())},
    "tuned": lambda: {"tuning": Tuning({}, {}, "all", compiled_sort=True, books_beside=True)},
    "sums": lambda: {"tuning": Tuning(sums="all")},
    "probation": lambda: {"method": "uniform", "plan": PROBATION},
    "InfoBatch": lambda: {"method": "uniform", "plan": InfoBatch()},
    "annealed, probation": lambda: folded(
        schedule=rho.annealed(STEPS, switch=0.5, drop=0), plan=PROBATION
    ),
    "annealed, shortlist, ahead": lambda: folded(
        scoring=Shortlist(0.5, by=Folded(0.5, means=8)),
        overlap="ahead",
        plan=PROBATION,
        schedule=rho.annealed(STEPS, switch=0.5, drop=0),
    ),
    "annealed": lambda: {"schedule": rho.annealed(STEPS, switch=0.5, drop=0.1)},
    "window": lambda: {"schedule": rho.window(6, 14)},
    "SGD": lambda: {"optimizer": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True)},
    "AdamW": lambda: {"optimizer": torch.optim.AdamW},
}
KINDS = {name: lambda name=name: {"method": name} for name in rho.METHODS} | OPTIONS


def make(kind="rho", data=Resident, steps=STEPS, **options):
    options = {"irreducible": IL[:N], "draws": 3, **KINDS[kind](), **options}
    made = Trainer(
        make_model(), data(IMAGES[:N], Y[:N], **THERE), total_steps=steps, candidates=32, keep=0.25,
        learning_rate=one_cycle(1e-2, steps), seed=3, **options,
    )  # fmt: skip
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index.tolist()))
    torch.manual_seed(7)  # of dropout
    return made


def done(made, steps=STEPS):
    made.train(steps)
    made.flush()
    return made


def check_same(one, other):
    assert one.seen == other.seen
    weights, others = (made.model.state_dict().values() for made in (one, other))
    assert all(map(torch.equal, weights, others))


def eagerly(monkeypatch):
    """No more graphs from now on."""
    monkeypatch.setattr(capture, "WARM_UP", math.inf)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_do_what_eager_ones_do(monkeypatch, kind):
    graphs = done(make(kind))
    used = [captured for captured in graphs.captured.values() if captured.graph]
    assert len(used) == (2 if kind.startswith(("annealed", "window")) else 1)
    assert not any(captured.why_eager for captured in graphs.captured.values())
    eagerly(monkeypatch)
    eager = done(make(kind))
    assert not any(captured.graph for captured in eager.captured.values())
    check_same(graphs, eager)


@pytest.mark.parametrize("kind", ["rho", "overlapped", "annealed, shortlist, ahead", "shortlist"])
def test_streamed_rows_reach_a_graph(kind):
    streamed, resident = (done(make(kind, data)) for data in (Streamed, Resident))
    assert any(captured.graph for captured in streamed.captured.values())
    check_same(streamed, resident)


RESUMED = (
    "following means, ahead",
    "grad_norm_is",
    "overlapped",
    "ahead",
    "live",
    "folded",
    "proxy",
    "shortlist",
    "annealed, probation",
    "annealed, shortlist, ahead",
)


@pytest.mark.parametrize("kind", RESUMED)
def test_a_graph_goes_on_from_a_state(kind):
    """In the trainer that saved it and went on, and in another that was captured before."""
    whole, second, first = done(make(kind)), done(make(kind), 7), done(make(kind), 10)
    state = first.state_dict()
    done(first, 6)
    for made in (first, second):
        made.load_state_dict(state)
        made.seen = whole.seen[:10]
        check_same(done(made, STEPS - 10), whole)


@pytest.mark.parametrize(
    "kind", ["rho", "bald", "live, train", "folded", "following means", "proxy", "shortlist"]
)
def test_timing_scoring_between_replays_changes_nothing(kind):
    timed = done(make(kind), 10)
    timed.time_scoring(repeats=2)
    check_same(done(timed, STEPS - 10), done(make(kind)))


@pytest.mark.parametrize("kind", ["overlapped", "ahead", "following means, ahead"])
def test_weights_are_not_updated_before_they_are_copied(monkeypatch, kind):
    """By the stream that scores: it notes that it has them, and the update waits for that."""
    told = []
    made = make(kind)
    update, refresh = made.optimizer.step, made.overlapped.refresh_weights
    monkeypatch.setattr(made.optimizer, "step", lambda: (told.append("update"), update()))
    monkeypatch.setattr(
        made.overlapped, "refresh_weights", lambda: (refresh(), told.append("copied"))
    )
    monkeypatch.setattr(torch.cuda.Event, "record", lambda *_: told.append("noted"))
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *_: told.append("awaited"))
    made.train(2)
    assert told == 2 * ["copied", "noted", "awaited", "update"]


def test_a_graph_reads_the_losses_of_the_next_rung_and_new_rates(monkeypatch):
    def run():
        rungs = [torch.full((N,), 1.3), IL[:N] / 10]
        losses = rho.Ladder([rho.Irreducible.from_losses(rung) for rung in rungs])
        made = done(make(steps=140, irreducible=losses), 120)
        assert made.source.rung == 1
        made.change_length(130, 0.05)
        return done(made, 10)

    graphs = run()
    eagerly(monkeypatch)
    check_same(graphs, run())


def test_irreducible_losses_and_evaluation_in_graphs(monkeypatch):
    data = Resident(IMAGES[:N], Y[:N], **THERE)

    def run():
        torch.manual_seed(7)
        il = fit_resident(make_model, data, folds=2, epochs=4, batch_size=32, precision="bf16")
        made = make(irreducible=il)
        evaluate = Evaluator(made.model, data, num_classes=4, batch_size=64)
        return il.values, [(done(made, 4), evaluate())[1] for _ in range(6)]

    values, found = run()
    eagerly(monkeypatch)
    others, expected = run()
    assert torch.equal(values, others)
    assert found == expected
    assert found[0] != found[-1]


@pytest.mark.parametrize(
    "kind", ["rho", "overlapped", "folded", "shortlist", "annealed, probation"]
)
def test_graphs_go_with_their_trainer(kind):
    """And with them their memory. To capture another one does not make Python look for rings any more."""
    gc.collect()
    gc.disable()
    try:
        made = done(make(kind))
        made.on_flush.clear()  # which has the trainer, too
        left = [weakref.ref(made), *(weakref.ref(one) for one in made.captured.values())]
        del made
        assert [one() for one in left] == [None] * 3
    finally:
        gc.enable()


def test_cudnn_tries_as_many_algorithms_as_it_was_told_and_is_itself_again(monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark_limit", 3)
    seen = []

    class Layer(nn.Flatten):
        def forward(self, x):
            seen.append((cudnn.benchmark, cudnn.benchmark_limit))
            return super().forward(x)

    for tuning, expected in ((None, (True, 10)), (Tuning(algorithms=0), (True, 0))):
        model = nn.Sequential(Layer(), nn.Linear(IMAGES[0].numel(), 4))
        made = Trainer(
            model, Resident(IMAGES[:N], Y[:N], **THERE), total_steps=STEPS, candidates=32,
            irreducible=IL[:N], tuning=tuning,
        )  # fmt: skip
        for act in (lambda made=made: made.train(6), made.time_scoring):
            seen.clear()
            act()
            assert seen[-1] == expected
            assert (cudnn.benchmark, cudnn.benchmark_limit) == (False, 3)


@pytest.mark.parametrize("method", ["rho", "uniform"])
def test_a_label_without_an_output_is_told_before_it_reaches_the_gpu(method):
    data = Resident(IMAGES[:N], torch.where(torch.arange(N) == N - 1, 4, Y[:N]), **THERE)
    made = Trainer(
        make_model(), data, total_steps=9, method=method, irreducible=IL[:N], candidates=32
    )
    with pytest.raises(RholossError, match="labels go from 0 to 4, but the model put out 4 logits"):
        made.train(9)


@pytest.fixture
def default_there():
    """`torch.set_default_device`, as scripts do that have everything on the GPU."""
    yield lambda: torch.set_default_device("cuda:0")
    torch.set_default_device(None)


@pytest.mark.parametrize("data", [Resident, Streamed])
@pytest.mark.parametrize("kind", ["rho", "annealed", "probation", "InfoBatch", "replay", "folded"])
def test_choices_do_not_depend_on_the_default_device(default_there, kind, data):
    expected = done(make(kind, data))
    default_there()
    found = done(make(kind, data))
    found.load_state_dict(found.state_dict())
    assert found.seen == expected.seen


def test_rows_are_planned_on_the_host_whatever_the_default_device(default_there):
    plans = (RandomShare(0.5), PROBATION)
    expected = [list(rho.Planned(range(N), plan, passes=2)) for plan in plans]
    default_there()
    assert [list(rho.Planned(range(N), plan, passes=2)) for plan in plans] == expected


# That the pretended GPU notices what it is there for.


@pytest.mark.parametrize(
    ("asks", "why"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[x > 0], "by a mask"),
        (lambda x: x.cpu(), "a copy to the host"),
        (lambda x: x + torch.ones(3).to(x.device), "_to_copy"),
        (lambda x: x * torch.tensor(2.0), "mul"),
        (lambda x: torch.rand(3, generator=Generator(x.device), device=x.device), "generator"),
    ],
)
def test_what_cannot_be_captured_is_noticed(asks, why):
    x = torch.ones(3, device="cuda:0")
    captured = capture.Captured(lambda: asks(x), x.device)
    with pytest.warns(UserWarning, match=f"runs eagerly: operation not permitted.*{why}"):
        [captured() for _ in range(5)]


class Breaks(nn.Module):
    """Asks the GPU for a number, in scoring and in training."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x):
        return self.inner(x) * (1.5 if x.sum().item() > 0 else 1.0)


@pytest.mark.filterwarnings("always")  # else Python itself tells nothing twice
def test_a_model_that_breaks_capture_is_told_once_in_all_phases():
    schedule = rho.annealed(STEPS, switch=0.5, drop=0.1)
    data = Resident(IMAGES[:N], Y[:N], **THERE)
    made = Trainer(
        Breaks(), data, total_steps=STEPS, irreducible=IL[:N], candidates=32, schedule=schedule
    )
    assert made.why_eager == ""  # not tried yet
    with pytest.warns(UserWarning, match="runs eagerly: operation not permitted") as told:
        made.train(STEPS)
    assert len(told) == 1
    assert all(captured.eager for captured in made.captured.values())
    assert "_local_scalar_dense" in made.why_eager


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # torch's, the driver's
def test_no_memory_left_for_the_graph_is_told_as_such(error):
    calls = []

    def body():
        calls.append(1)
        if len(calls) > capture.WARM_UP:
            raise error("CUDA error: out of memory\nCompile with")

    captured = capture.Captured(body, torch.device("cuda", 0))
    with (
        pytest.raises(RholossError, match=r"Reduce it.*out of memory\)$"),
        capture.says_what_to_reduce("it"),
    ):
        [captured() for _ in range(capture.WARM_UP + 1)]
    assert not captured.eager


def test_a_tensor_that_is_replaced_is_not_seen_by_a_graph():
    class Holds:
        x = torch.ones(2, device="cuda:0")

    y = torch.zeros(2, device="cuda:0")
    captured = capture.Captured(lambda: y.add_(Holds.x), y.device)
    for _ in range(5):
        captured()
    Holds.x = torch.zeros(2, device="cuda:0")
    captured()
    assert y.tolist() == [6.0, 6.0]


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda:0") + torch.ones(2)
