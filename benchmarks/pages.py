"""Makes the pages of the engine's figures from their rows: `python benchmarks/pages.py`."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import missed, options, plots
from benchmarks.options import agreement_page, where

from experiments import records

RESULTS = Path(__file__).parent / "results"
# Milliseconds, or times the uniform step of the same size: of an option that is to choose as exact scoring does.
MOST_MS = {"uniform 32": 1.40, "rho 32 of 320": 2.6, "rho 32 of 320, folded": 2.6}
MOST_TIMES = {"rho 32 of 320, ": 1.5, "rho 128 of 512, ": 1.4}


def rows(name: str) -> list[dict[str, Any]]:
    return list(records.read(RESULTS / name))


def step_page(found: list[dict[str, Any]], agreement: list[dict[str, Any]]) -> list[str]:
    """One table a run, the last first; `agreement`: the rows that say which options count."""
    also = (
        "see [agreement.md](agreement.md); *met* in the tables of runs speaks of time alone."
        if any(map(options.drawn, agreement))
        else "`bench_agreement.py` measures that, and has not been run on the GPU yet, so *met* below speaks "
        "of time alone."
    )
    lines = [
        "# What a training step costs",
        "",
        "Medians of one training step of `rholoss.engine.Trainer`: CIFAR ResNet-18, AdamW, bf16, data resident on the device, "
        "the step compiled and captured as one CUDA graph; evaluation excluded. Rows: [step.jsonl](step.jsonl).",
        "",
        "- *Folded*: scored with BatchNorm's running statistics, folded into the convolutions (`scoring=Folded()`, "
        "`batch_norm='eval'`); exact in that mode, not in the default one. *Following means*: `Folded(0.5, means=64)`.",
        "- *Overlapped*: scored beside training, one step stale; *ahead*: by the weights that are expected after that step.",
        "- Behind a semicolon: the same step laid out in other ways (`Tuning`), against a uniform step that is laid out so, "
        "too, where the run has one.",
        "- An option counts if it agrees with exact scoring (rank correlation 0.9, 80 % of the choice) and ends within "
        f"0.3 points of it: {also}",
        "",
        "![milliseconds of each kind of step](step.png)",
        "",
        *missed.section(found, _against_uniform, options.of_steps(agreement)),
        "## All runs",
    ]
    for started in sorted({row["started"] for row in found}, reverse=True):
        lines += ["", *_step_table([row for row in found if row["started"] == started])]
    return lines


def _step_table(found: list[dict[str, Any]]) -> list[str]:
    """One run: ratios are taken within it, where it has what they are taken to."""
    ms = {row["row"]: row["ms"] for row in found}
    lines = [
        f"{where(found[0])} Run of {found[0]['started'].replace('T', ', ')}.",
        "",
        "| step | ms | against uniform | of which scoring | FLOP floor at 790 TFLOP/s, ms | target |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        name = row["row"]
        plain = name.startswith("uniform") or "eager" in name
        base, ratio = name.partition("; ")[0], _against_uniform(found, name)
        scoring = row.get("scoring_ms")
        share = f"{scoring:.2f} ms, {scoring / row['ms']:.0%}" if scoring else ""
        lines.append(
            f"| {name} | {row['ms']:.3f} | {'' if plain or math.isnan(ratio) else f'{ratio:.2f}x'} | {share} | {row['floor_ms']:.3f} "
            f"| {judged(base, row['ms'], ratio)} |"
        )
    eager = ms.get("rho 32 of 320, eager float32")
    lines.append("")
    for name in ("rho 32 of 320", "rho 32 of 320, folded"):
        layouts = [key for key in ms if key.partition("; ")[0] == name]
        if layouts and eager is not None:
            name = min(layouts, key=lambda key: ms[key])
            faster = eager / ms[name]
            told = "met" if faster >= 11 else "missed"
            lines.append(
                f"- {name}: {faster:.1f} times as fast as the eager float32 step (target 11: {told})."
            )
    return lines


def _against_uniform(run: Sequence[dict[str, Any]], name: str) -> float:
    """What a row of a run costs, against the uniform step of its size."""
    ms = {row["row"]: row["ms"] for row in run}
    return ms[name] / _uniform(ms, name.split()[1].rstrip(",;"), name.partition("; ")[2])


def _uniform(ms: dict[str, float], n_b: str, ways: str) -> float:
    """Milliseconds of the uniform step that is laid out most like a step with these ways.

    A layout that helps both is not to count as cheaper scoring.
    """
    mine = set(ways.split(", "))
    layouts = {
        name: name.partition("; ")[2] for name in ms if name.split(";")[0] == f"uniform {n_b}"
    }
    alike = [
        name for name, theirs in layouts.items() if not theirs or set(theirs.split(", ")) <= mine
    ]
    return ms[max(alike, key=lambda name: len(layouts[name]))] if alike else math.nan


def judged(name: str, ms: float, ratio: float) -> str:
    if name in MOST_MS:
        return _told(ms, MOST_MS[name], " ms")
    most = [most for start, most in MOST_TIMES.items() if name.startswith(start)]
    return "" if not most or "eager" in name or math.isnan(ratio) else _told(ratio, most[0], "x")


def _told(value: float, most: float, unit: str) -> str:
    return f"<= {most:g}{unit}: {'met' if value <= most else 'missed'}"


def il_page(found: list[dict[str, Any]]) -> list[str]:
    """One table a run, the last first: fits are judged by the reference of their own run."""
    lines = [
        "# Irreducible losses in seconds",
        "",
        "The paper's small CNN (537,610 parameters) on the odd half of CIFAR-10, the even half "
        "scored; bf16, data resident, the step as one CUDA graph, learning rate up to its peak and down to zero; "
        "one seed. Seconds include capture, evaluation and scoring. Rows: [il.jsonl](il.jsonl). Targets: at most "
        "2 s, a mean loss on the scored half at most 0.02 above the reference.",
    ]
    for started in sorted({row.get("started", "") for row in found}, reverse=True):
        run = [row for row in found if row.get("started", "") == started]
        reference = [row["loss"] for row in run if row["fit"].startswith("reference")]
        head = ["| fit | seconds | mean loss | both targets |", "|---|---|---|---|"]
        lines += ["", where(run[0]), "", *head]
        for row in run:
            met = bool(reference) and row["s"] <= 2 and row["loss"] <= reference[0] + 0.02
            lines.append(
                f"| {row['fit']} | {row['s']:.2f} | {row['loss']:.3f} | {'met' if met else ''} |"
            )
    return lines


def wrong_labels_page(digits: list[dict[str, Any]], images: list[dict[str, Any]]) -> list[str]:
    """One row a label set and plan, means over the seeds; a table for each problem."""
    return [
        "# Wrong labels, by the losses that training remembers",
        "",
        "Labels are made wrong in known ways; learning rate up and down to zero; means over the seeds. *Told*: the share of wrong labels that the plan found when it began to leave rows "
        "out for good. *Left out*: in the last pass, and how many of these are wrong, and how many of the wrong ones they are. Accuracy on the test set, whose labels are clean. "
        "*Never better than chance*: `Remembered(chance, measured=False, again=0)`; *measured*: `Remembered()`; *measured, with chance*: `Remembered(chance, again=0)`: all three act from half of "
        "the steps on. *On probation before*: `Remembered(chance)`, which also leaves out seven of eight such rows in each pass before that, as soon as the easy rows are learnt. "
        "Commands are as they were given; one names a plan that is gone (`mean of all visits`).",
        "",
        "## Digits, without augmentation",
        "",
        "A network of two layers on the demo's 12,000 digits. Lines: [wrong_labels.jsonl](wrong_labels.jsonl).",
        "",
        *_wrong_labels(digits),
        "",
        "## CIFAR-10, 6,000 images, cropped and flipped",
        "",
        "A small CNN, as many steps for each. Lines: [wrong_labels_cifar10.jsonl](wrong_labels_cifar10.jsonl).",
        "",
        *_wrong_labels(images),
    ]


def _wrong_labels(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        *sorted({f"- {where(row)}" for row in found}),
        "",
        "| passes | labels that are wrong | rows left out | told | left out | wrong among them | of the wrong ones | accuracy, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = ("passes", "labels", "plan")
    names = (dict.fromkeys(row[key] for row in found) for key in keys)
    for passes, labels, plan in itertools.product(*names):
        ours = [row for row in found if tuple(row[key] for key in keys) == (passes, labels, plan)]
        if not ours:
            continue
        shares = (_mean_share(ours, name) for name in ("told", "left_out", "precision", "recall"))
        accuracy = statistics.fmean(row["accuracy"] for row in ours)
        name = "none" if labels == "clean" else labels
        told = f"{passes} | {name} | {plan} | {' | '.join(shares)}"
        lines.append(f"| {told} | {accuracy:.1f} ({len(ours)}) |")
    return lines


def staleness_page(found: list[dict[str, Any]]) -> list[str]:
    """One table a learning rate: ways and ages down, moments across, means over the seeds."""
    lines = [
        "# Choosing by weights that are some steps old",
        "",
        "RHO-LOSS chooses 32 of 320 of the demo's digits (a tenth of the labels wrong) by the weights that a network of two layers had so many steps ago, as overlapped scoring "
        "(one step) and scoring workers (several) do. *Rescored*: the old weights choose 96, and of these the newest choose 32. Constant learning rate; test accuracy in %, means over "
        "the seeds. Lines: [staleness.jsonl](staleness.jsonl).",
        "",
        *sorted({where(row) for row in found}),
    ]
    for rate, steps in sorted({(row["rate"], row["steps"]) for row in found}, reverse=True):
        table = [row for row in found if (row["rate"], row["steps"]) == (rate, steps)]
        moments = sorted({int(step) for row in table for step in row["accuracy"]})
        head = " | ".join(f"step {moment}" for moment in moments)
        lines += ["", f"Learning rate {rate:g}, {steps} steps:", "", f"| choice by | {head} |"]
        lines.append("|---" * (1 + len(moments)) + "|")
        for way, age in dict.fromkeys((row["way"], row["age"]) for row in table):
            ours = [row for row in table if (row["way"], row["age"]) == (way, age)]
            name = f"{way}, {age} step{'s' * (age > 1)} old" if age else f"{way}, newest weights"
            name = way if way == "uniform" else name
            lines.append(f"| {name} | {_means([r['accuracy'] for r in ours], moments)} |")
    return lines


def candidates_page(found: list[dict[str, Any]]) -> list[str]:
    """Two tables, at equal steps and at equal arithmetic: candidates down, moments across."""
    lines = [
        "# How many candidates are worth their cost?",
        "",
        "RHO-LOSS chooses 32 of so many of the demo's digits (a tenth of the labels wrong); uniform takes 32 as they come. A network of two layers, constant learning rate; test "
        "accuracy in %, means over the seeds. A trained point is three forward passes, a scored one is one. The fit of the irreducible losses is not counted. "
        "Lines: [candidates.jsonl](candidates.jsonl).",
        "",
        *sorted({where(row) for row in found}),
    ]
    titles = {
        "by_steps": "After so many steps",
        "by_cost": "After as much arithmetic as so many uniform steps",
    }
    lengths = sorted({row["steps"] for row in found}, reverse=True)
    for steps, (field, title) in itertools.product(lengths, titles.items()):
        table = [row for row in found if row["steps"] == steps]
        moments = sorted({int(moment) for row in table for moment in row[field]})
        lines += ["", f"{title}, in runs of {steps}:", ""]
        lines.append("| 32 of | a step costs | " + " | ".join(map(str, moments)) + " |")
        lines.append("|---" * (2 + len(moments)) + "|")
        for num in sorted({row["candidates"] for row in table}):
            ours = [row[field] for row in table if row["candidates"] == num]
            name, price = ("32: uniform", 1.0) if num == 32 else (str(num), 1 + num / 96)
            lines.append(f"| {name} | {price:.1f}x | {_means(ours, moments)} |")
    return lines


def _means(found: list[dict[str, float]], moments: list[int]) -> str:
    """Cells of a row: means over runs at these moments."""
    means = (statistics.fmean(run[str(moment)] for run in found) for moment in moments)
    return " | ".join(f"{mean:.1f}" for mean in means)


def _mean_share(found: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in found if row[name] is not None]
    return f"{100 * statistics.fmean(values):.1f} %" if any(values) else ""


def made() -> dict[str, list[str]]:
    """The lines of each page, by its name."""
    agreement, wrong = rows("agreement.jsonl"), ("wrong_labels.jsonl", "wrong_labels_cifar10.jsonl")
    return {
        "il.md": il_page(rows("il.jsonl")),
        "agreement.md": agreement_page(agreement),
        "wrong_labels.md": wrong_labels_page(*map(rows, wrong)),
        "staleness.md": staleness_page(rows("staleness.jsonl")),
        "candidates.md": candidates_page(rows("candidates.jsonl")),
        "step.md": step_page(rows("step.jsonl"), agreement),
    }


def main() -> None:
    for name, lines in made().items():
        temporary = RESULTS / f"{name}.tmp"
        temporary.write_text("\n".join(lines) + "\n")
        os.replace(temporary, RESULTS / name)
    plots.draw_steps(rows("step.jsonl"), RESULTS / "step.png")
    runs = options.as_the_last([row for row in rows("agreement.jsonl") if options.drawn(row)])
    plots.draw_agreement(runs, RESULTS / "agreement.png")


if __name__ == "__main__":
    main()
