"""A study's page: tables beside the paper's and plots, from whatever was run so far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments.bench import plots
from experiments.bench.cell import Group, Study
from experiments.bench.claims import FAILS, HOLDS, IN_PART, NOT_RUN, OPEN, Claim
from experiments.bench.numbers import (
    FIG2_EPOCHS,
    LAST,
    Line,
    Results,
    asked_for,
    best,
    epochs_to,
    final,
    mean,
    missing,
    over,
    several_fits,
    share,
    share_below,
    speedup,
    spread,
    steps_to,
    weakest_final,
)
from experiments.records import save
from rholoss.errors import RholossError

Lines = Mapping[str, Sequence[Line]]  # by arm
BEGIN, END = "<!-- claims: made by `python -m experiments report` -->", "<!-- end of claims -->"
EPOCH = "An epoch is one pass over the *candidates*: every method trains on n_b of each n_B points."
PROTOCOL = f"""{EPOCH}
AdamW at PyTorch's defaults, learning rate constant, crop and flip (digits: none), test accuracy after every
epoch or more often; bf16 where the lines say so (the paper: fp32). Final is the mean of the last {LAST}
evaluations, best the highest. Numbers are means over seeds with the lowest and highest in brackets; NR: not
reached. A seed sets the initial weights and the order: runs of one seed start from the same weights, and all
methods that score see the same candidates in the same order; uniform takes the shuffled rows as they come,
n_b at a time. Wrong labels are the same for all seeds. An irreducible-loss model has the weights of lowest
loss on the training set; it is fitted once on a machine, and reused by all runs there. Seconds in the lines
are those of several runs side by side, no measure of speed."""


def epochs(group: Group, lines: Lines) -> list[str]:
    """Table 2: epochs to each target, and the final accuracy."""
    return _reached(group, lines, epochs_to, "epochs")


def steps(group: Group, lines: Lines) -> list[str]:
    """As `epochs`, in steps, for arms whose epochs differ."""
    return _reached(group, lines, steps_to, "steps")


def _reached(
    group: Group, lines: Lines, measure: Callable[[Line, float], float | None], unit: str
) -> list[str]:
    targets = [f"{unit} to {target:g} %" for target in group.targets]
    head = ["", *(["paper"] if group.paper else []), *targets, "final, %", "best, %", "seeds"]
    rows = []
    for name, found in lines.items():
        reached = [
            over(found, lambda line, target=target: measure(line, target), digits=0)
            for target in group.targets
        ]
        paper = [group.paper.get(name, "")] if group.paper else []
        accuracies = [over(found, final), over(found, best)]
        rows.append([name, *paper, *reached, *accuracies, str(len(found))])
    legend = []
    if group.paper:
        targets_text = " / ".join(f"{target:g}" for target in group.targets)
        legend = [f"Paper: epochs to {targets_text} % (final accuracy)."]
    return [*table(head, rows), "", *legend]


def shares(group: Group, lines: Lines) -> list[str]:
    """Shares of the picks, over all epochs and while accuracies can be compared."""
    kinds = {
        "corrupted": "corrupted",
        "low_relevance": "low relevance",
        "correct": "already correct",
    }
    everything = [line for found in lines.values() for line in found]
    there = [kind for kind in kinds if any(kind in line["shares"] for line in everything)]
    ended = [line for line in everything if line["eval"]]
    bound = weakest_final(ended) if ended else 0.0
    head = ["picks, %", *(kinds[kind] for kind in there), f"already correct, below {bound:.1f} %"]
    rows = [
        [
            name,
            *(over(found, lambda line, kind=kind: share(line, kind), 2) for kind in there),
            over(found, lambda line: share_below(line, "correct", bound), 2, none="no epoch"),
        ]
        for name, found in lines.items()
    ]
    text = (
        f"Shares count every step of all epochs; the last column only epochs with a test accuracy below "
        f"{bound:.1f} %, the final one of the weakest arm, as in the paper. Whether a pick was already "
        "classified correctly is read in the forward pass that trains on it."
    )
    return [*table(head, rows), "", text]


def speedups(group: Group, lines: Lines) -> list[str]:
    """Figure 2: by how much RHO-LOSS is faster to uniform's best of 100 epochs. Paired by seed."""
    rows = []
    for name, found in lines.items():
        if name.endswith("uniform"):
            continue
        partner = name.replace("RHO-LOSS", "uniform") if name.endswith("RHO-LOSS") else "uniform"
        uniform = {line["seed"]: line for line in lines.get(partner, lines.get("uniform", []))}
        pairs = [(line, uniform[line["seed"]]) for line in found if line["seed"] in uniform]
        values = [value for pair in pairs if (value := speedup(*pair)) is not None]
        ours = "runs too short" if pairs and not values else spread(values, 2)
        others = over([other for _, other in pairs], final)
        rows.append([name, group.paper.get(name, ""), ours, over(found, final), others])
    num = FIG2_EPOCHS
    text = f"Speed-up: {num} / the epoch at which uniform's best of {num} is reached; 0: never."
    head = ["", "paper, each seed", "ours", "final, %", "uniform's final, %"]
    return [*table(head, rows), "", text]


