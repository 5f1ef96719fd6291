"""Irreducible losses that keep pace with the target: first those of a model fitted briefly, then longer."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rholoss.errors import RholossError
from rholoss.guard import mean_of_finite
from rholoss.sources import TableSource, as_source

if TYPE_CHECKING:
    from rholoss.core import Stats
    from rholoss.distributed import Ranks
    from rholoss.steplog import Chosen

EVERY = 100  # steps between two looks at whether to climb


class Ladder(TableSource):
    """Irreducible losses of one model after different lengths of training, the shortest first.

    A model that is far better than the target finds nearly everything easy: its losses tell little, and the
    score is little more than the training loss. A model that the target has overtaken tells nothing any more.
    So a run begins with the losses of a model that was trained briefly. It climbs to the next rung when the
    target comes near: as soon as `ahead` times its mean loss on the candidates is below the mean of the rung.

    Args:
        rungs: irreducible losses of the same points, tables by id as `fit_irreducible` returns them. The
            mean loss must fall from each to the next.
        ahead: in (0, 1]; the smaller, the earlier it climbs.
    """

    def __init__(self, rungs: Sequence[Any], ahead: float = 0.8) -> None:
        sources = [as_source(rung) for rung in rungs]
        if not sources or not all(type(source) is TableSource for source in sources):
            given = [type(rung).__name__ for rung in rungs]
            raise RholossError(
                f"`rungs` must be tables of irreducible losses, at least one, but are {given}; pass what "
                "`fit_irreducible` returned for few epochs, for more, and to the end."
            )
        if not 0 < ahead <= 1:
            raise RholossError(f"`ahead` must be in (0, 1], but is {ahead}; the default is 0.8.")
        self.tables = [source.table for source in sources if isinstance(source, TableSource)]
        self.means = [_mean(table) for table in self.tables]
        for number, (mean, after) in enumerate(zip(self.means, self.means[1:], strict=False)):
            if not after < mean:
                raise RholossError(
                    f"The mean losses of `rungs` must fall, but that of number {number + 1} is {after:.4f} "
                    f"after {mean:.4f}; leave it out, or put the younger model first."
                )
        self.ahead, self.rung = ahead, 0
        self.seconds = sum(float(getattr(rung, "seconds", 0.0)) for rung in rungs)
        self._sum: Tensor | float = 0.0  # of mean reducible losses since the last look
        self._steps = 0
        super().__init__(self.tables[0])

    def own(self) -> Ladder:
        """A copy at the first rung: each run climbs by itself."""
        other = copy.copy(self)
        other.rung, other._sum, other._steps = 0, 0.0, 0
        other._stand()
        return other

    def watcher(self, ranks: Ranks) -> Callable[[int, Stats, Chosen], None]:
        """A function for `Selector(on_scores=...)`: every hundred steps all ranks may climb together.

        `Selector` installs it by itself.

        Args:
            ranks: the ranks of the run.
        """
        return functools.partial(self._watch, ranks)  # no closure: a copy watches its own

    def _watch(self, ranks: Ranks, step: int, stats: Stats, chosen: Chosen) -> None:
        # Of scored steps. Not the method's own score, which may be more than this difference.
        if chosen.score_B is not None:
            self._note(stats.loss - stats.irreducible_loss)
        if (step + 1) % EVERY == 0:
            told = [mean for mean in ranks.exchange(self._read()) if not math.isnan(mean)]
            if told:
                self.climb(sum(told) / len(told))

    def _note(self, reducible_B: Tensor) -> None:
        """The reducible losses of all candidates of a step. Does not wait for the device."""
        self._sum, self._steps = self._sum + mean_of_finite(reducible_B), self._steps + 1

    def _read(self) -> float:
        """Their mean since this was asked last, NaN if nothing was noted. Waits for the device."""
        mean = float(self._sum) / self._steps if self._steps else math.nan
        self._sum, self._steps = 0.0, 0
        return mean

    def climb(self, reducible: float) -> bool:
        """Move up to the rung that suits the target; returns whether the rung has changed.

        Args:
            reducible: how much the target's mean loss on the candidates is above this rung's.
        """
        before, loss = self.rung, reducible + self.means[self.rung]
        while self.rung + 1 < len(self.means) and self.ahead * loss < self.means[self.rung]:
            self.rung += 1
        if self.rung != before:
            self._stand()
        return self.rung != before

    def _stand(self) -> None:
        super().__init__(self.tables[self.rung])

    def digest(self) -> str | None:
        """That of all rungs."""
        every = [TableSource(table).digest() for table in self.tables]
        return None if None in every else "; ".join(map(str, every))

    def state_dict(self) -> dict[str, Any]:
        """On which rung it stands, and what was noted."""
        return {"rung": self.rung, "sum": float(self._sum), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if not 0 <= state["rung"] < len(self.tables):
            raise RholossError(
                f"The saved run stood on rung {state['rung']}, but there are {len(self.tables)}; pass the "
                "`Ladder` that it was given."
            )
        self.rung, self._sum, self._steps = state["rung"], state["sum"], state["steps"]
        self._stand()


def _mean(table: Any) -> float:
    values = np.asarray(getattr(table, "values", table.dense))
    return float(np.nanmean(values)) if len(values) else math.nan
