"""The page of the demo: what the methods chose, how accurate they became, and what it cost."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rholoss.demo.study import Result
from rholoss.demo.summary import HEADINGS, LABEL, Row, Summary, cells, percent
from rholoss.demo.train import CANDIDATES, KEEP
from rholoss.report import page

STYLE = {
    "uniform": (page.GREY, "dot"),
    "loss": (page.ORANGE, "dash"),
    "rho": (page.BLUE, "solid"),
}
NUM_HIGHEST, NUM_HIGHEST_RIGHT = 24, 12  # digits to show
BIN = 0.5  # width of the histogram's bars


def write(result: Result, path: str | os.PathLike[str]) -> Path:
    """Write the page of a result; returns its path."""
    return page.write(path, page.render("demo.html.j2", **context(result)))


def context(result: Result) -> dict[str, Any]:
    """Everything that the template shows, by name."""
    found, train = result.summary, result.splits["train"]
    accuracy = [accuracy_by_step(result), accuracy_by_second(result)]
    picked, bars = [picked_wrong(result), picked_correct(result)], histogram(result)
    return {
        "figures": {item["id"]: item["figure"] for item in [*accuracy, *picked, bars]},
        "title": "RHO-LOSS on handwritten digits with wrong labels",
        "summary": found,
        "sizes": {name: f"{len(split):,}" for name, split in result.splits.items()},
        "noise": f"{100 * train.wrong.mean():.0f} %",
        "candidates": CANDIDATES,
        "chosen": round(CANDIDATES * KEEP),
        "scoring": scoring_share(result),
        "tiles": tiles(found),
        "headings": [heading.replace("\n", " ") for heading in HEADINGS],
        "rows": [cells(row) for row in found.rows.values()],
        "runs": per_seed(result),
        "accuracy": accuracy,
        "picked": picked,
        "histogram": bars,
        "highest": highest(result),
        "made": how_made(result),
    }


def scoring_share(result: Result) -> str:
    """The share of RHO-LOSS's time that selecting took, without making the irreducible losses."""
    selecting = curves(result, "rho", "selecting_seconds").sum()
    return percent(selecting / curves(result, "rho", "seconds")[:, -1].sum())


def tiles(found: Summary) -> list[dict[str, Any]]:
    """The four figures at the top, each for RHO-LOSS and for uniform."""
    rho, uniform = found.rows["rho"], found.rows["uniform"]

    def steps(row: Row) -> str:
        return "not reached" if row.mean_steps is None else f"{row.mean_steps:.0f}"

    fewer = rho.mean_steps is not None and rho.mean_steps < (uniform.mean_steps or float("inf"))
    pairs = [
        (f"Steps to {percent(found.target)}", steps(rho), steps(uniform), fewer),
        ("Final accuracy", *_two(fmean(rho.final), fmean(uniform.final), up=True)),
        ("Wrong labels, first epoch", *_two(rho.wrong_first, uniform.wrong_first, up=False)),
        (
            f"Seconds for {found.passes}, IL included",
            f"{rho.seconds:.1f} s",
            f"{uniform.seconds:.1f} s",
            rho.seconds < uniform.seconds,
        ),
    ]
    return [
        {"name": name, "rho": ours, "uniform": theirs, "better": better}
        for name, ours, theirs, better in pairs
    ]


def _two(ours: float, theirs: float, *, up: bool) -> tuple[str, str, bool]:
    return percent(ours), percent(theirs), (ours > theirs) if up else (ours < theirs)


def per_seed(result: Result) -> list[list[str]]:
    """A row of the table for each run: method, seed, steps to the target, final accuracy."""
    table = []
    for row in result.summary.rows.values():
        for seed, (final, steps) in enumerate(zip(row.final, row.steps, strict=True)):
            reached = "not reached" if steps is None else str(steps)
            table.append([row.label, str(seed), reached, percent(final)])
    return table


def curves(result: Result, method: str, key: str) -> np.ndarray:
    """The curves under `key` in the records of a method, [seeds, n]."""
    return np.array([r[key] for r in result.records if r["method"] == method])