def classes(group: Group, lines: Lines) -> list[str]:
    """The worst class and how uneven classes are: selection is known to hurt the rare ones."""

    def worst(line: Line) -> float | None:
        return min((x for x in line["per_class"] if x is not None), default=None)

    def gap(line: Line) -> float | None:
        there = [x for x in line["per_class"] if x is not None]
        return max(there) - min(there) if there else None

    def evenly(line: Line) -> float | None:
        there = [x for x in line["per_class"] if x is not None]
        return mean(there) if there else None

    measures = (evenly, worst, gap)
    rows = [[name, *(over(found, m) for m in measures)] for name, found in lines.items()]
    head = ["by class, at the end", "mean of the classes, %", "worst class, %", "best minus worst"]
    return table(head, rows)


TABLES: dict[str, Callable[[Group, Lines], list[str]]] = {
    "epochs": epochs,
    "steps": steps,
    "shares": shares,
    "speedup": speedups,
    "classes": classes,
}
PLOTS: dict[str, dict[str, tuple[plots.Curve, str, str]]] = {
    "curves": {"accuracy": (plots.accuracy, "test accuracy, %", "epoch")},
    "reached": {"reached": (plots.reached, "steps", "test accuracy reached, %")},
    "share_curves": {
        "corrupted": (plots.share("corrupted"), "corrupted picks, %", "epoch"),
        "low_relevance": (plots.share("low_relevance"), "low-relevance picks, %", "epoch"),
        "correct": (plots.share("correct"), "picks already correct, %", "epoch"),
    },
    "il_curves": {"il": (plots.il_accuracy, "accuracy of the IL model, %", "epoch")},
}
SHOWS = (*TABLES, *PLOTS)
MANY = 8  # arms that are named one by one where the same is missing of each


def page(study: Study, results: Results, folder: Path) -> str:
    """The page as Markdown; plots are written to `folder`."""
    parts = [
        f"# {study.title}",
        *([study.note] if study.note else []),
        f"{how_many(study, results)} are there. {where(study, results)}".strip(),
        EPOCH,
        "<details><summary>How to read the numbers, and how to make them again</summary>",
        PROTOCOL.removeprefix(EPOCH).strip(),
        f"`python -m experiments run --study {study.name}` makes the runs that are missing, with `--again "
        "--out DIR` all of them; `python -m experiments report` makes this page.",
        "</details>",
    ]
    for group in study.groups:
        parts += [f"## {group.title}", *_group(study, group, results, folder)]
    return "\n\n".join(parts) + "\n"


def how_many(study: Study, results: Results) -> str:
    """'12 of 14 runs', and those of seeds that the study does not ask for."""
    own, further = asked_for(results.of_study(study), study.seeds)
    told = f"{own} of {len(list(study.cells()))} runs"
    return told + (f" and {further} of further seeds" if further else "")


def _group(study: Study, group: Group, results: Results, folder: Path) -> list[str]:
    lines = {name: results.of(arm) for name, arm in group.arms.items()}
    if not any(lines.values()):
        return ["Not run."]
    parts = []
    for name in group.show:
        if name in TABLES:
            parts.append("\n".join(TABLES[name](group, lines)).strip())
            continue
        for kind, curve, ylabel, xlabel in curves_of(group, name):
            file = f"{slug(group.title)}-{kind}.png"
            if plots.draw(folder / file, lines, curve, ylabel, xlabel):
                parts.append(f"![{ylabel} by {xlabel}]({file})")
    return [*parts, *remarks(group, results, study.seeds)]


