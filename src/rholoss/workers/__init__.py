"""Ranks that only score: the next candidates are scored elsewhere while this batch trains."""

from rholoss.workers.batches import Batches, ScoringWorkers

__all__ = ["Batches", "ScoringWorkers"]
