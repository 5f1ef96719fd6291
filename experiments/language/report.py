"""The page of results, made from the lines."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments import records
from experiments.bench import plots
from experiments.intervals import interval
from experiments.language.cells import (
    MINILM,
    PAPER_METHODS,
    Cell,
    cell_of,
    scoring_share,
    step_kinds,
)
from experiments.language.tasks import TASKS

TITLES = {
    "uniform": "uniform", "loss": "training loss", "grad_norm": "gradient norm",
    "grad_norm_is": "gradient norm IS", "svp": "SVP", "negative_il": "negative IL", "rho": "RHO-LOSS",
    "annealed": "annealed RHO-LOSS", "random_half": "random half", "filtered": "uniform minus IL 10 %",
    "remembered": "remembered losses", "measured": "remembered losses, measured",
    "annealed_fresh": "annealed RHO-LOSS, fresh, measured",
}  # fmt: skip
# Table 2 of the paper (ALBERT v2): epochs to the two targets, NR where never reached, final accuracy.
PAPER: dict[str, dict[str, tuple[str, str, str]]] = {
    "sst2": {
        "loss": ("8", "NR", "87"), "grad_norm": ("2", "4", "91"), "grad_norm_is": ("3", "NR", "89.7"),
        "svp": ("NR", "NR", "66"), "negative_il": ("7", "NR", "83"), "uniform": ("1", "6", "90"),
        "rho": ("1", "3", "92"),
    },
    "cola": {
        "loss": ("8", "NR", "78"), "grad_norm": ("6", "NR", "79"), "grad_norm_is": ("16", "NR", "78"),
        "svp": ("NR", "NR", "62"), "negative_il": ("NR", "NR", "69"), "uniform": ("34", "NR", "76"),
        "rho": ("3", "39", "80"),
    },
}  # fmt: skip


def epochs_to(record: dict[str, Any], target: float) -> float | None:
    """Epochs (passes over the candidates) after which the accuracy was first reached."""
    reached = next((step for step, accuracy, _ in record["curve"] if accuracy >= target), None)
    return None if reached is None else reached / record["steps_an_epoch"]


def over_seeds(values: Iterable[float | None], digits: int = 1) -> str:
    """Mean and range; of seeds that never reached it, how many."""
    given = list(values)
    found = [value for value in given if value is not None]
    if not found:
        return "NR" if given else "-"
    text = f"{statistics.fmean(found):.{digits}f}"
    if len(found) > 1:
        text += f" ({min(found):.{digits}f}-{max(found):.{digits}f})"
    return text + (f", NR in {len(given) - len(found)}" if len(found) < len(given) else "")


def last(record: dict[str, Any], place: int) -> float | None:
    """Mean of the last tenth of the evaluations, in percent: one of them alone is noise."""
    tail = record["curve"][-max(1, len(record["curve"]) // 10) :]
    return 100 * statistics.fmean(point[place] for point in tail) if tail else None


Record = dict[str, Any]
Runs = list[tuple[Cell, Record]]


def minus_uniform(
    ours: list[Record], uniform: list[Record], end: Callable[[Record], float | None]
) -> str:
    """How far the runs end above uniform: mean over seeds that both have, and half of its 95 % t interval."""
    base = {r["cell"]["seed"]: end(r) for r in uniform}
    pairs = [(end(r), base.get(r["cell"]["seed"])) for r in ours]
    found = [a - b for a, b in pairs if a is not None and b is not None]
    if ours == uniform or len(found) < 2:
        return ""
    mean, half = interval(found)
    return f"{mean:+.2f} ± {half:.2f}"


def paper_table(task: str, runs: Runs) -> list[str]:
    """Rows of one task under the paper's protocol."""
    targets = TASKS[task].targets
    names = [f"epochs to {100 * t:g} %" for t in targets]
    extra = (
        ["Matthews (x 100)"]
        if task == "cola"
        else ["wrong labels picked"]
        if TASKS[task].noise
        else []
    )
    theirs = ["paper: epochs (final)"] if task in PAPER else []
    head = ["method", "seeds", *names, "final accuracy", "minus uniform", "best", *extra, *theirs]
    uniform = [r for c, r in runs if c.method == "uniform"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for method, size in [*((m, "same") for m in PAPER_METHODS), ("rho", "small")]:
        found = [r for c, r in runs if (c.method, c.irreducible) == (method, size)]
        if not found:
            continue
        title = TITLES[method] + (", IL model of 2 layers" if size == "small" else "")
        row = [title, str(len(found))]
        row += [over_seeds(epochs_to(r, t) for r in found) for t in targets]
        row += [over_seeds(last(r, 1) for r in found)]
        row += [minus_uniform(found, uniform, lambda r: last(r, 1))]
        row += [over_seeds(100 * max(p[1] for p in r["curve"]) for r in found)]
        if task == "cola":
            row += [over_seeds(last(r, 2) for r in found)]
        elif TASKS[task].noise:
            row += [over_seeds((100 * r["wrong_share"] for r in found), 1) + " %"]
        if task in PAPER:
            first, second, final = PAPER[task][method]
            row += [f"{first} / {second} ({final})" if size == "same" else ""]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def fair_table(runs: Runs) -> list[str]:
    """Rows of the fair protocol, all tasks."""
    head = [
        "task",
        "rows",
        "arm",
        "IL time",
        "budget, s",
        "seeds",
        "steps",
        "seconds used",
        "final accuracy",
        "minus uniform",
        "Matthews (x 100)",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for cell, record in runs:
        key = (cell.task, cell.rows, cell.method, cell.il_counts, cell.budget)
        groups.setdefault(key, []).append(record)
    places = itertools.product(TASKS, ("half", "all"), TITLES)
    order = {place: number for number, place in enumerate(places)}
    for (task, rows, method, counts, budget), found in sorted(
        groups.items(), key=lambda group: (group[0][4], order[group[0][:3]], not group[0][3])
    ):
        il = statistics.fmean(r["il_seconds"] for r in found)
        used = f"{il:.1f} s, {'counted' if counts else 'reused'}" if il else ""
        uniform = groups.get((task, rows, "uniform", False, budget), [])
        scale = [100 * r["curve"][-1][2] if r["curve"] else None for r in found]
        row = [task, rows, TITLES[method], used, f"{budget:g}", str(len(found))]
        row += [over_seeds((r["steps"] for r in found), 0)]
        row += [over_seeds(seconds_used(r, counts) for r in found)]
        row += [over_seeds(map(at_the_end, found)), minus_uniform(found, uniform, at_the_end)]
        lines.append(f"| {' | '.join([*row, over_seeds(scale) if task == 'cola' else ''])} |")
    return lines


def at_the_end(record: Record) -> float | None:
    """The last accuracy, in percent: a rate that has fallen to zero leaves no noise in it."""
    return 100 * record["curve"][-1][1] if record["curve"] else None


def seconds_used(record: dict[str, Any], il_counts: bool) -> float:
    """What the run would take with nothing beside it, to be held against its budget."""
    trained = record["steps"] * record["seconds_a_step"]
    return float(trained + (record["il_seconds"] if il_counts else 0.0))


def seconds_at(record: Record, step: int) -> float:
    """When a fair run was at this step, by the times of steps that were measured alone."""
    cell = cell_of(record)
    scoring, plain = (record["step_ms"].get(kind, 0.0) for kind in step_kinds(cell.method))
    scored = min(step, round(scoring_share(cell.method) * record["steps"]))
    before = record["il_seconds"] if cell.il_counts else 0.0
    return float(before + (scored * scoring + (step - scored) * plain) / 1000)


def draw_fair(task: str, runs: Runs, folder: Path, named: str = "") -> list[str]:
    """Accuracy over seconds, the irreducible losses counted."""
    arms: dict[str, list[Record]] = {}
    for cell, record in sorted(
        runs, key=lambda run: (run[0].rows == "all", list(TITLES).index(run[0].method))
    ):
        if cell.task == task and (cell.il_counts or not cell.needs_il):
            name = TITLES[cell.method] + (", all rows" if cell.rows == "all" else "")
            name += f", {cell.budget:g} s" if len({c.budget for c, _ in runs}) > 1 else ""
            arms.setdefault(name, []).append(record)

    def curve(line: Record) -> list[tuple[float, float]]:
        return [(seconds_at(line, step), 100 * a) for step, a, _ in line["curve"]]

    name = f"{task}{named.replace(', ', '-')}-seconds.png"
    drawn = plots.draw(folder / name, arms, curve, "test accuracy, %", "seconds")
    return [f"![{task}: test accuracy over seconds]({name})"] if drawn else []


def draw(task: str, runs: Runs, folder: Path, named: str = "") -> list[str]:
    """Accuracy by epoch, and the steps to each accuracy (Fig. 5)."""
    start = f"{task}{named.replace(', ', '-')}"
    arms: dict[str, list[dict[str, Any]]] = {}
    place = list(TITLES).index
    # In the same order, and so in the same colours, in every plot.
    for cell, record in sorted(runs, key=lambda run: (place(run[0].method), run[0].irreducible)):
        name = TITLES[cell.method] + (", small IL model" if cell.irreducible == "small" else "")
        curve = [(step, 100 * accuracy) for step, accuracy, _ in record["curve"]]
        line = {"steps_per_epoch": record["steps_an_epoch"], "eval": curve}
        arms.setdefault(name, []).append(line)
    plots.draw(folder / f"{start}-accuracy.png", arms, plots.accuracy, "test accuracy, %")
    drawn = [f"![test accuracy by epoch]({start}-accuracy.png)"]
    steps = f"{start}-steps.png"
    if plots.draw(folder / steps, arms, plots.reached, "steps", "test accuracy, %"):
        drawn.append(f"![steps to each accuracy]({steps})")
    return drawn


def page(lines: list[dict[str, Any]], folder: Path | None = None) -> str:
    """The whole page; plots are drawn where there is a folder for them."""
    runs = [(cell_of(record), record) for record in lines]
    text = ["# Language: CoLA, SST-2, Banking77", "", INTRODUCTION, ""]
    for encoder in sorted({c.encoder for c, _ in runs}, key=lambda name: (name != MINILM, name)):
        named = "" if encoder == MINILM else f", {encoder}"
        with_it = [(c, r) for c, r in runs if c.encoder == encoder]
        for task in TASKS:
            mine = [(c, r) for c, r in with_it if c.task == task and not (c.budget or c.shortened)]
            if mine:
                text += [
                    f"## {task}, the paper's protocol{named}",
                    "",
                    *paper_table(task, mine),
                    "",
                ]
                text += [*draw(task, mine, folder, named), ""] if folder else []
        timed = [(c, r) for c, r in with_it if c.budget]
        if timed:
            title = f"## Equal wall clock, learning rate decayed to zero{named}"
            text += [title, "", FAIR, "", *fair_table(timed), ""]
            for task in TASKS:
                text += draw_fair(task, timed, folder, named) if folder else []
            text += [""]
    about = sorted({f"{r['device']}, torch {r['torch']}, {r['date']}" for r in lines})
    commands = sorted({r["command"] for r in lines})
    text += ["## How it was made", "", *(f"- {line}" for line in about), "", "```"]
    text += [*commands, "python -m experiments.language report", "```", ""]
    again = "What has its line is made once more with `--again --out FILE`."
    return "\n".join([*text, again, ""])


def write(out: Path) -> Path:
    """Write the page beside the lines."""
    # Of two lines of a run the later counts: twice the same is no second seed.
    lines = list({cell_of(line).key(): line for line in records.read(out)}.values())
    if not lines:
        raise SystemExit(f"{out} has no runs; make some with `paper` or `fair`.")
    return records.save(records.page_of(out), page(lines, out.parent))


INTRODUCTION = """\
Table 2's last rows and Fig. 5. Training half: even rows; holdout half (for the irreducible losses): odd
rows. n_b 32 of 320 candidates, AdamW, weight decay 0.02 (none on biases and norms), constant learning rate:
2e-5 (Banking77: 1e-4). An epoch is one pass over the candidates. Final: mean of the last tenth of the
evaluations. Means over seeds, lowest and highest in brackets; NR: never reached. Minus uniform: paired by
seed, with half of the 95 % t interval. What it says, beside the paper: [FINDINGS.md](FINDINGS.md).

What differs from the paper: the encoder is a pretrained MiniLM of 6 layers (22.7 M parameters; ALBERT's
weights could not be had; whoever has them puts them into the data's folder `model`, and headings name
them), bf16 with float32 losses, rows cut at 48 (CoLA) or 64 tokens, dropout off while scoring, the IL
checkpoint chosen once an epoch. CoLA is tested on both public development sets (1,043 rows). Banking77 is
not in the paper: 77 intents, a fifth of the labels of both halves wrong, clean test set."""

FAIR = """\
Every arm has the same seconds of training (evaluation not counted) and a learning rate that rises over a
tenth of the steps and falls linearly to zero. All of it runs on `rholoss.engine`: rows on the device, a
step in one CUDA graph, bf16, RHO-LOSS scored beside training by a copy of the weights that is one step old.
*Counted*: the time of the irreducible-loss model (2 layers, 3 epochs of the holdout half, 6 for Banking77;
length and rate by its loss on the training half, in trials that were not kept) is part of the budget;
*reused*: it is not. The learning rate is the same in all arms. Annealed: RHO-LOSS for the first 30 % of the
steps, then uniform without the tenth of highest irreducible loss; uniform minus IL 10 % is that from the
first step on. Rows: *half* leaves the holdout half to the irreducible-loss model, in every arm; *all*
trains on both halves, and then irreducible losses are cross-fitted, each half by a model of the other.
Random half trains on half of the rows, drawn once. Remembered losses: no irreducible-loss model; from 30 %
of the steps on, rows that were never better than chance are left out. Loading of kernels and capture are
counted for no arm. The number of steps is set beforehand, from steps that were timed with nothing beside
them; after that, runs go side by side, which changes no result. *Seconds used* is steps times that time, with
the irreducible losses (timed alone, too) where they count. In the plots they count."""
