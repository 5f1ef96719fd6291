"""The page of the race, from its result lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import records
from experiments.fair_clock.again import command
from experiments.fair_clock.arms import ARMS, LABELS, Cell
from experiments.fair_clock.choose import Choices, choice_for, tuned, tuned_best
from experiments.fair_clock.words import about
from experiments.intervals import interval

Line = dict[str, Any]
ALL_LABELS = LABELS["cifar10"]
NAMES = {"clean": "clean", "noise 10 %": "10 % noise", "worse": "CIFAR-10N worse"}


def paired(ours: Sequence[Line], theirs: Sequence[Line]) -> list[float]:
    """Differences in accuracy, seed by seed, where both have it."""
    by_seed = {line["seed"]: line["accuracy"] for line in theirs}
    return [line["accuracy"] - by_seed[line["seed"]] for line in ours if line["seed"] in by_seed]


def spread(lines: Sequence[Line]) -> str:
    """Mean accuracy, its standard deviation, and how many seeds; those that diverged count, too."""
    values = [line["accuracy"] for line in lines]
    diverged = sum(bool(line["error"]) for line in lines)
    told = f"{len(values)}, {diverged} diverged" if diverged else str(len(values))
    if len(values) == 1:
        return f"{values[0]:.2f} ({told})"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f} ({told})"


def difference(ours: Sequence[Line], theirs: Sequence[Line]) -> str:
    """Mean paired difference with its interval; bold if ahead, with 0 outside of the interval."""
    found = paired(ours, theirs)
    if not found:
        return ""
    mean, half = interval(found)
    if half == float("inf"):
        return f"{mean:+.2f}"
    told = f"{mean:+.2f} ± {half:.2f}"
    return f"**{told}**" if mean > half else told


def table(lines: Sequence[Line], best: Choices) -> list[str]:
    """Arms down, label sets across: accuracy, and the difference to uniform at its best."""
    arms = [name for name in ARMS if any(line["arm"] == name for line in lines)]
    shown = [name for name in ALL_LABELS if any(line["labels"] == name for line in lines)]
    head = "| arm | " + " | ".join(f"{NAMES[n]} | against uniform" for n in shown) + " |"
    rows = [head, "|---" * (1 + 2 * len(shown)) + "|"]
    for arm in arms:
        cells = []
        for name in shown:
            ours, uniform = (_of(lines, name, a, best) for a in (arm, "uniform"))
            cells.append(spread(ours) if ours else "not run")
            cells.append(difference(ours, uniform) if ours and arm != "uniform" else "")
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return rows


def _of(lines: Iterable[Line], labels: str, arm: str, best: Choices) -> list[Line]:
    """An arm's runs on a label set; if it was run at several sizes or rates, those that tuning chose.

    Else those with most seeds: what the test set says of them decides nothing.
    """
    groups: dict[tuple[int, float], list[Line]] = {}
    for line in lines:
        if line["labels"] == labels and line["arm"] == arm:
            groups.setdefault((line["n_b"], line["lr"]), []).append(line)
    chosen = {choice_for(best, Cell.of(line)) for group in groups.values() for line in group}
    return max(groups.values(), key=lambda g: (_at(g[0]) in chosen, len(g)), default=[])


def _at(line: Line) -> tuple[int, float]:
    return line["n_b"], line["lr"]


def tuning(lines: Sequence[Line]) -> list[str]:
    """All tuning runs: one row an arm and size, the rates side by side."""
    rates = sorted({line["lr"] for line in lines})
    head = "| labels | arm | n_b | " + " | ".join(f"rate {rate:g}" for rate in rates) + " |"
    rows = [head, "|---" * (3 + len(rates)) + "|"]
    keys = sorted(
        {(line["labels"], line["arm"], line["n_b"]) for line in lines},
        key=lambda key: (ALL_LABELS.index(key[0]), list(ARMS).index(key[1]), key[2]),
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


def draw_curves(lines: Sequence[Line], path: Path, arms: Sequence[str]) -> Path | None:
    """Accuracy over seconds on the 5,000, a panel for each label set; arms where they did best, all seeds."""
    with_curve = [line for line in lines if line.get("curve") and line["arm"] in arms]
    if not with_curve:
        return None
    from matplotlib.figure import Figure

    shown = [name for name in ALL_LABELS if any(line["labels"] == name for line in with_curve)]
    there = [arm for arm in arms if any(line["arm"] == arm for line in with_curve)]
    looks = {arm: _look(arm, place) for place, arm in enumerate(there)}  # the same in all panels
    figure = Figure(figsize=(5 * len(shown), 4), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for arm in there:
            ours = [line for line in with_curve if line["labels"] == name and line["arm"] == arm]
            if ours:
                choice = choice_for(tuned(ours), Cell.of(ours[0]))
                runs = [line for line in ours if _at(line) == choice]
                seconds, mean, low, high = _band([line["curve"] for line in runs])
                seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
                label = f"{arm} (n_b {runs[0]['n_b']}{seeds})"
                axis.plot(seconds, mean, label=label, **looks[arm])
                band = {"color": looks[arm]["color"], "alpha": 0.15, "linewidth": 0}
                axis.fill_between(seconds, low, high, **band)
        axis.set(title=NAMES[name], xlabel="seconds, irreducible losses included")
        axis.set_ylabel("accuracy on 5,000 held-out points, %")
        axis.set_ylim(bottom=0.85 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return path


def _look(arm: str, place: int) -> dict[str, Any]:
    """Uniform is black, what scores is a full line, and what does without it a thin, broken one."""
    if arm == "uniform":
        return {"color": "black", "linewidth": 2}
    if arm == "uniform, remembering":
        return {"color": "black", "linestyle": "dotted", "linewidth": 2}
    if ARMS[arm].scores:
        return {"color": f"C{place}", "linewidth": 2}
    return {"color": f"C{place}", "linestyle": "dashed", "linewidth": 1}


def _band(curves: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Seconds of the first run; mean, lowest and highest accuracy of all runs there."""
    import numpy as np

    seconds = np.array(curves[0])[:, 0]
    each = [np.interp(seconds, *np.array(curve).T) for curve in curves]
    return seconds, np.mean(each, 0), np.min(each, 0), np.max(each, 0)


