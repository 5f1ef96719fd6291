"""`rholoss il show`: what is in a store of irreducible losses."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rholoss.cli import objects, options
from rholoss.errors import RholossError
from rholoss.il.guessing import SAMPLED, assessed, mean_and_guess, strided
from rholoss.il.ids import Ids, plain_id
from rholoss.il.store import Irreducible
from rholoss.progress import clock

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
BAR, LINEAR_BINS = 40, 10


@dataclass(frozen=True)
class Bin:
    """How many losses lie in [low, high); the last bin includes its upper end."""

    low: float
    high: float
    count: int


def edges_of(values: np.ndarray) -> np.ndarray:
    """The ends of the bins: 0.1, 0.3, 1, 3, ..., since most are near 0; evenly spaced if any is negative."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low, math.nextafter(high, math.inf)])
    if low < 0:
        return np.linspace(low, high, LINEAR_BINS + 1)
    ends = [a * 10.0**power for power in range(-3, 40) for a in (1, 3)]
    inner = [end for end in ends if low < end < high]
    first = max((end for end in [0.0, *ends] if end <= low), default=0.0)
    last = next(end for end in ends if end >= high)
    return np.array([first, *inner, last])


def histogram(values: np.ndarray) -> list[Bin]:
    """Counts of the finite values in a handful of bins."""
    counts, edges = np.histogram(values, edges_of(values))
    return [
        Bin(float(a), float(b), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)
    ]


def check_named(il: Irreducible, ids: Ids | None) -> None:
    """Raise if ids are to be listed, but the store has only their hashes and none were given."""
    if ids is None and il.keys is not None:
        raise RholossError(
            "The store keeps hashes of its string ids only; pass --data M:TRAIN, which has the ids."
        )


def highest(il: Irreducible, number: int, ids: Ids | None = None) -> list[tuple[Any, float]]:
    """The `number` highest finite losses with their ids, highest first.

    Args:
        il: the store.
        number: how many.
        ids: the ids to look among; needed if they are strings.
    """
    check_named(il, ids)
    values = (il.values if ids is None else il.lookup(ids)).numpy()
    best = np.empty(0, np.int64)
    for start in range(0, len(values), SAMPLED):  # in parts: the values may be a mapped file
        part = values[start : start + SAMPLED]
        best = np.concatenate([best, start + np.flatnonzero(np.isfinite(part))])
        best = best[np.argsort(-values[best], kind="stable")][:number]
    return [(int(i) if ids is None else plain_id(ids[i]), float(values[i])) for i in best]


def describe(il: Irreducible) -> dict[str, Any]:
    """Everything that is known about a store, ready for JSON."""
    values = il.values.numpy()
    sample, (mean, guess) = strided(values), mean_and_guess(il)
    finite = sample[np.isfinite(sample)]
    identity = {k: v for k, v in (il.meta.get("identity") or {}).items() if k != "content"}
    known = ("loss", "model", "split", "transform", "seconds", "created", "rholoss", "torch")
    return {
        "path": str(il.path),
        "rows": len(il),
        "measured": il.meta.get("measured", int((~np.isnan(values)).sum())),
        "sampled": len(sample),
        "not_finite": len(sample) - len(finite),
        "infinite": int(np.isinf(sample).sum()),
        "ids": "integers" if il.keys is None else "strings",
        "identity": identity or None,
        **{key: il.meta.get(key) for key in known},
        "mean": None if math.isnan(mean) else mean,
        "guess": guess,
        "quantiles": dict(
            zip(map(str, QUANTILES), np.quantile(finite, QUANTILES).tolist(), strict=True)
        )
        if len(finite)
        else {},
        "histogram": [vars(b) for b in histogram(finite)] if len(finite) else [],
    }


