"""The page of the race, from its result lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments import records
from experiments.fair_clock.arms import ARMS, Cell

Line = dict[str, Any]
LABELS = ("clean", "noise 10 %", "worse")
NAMES = {"clean": "clean", "noise 10 %": "10 % noise", "worse": "CIFAR-10N worse"}
# 97.5 % quantiles of Student's t by degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def paired(ours: Sequence[Line], theirs: Sequence[Line]) -> list[float]:
    """Differences in accuracy, seed by seed, where both have it."""
    by_seed = {line["seed"]: line["accuracy"] for line in theirs}
    return [line["accuracy"] - by_seed[line["seed"]] for line in ours if line["seed"] in by_seed]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of the 95 % t interval (infinite for one value)."""
    mean, num = statistics.fmean(differences), len(differences)
    if num < 2:
        return mean, float("inf")
    quantile = T_975[min(num - 2, len(T_975) - 1)]
    return mean, quantile * statistics.stdev(differences) / num**0.5


def spread(lines: Sequence[Line]) -> str:
    """Mean accuracy, its standard deviation, and how many seeds."""
    values = [line["accuracy"] for line in lines]
    if len(values) == 1:
        return f"{values[0]:.2f} (1)"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def difference(ours: Sequence[Line], theirs: Sequence[Line]) -> str:
    """Mean paired difference with its interval."""
    found = paired(ours, theirs)
    if not found:
        return ""
    mean, half = interval(found)
    return f"{mean:+.2f}" if half == float("inf") else f"{mean:+.2f} ± {half:.2f}"


def table(lines: Sequence[Line], labels: Sequence[str] = LABELS) -> list[str]:
    """Arms down, label sets across: accuracy, and the difference to uniform at its best."""
    arms = [name for name in ARMS if any(line["arm"] == name for line in lines)]
    shown = [name for name in labels if any(line["labels"] == name for line in lines)]
    head = "| arm | " + " | ".join(f"{NAMES[n]} | against uniform" for n in shown) + " |"
    rows = [head, "|---" * (1 + 2 * len(shown)) + "|"]
    for arm in arms:
        cells = []
        for name in shown:
            ours, uniform = (_of(lines, name, a) for a in (arm, "uniform"))
            cells.append(spread(ours) if ours else "not run")
            cells.append(difference(ours, uniform) if ours and arm != "uniform" else "")
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return rows


def _of(lines: Iterable[Line], labels: str, arm: str) -> list[Line]:
    """An arm's runs on a label set; if it was run at several sizes or rates, those with most seeds."""
    groups: dict[tuple[int, float], list[Line]] = {}
    for line in lines:
        if line["labels"] == labels and line["arm"] == arm and not line["error"]:
            groups.setdefault((line["n_b"], line["lr"]), []).append(line)
    return max(groups.values(), key=len, default=[])


def tuning(lines: Sequence[Line]) -> list[str]:
    """All tuning runs: one row an arm and size, the rates side by side."""
    rates = sorted({line["lr"] for line in lines})
    head = "| labels | arm | n_b | " + " | ".join(f"rate {rate:g}" for rate in rates) + " |"
    rows = [head, "|---" * (3 + len(rates)) + "|"]
    keys = sorted(
        {(line["labels"], line["arm"], line["n_b"]) for line in lines},
        key=lambda key: (LABELS.index(key[0]), list(ARMS).index(key[1]), key[2]),
    )
    for labels, arm, n_b in keys:
        cells = []
        for rate in rates:
            found = [
                line for line in lines
                if (line["labels"], line["arm"], line["n_b"], line["lr"]) == (labels, arm, n_b, rate)
            ]  # fmt: skip
            cells.append(spread(found) if found else "")
        rows.append(f"| {NAMES[labels]} | {arm} | {n_b} | " + " | ".join(cells) + " |")
    return rows


