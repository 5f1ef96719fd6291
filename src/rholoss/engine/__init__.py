"""The engine, fast training on data that fits the device: start with `Trainer` and `Resident`."""

from rholoss.engine.cheaper import Cheaper, LowerResolution, Proxy
from rholoss.engine.evaluate import Evaluation, Evaluator
from rholoss.engine.folded import Folded
from rholoss.engine.irreducible import fit_ladder, fit_resident, losses_of, one_cycle
from rholoss.engine.optimizers import adamw
from rholoss.engine.partial import Gate, Reuse, Shortlist
from rholoss.engine.replay import Recorded
from rholoss.engine.resident import CropFlip, Resident
from rholoss.engine.streamed import Streamed
from rholoss.engine.trainer import Trainer
from rholoss.memory import Epoch, Memory, Plan, Situation
from rholoss.plans import InfoBatch, RandomShare, Remembered

__all__ = [
    "Cheaper",
    "CropFlip",
    "Epoch",
    "Evaluation",
    "Evaluator",
    "Folded",
    "Gate",
    "InfoBatch",
    "LowerResolution",
    "Memory",
    "Plan",
    "Proxy",
    "RandomShare",
    "Recorded",
    "Remembered",
    "Resident",
    "Reuse",
    "Shortlist",
    "Situation",
    "Streamed",
    "Trainer",
    "adamw",
    "fit_ladder",
    "fit_resident",
    "losses_of",
    "one_cycle",
]
