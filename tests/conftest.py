"""What all tests share: a worked example, a small problem, real data where there is some."""

import contextlib
import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)

# No deadline, and not too slow: the machine may be busy. Derandomised: a run that passes does so again.
hypothesis.settings.register_profile(
    "rholoss",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=True,
    max_examples=50,
)
hypothesis.settings.load_profile("rholoss")


def pytest_configure(config):
    # A shell starts what runs in the background with Ctrl-C ignored, `nohup` with the end of the terminal;
    # processes pass that on, and signals that are ignored end nobody.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Python 3.12 says so of every loader with workers; torch forks them all the same. And torch asks for
    # no more workers than cores: a machine with one of them runs the tests as well.
    for told in (".*multi-threaded, use of fork:DeprecationWarning", "This DataLoader will create"):
        config.addinivalue_line("filterwarnings", f"ignore:{told}")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def data_dir():
    """The folder of real data sets."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    found = Path(os.environ.get("RHOLOSS_DATA", beside))
    if not found.is_dir():
        pytest.skip(f"no real data: {found} is not there; set RHOLOSS_DATA")
    return found


@pytest.fixture
def no_waiting():
    """`with no_waiting():` makes it an error to wait for the GPU."""

    def mode(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a prototype feature
            torch.cuda.set_sync_debug_mode(name)

    @contextlib.contextmanager
    def block():
        mode("error")
        try:
            yield
        finally:
            mode("default")

    return block


@dataclass(frozen=True)
class Worked:
    """Six candidates whose losses, scores and choices were worked out by hand, in float64."""

    logits: Tensor
    labels: Tensor
    il: Tensor
    loss: Tensor
    rho: Tensor
    grad_norm: Tensor
    probability: Tensor  # of being drawn by gradient-norm importance sampling
    weight: Tensor


@pytest.fixture
def fixture_a():
    logits = [[2, 0, 0], [0, 0, 0], [0, 3, 0], [1, 1, -2], [-1, 2, 0.5], [0, 0, 4.0]]
    return Worked(
        logits=torch.tensor(logits),
        labels=torch.tensor([0, 1, 0, 2, 1, 2]),
        il=torch.tensor([0.10, 1.50, 4.00, 0.50, 0.05, 0.90]),
        loss=torch.tensor([0.239545, 1.098612, 3.094923, 3.717736, 0.241311, 0.035976]),
        rho=torch.tensor([0.139545, -0.401388, -0.905077, 3.217736, 0.191311, -0.864024]),
        grad_norm=torch.tensor([0.260888, 0.816497, 1.319329, 1.194997, 0.279688, 0.043279]),
        probability=torch.tensor([0.066644, 0.208573, 0.337021, 0.305261, 0.071446, 0.011055]),
        weight=torch.tensor([2.500869, 0.799080, 0.494529, 0.545981, 2.332768, 15.0755]),
    )


@dataclass(frozen=True)
class Toy:
    """3200 points of five classes with an irreducible loss each; ten batches of 320 candidates."""

    x: Tensor
    y: Tensor
    il: Tensor

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.arange(step * 320, (step + 1) * 320)
        return index, self.x[index], self.y[index]

    def model(self, *, width: int = 32, dropout: float = 0.3) -> nn.Module:
        """The same weights each time."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(
                nn.Linear(20, width),
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(width, 5),
            )


@pytest.fixture(scope="session")
def toy():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 5, (3200,), generator=generator)
    means = torch.randn(5, 20, generator=generator)
    x = means[y] + 1.5 * torch.randn(3200, 20, generator=generator)
    return Toy(x, y, torch.rand(3200, generator=generator))