def remarks(group: Group, results: Results, seeds: int) -> list[str]:
    """What is to be said below the tables, each a paragraph."""
    said = [group.note] if group.note else []
    if fits := several_fits(group, results):
        said.append(f"Irreducible losses of more than one fit (test accuracy): {'; '.join(fits)}.")
    if left := missing(group, results, seeds):
        said.append(f"Not run, or not in full: {'; '.join(in_short(left))}.")
    return said


def in_short(left: Sequence[str]) -> list[str]:
    """What is missing of each arm; a number where the same is missing of many."""
    same = Counter(told.rpartition(": ")[2] for told in left)
    many = {what: num for what, num in same.items() if num > MANY}
    named = [told for told in left if told.rpartition(": ")[2] not in many]
    return [*named, *(f"{num} arms: {what}" for what, num in many.items())]


def curves_of(group: Group, name: str) -> Iterator[tuple[str, plots.Curve, str, str]]:
    """(kind, curve, label of y, label of x) of each plot that `name` stands for."""
    for kind, (curve, ylabel, xlabel) in PLOTS[name].items():
        if name == "curves" and "steps" in group.show:
            yield kind, plots.over_steps(curve), ylabel, "thousand steps"
        else:
            yield kind, curve, ylabel, xlabel


def where(study: Study, results: Results) -> str:
    """On what and when the runs were made, and where their lines are."""
    lines = results.of_study(study)
    if not lines:
        return ""
    kinds = sorted({(line["device"], line["torch"], line["precision"]) for line in lines})
    dates = sorted({line["date"] for line in lines})
    files = sorted({line["study"] for line in lines})
    told = "; ".join(f"{device}, torch {torch}, {precision}" for device, torch, precision in kinds)
    links = ", ".join(f"[{name}](../{name}/runs.jsonl)" for name in files)
    return f"Made on {told}, {' to '.join(sorted({dates[0], dates[-1]}))}. Lines: {links}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    return [line(head), line(["---"] * len(head)), *(line(row) for row in rows)]


def slug(title: str) -> str:
    """A title as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:48].strip("-")


def write(study: Study, out: Path) -> Path:
    """Make the page of a study in `<out>/<study>`; returns its path."""
    folder = out / study.name
    return save(folder / "README.md", page(study, Results.read(out), folder))


def claims_table(claims: Sequence[Claim], studies: Mapping[str, Study], results: Results) -> str:
    """All claims in one table, those that were not run at its end."""
    rows = []
    for claim in claims:
        ours, verdict = claim.judge(studies[claim.study], results)
        rows.append([claim.text, claim.paper, ours, f"[{verdict}]({claim.study}/README.md)"])
    rows.sort(key=lambda row: row[-1].startswith(f"[{NOT_RUN}]"))
    return "\n".join(table(["claim", "the paper", "ours", "verdict"], rows))


VERDICTS = {  # of one claim, of several
    HOLDS: ("holds", "hold"),
    IN_PART: ("holds in part", "hold in part"),
    FAILS: ("does not hold", "do not hold"),
    OPEN: ("is open", "are open"),
    NOT_RUN: ("was not run", "were not run"),
}


def tally(claims: Sequence[Claim], studies: Mapping[str, Study], results: Results) -> str:
    """How many claims got which verdict, in words."""
    verdicts = [claim.judge(studies[claim.study], results)[1] for claim in claims]
    counts = Counter(verdict.partition(" (")[0] for verdict in verdicts)
    told = [
        f"{counts[verdict]} {one if counts[verdict] == 1 else many}"
        for verdict, (one, many) in VERDICTS.items()
        if counts[verdict]
    ]
    short = sum("(" in verdict for verdict in verdicts)
    more = f" {short} of the verdicts rest on fewer seeds or parts than planned." if short else ""
    return f"Of the {len(claims)} claims below {', '.join(told)}.{more}"


def put_between(text: str, begin: str, end: str, made: str) -> str:
    """The text with this between two marks that it has."""
    return f"{text.partition(begin)[0]}{begin}\n{made}\n{end}{text.partition(end)[2]}"


def write_claims(claims: Sequence[Claim], studies: Mapping[str, Study], out: Path) -> Path:
    """Put the table between its marks in `<out>/README.md`; what stands around it is written by hand."""
    path = out / "README.md"
    text = path.read_text() if path.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        raise RholossError(f"{path} has no '{BEGIN}' and '{END}'; put them where the table goes.")
    results = Results.read(out)
    made = f"{tally(claims, studies, results)}\n\n{claims_table(claims, studies, results)}"
    return save(path, put_between(text, BEGIN, END, made))
