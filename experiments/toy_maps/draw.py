"""The picture: a row for each method, a column for each phase; dots are what was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.records import replacing
from experiments.toy_maps.problem import KINDS, Plane
from experiments.toy_maps.run import METHODS, PHASES, Run, grid

COLOURS = dict(zip(KINDS, ("#4878a8", "#2ca02c", "#d62728", "#e69f00"), strict=True))
TITLES = {
    "uniform": "uniform\n(at random)",
    "loss": "training loss\n(the hardest)",
    "negative_il": "negative IL\n(the easiest)",
    "rho": "RHO-LOSS\n(loss minus IL)",
}
EXTENT = 7.0


def draw(train: Plane, runs: dict[str, Run], path: Path) -> None:
    """Write the small multiples as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.titlesize": 11})
    heights = [1.0, 0.07] * len(METHODS)
    figure, axes = plt.subplots(
        len(heights), len(PHASES), figsize=(11, 12.4), height_ratios=heights,
        gridspec_kw={"hspace": 0.06, "wspace": 0.06},
    )  # fmt: skip
    for row, method in enumerate(METHODS):
        run, shares = runs[method], runs[method].shares(train)
        for column, (start, stop) in enumerate(PHASES):
            ax, strip = axes[2 * row, column], axes[2 * row + 1, column]
            picked = run.picked[start:stop].flatten()
            _panel(ax, train, picked, run.maps[column])
            ax.text(
                0.98, 0.015, f"{100 * run.accuracy[column]:.0f} %", transform=ax.transAxes,
                ha="right", va="bottom", weight="bold",
            )  # fmt: skip
            _strip(strip, shares[column])
            if row == 0:
                ax.set_title(f"steps {start + 1}-{stop}")
            if column == 0:
                ax.set_ylabel(TITLES[method], fontsize=12)
    handles = [
        plt.Line2D([], [], marker="o", ls="", color=COLOURS[kind], label=kind) for kind in KINDS
    ]
    handles.append(plt.Line2D([], [], color="black", lw=1, label="what the network decides"))
    figure.legend(
        handles=handles, loc="upper center", ncols=5, frameon=False, bbox_to_anchor=(0.5, 0.935)
    )
    options: dict[str, Any] = {"bbox_inches": "tight", "metadata": {"Software": None}}
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100, **options)
    plt.close(figure)


def _panel(ax: Any, train: Plane, picked: torch.Tensor, probability: np.ndarray) -> None:
    """All points faint, those that were trained on in the colour of their kind, larger if often."""
    x, kind = train.x.numpy(), train.kind.numpy()
    ax.scatter(*x.T, s=2, color="#d8d8d8", linewidths=0, rasterized=True)
    counts = torch.bincount(picked, minlength=len(train)).numpy()
    # In no order of kinds, or the last would cover the others; a favourite grows to nine times the size.
    rows = np.random.default_rng(0).permutation(np.flatnonzero(counts))
    size = 4 + 4 * np.minimum(counts[rows] - 1, 8)
    colours = np.array(list(COLOURS.values()))[kind[rows]]
    ax.scatter(*x[rows].T, s=size, c=colours, alpha=0.8, linewidths=0, zorder=2)
    num = round(len(probability) ** 0.5)
    line = grid()[:num, 0].numpy()
    ax.contour(
        line, line, probability.reshape(num, num), [0.5], colors="black", linewidths=1, zorder=4
    )
    ax.set(xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT), xticks=[], yticks=[], aspect="equal")


def _strip(ax: Any, shares: list[float]) -> None:
    """How the picks divide among the kinds."""
    left = 0.0
    for name, share in zip(KINDS, shares, strict=True):
        ax.barh(0, share, left=left, color=COLOURS[name], height=1.0)
        left += share
    ax.set(xlim=(0, 1), ylim=(-0.5, 0.5), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
