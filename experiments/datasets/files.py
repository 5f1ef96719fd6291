"""Where the data is, and what to say when it is not there."""

from __future__ import annotations

import os
from pathlib import Path


def data_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """The directory with the unpacked data: as given, or the environment variable RHOLOSS_DATA, or `data`."""
    return Path(given or os.environ.get("RHOLOSS_DATA") or "data")


def need(path: Path, what: str, origin: str) -> Path:
    """The path, if it exists; otherwise an error that says where to get it and where to put it."""
    if not path.exists():
        raise FileNotFoundError(
            f"{what} was expected at {path}. Get it from {origin} and unpack it there, or set RHOLOSS_DATA "
            "to the directory that holds it."
        )
    return path
