"""Arms that several studies have, so that they share their runs."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell

R18_IL, CNN_IL = "resnet18, clean holdout", "small_cnn, clean holdout"
CROSS_FIT, MIXED_UP = "small_cnn, cross-fit", "small_cnn, cross-fit mixed up"
R18_NOISY_IL, CNN_NOISY_IL = "resnet18, noisy holdout", "small_cnn, noisy holdout"


def early(epochs: int, source: str = "clean holdout") -> str:
    """Irreducible losses of a small CNN that was not fitted to the end."""
    return f"small_cnn of {epochs} epochs, {source}"


def most_accurate(source: str) -> str:
    """Those of the epoch of highest accuracy, and not of lowest loss."""
    return f"small_cnn of highest accuracy, {source}"


def ladder(source: str = "clean holdout") -> str:
    """Those of a small CNN after few epochs first, of lowest loss at last (`rholoss.Ladder`)."""
    return f"small_cnn ladder, {source}"


def rho(base: Cell, il: str, **changes: object) -> Cell:
    """RHO-LOSS with these irreducible losses."""
    return replace(base, method="rho", il=il, **changes)  # type: ignore[arg-type]


def all_methods(base: Cell, il: str = R18_IL) -> dict[str, Cell]:
    """The columns of Table 2. The proxy of SVP is the irreducible-loss model, as in the authors' code."""
    return {
        "uniform": base,
        "RHO-LOSS": rho(base, il),
        "training loss": replace(base, method="loss"),
        "gradient norm": replace(base, method="grad_norm"),
        "gradient norm IS": replace(base, method="grad_norm_is"),
        "negative IL": replace(base, method="negative_il", il=il),
        "SVP": replace(base, method="svp", il=il),
    }
