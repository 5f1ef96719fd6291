"""What the engine must survive: no memory, loss of a number, an interrupt."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from rholoss.engine import Evaluator, Resident, Trainer, fit_resident
from rholoss.engine.capture import says_what_to_reduce
from rholoss.engine.interrupt import whole_steps
from rholoss.errors import RholossError, TooFewFiniteScoresError

X = torch.randn(400, 20, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (400,), generator=torch.Generator().manual_seed(1))


def trainer(model=None, **options):
    torch.manual_seed(0)
    options = {"total_steps": 300, "irreducible": torch.zeros(400), "candidates": 40, **options}
    return Trainer(model or nn.Linear(20, 5), Resident(X, Y, device="cpu"), **options)


class Greedy(nn.Module):
    """Runs out of memory when it has been called so often."""

    def __init__(self, calls, error):
        super().__init__()
        self.inner, self.calls, self.error = nn.Linear(20, 5), calls, error

    def forward(self, x):
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return self.inner(x)


@pytest.mark.parametrize("calls", [0, 1, 2, 7])  # in the first look, in scoring, in training, later
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore."),
        RuntimeError("CUDA error: out of memory\nCompile with"),
    ],
    ids=["by the allocator", "by the driver"],
)
def test_out_of_memory_says_what_to_reduce(calls, error):
    message = (
        r"Reduce `candidates` or `keep`, use precision='bf16'.*\(CUDA.* out of memory[^\n]*\)$"
    )
    with pytest.raises(RholossError, match=message):
        trainer(Greedy(calls, error)).train(10)


def test_a_model_that_does_not_fit_says_so():
    def none_left(parameters):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    with pytest.raises(RholossError, match=r"Reduce the model, or what needs copies of it"):
        trainer(optimizer=none_left)


@pytest.mark.parametrize("trains", [True, False])  # in a step, or in a look at the losses
def test_a_fit_out_of_memory_names_its_own_arguments(trains):
    rows = []

    class Small(nn.Linear):
        def forward(self, x):
            rows.append(len(x))
            if self.training is trains and len(x) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(x)

    data = Resident(X, Y, device="cpu")
    with pytest.raises(RholossError, match="Reduce `batch_size`, use"):
        fit_resident(lambda: Small(20, 5), data, folds=2, epochs=1, batch_size=10)
    assert max(rows) <= 10 * 10


def test_folds_that_do_not_fit_say_so(monkeypatch):
    def none_left(self, rows):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Resident, "take", none_left)
    with pytest.raises(RholossError, match="Reduce `folds`, each of which has a copy of the data"):
        fit_resident(lambda: nn.Linear(20, 5), Resident(X, Y, device="cpu"), folds=2)


def test_an_evaluation_out_of_memory_says_so_too():
    error = torch.OutOfMemoryError("CUDA out of memory.")
    evaluate = Evaluator(Greedy(0, error), Resident(X, Y, device="cpu"), num_classes=5)
    with pytest.raises(RholossError, match="Reduce `batch_size`"):
        evaluate()


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match=r"^shapes$"), says_what_to_reduce("it"):
        raise RuntimeError("shapes")
    fast = trainer(Greedy(3, RuntimeError("shapes")))
    with pytest.raises(RuntimeError) as caught:
        fast.train(10)
    assert str(caught.value) == "shapes"


def test_a_run_that_breaks_in_the_middle_stops_within_100_steps_and_counts(tmp_path):
    log = tmp_path / "log.jsonl"
    fast = trainer(learning_rate=lambda step: 1e-3 if step < 130 else 1e38, log=log)
    fast.train(100)
    with pytest.raises(TooFewFiniteScoresError) as caught:
        fast.train(200)
    # the update of step 131 overflows, so that steps 132 to 199 have no finite score or loss
    losses = torch.cat(fast.losses)
    first = int((~losses.isfinite()).nonzero()[0])
    assert 130 < first < 135
    assert f"Between step 100 and step 200, {200 - first} step(s) had a loss" in str(caught.value)
    assert fast.step == 200
    assert len(log.read_text().splitlines()) == 200  # what was done is there to be looked at


SCRIPT = """
import sys
import torch
from torch import nn
from rholoss.engine import Resident, Trainer

torch.set_num_threads(1)
data = Resident(torch.randn(400, 20), torch.randint(0, 5, (400,)), device="cpu")
trainer = Trainer(
    nn.Linear(20, 5), data, total_steps=10**6, irreducible=torch.zeros(400), candidates=40, log=sys.argv[1]
)
trainer.on_flush.append(lambda step, index, losses: print(step, flush=True))
try:
    trainer.train(10**6)
except KeyboardInterrupt:
    written = len(open(sys.argv[1]).readlines())  # before anything else is asked of the trainer
    torch.save(trainer.state_dict(), sys.argv[2])
    print("interrupted", written, trainer.step, flush=True)
    raise
"""


def test_an_interrupt_leaves_whole_steps_on_disk_and_a_state_to_go_on_from(tmp_path):
    log, saved = tmp_path / "log.jsonl", tmp_path / "state.pt"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(log), str(saved)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "100\n"
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=300)
    assert process.returncode != 0
    assert error.rstrip().endswith("KeyboardInterrupt")
    written, step = map(int, printed.split()[-2:])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(step))
    assert 100 <= written == step < 10**6
    state = torch.load(saved, weights_only=True)
    order = state["order"]
    assert state["step"] == step
    assert int(order["place"]) + order["left"] == 10  # no batch of the epoch was half taken
    assert (step - int(order["place"])) % 10 == 0


def test_an_interrupt_waits_for_the_end_of_a_step_and_a_second_one_does_not():
    reached = []

    def steps(interrupts):
        with whole_steps() as let_through:
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
            reached.append("end of the step")
            let_through()
            reached.append("never")

    for interrupts in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            steps(interrupts)
        assert reached == ["end of the step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("call", [20, 21])  # while it scores, while it trains
def test_a_step_that_was_cut_in_its_middle_is_no_state_to_go_on_from(call):
    """Half of it is done: whoever went on from there would end elsewhere, and not know."""

    class Interrupted(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == call:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return super().forward(x)

    fast = trainer(Interrupted(20, 5))
    fast.train(3)
    state = fast.state_dict()
    with pytest.raises(KeyboardInterrupt):
        fast.train(100)
    told = r"Step \d+ was interrupted in the middle.* earlier state \(`load_state_dict`\)"
    with pytest.raises(RholossError, match=told):
        fast.state_dict()
    fast.load_state_dict(state)
    assert fast.state_dict()["step"] == 3


def test_counts_that_were_cut_off_are_no_state_to_go_on_from(monkeypatch):
    def interrupted(self, *args):
        raise KeyboardInterrupt

    fast = trainer()
    fast.train(3)
    monkeypatch.setattr(type(fast.log), "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fast.flush()
    with pytest.raises(RholossError, match="Step 3 was interrupted"):
        fast.state_dict()


def test_other_handlers_and_threads_are_left_alone():
    told = []
    before = signal.signal(signal.SIGINT, lambda *_: told.append("mine"))
    try:
        with whole_steps() as let_through:
            signal.raise_signal(signal.SIGINT)
            let_through()
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == ["mine"]
    fast = trainer()
    thread = threading.Thread(target=lambda: (fast.train(3), told.append(fast.step)))
    thread.start()
    thread.join()
    assert told == ["mine", 3]
