"""`rholoss demo`: see what selection does, on real digits."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rholoss.cli import options
from rholoss.cli.errors import when_stopped


def demo(
    epochs: Annotated[
        int, typer.Option(help="Passes over the candidates; a tenth of each is trained on.")
    ] = 12,
    seeds: Annotated[int, typer.Option(help="Repetitions, each with other weights and order.")] = 3,
    out: options.Out = Path("rholoss-demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Do finished runs again.")] = False,
    page: Annotated[bool, typer.Option(help="Write report.html.")] = True,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser at the end.")
    ] = True,
    limit: Annotated[
        int | None, typer.Option(help="Use the first rows only, for a quick look.")
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """See what selection does: real digits with 10 % wrong labels, three methods, a minute or two.

    Fits irreducible losses on a holdout set, then trains the same small network with uniform
    batches, by training loss and by RHO-LOSS, from the same weights and the same candidates. Prints
    a table and writes a page with curves and pictures. Needs no network.

    An epoch is one pass over the candidates: each epoch looks at all points and trains on a tenth.
    Finished runs are kept in --out; the same command again does only what is missing.

    \b
    Examples:
      rholoss demo
      rholoss demo --epochs 3 --seeds 1 --no-open
    """
    from rholoss.demo import run

    with when_stopped(
        "Run the same command again: finished runs were kept and are not done again."
    ):
        result = run(epochs, seeds, out, progress=not quiet, page=page, fresh=fresh, limit=limit)
    if open_page and result.page is not None and has_screen():
        webbrowser.open(result.page.resolve().as_uri())


def has_screen() -> bool:
    """Whether a page can be shown: there is a terminal and a screen, not a pipe or a bare remote machine."""
    local = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    return local and sys.stdout.isatty()