def show(
    store: options.Store,
    most: Annotated[
        int,
        typer.Option("--highest", min=0, help="List this many ids, those with the highest losses."),
    ] = 0,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write ids and losses to a Parquet file.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="M:TRAIN", help="The data set, to name ids that are strings."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what is in a directory of irreducible losses: their origin and their distribution.

    A point with a high irreducible loss is one that a model of holdout data gets wrong: its label is
    wrong, or the point is ambiguous or rare. Look at the highest.

    \b
    Examples:
      rholoss il show il/mytask --highest 20
      rholoss il show il/mytask --json
      rholoss il show il/mytask --parquet losses.parquet
    """
    il = Irreducible.load(store)
    ids = None if data is None else objects.ids(objects.dataset(data, "--data"))
    if ids is not None and il.lookup(ids).isnan().all():
        il.check(ids)  # raises, with the reason
    about = describe(il)
    if most:
        top = highest(il, most, ids)
        about["highest"] = [{"id": id_, "loss": loss} for id_, loss in top]
    if parquet is not None:
        check_named(il, ids)
        il.to_parquet(parquet, ids=ids)
    typer.echo(json.dumps(about, indent=1) if as_json else "\n".join(lines(about)))
    if parquet is not None:
        typer.echo(f"Wrote {parquet}.", err=True)


def lines(about: dict[str, Any]) -> list[str]:
    """The description as text."""
    pairs = [
        ("store", about["path"]),
        ("rows", f"{about['rows']:,}, {about['measured']:,} measured, ids are {about['ids']}"),
        ("identity", _identity(about["identity"])),
        ("model", _model(about["model"])),
        ("loss", about["loss"]),
        ("split", _split(about["split"])),
        ("transform", about["transform"] or "none known"),
        ("cost", f"{clock(about['seconds'] or 0)} ({about['seconds'] or 0:.1f} s)"),
        ("made", f"{about['created']}, rholoss {about['rholoss']}, torch {about['torch']}"),
    ]
    said = [f"{name:<10} {value}" for name, value in pairs]
    if about["sampled"] < about["rows"]:
        said.append(f"{'sample':<10} figures below are of {about['sampled']:,} rows, evenly spaced")
    if about["infinite"]:
        number = f"{about['infinite']:,} of the losses"
        said.append(
            f"{'infinite':<10} {number}: leave these points out, selecting from them is an error"
        )
    if about["quantiles"]:
        said += ["", f"{assessed(about['mean'], about['guess'])}; quantiles:"]
        said.append("  ".join(f"{float(q):.0%} {v:.4f}" for q, v in about["quantiles"].items()))
        said += ["", *_bars(about["histogram"])]
    if "highest" in about:
        said += ["", "highest irreducible losses (id, loss):"]
        said += [f"{row['id']!s:>12}  {row['loss']:.4f}" for row in about["highest"]]
    return said


def _bars(bins: list[dict[str, Any]]) -> list[str]:
    most = max(b["count"] for b in bins)
    return [
        f"{b['low']:>9.4g} to {b['high']:<9.4g} {b['count']:>12,}  "
        f"{'#' * math.ceil(BAR * b['count'] / most)}".rstrip()
        for b in bins
    ]


def _identity(identity: dict[str, Any] | None) -> str:
    if not identity:
        return "not known, so a changed data set cannot be noticed"
    by = identity.get("labels")
    kept = f"labels ({by})" if by else "content of up to 256 rows"
    rows = identity.get("rows")
    return (
        f"{kept}, {'ids of the caller' if rows is None else f'{rows:,} rows'}, {identity['digest']}"
    )


def _model(model: dict[str, Any] | None) -> str:
    if not model:
        return "not known (losses made elsewhere)"
    size = f", {model['parameters']:,} parameters" if "parameters" in model else ""
    said = f"{model.get('class') or model.get('note', 'not named')}{size}"
    fits = [
        f"epoch {f['epoch']} of {f['epochs']}, loss {f['loss']:.4f}" for f in model.get("fits", [])
    ]
    return "; ".join([said, *fits])


def _split(split: dict[str, Any] | None) -> str:
    if not split:
        return "not known"
    rest = ", ".join(f"{k} {v}" for k, v in split.items() if k != "kind" and v is not None)
    if "kind" not in split:  # the user's own note
        return rest
    return f"{split['kind']}" + (f" ({rest})" if rest else "")
