"""RHO-LOSS for PyTorch: train on the points that are learnable, worth learning and not yet learnt."""

from rholoss.core import Method, Selection, Stats
from rholoss.coreset import coreset
from rholoss.il.fit import fit_irreducible
from rholoss.il.live import LiveIrreducible
from rholoss.il.score import score_irreducible
from rholoss.il.store import Irreducible
from rholoss.indexed import WithIndex, WithIrreducible
from rholoss.ladder import Ladder
from rholoss.ledger import Ledger
from rholoss.methods import METHODS, boltzmann
from rholoss.planned import Planned
from rholoss.plans import Remembered, wrong_labels
from rholoss.schedules import annealed, constant, warm_up, window
from rholoss.scoring import Scorer
from rholoss.selector import Selector
from rholoss.streams import Stream
from rholoss.workers.batches import ScoringWorkers

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Irreducible",
    "Ladder",
    "Ledger",
    "LiveIrreducible",
    "Method",
    "Planned",
    "Remembered",
    "Scorer",
    "ScoringWorkers",
    "Selection",
    "Selector",
    "Stats",
    "Stream",
    "WithIndex",
    "WithIrreducible",
    "annealed",
    "boltzmann",
    "constant",
    "coreset",
    "fit_irreducible",
    "score_irreducible",
    "warm_up",
    "window",
    "wrong_labels",
]
