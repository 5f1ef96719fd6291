"""Plans: which rows a pass over the data trains on, decided once a pass from what training has shown.

A plan costs no forward pass. It sees the losses that training itself has measured (`memory`).
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from rholoss.errors import RholossError
from rholoss.memory import Epoch, Situation


@dataclass(frozen=True)
class RandomShare:
    """Train on a new random share of the rows in each pass: what any other plan must beat.

    Args:
        share: of the rows, in [0, 1]; at least one row.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        _check_share("share", self.share)

    def __call__(self, situation: Situation) -> Epoch:
        """Draw the rows of a pass."""
        num = len(situation.seen)
        order = torch.randperm(num, generator=situation.generator, device="cpu")
        return Epoch(order[: max(1, round(self.share * len(order)))])


@dataclass(frozen=True)
class InfoBatch:
    """Leave out a random part of the easy rows, without bias (InfoBatch: Qin et al., ICLR 2024).

    A row whose last loss is below the mean is left out with probability `prune`. Such rows that stay get the
    weight 1 / (1 - prune), so that the expected gradient is that of the whole data.

    Args:
        prune: the probability to leave an easy row out of a pass, in [0, 1).
        until: after this share of the steps a pass has all rows, in [0, 1].
    """

    prune: float = 0.5
    until: float = 0.875

    def __post_init__(self) -> None:
        _check_share("until", self.until)
        if not 0 <= self.prune < 1:
            raise RholossError(
                f"`prune` must be in [0, 1), but is {self.prune}: with this probability a row that is easy "
                "is left out."
            )

    def __call__(self, situation: Situation) -> Epoch:
        """Draw the rows of a pass, and set their weights."""
        s = situation
        everything = torch.arange(len(s.seen), device="cpu")
        known = s.last.isfinite()
        if s.progress >= self.until or not known.any():
            return Epoch(everything)
        low = known & (s.last < s.last[known].mean())
        stays = ~low | (s.random() >= self.prune)
        weight = torch.where(low, 1 / (1 - self.prune), 1.0)
        return Epoch(everything[stays], weight)


# Doubt: the share of wrong labels as measured. Hopeless rows: those that were never better than chance.
UNSURE = 0.5  # doubt above this says that nothing is learnt yet, not that labels are wrong
LEARNT = 5.0  # times the share of hopeless rows; with more doubt, hard rows look hopeless too
BORNE_OUT = 3.0  # times the share of hopeless rows; more doubt comes from a weak model


def wrong_labels(loss_N: Tensor, surest: float = 0.3) -> float:
    """Estimate the share of wrong labels from each row's last loss in training; 0.0 if there are no rows.

    If one label in ten is wrong and nothing tells which, the best a model can do is to give the label of
    an easy row a probability of nine tenths. So the share of wrong labels is one minus the probability of
    the surest rows' labels: of the share `surest` with the lowest losses, the one with the highest.

    The estimate is too high while the model has not learnt the easy rows, or if labels are smoothed. It is
    too low once the model has memorised labels, or if only some classes have wrong ones.

    Args:
        loss_N: cross-entropies [N], without NaN.
        surest: the share of rows that are taken for easy ones.
    """
    if not len(loss_N):
        return 0.0
    kth = max(1, round(surest * len(loss_N)))
    return 1 - math.exp(-float(loss_N.kthvalue(kth).values))


