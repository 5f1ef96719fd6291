"""The fast path for data that fits the device: see `Trainer`."""

from rholoss.engine.evaluate import Evaluation, Evaluator
from rholoss.engine.irreducible import fit_resident, losses_of, one_cycle
from rholoss.engine.resident import CropFlip, Resident
from rholoss.engine.trainer import Trainer, adamw

__all__ = [
    "CropFlip",
    "Evaluation",
    "Evaluator",
    "Resident",
    "Trainer",
    "adamw",
    "fit_resident",
    "losses_of",
    "one_cycle",
]