SHORT = 11.33  # two thirds of 17 s
Which = Callable[[Cell], bool]


@dataclass(frozen=True)
class Section:
    """A table: which final runs belong there, and which of them it is not shown without."""

    title: str
    belongs: Which
    own: Which = lambda cell: True
    n_b: int | None = None  # the size that tuning was given, else it chose that, too


def sections(best: Choices) -> list[Section]:
    """All that the race is to show."""

    def usual(cell: Cell) -> bool:
        """At the size that was chosen; 32 may be just that, or be asked for (the paper's)."""
        choice = choice_for(best, cell)
        return _plain(cell) and (cell.n_b != 32 or (choice is not None and choice[0] == 32))

    def reused(cell: Cell) -> bool:
        return usual(cell) and (cell.il == "reused" or not ARMS[cell.arm].needs_il)

    def paid(dataset: str, part: str, budget: float) -> Which:
        race = (dataset, part, budget)
        return lambda cell: cell.race == race and cell.il == "inside"

    def short(cell: Cell) -> bool:
        return cell.arm != "uniform" and paid("cifar10", "all", SHORT)(cell)

    return [
        Section(
            "Main table: 17 s, all training points, each arm at its best known n_b and rate",
            lambda cell: usual(cell) and cell.il == "inside",
        ),
        Section(
            "The same with irreducible losses reused from an earlier run",
            reused,
            lambda cell: cell.il == "reused",
        ),
        Section(
            "n_b = 32 for every arm",
            lambda cell: _plain(cell) and cell.il == "inside" and cell.n_b == 32,
            n_b=32,
        ),
        Section(
            "Abundant data: even ids train, odd ids are the holdout set",
            paid("cifar10", "half", 17.0),
        ),
        Section("Longer: 60 s", paid("cifar10", "all", 60.0)),
        Section("CIFAR-100, 17 s", paid("cifar100", "all", 17.0)),
        Section(
            "Two thirds of the time: 11.33 s against uniform's 17 s",
            lambda cell: short(cell) or (cell.arm == "uniform" and usual(cell)),
            short,
        ),
    ]


def _plain(cell: Cell) -> bool:
    return cell.race == ("cifar10", "all", 17.0)


def _counts(cell: Cell) -> bool:
    """Of a tuning run: whether the main table's sizes and rates are chosen by it."""
    return _plain(cell) and cell.il == "inside"


def _name(line: Line) -> str:
    """Of a race that has no section of its own."""
    dataset, part, budget = Cell.of(line).race
    return f"{dataset}, {part} points, {budget:g} s, irreducible losses {Cell.of(line).il}"


def results(lines: Sequence[Line]) -> list[str]:
    """A table for each section, and for what was run beyond them."""
    best, text = tuned(lines), []
    beyond = final = [line for line in lines if line["split"] == "final"]
    for section in sections(best):
        found = [line for line in final if section.belongs(Cell.of(line))]
        beyond = [line for line in beyond if line not in found]
        was_run = any(section.own(Cell.of(line)) for line in found)
        text += [f"## {section.title}", ""]
        chosen = tuned(lines, section.n_b) if section.n_b else best
        text += [*(table(found, chosen) if was_run else ["Not run yet."]), ""]
        text += _again(found) if was_run else []
    for name in dict.fromkeys(map(_name, beyond)):
        text += [f"## Also run: {name}", ""]
        found = [line for line in beyond if _name(line) == name]
        text += [*table(found, best), "", *_again(found)]
    return text


def _again(lines: Sequence[Line]) -> list[str]:
    """The command for these runs once more, which is long."""
    summary = "<details><summary>Once more: the command for all runs of this table</summary>"
    return [summary, "", "```", command(lines), "```", "", "</details>", ""]


def _until_then(lines: Sequence[Line], first: str) -> str:
    """Which arm stands for the first one as long as that was not raced in the main table."""
    final = [Cell.of(line) for line in lines if line["split"] == "final"]
    raced = {cell.arm for cell in final if _plain(cell) and cell.n_b != 32}
    best = tuned_best(lines, raced)
    if first in raced or best is None:
        return ""
    return f" It has no final runs yet; of those that have, **{best[0]}** is first ({best[1]:.2f})."