@dataclass(frozen=True)
class Remembered:
    """Train on the rows that are learnable and not yet learnt, as told by their last losses in training.

    The losses must be cross-entropies, with labels that are not smoothed.

    *Learnable?* A row is left out if all of its last losses were above a bound. The bound is measured: how
    sure the model is of its surest rows gives the share of wrong labels (`wrong_labels`, here: the doubt),
    and a label that never had a higher probability than that share is taken to be wrong. If more rows than
    that were never better than `chance`, those are left out. They alone are left out if the doubt is more
    than three times their share, since it then comes from a model that has not learnt its easy rows. If half
    of the rows were never better than chance, nothing has been learnt yet, and nothing is left out.

    After the share `filter_from` of the steps the bound is measured once, and rows are left out for good.
    Before that, if `chance` is given, rows are left out on probation as soon as the easy ones are learnt:
    the bound is measured for every pass, and of the rows above it one in `again` is trained on even so. A
    hard row comes back once the model has learnt what it takes; a wrong label is seen too rarely to be
    memorised.

    *Not yet learnt?* Up to the share `skip_until` of the steps, a row whose last loss is below the mean is
    left out of a pass with probability `skip`. But not if more than the share `most` of the labels is wrong:
    then what has not been learnt is mostly wrong labels.

    Args:
        chance: the loss of a guess, the logarithm of the number of classes. None: the bound is only measured,
            which on hard data, or with a weak model, takes right labels for wrong ones.
        measured: whether to measure the bound. False: it is `chance` alone.
        filter_from: the share of the steps after which rows are left out for good.
        least: nothing is left out unless more than this share of the rows was never better than chance
            (without `chance`: unless more is measured to be wrong). Rows that are hard and right are worth
            learning.
        skip: the probability to leave a learnt row out of a pass; 0: none are left out for that.
        skip_until: the share of the steps after which learnt rows are no longer left out.
        most: `skip` applies only if at most this share of the labels seems wrong.
        again: of rows on probation, one in this many is trained on in a pass. 0: no probation, so nothing is
            left out before `filter_from`.
    """

    chance: float | None = None
    measured: bool = True
    filter_from: float = 0.5
    least: float = 0.03
    skip: float = 0.0
    skip_until: float = 0.85
    most: float = 0.2
    again: int = 8

    def __post_init__(self) -> None:
        for name in ("filter_from", "least", "skip", "skip_until", "most"):
            _check_share(name, getattr(self, name))
        if self.again < 0:
            raise RholossError(
                f"`again` is {self.again}, but must be at least 0: of rows on probation one in so many is "
                "trained on in a pass."
            )
        if self.chance is None and not self.measured:
            raise RholossError(
                "`chance` must be given if `measured` is False; else there is no bound."
            )
        if self.chance is not None and not 0 < self.chance < math.inf:
            raise RholossError(
                f"`chance` is {self.chance}, but must be finite and above 0: it is the loss of a guess, the "
                "logarithm of the number of classes."
            )
        if isinstance(self.chance, numbers.Integral) and self.chance > 1:
            raise RholossError(
                f"`chance` is {self.chance}, a whole number, as of classes; pass its logarithm, "
                f"math.log({self.chance}) = {math.log(self.chance):.4g} (or {float(self.chance)}, if that is "
                "the loss of a guess)."
            )

    def __call__(self, situation: Situation) -> Epoch:
        """The rows that are worth a step."""
        s = situation
        wrong, bound = self._bound(s)
        out, known = s.lowest > bound, s.last.isfinite()
        stays = ~out
        skips = self.skip and s.progress < self.skip_until and wrong <= self.most
        if skips and (known & stays).any():
            learnt = known & (s.last < s.last[known & stays].mean())
            stays &= ~learnt | (s.random() >= self.skip)
        on_probation = s.progress < self.filter_from and "bound" not in s.notes
        if out.any() and on_probation:
            stays |= out & (s.random() < 1 / self.again)
        return Epoch(stays.nonzero().flatten())

    def _bound(self, s: Situation) -> tuple[float, float]:
        """The share of wrong labels, and the bound; once it is measured for good, it stays."""
        if "bound" in s.notes:
            return s.notes["wrong"], s.notes["bound"]
        doubt = wrong_labels(s.last[s.last.isfinite()])
        hopeless, chance = self._by_chance(s)
        for_good = s.progress >= self.filter_from
        if not for_good and not (self.again and doubt < min(UNSURE, LEARNT * hopeless)):
            return (doubt if self.measured else 0.0), math.inf
        if not self.measured:
            return hopeless, chance
        # Rows on probation are hardly trained on, so the doubt counts wrong labels among the others only.
        apart = s.notes.pop("hopeless", 0.0)
        wrong, bound = self._measured(s, apart + (1 - apart) * doubt, hopeless, chance)
        if bound < math.inf:
            found = {"wrong": wrong, "bound": bound} if for_good else {"hopeless": hopeless}
            s.notes.update(found)
        return wrong, bound

    def _measured(
        self, s: Situation, doubt: float, hopeless: float, chance: float
    ) -> tuple[float, float]:
        most = UNSURE if self.chance is None else min(UNSURE, BORNE_OUT * hopeless)
        believed = doubt if doubt < most else 0.0
        wrong = max(believed, hopeless)
        # Doubt alone can have other causes (smoothed labels, a small model); rows below chance cannot.
        if not self.least < (wrong if self.chance is None else hopeless) < UNSURE:
            return doubt, math.inf
        sure = -math.log(believed) if believed else math.inf
        # So that no more rows are above the bound than are wrong; rows without losses count as lowest.
        kth = len(s.seen) - round(wrong * len(s.seen))
        highest = s.lowest.clamp(min=0.0).kthvalue(kth).values
        return wrong, max(min(chance, sure), float(highest))

    def _by_chance(self, s: Situation) -> tuple[float, float]:
        """The share of rows that were never better than chance, and chance if they are enough.

        But not if they are most: then nothing is learnt yet, or `chance` is another number.
        """
        if self.chance is None:
            return 0.0, math.inf
        hopeless = float((s.lowest > self.chance).float().mean())
        return hopeless, self.chance if self.least < hopeless < UNSURE else math.inf


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise RholossError(f"`{name}` must be in [0, 1], but is {value}; it is a share.")
