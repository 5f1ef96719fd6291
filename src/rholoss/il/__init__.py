"""Irreducible losses: fitting the small model, scoring the training points, keeping the result."""

from rholoss.il.fit import fit_irreducible
from rholoss.il.live import LiveIrreducible
from rholoss.il.score import score_irreducible
from rholoss.il.store import Irreducible

__all__ = ["Irreducible", "LiveIrreducible", "fit_irreducible", "score_irreducible"]
