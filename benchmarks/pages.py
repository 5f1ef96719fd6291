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

from benchmarks import missed, plots

from experiments import records

RESULTS = Path(__file__).parent / "results"
# Milliseconds, or times the uniform step of the same size: of an option that is to choose as exact scoring does.
MOST_MS = {"uniform 32": 1.40, "rho 32 of 320": 2.6, "rho 32 of 320, folded": 2.6}
MOST_TIMES = {"rho 32 of 320, ": 1.5, "rho 128 of 512, ": 1.4}


def rows(name: str) -> list[dict[str, Any]]:
    return list(records.read(RESULTS / name))


def where(row: dict[str, Any]) -> str:
    return f"`{row['command']}`; {row['device']}, torch {row['torch']}, Python {row['python']}, {row['date']}."


def step_page(found: list[dict[str, Any]], agreement: bool) -> list[str]:
    """One table a run, the last first; `agreement`: whether the options' agreement was measured."""
    also = (
        "see [agreement.md](agreement.md); *met* below speaks of time alone."
        if agreement
        else "`bench_agreement.py` measures that, and has not been run on the GPU yet, so *met* below speaks "
        "of time alone."
    )
    lines = [
        "# What a training step costs",
        "",
        "CIFAR ResNet-18, AdamW, bf16, data resident on the device, the step compiled and captured as one CUDA graph "
        "(`rholoss.engine.Trainer`); medians, evaluation excluded. *Folded*: scored with BatchNorm's running statistics, folded into "
        "the convolutions (`scoring=Folded()`, `batch_norm='eval'`); exact in that mode, not in the default one. *Overlapped*: scored beside "
        "training, one step stale. Behind a semicolon: the same step laid out in other ways (`Tuning`), against a uniform step that is laid out so, too, "
        "where the run has one. An option is also to agree with exact scoring (rank correlation 0.9, 80 % of the choice) and to end within "
        f"0.3 points of it: {also} Rows: [step.jsonl](step.jsonl).",
        "",
        "![milliseconds of each kind of step](step.png)",
        "",
        *missed.section(found, _against_uniform),
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


EARNED = (
    "## Which earned their place",
    "",
    "Until 2026-11-19 agreement was read off exact runs, whose candidates move the running statistics, too. That flattered what is scored with statistics of BatchNorm from before: folded, with recent "
    "statistics, had 0.99 and 87 % on the H200. Those rows are gone; on the H200 agreement has not been measured again yet, so that nothing counts there for now.",
    "",
    "- **Folded, following means** (`Folded(0.5, means=64)`) shares nine tenths of exact scoring's choice on digits and 85 % on CIFAR-10, and ends level on digits, at 128 of 512, too. On the GPU it was neither timed nor run to the end.",
    "- **Folded, recent statistics** ends level on the H200. It shares less of the choice.",
    "- **Overlapped** by the weights before the step ends 1.7 points below exact on CIFAR-10: one step stale is too old. **Ahead**, by the weights that the step is expected to leave, the choice is nearer to exact "
    "scoring; folded, with following means, it agrees on digits and on CIFAR-10, and ends level on digits. On the GPU it was neither timed nor run to the end.",
    "- **A gate** never trains on what it drops, so that the losses of these rows stay high, and exact scoring would choose them: it agreed along exact runs alone.",
    "- **A shortlist** shares the choice, but what is left out ranks last: one of 60 % has too low a rank correlation to count. One of 85 %, folded with following means, overlapped and looking ahead, agrees on digits. There it "
    "counts at 128 of 512, and not at 32 of 320, by 0.02 points of accuracy. On the GPU shortlists were timed ([step.md](step.md)), beside training not yet, and none was held against exact scoring.",
    "- **Half resolution, a proxy, reuse of half** choose otherwise than exact scoring does and have **not earned their place here**. They were not timed on the GPU. They stay since each is a few lines, and a proxy or a smaller image may suit a model and images that are larger than these.",
    "- **Replay** is listed apart: it scores nothing, so that a step does what a uniform one does. Rows are augmented anew, and BatchNorm's running statistics see the chosen rows alone; without either it gives the weights of the run that was recorded, bit for bit (tested on a CPU). Its time on the GPU was not measured.",
)


def agreement_page(found: list[dict[str, Any]]) -> list[str]:
    """Agreement and equal-step accuracy of cheaper scoring, one table for each problem."""
    lines = [
        "# Cheaper scoring against exact scoring",
        "",
        "Agreement: in runs by the option, exact RHO-LOSS looks at the candidates of ten steps, with their own statistics of BatchNorm, at the weights that the chosen are trained at: Spearman's "
        "rank correlation of the scores, and the share of the exact choice that the option made too. An option that "
        "leaves candidates out ranks them last, which costs it correlation but nothing of the choice if they were not wanted. "
        "Then whole runs by each option: milliseconds a step, and test accuracy at equal steps, means over the seeds. An option "
        "counts if its mean Spearman is at least 0.9, its mean share at least 80 %, and its accuracy at most 0.3 points below "
        "exact. A look at the last step is not in these means: the learning rate is 0 there, so that what is a step old is not. Rows: [agreement.jsonl](agreement.jsonl).",
        "",
        *EARNED,
    ]
    problem = ("data", "noise", "k", "candidates", "device")
    for key in dict.fromkeys(tuple(row[name] for name in problem) for row in found):
        rows = [row for row in found if tuple(row[name] for name in problem) == key]
        data, noise, k, candidates, device = key
        lines += ["", f"## {data}, {noise:.0%} wrong labels, {k} of {candidates}, {device}", ""]
        lines += [f"- {line}" for line in dict.fromkeys(where(row) for row in rows)]
        lines += ["", *_agreement_table(rows)]
        if any(map(_drawn, rows)):
            lines += ["", "![accuracy at equal steps over milliseconds a step](agreement.png)"]
    return lines


def _agreement_table(found: list[dict[str, Any]]) -> list[str]:
    scores = [row for row in found if row["mode"] == "scores"]
    runs = [row for row in found if row["mode"] == "train"]
    scores, runs = _as_the_last(scores), _as_the_last(runs)
    moments = sorted({row["moment"] for row in scores})
    names = list(dict.fromkeys(row["option"] for row in [*runs, *scores]))

    every = [*scores, *runs]

    def mean(option: str, field: str, rows: Any = every, **only: Any) -> float | None:
        wanted = {"option": option, **only}.items()
        values = [row[field] for row in rows if wanted <= row.items() and field in row]
        return statistics.fmean(values) if values else None

    last = scores[-1]["steps"] if scores else 0  # the learning rate is 0 there
    moving = [row for row in scores if row["moment"] < last]
    columns = [
        f"step {moment}{' (at rest)' if moment == last else ''}: Spearman, shared"
        for moment in moments
    ]
    columns += ["ms a step", "against uniform", "accuracy, %", "against exact", "counts"]
    lines = [f"| option | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    uniform, exact = mean("uniform", "ms"), _by_seed(runs, "exact")
    for name in names:
        cells = []
        for moment in moments:
            pair = [mean(name, field, moment=moment) for field in ("spearman", "shared")]
            cells.append("" if None in pair else f"{pair[0]:.3f}, {pair[1]:.0%}")
        ms, accuracy = mean(name, "ms"), mean(name, "accuracy")
        cells.append("" if ms is None else f"{ms:.2f}")
        cells.append("" if ms is None or uniform is None else f"{ms / uniform:.2f}x")
        cells.append("" if accuracy is None else f"{accuracy:.2f}")
        pairs = [(a, exact[s]) for s, a in _by_seed(runs, name).items() if s in exact]
        above = statistics.fmean(a - b for a, b in pairs) if pairs else None
        cells.append("" if above is None else f"{above:+.2f}")
        overall, counts = [mean(name, field, moving) for field in ("spearman", "shared")], ""
        if None not in (*overall, above):
            agrees = overall[0] >= 0.9 and overall[1] >= 0.8
            counts = "yes" if agrees and above >= -0.3 else "no"
        lines.append(f"| {name} | {' | '.join(cells)} | {counts} |")
    return lines


def _as_the_last(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one length and kind of run: that of the last."""
    kind = {name: found[-1][name] for name in ("steps", "compile")} if found else {}
    return [row for row in found if kind.items() <= row.items()]


def _by_seed(runs: list[dict[str, Any]], option: str) -> dict[int, float]:
    return {row["seed"]: row["accuracy"] for row in runs if row["option"] == option}


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
        "step.md": step_page(rows("step.jsonl"), any(map(_drawn, agreement))),
    }


def _drawn(row: dict[str, Any]) -> bool:
    """Whether the picture is of this row: of runs of the usual size alone, whatever was run last."""
    return (row["data"], row["mode"], row["k"]) == ("CIFAR-10", "train", 32)


def main() -> None:
    for name, lines in made().items():
        temporary = RESULTS / f"{name}.tmp"
        temporary.write_text("\n".join(lines) + "\n")
        os.replace(temporary, RESULTS / name)
    plots.draw_steps(rows("step.jsonl"), RESULTS / "step.png")
    runs = _as_the_last([row for row in rows("agreement.jsonl") if _drawn(row)])
    plots.draw_agreement(runs, RESULTS / "agreement.png")


if __name__ == "__main__":
    main()
