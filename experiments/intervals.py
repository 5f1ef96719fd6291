"""How sure a mean of few seeds is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# 97.5 % quantiles of Student's t by degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of the 95 % t interval (infinite for one value)."""
    mean, num = statistics.fmean(differences), len(differences)
    if num < 2:
        return mean, float("inf")
    quantile = T_975[min(num - 2, len(T_975) - 1)]
    return mean, quantile * statistics.stdev(differences) / num**0.5