def draw_curves(lines: Sequence[Line], path: Path) -> Path | None:
    """Accuracy over seconds on the 5,000, one panel a label set: each arm's best tuning run."""
    with_curve = [line for line in lines if line.get("curve")]
    if not with_curve:
        return None
    from matplotlib.figure import Figure

    shown = [name for name in LABELS if any(line["labels"] == name for line in with_curve)]
    figure = Figure(figsize=(5 * len(shown), 4), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for arm in ARMS:
            ours = [line for line in with_curve if line["labels"] == name and line["arm"] == arm]
            if ours:
                best = max(ours, key=lambda line: line["accuracy"])
                axis.plot(*zip(*best["curve"], strict=True), label=f"{arm} (n_b {best['n_b']})")
        axis.set(title=NAMES[name], xlabel="seconds, irreducible losses included")
        axis.set_ylabel("accuracy on 5,000 held-out points, %")
        axis.set_ylim(bottom=0.85 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return path


Section = tuple[str, Callable[[Cell], bool]]
SECTIONS: tuple[Section, ...] = (
    (
        "Main table: 17 s, all training points, each arm at its best n_b and rate",
        lambda c: c.split == "final" and _plain(c) and c.il == "inside" and c.n_b != 32,
    ),
    (
        "The same with irreducible losses reused from an earlier run",
        lambda c: c.split == "final" and _plain(c) and c.il == "reused" and c.n_b != 32,
    ),
    ("n_b = 32 for every arm", lambda c: c.split == "final" and _plain(c) and c.n_b == 32),
    (
        "Abundant data: even ids train, odd ids are the holdout set",
        lambda c: c.split == "final" and c.part == "half",
    ),
    ("Longer: 60 s", lambda c: c.split == "final" and c.budget == 60 and c.dataset == "cifar10"),
    ("CIFAR-100, 17 s", lambda c: c.split == "final" and c.dataset == "cifar100"),
)


def _plain(cell: Cell) -> bool:
    return (cell.dataset, cell.part, cell.budget) == ("cifar10", "all", 17.0)


def page(lines: Sequence[Line], curves: Path | None) -> str:
    """Everything that was run, and what was not."""
    text = [INTRODUCTION]
    for title, belongs in SECTIONS:
        found = [line for line in lines if belongs(Cell.of(line))]
        text += [f"## {title}", "", *(table(found) if found else ["Not run yet."]), ""]
    tune = [
        line
        for line in lines
        if line["split"] == "tune" and line.get("dataset", "cifar10") == "cifar10"
    ]
    text += [
        "## Tuning: accuracy on the 5,000 held-out training points, whose labels are as noisy",
        "",
    ]
    text += [*tuning(tune), ""]
    if curves is not None:
        text += [f"![accuracy over seconds]({curves.name})", ""]
    where = sorted({f"{line['device']}, torch {line['torch']}, {line['date']}" for line in lines})
    commands = sorted({line["command"] for line in lines})
    text += [
        "## Where and how",
        "",
        *(f"- {place}" for place in where),
        "",
        "Commands, as they were given:",
        "",
    ]
    text += ["```", *commands, "python -m experiments.fair_clock report", "```", ""]
    return "\n".join(text)


INTRODUCTION = """# The fair race: who is ahead at equal wall clock?

ResNet-18 on CIFAR. Every arm has the same seconds of one H200, learning rate up over a tenth of its steps
and then down to zero, bf16, random crops and flips, the same initial weights for a seed. A budget is turned
into steps by step times measured alone in the same call. **Irreducible losses (2-fold cross-fit of the
small CNN) are paid from the budget** unless a table says "reused". Batch size and rate are chosen on 5,000
training points held out (with labels as noisy as the rest); an arm that was not tuned by itself takes
uniform's. The test set is read once, at the end of a final run. Numbers: accuracy in %, mean ± standard
deviation (seeds); difference to uniform seed by seed with its 95 % t interval. Lines:
[runs.jsonl](runs.jsonl). What was found, and what it means: [FINDINGS.md](FINDINGS.md).
"""


def write(out: Path) -> Path:
    """Write README.md and the plot beside the result lines."""
    lines = [line for line in records.read(out) if line["arm"] in ARMS]
    tune = [line for line in lines if line["split"] == "tune"]
    target = out.parent / "README.md"
    text = page(lines, draw_curves(tune, out.parent / "curves.png"))
    temporary = target.with_suffix(".part")
    temporary.write_text(text)
    return temporary.replace(target)