def _fixed(lines: Sequence[Line]) -> str:
    """What the arms have whose switch is fixed by hand."""
    best = tuned_best(lines, by_hand=True)
    return "" if best is None else f" Of those fixed by hand, {best[0]} is first ({best[1]:.2f})."


def _arms(lines: Sequence[Line]) -> list[str]:
    """What each arm does; those that were only tuned come last."""
    final = {line["arm"] for line in lines if line["split"] == "final"}
    there = {line["arm"] for line in lines}
    told = {name: f"| {name} | {about(arm)} |" for name, arm in ARMS.items() if name in there}
    raced = [row for name, row in told.items() if name in final]
    others = [row for name, row in told.items() if name not in final]
    head = ["| arm | what it does |", "|---|---|"]
    text = ["## The arms", "", *head, *raced]
    return [*text, "", "Only in tuning runs:", "", *head, *others] if others else text


def page(lines: Sequence[Line], curves: Path | None) -> str:
    """Everything that was run, and what was not."""
    text = [INTRODUCTION, *results(lines)]
    if curves is not None:
        told = (
            "On the way, in tuning runs: means over the seeds, each arm at the size and rate where it did "
            "best; bands go from the lowest to the highest."
        )
        text += ["## Accuracy over seconds", "", told, ""]
        text += [f"![accuracy over seconds]({curves.name})", ""]
    text += [*_arms(lines), ""]
    text += [
        "## Tuning: accuracy on the 5,000 held-out training points, whose labels are as noisy",
        "",
    ]
    tune = [line for line in lines if line["split"] == "tune"]
    text += [*tuning([line for line in tune if _counts(Cell.of(line))]), ""]
    first = tuned_best(lines)
    if first is not None:
        text += [
            "Of the RHO-type arms that find their switch themselves and were tuned on every label set, "
            f"**{first[0]}** has the highest mean ({first[1]:.2f}): it is the one that stands for them, "
            "whatever the test set says of others." + _until_then(lines, first[0]) + _fixed(lines),
            "",
        ]
    others = [line for line in tune if not _counts(Cell.of(line))]
    for race in dict.fromkeys(map(_name, others)):
        text += [f"Tuning, {race}:", ""]
        text += [*tuning([line for line in others if _name(line) == race]), ""]
    where = sorted({f"{line['device']}, torch {line['torch']}, {line['date']}" for line in lines})
    commands = sorted({line["command"] for line in lines})
    text += [
        "## Where and how",
        "",
        *(f"- {place}" for place in where),
        "",
        "Commands, as they were given (some were cut off by time, some name arms that are gone):",
        "",
    ]
    text += ["```", *commands, "python -m experiments.fair_clock report", "```", ""]
    return "\n".join(text)


INTRODUCTION = """# The fair race: who is ahead at equal wall clock?

What was found, and what it means: [FINDINGS.md](FINDINGS.md). Here are all tables. The rules:

- ResNet-18 on CIFAR, bf16, random crops and flips; [the arms](#the-arms) of a seed begin with the same
  weights.
- Every arm has the same seconds of one H200, and takes its learning rate up over a tenth of its steps and
  then down to zero.
- **Irreducible losses (2-fold cross-fit of the small CNN) are paid from the budget** unless a table says
  "reused"; those of a label set are fitted once a call, for all its seeds.
- A budget is turned into steps by step times measured alone in the same call; compiling and capturing the
  training step, and evaluating, are in nobody's time.
- Batch size and rate are chosen on 5,000 training points held out, with labels as noisy as the rest. An arm
  that was not tuned by itself takes what was uniform's then, and what was not tuned at all (60 s, half of
  the data) takes those of the main table.
- The test set is read once, at the end of a final run.

Numbers: accuracy in %, mean ± standard deviation (seeds; runs that diverged are among them). Differences
are taken seed by seed, with their 95 % t interval; bold: ahead, with 0 outside of the interval. Lines:
[runs.jsonl](runs.jsonl).
"""


def write(out: Path) -> Path:
    """Write the page and the plot beside the result lines."""
    # Of two lines of a run the later counts: twice the same is no second seed.
    every = {Cell.of(line).key(): line for line in records.read(out)}
    lines = [line for line in every.values() if line["arm"] in ARMS]
    if not lines:  # rather than a page of nothing in place of another file's
        raise SystemExit(f"{out} has no runs; make some with `tune` or `final`.")
    tune = [line for line in lines if line["split"] == "tune"]
    plain = [line for line in tune if _counts(Cell.of(line))]
    finals = {line["arm"] for line in lines if line["split"] == "final" and _plain(Cell.of(line))}
    # What the tables show; all others crowd the plot. The second trains as the first does, and has curves
    # where the first was tuned before they were kept.
    arms = [name for name in ARMS if name in finals | {"uniform", "uniform, remembering"}]
    text = page(lines, draw_curves(plain, out.parent / "curves.png", arms))
    return records.save(records.page_of(out), text)
