"""How long to score and how many steps to take can change in mid-run."""

import pytest
import torch
from torch import nn

from rholoss.engine import (
    Folded,
    Gate,
    InfoBatch,
    LowerResolution,
    Proxy,
    Resident,
    Reuse,
    Shortlist,
    Trainer,
)
from rholoss.engine.rows import Rows
from rholoss.engine.sources import irreducible_table
from rholoss.errors import RholossError
from rholoss.methods import by_name
from rholoss.schedules import annealed

N = 640


@pytest.fixture(scope="module")
def easy():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 12, generator=generator)
    return x, (x @ torch.randn(12, 3, generator=generator)).argmax(1)


def make(easy, irreducible, total_steps=400, **options):
    x, y = easy
    torch.manual_seed(0)
    options = {"catch_up": True, "learning_rate": 0.02, "candidates": 64, "keep": 0.25, **options}
    return Trainer(
        nn.Linear(12, 3), Resident(x, y, device="cpu"), total_steps=total_steps,
        irreducible=torch.full((N,), irreducible), **options,
    )  # fmt: skip


def test_scoring_stops_when_the_target_has_caught_up(easy):
    trainer = make(easy, irreducible=0.5)
    means = []

    def note(step, index, losses):
        means.append(trainer.counters.reducible.clone().mean())

    trainer.on_flush.append(note)
    trainer.train(400)
    stop = trainer.schedule.stop
    assert stop in (100, 200, 300)
    caught_up = stop // 100 - 1
    assert means[caught_up] <= 0
    assert all(mean > 0 for mean in means[:caught_up])
    assert trainer.ledger.scored == 64 * stop


@pytest.mark.parametrize(("irreducible", "catch_up"), [(-5.0, True), (5.0, False)])
def test_it_goes_on_if_it_has_not_or_if_nobody_asked(easy, irreducible, catch_up):
    trainer = make(easy, irreducible, catch_up=catch_up, schedule=annealed(400, switch=0.75))
    trainer.train(400)
    assert trainer.schedule.stop == 300
    assert trainer.ledger.scored == 64 * 300


def test_a_resumed_run_has_stopped_too(easy):
    first = make(easy, irreducible=5.0)
    first.train(150)
    assert first.schedule.stop == 100
    second = make(easy, irreducible=5.0)
    second.load_state_dict(first.state_dict())
    second.train(50)
    assert second.ledger.scored == 64 * 100


def test_who_looks_or_saves_more_often_does_not_move_the_switch(easy):
    """Ten steps may have caught up where a hundred have not."""
    schedule = annealed(400, switch=1.0, drop=0.0)
    whole = make(easy, irreducible=0.5, schedule=schedule)
    whole.train(400)
    often = make(easy, irreducible=0.5, schedule=schedule)
    for _ in range(13):
        often.train(10)
        often.flush()
    resumed = make(easy, irreducible=0.5, schedule=schedule)
    resumed.load_state_dict(often.state_dict())
    assert len(resumed.reducible) == 30  # what is known of this hundred
    resumed.train(270)
    assert whole.schedule.stop == resumed.schedule.stop
    assert whole.ledger.scored == resumed.ledger.scored
    assert torch.equal(whole.model.weight, resumed.model.weight)


def test_it_is_for_rho_alone(easy):
    with pytest.raises(
        RholossError, match=r"`catch_up` compares .* the method 'loss' does not read both"
    ):
        make(easy, 0.0, method="loss")


@pytest.mark.parametrize(
    "scoring", [Gate(0.5), Reuse(0.5, by=LowerResolution()), Proxy(lambda: nn.Linear(10, 2))]
)
def test_it_is_refused_where_another_mean_is_measured(easy, scoring):
    with pytest.raises(RholossError, match=f"with `{type(scoring).__name__}` another mean"):
        make(easy, 0.0, scoring=scoring)
    assert Folded().mean_of_all
    assert Shortlist(0.5, by=Folded()).mean_of_all


@pytest.mark.parametrize("method", ["uniform", "rho"])
def test_a_plan_needs_an_id_for_each_row(method):
    x, y = torch.randn(20, 3), torch.zeros(20, dtype=torch.long)
    data = Resident(x, y, ids=torch.arange(20) % 15, device="cpu")
    with pytest.raises(RholossError, match="5 rows of the data have the id of another"):
        Trainer(
            nn.Linear(3, 2), data, method=method, total_steps=5, plan=InfoBatch(), candidates=4,
            irreducible=torch.zeros(20),
        )  # fmt: skip


def test_a_run_can_be_made_shorter_and_longer_up_to_what_it_was_made_for(easy):
    trainer = make(easy, 0.0, total_steps=50)
    trainer.change_length(20, lambda step: 0.01 * step)
    trainer.train(10)
    with pytest.raises(RholossError, match=r"must be in 0\.\.10: 10 of `total_steps`=20"):
        trainer.train(11)
    trainer.change_length(50, 0.5)
    other = make(easy, 0.0, total_steps=50)
    other.load_state_dict(trainer.state_dict())
    for each in (trainer, other):
        each.train(1)
        assert each.optimizer.param_groups[0]["lr"] == 0.5
        assert each.total_steps == 50
    for wrong in (5, 51):
        with pytest.raises(RholossError, match=rf"must be in 11..50, .* but is {wrong}"):
            trainer.change_length(wrong, 0.1)


def test_it_says_who_asks_for_irreducible_losses():
    ids = torch.arange(3)
    for name, drop, says in (("rho", 0.0, "The method 'rho'"), ("loss", 0.1, "`drop`=0.1")):
        with pytest.raises(RholossError, match=f"{says} needs irreducible losses"):
            irreducible_table(by_name(name), None, ids, drop)


def test_the_highest_losses_are_left_out_however_many_rows_there_are():
    num = 2**24 + 1  # more than `torch.quantile` takes

    class Data:
        ids = torch.arange(num)

        def __len__(self):
            return num

    loss_N = torch.linspace(0, 1, num)
    rows = Rows(
        Data(), seed=0, irreducible=loss_N, drop=0.25, plan=None, memory=None, recorded=None
    )
    assert len(rows._kept) == num * 3 // 4 + 1
    assert loss_N[rows._kept].max() <= 0.75
