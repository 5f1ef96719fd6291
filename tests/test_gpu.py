"""What holds on a CUDA device only: nothing waits for it, memory, late errors, events, compilation."""

import contextlib
import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rholoss as rho
from rholoss.errors import TooFewFiniteScoresError, UnmeasuredLossError

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
MIB = 2**20


@contextlib.contextmanager
def no_waiting():
    """An error if anything inside makes the host wait for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype, by a warning
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def placed(batch, where):
    if where == "device":
        return tuple(part.to(DEVICE) for part in batch)
    return tuple(part.pin_memory() for part in batch) if where == "pinned" else batch


def on_device(toy, **options):
    return toy.model(**options).to(DEVICE)


# Nothing waits (check 16).


@pytest.mark.parametrize("where", ["pinned", "pageable", "device"])
@pytest.mark.parametrize(
    "method", ["rho", "loss", "uniform", "grad_norm_is", "negative_il", "bald", "boltzmann"]
)
def test_selecting_never_waits_for_the_device(toy, method, where):
    method = rho.boltzmann("rho") if method == "boltzmann" else method
    model = on_device(toy)
    select = rho.Selector(method, irreducible=toy.il, keep=0.1, draws=2)
    batches = [placed(toy.batch(step), where) for step in range(5)]
    select(model, batches[0])  # the dry run may wait
    _ = select.weights
    with no_waiting():
        for batch in batches[1:]:
            chosen = select(model, batch)
            _ = select.weights
    assert all(part.device == DEVICE and len(part) == 32 for part in chosen)
    select.flush()
    index, x, y = (part.cpu() for part in chosen)
    assert torch.equal(x, toy.x[index])
    assert torch.equal(y, toy.y[index])


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"batch_norm": "batch"},
        {"batch_norm": "eval", "chunk": 100},
        {"dropout": True},
        {"schedule": rho.annealed(5, switch=0.4, drop=0.1)},
        {"schedule": rho.warm_up(2)},
        {"log": True},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("where", ["pinned", "device"])
def test_no_option_makes_it_wait(toy, options, where, tmp_path):
    if "log" in options:
        options = {"log": tmp_path / "log"}
    model = on_device(toy)
    select = rho.Selector("rho", irreducible=toy.il, keep=0.1, **options)
    batches = [placed(toy.batch(step), where) for step in range(5)]
    select(model, batches[0])
    with no_waiting():
        for batch in batches[1:]:
            select(model, batch)
    select.flush()
    assert select.step == 5


def test_a_live_model_does_not_wait_either(toy):
    model = on_device(toy)
    select = rho.Selector("rho", irreducible=rho.LiveIrreducible(toy.model(), lr=1e-3), keep=0.1)
    batches = [placed(toy.batch(step), "device") for step in range(4)]
    for batch in batches[:2]:  # the second has the optimizer's state
        select(model, batch)
    with no_waiting():
        for batch in batches[2:]:
            select(model, batch)
    select.flush()


def test_the_table_goes_to_the_device_once(toy):
    model = on_device(toy)
    select = rho.Selector("rho", irreducible=toy.il, keep=0.1)
    select(model, placed(toy.batch(0), "device"))
    table = select.source._on_device
    assert table.device == DEVICE
    for step in range(1, 4):
        select(model, placed(toy.batch(step), "device"))
        assert select.source._on_device.data_ptr() == table.data_ptr()


# Memory (check 13).


def peak(function):
    """Bytes that were allocated at most, beyond what was there before."""
    function()  # workspaces and the optimizer's state
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(DEVICE) - before


def test_peak_memory_of_a_step():
    """At most training on n_b plus inference on n_B; in fact the larger of both and 32 MiB."""
    layers = [nn.Linear(1024, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 4096)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(4096, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    index = torch.arange(8192, device=DEVICE)
    x, y = torch.randn(8192, 1024, device=DEVICE), index % 10
    select = rho.Selector("rho", irreducible=torch.zeros(8192), keep=0.1)
    x_b, y_b = x[:819].clone(), y[:819].clone()

    def train(x, y):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def infer():
        with torch.no_grad():
            F.cross_entropy(model(x), y, reduction="none")

    training, inference = peak(lambda: train(x_b, y_b)), peak(infer)
    whole = peak(lambda: train(*select(model, (index, x, y))[1:]))
    assert whole <= training + inference
    assert whole <= max(training, inference) + 32 * MIB


# Errors come late, but nothing bad is chosen before.


def test_an_unmeasured_loss_is_told_at_the_next_flush_and_never_selected(toy):
    il = toy.il.clone()
    il[400:404] = torch.nan
    select = rho.Selector("negative_il", irreducible=il, keep=0.95, flush_every=3)
    model = on_device(toy)
    fine, bad = (placed(toy.batch(step), "device") for step in (0, 1))
    select(model, fine)
    with no_waiting():
        index, _, _ = select(model, bad)
    assert not set(index.tolist()) & set(range(400, 404))
    with pytest.raises(UnmeasuredLossError, match=r"4 candidates had .* instance id 40[0-3]; none"):
        select(model, fine)
    select(model, fine)


def test_an_unmeasured_loss_is_told_at_once_where_ids_are_on_the_host(toy):
    select = rho.Selector("rho", irreducible=toy.il[:330], keep=0.1)
    model = on_device(toy)
    select(model, toy.batch(0))
    with pytest.raises(UnmeasuredLossError, match="330"):
        select(model, toy.batch(1))


def test_at_the_first_call_everything_is_told_at_once(toy):
    batch = placed(toy.batch(1), "device")
    with pytest.raises(UnmeasuredLossError, match="320 candidates had no finite irreducible loss"):
        rho.Selector("rho", irreducible=toy.il[:10], keep=0.1)(on_device(toy), batch)
    index, x, y = batch
    with pytest.raises(TooFewFiniteScoresError, match="fewer candidates had a finite score"):
        rho.Selector("loss", keep=0.1)(on_device(toy), (index, x * torch.nan, y))


def test_training_losses_that_are_not_finite(toy):
    select = rho.Selector("loss", keep=0.5, batch_norm="eval", flush_every=4)
    model = on_device(toy)
    index, x, y = placed(toy.batch(0), "device")
    select(model, (index, x, y))
    some, many = x.clone(), x.clone()
    some[:100], many[:200] = torch.nan, torch.inf
    with no_waiting():
        chosen, _, _ = select(model, (index, some, y))
    assert chosen.min().item() >= 100
    select.flush()
    assert select.guard.not_finite == 100
    with no_waiting():
        select(model, (index, many, y))
    with pytest.raises(TooFewFiniteScoresError, match=r"At 1 step\(s\).*\(300 scores were not"):
        select(model, (index, x, y))


# The same choice as on the CPU.


@pytest.mark.parametrize(
    "method", ["rho", "loss", "grad_norm", "grad_norm_is", "negative_il", "uniform", "boltzmann"]
)
@pytest.mark.parametrize("batch_norm", ["train", "batch", "eval"])
def test_the_choice_is_that_of_the_cpu(toy, method, batch_norm):
    assert torch.get_float32_matmul_precision() == "highest"  # no tf32
    method = rho.boltzmann("rho") if method == "boltzmann" else method
    here, there = toy.model(), on_device(toy)
    ours, theirs = (
        rho.Selector(method, irreducible=toy.il, keep=0.1, batch_norm=batch_norm) for _ in range(2)
    )
    for step in range(5):
        expected = ours(here, toy.batch(step))[0]
        found = theirs(there, placed(toy.batch(step), "pinned"))[0]
        assert sorted(found.tolist()) == sorted(expected.tolist())
        pairs = [(theirs.weights, ours.weights), (theirs.selection.score, ours.selection.score)]
        for found_k, expected_k in pairs:
            if expected_k is not None:
                torch.testing.assert_close(found_k.cpu(), expected_k, atol=1e-4, rtol=1e-4)


# Precision, compilation, randomness.


def test_low_precision_scores_are_float32_and_near(toy):
    seen = {}
    for precision in (None, "bf16", "fp16"):
        select = rho.Selector(
            "loss",
            keep=0.1,
            batch_norm="eval",
            precision=precision,
            on_scores=[lambda step, stats, chosen, p=precision: seen.update({p: stats.loss})],
        )
        select(on_device(toy), toy.batch(0))
    for precision in ("bf16", "fp16"):
        assert seen[precision].dtype == torch.float32
        torch.testing.assert_close(seen[precision], seen[None], atol=0.1, rtol=0.1)
        assert not torch.equal(seen[precision], seen[None])


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gradients_are_whole_when_selecting_in_the_same_autocast_block(toy, precision):
    gradients = []
    for scored in (False, True):
        model = on_device(toy, dropout=0.0)
        index, x, y = placed(toy.batch(0), "device")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if scored:
                select = rho.Selector("loss", keep=0.1, batch_norm="batch", precision=precision)
                select(model, (index, x, y))
            F.cross_entropy(model(x), y).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(gradient is not None for gradient in gradients[1])
    for plain, after in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, after)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports
def test_compiled_scoring_chooses_the_same_within_tolerance(toy):
    pytest.importorskip("triton")
    model, plain = on_device(toy), on_device(toy)
    seen = []
    compiled = rho.Selector("rho", irreducible=toy.il, keep=0.1, compile=True)
    eager = rho.Selector(
        "rho", irreducible=toy.il, keep=0.1, on_scores=[lambda _, stats, chosen: seen.append(stats)]
    )
    for step in range(3):
        compiled(model, toy.batch(step))
        eager(plain, toy.batch(step))
        score_B = seen[-1].loss - seen[-1].irreducible_loss
        kth = score_B.topk(32).values[-1]
        assert (score_B[compiled.selection.position] >= kth - 1e-3).all()
        torch.testing.assert_close(
            compiled.selection.score, score_B[compiled.selection.position], atol=1e-3, rtol=1e-3
        )
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


class Noisy(nn.Module):
    """Draws on the device in every mode."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + 0.01 * torch.randn_like(x))


