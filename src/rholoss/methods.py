"""The methods of the paper, as rows: a name, a score, a pick, and the quantities that are read.

A method of your own is one more row:

    def cautious(stats): return stats.loss - 2 * stats.irreducible_loss
    mine = Method("cautious", cautious, picks.top_k, frozenset({"loss", "irreducible_loss"}))
    select = Selector(mine, irreducible=il, keep=0.1)
"""

from __future__ import annotations

import dataclasses

from rholoss import picks, scores
from rholoss.core import Method
from rholoss.errors import RholossError

_ROWS = [
    Method("uniform", scores.nothing, picks.random_k, frozenset()),
    Method("loss", scores.training_loss, picks.top_k, frozenset({"loss"})),
    Method("grad_norm", scores.gradient_norm, picks.top_k, frozenset({"grad_norm"})),
    Method(
        "grad_norm_is", scores.gradient_norm, picks.ImportanceSample(), frozenset({"grad_norm"})
    ),
    Method(
        "negative_il",
        scores.negative_irreducible_loss,
        picks.top_k,
        frozenset({"irreducible_loss"}),
    ),
    Method("rho", scores.reducible_loss, picks.top_k, frozenset({"loss", "irreducible_loss"})),
    Method("entropy", scores.entropy, picks.top_k, frozenset({"entropy"})),
    Method(
        "conditional_entropy",
        scores.conditional_entropy,
        picks.top_k,
        frozenset({"conditional_entropy"}),
    ),
    Method("bald", scores.bald, picks.top_k, frozenset({"entropy", "conditional_entropy"})),
    Method(
        "loss_minus_conditional_entropy",
        scores.loss_minus_conditional_entropy,
        picks.top_k,
        frozenset({"loss", "conditional_entropy"}),
    ),
]

METHODS: dict[str, Method] = {method.name: method for method in _ROWS}


def by_name(method: str | Method) -> Method:
    """The method of that name; a `Method` is returned as it is."""
    if isinstance(method, Method):
        if isinstance(method.needs, frozenset):
            return method
        if isinstance(method.needs, str):
            raise RholossError(
                f"`needs` of the method {method.name!r} is {method.needs!r}; give the names of what it reads "
                "as a set, as in {'loss', 'irreducible_loss'}."
            )
        return dataclasses.replace(method, needs=frozenset(method.needs))
    if method not in METHODS:
        raise RholossError(
            f"`method` is {method!r}, which is not known; choose one of {', '.join(METHODS)}, "
            "or pass a `rholoss.Method` of your own."
        )
    return METHODS[method]


def boltzmann(
    method: str | Method = "rho", *, temperature: float = 1.0, replacement: bool = False
) -> Method:
    """A method that samples by another one's scores, p ~ exp(score / temperature), for a softer choice.

    Args:
        method: whose scores to use: a name from `rholoss.METHODS`, or a `Method`.
        temperature: above 0; the higher, the closer to a uniform choice.
        replacement: whether a candidate may be selected more than once.

    Returns:
        A `Method` named boltzmann_..., for `Selector` and the like.
    """
    base = by_name(method)
    pick = picks.SoftmaxSample(temperature, replacement)
    return dataclasses.replace(base, name=f"boltzmann_{base.name}", pick=pick)
