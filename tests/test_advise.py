"""The arithmetic of break-even, against figures worked out by hand."""

from __future__ import annotations

import math

import pytest

from rholoss import methods
from rholoss.advise import advice, costs, live_cost, relative_cost, step_seconds
from rholoss.errors import RholossError
from rholoss.timing import KS, Timings

FORWARD = 1e-3  # seconds of a forward pass of n_b rows


def timings(loading: float = 0.0, forward: float = FORWARD) -> Timings:
    """A machine on which a backward pass costs two forward passes."""
    return Timings(
        batch=32,
        training=3 * FORWARD,
        scoring={k: k * forward for k in KS},
        loading={k: k * loading for k in (1, *KS)},
        rounds=5,
        device="cpu",
        parameters=10,
        flops_per_example=1.0,
    )


def test_break_even_is_one_plus_a_third_of_k() -> None:
    found = {row.k: row.break_even for row in costs(timings())}
    assert found == pytest.approx({k: 1 + k / 3 for k in KS})
    assert found[10] == pytest.approx(4.33, abs=0.01)  # 1 + 1/(3 x 0.1)
    assert found[2] == pytest.approx(1.67, abs=0.01)


def test_cost_of_each_method_at_the_papers_sizes() -> None:
    at = {name: relative_cost(m.needs, 0.1, draws=10) for name, m in methods.METHODS.items()}
    assert at["uniform"] == at["negative_il"] == 1
    assert at["loss"] == at["grad_norm"] == at["rho"] == pytest.approx(416 / 96)
    assert at["bald"] == at["entropy"] == pytest.approx(3296 / 96)
    assert live_cost(0.1) == pytest.approx(832 / 96)
    assert live_cost(0.1, size=0.0) == pytest.approx(416 / 96)


def test_loading_is_on_top_without_workers_and_beside_the_model_with_them() -> None:
    assert step_seconds(3.0, 4.0, workers=0) == 7
    assert step_seconds(3.0, 4.0, workers=1) == 4
    assert step_seconds(3.0, 4.0, workers=2) == 3
    row = costs(timings(loading=FORWARD))[-1]
    assert row.ratio == pytest.approx((10 + 3 + 10) / (3 + 1))
    hidden = costs(timings(loading=FORWARD), workers=1)[-1]
    assert hidden.ratio == pytest.approx(13 / 3)


def test_cost_of_irreducible_losses_is_spread_over_the_uniform_run() -> None:
    steps, il_seconds = 1000, 0.6  # uniform takes 3 s
    row = costs(timings(), il_seconds=il_seconds, steps=steps)[-1]
    selected_run = steps / row.break_even * row.step + il_seconds
    assert selected_run == pytest.approx(steps * row.uniform_step)
    assert row.ratio == pytest.approx(13 / 3)  # a step itself costs the same


def test_irreducible_losses_that_cost_the_whole_run_can_never_pay() -> None:
    table = costs(timings(), il_seconds=3.1, steps=1000)
    assert all(math.isinf(row.break_even) for row in table)
    said = advice(timings(), table)
    assert len(said) == 1
    assert "cannot pay" in said[0]
    assert "smaller model" in said[0]


def test_advice_blames_the_irreducible_losses_where_the_steps_are_cheap() -> None:
    said = " ".join(
        advice(timings(), costs(timings(), il_seconds=1.5, steps=1000))
    )  # half of uniform's 3 s
    assert (
        "k=2 costs 1.67x a uniform step, but with the irreducible losses it must need 3.33x" in said
    )
    assert "(--il-runs), or make them with a smaller model" in said
    assert "No k" not in said


def test_cost_of_irreducible_losses_needs_steps() -> None:
    with pytest.raises(RholossError, match=r"cost 5 s, but the number of steps .* pass `steps`"):
        costs(timings(), il_seconds=5)


def test_advice_names_the_largest_k_below_two() -> None:
    said = " ".join(advice(timings(), costs(timings())))
    assert "k=2 costs less than 2x a uniform step: start with keep=0.5." in said
    cheap = timings(forward=FORWARD / 4)  # k=5 1.42x, k=10 1.83x
    assert "k=10 costs less than 2x" in " ".join(advice(cheap, costs(cheap)))
    dear = timings(forward=2 * FORWARD)
    said = " ".join(advice(dear, costs(dear)))
    assert "No k costs less than 2x a uniform step: k=2 must already need 2.33x" in said
    assert "--precision bf16" in said


def test_advice_warns_where_scoring_looks_too_cheap() -> None:
    fast = timings(forward=0.4 * FORWARD)
    assert "Scoring a point costs 0.13 of training" in " ".join(advice(fast, costs(fast)))
    assert "bound by its launches" in " ".join(advice(fast, costs(fast)))
    assert "bound by its launches" not in " ".join(advice(timings(), costs(timings())))


def test_advice_compares_with_the_paper() -> None:
    said = " ".join(advice(timings(), costs(timings())))
    assert "must need 4.33x fewer steps" in said
    assert "cleared that on CoLA (11.3x), Clothing-1M (15x) and did not on CIFAR-100 (1.7x)" in said
    cheap = timings(forward=0.1 * FORWARD)
    assert "did not on" not in " ".join(advice(cheap, costs(cheap)))


def test_advice_about_loading() -> None:
    slow = timings(loading=5 * FORWARD)  # 50 ms of loading, 13 ms of the model at k = 10
    said = " ".join(advice(slow, costs(slow)))
    assert "Loading, not the model, is your bottleneck: 320 rows take 50.0 ms" in said
    assert "13.0 ms to score and train. Use 4 or more workers" in said
    table = costs(slow, workers=4)
    assert "oading" not in " ".join(advice(slow, table, workers=4))
    some = timings(loading=0.5 * FORWARD)
    said = " ".join(advice(some, costs(some)))
    assert "Loading takes 28% of a step at k=10; a loader with 1 worker hides it" in said
