"""RHO-LOSS for PyTorch: train on the points that are learnable, worth learning and not yet learnt."""

from rholoss.core import Method, Selection, Stats
from rholoss.data import WithIndex, WithIrreducible
from rholoss.il.live import LiveIrreducible
from rholoss.ledger import Ledger
from rholoss.methods import METHODS, boltzmann
from rholoss.schedules import annealed, constant, warm_up, window
from rholoss.scoring import Scorer
from rholoss.selector import Selector

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Ledger",
    "LiveIrreducible",
    "Method",
    "Scorer",
    "Selection",
    "Selector",
    "Stats",
    "WithIndex",
    "WithIrreducible",
    "annealed",
    "boltzmann",
    "constant",
    "warm_up",
    "window",
]
