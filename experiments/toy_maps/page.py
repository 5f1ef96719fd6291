"""The page of the toy maps: the picture, and the shares of all seeds as a table."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from experiments import records
from experiments.toy_maps.problem import KINDS, SHARES
from experiments.toy_maps.run import CANDIDATES, KEEP, METHODS, NUM_POINTS, PHASES

FOLDER = records.RESULTS / "toy_maps"
LABELS = {
    "uniform": "uniform",
    "loss": "training loss",
    "negative_il": "negative IL",
    "rho": "RHO-LOSS",
}


def mean(lines: list[dict[str, Any]], method: str, what: str, phase: int) -> Any:
    """Over the seeds: a number for `accuracy`, one for each kind for `shares`."""
    values = [line["runs"][method][what][phase] for line in lines]
    if what == "accuracy":
        return statistics.fmean(values)
    return [statistics.fmean(of_kind) for of_kind in zip(*values, strict=True)]


def page(lines: list[dict[str, Any]], pictured: int = 0) -> list[str]:
    """Markdown lines; `pictured` is the seed of the picture."""
    about, seeds = lines[-1], sorted(line["seed"] for line in lines)
    k = round(CANDIDATES * KEEP)
    shares = ", ".join(f"{100 * s:.0f} % {kind}" for kind, s in zip(KINDS, SHARES, strict=True))
    out = [
        "# What each method picks: a problem that one can look at",
        "",
        "![Small multiples: a row for each method, a column for each phase of training](maps.png)",
        "",
        f"{NUM_POINTS:,} points of two classes in the plane: {shares}. The two **bulks** are far apart and learnt after a few "
        "steps: from then on most of their points are *redundant*. The six small **islands** above them, whose classes alternate, "
        "are *useful*: they can be learnt, and they are what is left to learn. *Noisy* points lie among both and have the wrong "
        "label. *Outlying* points lie far away with labels drawn by a coin; there are none in the holdout set nor in the test set. "
        f"At each step a network (2-64-64-2) sees {CANDIDATES} candidates and is trained on {k} of them. Dots are the points that it was "
        "trained on in these steps, larger if often; the bar below a map shows how they divide among the kinds; the number is the "
        "accuracy on clean test points at the end of these steps. The irreducible losses (IL) come from a smaller network "
        "(2-32-32-2) trained on holdout points that are as noisy as the others. "
        f"The picture shows seed {pictured}.",
        "",
        f"Means over {len(seeds)} seeds ({', '.join(map(str, seeds))}):",
        "",
        "| method | steps | "
        + " | ".join(f"{kind}, %" for kind in KINDS)
        + " | test accuracy, % |",
        "|---|---|" + "---|" * (len(KINDS) + 1),
    ]
    for method in METHODS:
        for phase, (start, stop) in enumerate(PHASES):
            cells = [f"{100 * s:.0f}" for s in mean(lines, method, "shares", phase)]
            accuracy = f"{100 * mean(lines, method, 'accuracy', phase):.1f}"
            name = LABELS[method] if phase == 0 else ""
            out.append(f"| {name} | {start + 1}-{stop} | " + " | ".join(cells) + f" | {accuracy} |")
    late = mean(lines, "rho", "shares", len(PHASES) - 1)
    return [
        *out,
        "",
        "How to read it:",
        "- **Uniform** spends seven of ten picks on what it soon knows.",
        "- The **highest training loss** is that of wrong labels and outliers, and no number of steps makes it fall: the network is "
        "pulled to and fro and ends up the worst. (Gradient norms rank two classes as losses do, so they make the same choice.)",
        "- The **lowest irreducible loss** avoids wrong labels, but takes the same easy points for ever.",
        "- **RHO-LOSS** goes where its loss is high *and* the holdout model shows that it need not be: to the islands, until they are learnt.",
        f"- After that, nothing that can be learnt is left, and wrong labels and outliers come up too: {100 * late[2]:.0f} and {100 * late[3]:.0f} % of "
        f"the picks in the last phase, where the data has {100 * SHARES[2]:.0f} and {100 * SHARES[3]:.0f} %. Selection is for the time in which there is "
        "something to learn.",
        "",
        "The problem was made up to show these four kinds apart (its geometry, phases and IL width were changed twice until they did); it is an explanation, not evidence. Evidence is in the other studies.",
        "",
        f"`{about['command']}`; {about['device']}, torch {about['torch']}, Python {about['python']}, {about['date']}; "
        f"{about['seconds']:.0f} s a seed. Rows: [runs.jsonl](runs.jsonl).",
    ]


def write(folder: Path = FOLDER, pictured: int = 0) -> None:
    """Make the page from the lines; of a seed that was run again the last line counts."""
    lines = {line["seed"]: line for line in records.read(folder / "runs.jsonl")}
    records.save(folder / "README.md", "\n".join(page(list(lines.values()), pictured)) + "\n")
