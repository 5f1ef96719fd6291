"""`rholoss methods`: the methods of the paper, what they read and what they cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from rholoss import picks, scores
from rholoss.advise import live_cost, relative_cost
from rholoss.cli import options, tables
from rholoss.core import Method
from rholoss.errors import RholossError
from rholoss.methods import METHODS, boltzmann

PICKS: dict[object, str] = {
    picks.random_k: "k at random",
    picks.top_k: "highest k",
    picks.ImportanceSample: "k drawn by score, weighted",
    picks.SoftmaxSample: "k drawn by exp(score / T)",
}
SCORES: dict[object, str] = {
    scores.nothing: "all alike",
    scores.training_loss: "loss",
    scores.gradient_norm: "||softmax - onehot||",
    scores.negative_irreducible_loss: "-irreducible loss",
    scores.reducible_loss: "loss - irreducible loss",
    scores.entropy: "H[E p]",
    scores.conditional_entropy: "E H[p]",
    scores.bald: "H[E p] - E H[p]",
    scores.loss_minus_conditional_entropy: "loss - E H[p]",
}
ADVICE = {
    "uniform": "The baseline: run it too, whatever method you try.",
    "loss": "Clean data only: prefers wrong labels and outliers.",
    "grad_norm": "As loss, bounded; classification only.",
    "grad_norm_is": "Unbiased gradient: take `select.reduce(loss_B)`.",
    "negative_il": "No forward pass, but keeps choosing points that are learnt already.",
    "rho": "First choice for large, noisy or redundant data; needs irreducible losses.",
    "entropy": "Active learning, ignores labels; needs dropout. For comparisons.",
    "conditional_entropy": "Active learning, prefers noisy points; needs dropout. For comparisons.",
    "bald": "Active learning, ignores labels; needs dropout. For comparisons.",
    "loss_minus_conditional_entropy": "The model's own estimate of noise for the IL; needs dropout.",
    "boltzmann_rho": "Softer choice: `boltzmann('rho', temperature=1)`, of any method.",
}
COLUMNS = ("method", "cost", "what it picks, what it reads, when to use it")


@dataclass(frozen=True)
class Row:
    """A method as the table shows it; `cost` is the cost of a step relative to uniform training."""

    method: str
    cost: float
    score: str
    pick: str
    reads: list[str]
    advice: str


def row_of(method: Method, keep: float, draws: int) -> Row:
    """The row of a method.

    Args:
        method: which one.
        keep: the share of the candidates that is trained on.
        draws: the number of Monte-Carlo dropout draws.
    """
    pick = PICKS.get(method.pick, PICKS.get(type(method.pick), _name(method.pick)))
    return Row(
        method.name,
        relative_cost(method.needs, keep, draws),
        SCORES.get(method.score, _name(method.score)),
        pick,
        sorted(method.needs),
        ADVICE.get(method.name, ""),
    )


def _name(thing: object) -> str:
    return getattr(thing, "__name__", type(thing).__name__)


def rows_of(keep: float, draws: int) -> list[Row]:
    """The rows of all methods, also of those that are not in `METHODS`."""
    rows = [row_of(method, keep, draws) for method in [*METHODS.values(), boltzmann("rho")]]
    original = Row(
        "rho + LiveIrreducible",
        live_cost(keep),
        "loss - loss of a live model that learns from the chosen too",
        PICKS[picks.top_k],
        ["loss", "irreducible_loss"],
        "The original selection function (Eq. 2); cost for a live model of the target's size.",
    )
    svp = Row(
        "svp (rholoss.coreset)",
        relative_cost(frozenset(), keep),
        "entropy of a proxy, of the whole data set, once and offline",
        PICKS[picks.top_k],
        ["entropy"],
        "One core-set for all steps. Costs training a proxy and one pass over the data, too.",
    )
    return [*rows, original, svp]


def methods(
    keep: Annotated[float, typer.Option(help="Share of the candidates that is trained on.")] = 0.1,
    draws: Annotated[int, typer.Option(min=1, help="Monte-Carlo dropout draws.")] = 10,
    as_json: options.Json = False,
) -> None:
    """List the methods: score, pick, what they read, and what a step costs relative to uniform.

    The cost counts forward passes: one for each candidate that is scored (--draws of them for
    entropies), three for each point trained on. `rholoss advise` measures it on your machine.

    An epoch is one pass over the candidates, in which every point is one once: with --keep 0.1 a
    tenth of the data is trained on in an epoch, by every method, also by uniform.

    \b
    Examples:
      rholoss methods
      rholoss methods --keep 0.5
    """
    if not 0 < keep <= 1:
        raise RholossError(f"--keep must be in (0, 1], but is {keep}; the paper has 0.1.")
    rows = rows_of(keep, draws)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    cells = [
        (
            row.method,
            f"{row.cost:.2f}x",
            f"{row.pick}: {row.score}\nreads {', '.join(row.reads) or 'nothing'}\n{row.advice}",
        )
        for row in rows
    ]
    tables.show(COLUMNS, cells, numbers=("cost",), lines=True)
    typer.echo(
        f"cost: of a step relative to uniform, at keep={keep:g}, {draws} dropout draws; a backward pass "
        "counts as two forward passes.\n"
        "p: what the model predicts in one dropout draw; E: mean over draws; H: entropy."
    )
