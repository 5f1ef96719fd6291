"""Plans: which rows a pass over the data trains on, decided once a pass from what training has shown.

A plan costs no forward pass. It sees the losses that training itself has measured (`memory`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rholoss.errors import RholossError
from rholoss.memory import Epoch, Situation


@dataclass(frozen=True)
class RandomShare:
    """A fresh random share of the rows each pass: what any plan that leaves rows out must beat."""

    share: float = 0.5

    def __post_init__(self) -> None:
        _check_share("share", self.share)

    def __call__(self, situation: Situation) -> Epoch:
        """The rows whose lot is drawn."""
        order = torch.randperm(len(situation.seen), generator=situation.generator)
        return Epoch(order[: max(1, round(self.share * len(order)))])


@dataclass(frozen=True)
class InfoBatch:
    """Unbiased pruning (Qin et al., ICLR 2024): a row whose last loss is below the mean is left out with
    probability `prune`; those that stay count 1 / (1 - prune), so that the expected gradient is that of
    the whole data. After the share `until` of the steps, all rows.
    """

    prune: float = 0.5
    until: float = 0.875

    def __post_init__(self) -> None:
        _check_share("until", self.until)
        if not 0 <= self.prune < 1:
            raise RholossError(f"`prune` must be in [0, 1), but is {self.prune}.")

    def __call__(self, situation: Situation) -> Epoch:
        """Rows and weights."""
        s = situation
        everything = torch.arange(len(s.seen))
        if s.progress >= self.until or not s.seen.any():
            return Epoch(everything)
        low = (s.seen > 0) & (s.last < s.last[s.seen > 0].mean())
        stays = ~low | (s.random() >= self.prune)
        weight = torch.where(low, 1 / (1 - self.prune), 1.0)
        return Epoch(everything[stays], weight)


@dataclass(frozen=True)
class Remembered:
    """RHO-LOSS's questions, answered from the losses that training itself has seen.

    *Learnable?* From the share `filter_from` of the steps on, a row is left out if none of its last losses
    was below `chance`: the model, which has not yet learnt it by heart, never gave its label more
    probability than drawing one by lot would. Some rows of clean data are like that, too, and those are
    worth learning; so nothing is left out unless it is more than the share `least`. *Not yet learnt?* Up to
    the share `skip_until` of the steps, a row whose last loss is below the mean is left out of a pass with
    probability `skip`; but not once more than the share `most` of all rows has turned out not to be
    learnable, for what is not learnt is then mostly wrong labels.

    Args:
        chance: the logarithm of the number of classes.
    """

    chance: float
    filter_from: float = 0.3
    least: float = 0.03
    skip: float = 0.0
    skip_until: float = 0.85
    most: float = 1.0

    def __post_init__(self) -> None:
        for name in ("filter_from", "least", "skip", "skip_until", "most"):
            _check_share(name, getattr(self, name))

    def __call__(self, situation: Situation) -> Epoch:
        """The rows that are worth a step."""
        s = situation
        known = s.seen > 0
        stays = torch.ones(len(known), dtype=torch.bool)
        hopeless = s.lowest > self.chance
        share = float(hopeless.float().mean()) if s.progress >= self.filter_from else 0.0
        if share > self.least:
            stays &= ~hopeless
        skips = self.skip and s.progress < self.skip_until and share <= self.most
        if skips and (known & stays).any():
            learnt = known & (s.last < s.last[known & stays].mean())
            stays &= ~learnt | (s.random() >= self.skip)
        return Epoch(stays.nonzero().flatten())


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise RholossError(f"`{name}` must be in [0, 1], but is {value}; it is a share.")