def _accuracy(result: Result, key: str, x: str, shift: dict[str, float]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for method, (colour, dash) in STYLE.items():
        at = (curves(result, method, key).mean(0) + shift.get(method, 0.0)).tolist()
        y = 100 * curves(result, method, "accuracy")
        traces.append(page.band(LABEL[method], at, y.min(0), y.max(0), colour))
        hover = "%{y:.1f} %"
        shown = page.line(LABEL[method], at, y.mean(0), colour, dash, hovertemplate=hover)
        traces.append({**shown, "legendgroup": LABEL[method]})
    target = 100 * result.summary.target
    floor = min(100 * min(row.final) for row in result.summary.rows.values()) - 12
    low = max(0.0, 5 * (floor // 5))
    return page.figure(
        traces,
        x,
        "accuracy on clean test digits (%)",
        yaxis={"range": [low, 100]},
        xaxis={"rangemode": "tozero"},
        shapes=[page.rule(target)],
    )


def accuracy_by_step(result: Result) -> dict[str, Any]:
    """The figure of accuracy against gradient steps."""
    found = result.summary
    ends = ", ".join(f"{row.label} {percent(fmean(row.final))}" for row in found.rows.values())
    return {
        "id": "by-step",
        "title": "Counted in steps",
        "figure": _accuracy(result, "step", "gradient steps", {}),
        "caption": f"Mean over the seeds; the band runs from the lowest to the highest. Where they end: "
        f"{ends}. The thin line marks where uniform ends.",
    }


def accuracy_by_second(result: Result) -> dict[str, Any]:
    """The figure of accuracy against seconds; RHO-LOSS starts once its irreducible losses are made."""
    il = result.summary.il_seconds
    return {
        "id": "by-second",
        "title": "Counted in seconds",
        "figure": _accuracy(result, "seconds", "seconds of training", {"rho": il}),
        "caption": f"The same runs. Scoring is included, evaluation is not. RHO-LOSS starts "
        f"{il:.1f} s late, because that is how long it took to fit and score the irreducible losses. Each "
        "run is charged all of it, though they shared one fit.",
    }


def _by_epoch(result: Result, key: str, y: str, marked: float | None) -> dict[str, Any]:
    traces, highest = [], 0.0
    for method, (colour, dash) in STYLE.items():
        share = 100 * curves(result, method, key).mean(0)
        epochs = list(range(1, len(share) + 1))
        shown = page.line(LABEL[method], epochs, share, colour, dash, hovertemplate="%{y:.1f} %")
        traces.append({**shown, "mode": "lines+markers", "marker": {"size": 6}})
        highest = max(highest, float(share.max()))
    ticks = {"tickformat": "d", "dtick": max(1, len(epochs) // 6), "tick0": 1}
    return page.figure(
        traces,
        "epoch (one pass over the candidates)",
        y,
        xaxis=ticks,
        yaxis={"range": [0, max(1.12 * highest, 1)]},
        shapes=[] if marked is None else [page.rule(marked)],
    )


def picked_wrong(result: Result) -> dict[str, Any]:
    """The figure of the share of wrong labels among the chosen points, by epoch."""
    rho = curves(result, "rho", "wrong_by_epoch").mean(0)
    noise = 100 * result.splits["train"].wrong.mean()
    return {
        "id": "wrong",
        "title": "Points with a wrong label",
        "figure": _by_epoch(result, "wrong_by_epoch", "of the chosen points (%)", noise),
        "caption": f"{noise:.0f} % of all labels are wrong (thin line). Of the points that RHO-LOSS chose it "
        f"is {percent(rho[0])} in the first epoch and {percent(rho[-1])} in the last.",
    }


def picked_correct(result: Result) -> dict[str, Any]:
    """The figure of the share of chosen points that the network classified right before the step."""
    shares = {m: row.correct for m, row in result.summary.rows.items()}
    listed = ", ".join(f"{LABEL[m]} {percent(share)}" for m, share in shares.items())
    return {
        "id": "correct",
        "title": "Points that were right already",
        "figure": _by_epoch(result, "correct_by_epoch", "of the chosen points (%)", None),
        "caption": "A point that the network classifies as labelled before the step has little left to "
        f"teach. Over all epochs: {listed}.",
    }


def histogram(result: Result) -> dict[str, Any]:
    """The histogram of irreducible losses, for right and for wrong labels."""
    wrong, il = result.splits["train"].wrong, result.irreducible
    edges = np.arange(0, BIN * (np.ceil(il.max() / BIN) + 1), BIN)
    traces = []
    for name, group, colour, pattern in (
        ("label right", il[~wrong], page.BLUE, ""),
        ("label wrong", il[wrong], page.ORANGE, "/"),
    ):
        share = 100 * np.histogram(group, edges)[0] / max(len(group), 1)
        traces.append(
            {
                "type": "bar",
                "name": name,
                "x": page.rounded((edges[:-1] + BIN / 2).tolist()),
                "y": page.rounded(share.tolist()),
                "width": BIN,
                "opacity": 0.75,
                "marker": {"color": colour, "pattern": {"shape": pattern, "size": 6}},
                "hovertemplate": "%{y:.1f} %",
            }
        )
    medians = [float(np.median(group)) for group in (il[~wrong], il[wrong])]
    return {
        "id": "histogram",
        "title": "Irreducible losses of right and wrong labels",
        "figure": page.figure(
            traces, "irreducible loss", "share of the group (%)", barmode="overlay", bargap=0
        ),
        "caption": f"Measured once, before training, by a small model that never saw these digits. The "
        f"median is {medians[0]:.2f} where the label is right and {medians[1]:.2f} where it is wrong.",
    }


def highest(result: Result) -> dict[str, Any]:
    """The digits with the highest irreducible losses, of all labels and of right labels only."""
    train, il = result.splits["train"], result.irreducible
    order = np.argsort(-il, kind="stable")
    groups = [order[:NUM_HIGHEST], order[~train.wrong[order]][:NUM_HIGHEST_RIGHT]]
    shown = np.concatenate(groups)
    cards = [
        {
            "position": f"{100 * place / max(len(shown) - 1, 1):.4f}%",
            "given": int(train.given[row]),
            "true": int(train.true[row]),
            "wrong": bool(train.wrong[row]),
            "loss": f"{il[row]:.1f}",
        }
        for place, row in enumerate(shown)
    ]
    num_wrong = int(train.wrong.sum())
    found = int(train.wrong[order[:num_wrong]].sum())
    return {
        "sprite": page.sprite(train.images[shown]),
        "size": f"{100 * len(shown)}%",
        "all": cards[: len(groups[0])],
        "right": cards[len(groups[0]) :],
        "wrong": int(train.wrong[groups[0]].sum()),
        "found": f"The {num_wrong:,} digits with the highest irreducible loss hold {found:,} of the "
        f"{num_wrong:,} wrong labels ({percent(found / max(num_wrong, 1))}).",
    }


def how_made(result: Result) -> list[tuple[str, str]]:
    """How the page was made: command, versions, device, seeds and date."""
    records, found = result.records, result.summary
    seeds = sorted({record["seed"] for record in records})
    limit = records[0]["settings"]["limit"]
    rows = "" if limit is None else f" --limit {limit}"

    def all_of(key: str) -> str:
        return ", ".join(sorted({str(record[key]) for record in records}))

    versions = f"rholoss {records[0]['settings']['rholoss']}, torch {all_of('torch')}"
    days = sorted({record["date"][:10] for record in records})
    return [
        ("Command", f"rholoss demo --epochs {found.epochs} --seeds {len(seeds)}{rows}"),
        ("Versions", f"{versions}, numpy {all_of('numpy')}, Python {all_of('python')}"),
        ("Device", all_of("device")),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Date", " to ".join(dict.fromkeys([days[0], days[-1]]))),
    ]