@pytest.mark.parametrize("options", [{}, {"dropout": True}, {"method": "bald", "draws": 2}])
def test_the_random_state_of_the_device_is_kept(toy, options):
    model = Noisy(on_device(toy))
    select = rho.Selector(**{"method": "loss", "keep": 0.1, **options})
    torch.rand(3, device=DEVICE)
    states = torch.cuda.get_rng_state(DEVICE), torch.get_rng_state()
    for step in range(2):
        select(model, toy.batch(step))
        assert torch.equal(states[0], torch.cuda.get_rng_state(DEVICE))
        assert torch.equal(states[1], torch.get_rng_state())


# Time.


def test_scoring_seconds_are_read_late(toy):
    select, model = rho.Selector("rho", irreducible=toy.il, keep=0.1), on_device(toy)
    for step in range(4):
        select(model, toy.batch(step))
    assert select.ledger.scoring_seconds == 0
    assert select.ledger.dry_run_seconds > 0
    select.flush()
    ledger = select.ledger
    assert 0 < ledger.scoring_seconds < ledger.seconds
    assert "selecting" in str(ledger)


def test_a_pause_waits_for_what_the_device_was_told_before(toy):
    select, model = rho.Selector("loss", keep=0.1), on_device(toy)
    for step in range(2):
        select(model, toy.batch(step))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(200_000_000)  # cycles, a tenth of a second or so: a training step, say
    end.record()
    before = select.ledger.seconds
    with select.ledger.paused():
        assert end.query()
    assert select.ledger.seconds - before >= 0.9 * start.elapsed_time(end) / 1000


# A live model goes where the target is.


def test_a_live_model_and_its_optimizers_state_go_to_the_device(toy):
    def selector():
        live = rho.LiveIrreducible(toy.model(width=8), lr=0.01)
        return rho.Selector("rho", irreducible=live, keep=0.1)

    first, model = selector(), on_device(toy)
    first(model, toy.batch(0))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    second, other = selector(), on_device(toy)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # while its model is on the CPU
    other.load_state_dict(state)
    for step in range(1, 4):
        ours, theirs = first(model, toy.batch(step)), second(other, toy.batch(step))
        assert torch.equal(ours[0], theirs[0])
    for a, b in zip(first.source.model.parameters(), second.source.model.parameters(), strict=True):
        assert b.device == DEVICE
        assert torch.equal(a, b)
