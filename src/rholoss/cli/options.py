"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rholoss.losses import TASKS

PATHS = "as module:attribute"

Loss = Annotated[
    str,
    typer.Option(
        metavar="NAME|M:FN",
        help=f"{', '.join(TASKS)}; or a function (model, batch) -> one loss per example, {PATHS}.",
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="M:Y",
        help="One label for each row, if the data set has no `targets` or `labels`. A later run "
        "compares them to notice whether the data has changed.",
    ),
]
Collate = Annotated[
    str | None,
    typer.Option(
        metavar="M:FN", help="The collate function of the loader, for instance for padding."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.")
]
Workers = Annotated[int, typer.Option(min=0, help="Worker processes of the loader.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows at a time.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory to write to.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the losses that are in --out already.")
]
Store = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="What `rholoss il fit --out` wrote.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
