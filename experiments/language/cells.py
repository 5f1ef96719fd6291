"""Which runs there are: a cell is one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.language.tasks import TASKS

PAPER_METHODS = ("uniform", "loss", "grad_norm", "grad_norm_is", "svp", "negative_il", "rho")
FRESH = "annealed_fresh"  # scored with the newest weights; then what is measured to be wrong is left out
FAIR_METHODS = (
    "uniform", "random_half", "rho", "annealed", "filtered", "remembered", "measured", FRESH,
)  # fmt: skip
ON_ALL_ROWS = ("uniform", "annealed", "remembered", "measured", FRESH)
UNSCORED = ("uniform", "svp")
CANDIDATES, KEEP = 320, 0.1  # n_B, and n_b = 32
SWITCH, DROP = 0.3, 0.1  # annealed: RHO-LOSS at first, then uniform without the highest IL
IL_EPOCHS = 10  # of an irreducible-loss model in the paper's protocol, at most
MINILM = "MiniLM-L6-H384-uncased"
IRREDUCIBLE = ("same", "small")  # the model that trains, or its first two layers


@dataclass(frozen=True)
class Cell:
    """One run. `budget` is in seconds and 0 in the paper's protocol, which counts epochs."""

    task: str
    method: str
    seed: int
    irreducible: str = "same"
    budget: float = 0.0
    il_counts: bool = False
    epochs: int = 0  # 0: the task's own
    encoder: str = MINILM  # the pretrained model that is fine-tuned
    rows: str = "half"  # or 'all': of both halves, with irreducible losses by cross-fitting
    il_epochs: int = IL_EPOCHS

    def key(self) -> tuple[Any, ...]:
        """What tells it from other runs."""
        return tuple(asdict(self).values())

    @property
    def shortened(self) -> bool:
        """Whether it is for a look only: itself, or the irreducible-loss model, was not trained as long."""
        return bool(self.epochs) or self.il_epochs != IL_EPOCHS

    @property
    def needs_il(self) -> bool:
        """Whether something of the irreducible-loss model is read: its losses, or itself as a proxy."""
        return self.method in ("rho", "negative_il", "annealed", "filtered", "svp", FRESH)


def paper(
    tasks: list[str], seeds: list[int], epochs: int = 0, il_epochs: int = IL_EPOCHS
) -> Iterator[Cell]:
    """Table 2's last rows and Fig. 5: constant learning rate; RHO-LOSS with a small IL model too."""
    for seed in seeds:
        for task in tasks:
            for method, size in [*((name, "same") for name in PAPER_METHODS), ("rho", "small")]:
                cell = Cell(task, method, seed, size, epochs=epochs)
                yield replace(cell, il_epochs=il_epochs) if cell.needs_il else cell


def fair(tasks: list[str], seeds: list[int], budget: float) -> Iterator[Cell]:
    """Equal wall clock, learning rate decayed to zero; the small IL model's time inside and outside.

    Some arms train on all rows: who fits no irreducible-loss model need not hold any out.
    """
    arms = [
        *((method, "half") for method in FAIR_METHODS),
        *((method, "all") for method in ON_ALL_ROWS),
    ]
    for seed in seeds:
        for task in tasks:
            for method, rows in arms:
                cell = Cell(task, method, seed, "small", budget, rows=rows)
                yield from (replace(cell, il_counts=True), cell) if cell.needs_il else (cell,)


def cell_of(record: dict[str, Any]) -> Cell:
    """The cell of a result line."""
    return Cell(**record["cell"])


def scoring_share(method: str) -> float:
    """Of the steps of a fair run: how many of them score candidates."""
    return {"rho": 1.0, "annealed": SWITCH, FRESH: SWITCH}.get(method, 0.0)


def step_kinds(method: str) -> tuple[str, str]:
    """Of a fair run, what its steps that score and its other steps are timed as.

    A step that does not score is uniform's, but for remembering its losses.
    """
    plain = "remembered" if method in ("remembered", "measured", FRESH) else "uniform"
    return FRESH if method == FRESH else "rho", plain


def known_tasks() -> list[str]:
    """All of them."""
    return list(TASKS)
