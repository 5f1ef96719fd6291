"""Files that the bench keeps: reading and writing them with errors that say what to do."""

from __future__ import annotations

import contextlib
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from experiments.bench.lines import tell
from experiments.records import replacing
from rholoss.errors import RholossError


def keep(path: Path | None, write: Callable[[Path], None]) -> None:
    """Write what took minutes to make. If the disk is full, the work goes on without the file."""
    if path is None:
        return
    try:
        with replacing(path) as temporary:
            write(temporary)
    except (OSError, RuntimeError) as error:
        tell(f"{path} could not be written, and will be made again: {error}", sys.stderr)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file; any error in the block names it and says what to do."""
    try:
        with path.open("rb") as file:
            yield file
    except (RholossError, MemoryError, torch.OutOfMemoryError):  # it is not the file
        raise
    except Exception as error:
        raise RholossError(
            f"{path} cannot be read: {str(error) or type(error).__name__}. It is damaged; delete it, and "
            "what it holds is made anew."
        ) from error


def read_tensors(path: Path, **options: Any) -> dict[str, Any]:
    """What `torch.save` wrote, with its checksums compared: torch does not notice a changed bit."""
    with reading(path) as file:
        if damaged := zipfile.ZipFile(file).testzip():
            raise OSError(f"{damaged} has another checksum")
        return dict(torch.load(path, weights_only=True, **options))
