"""Files of the bench: written under a temporary name first, and read whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from experiments.bench.lines import tell
from rholoss.errors import RholossError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to, which takes the place of the file if all goes well."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def keep(path: Path | None, write: Callable[[Path], None]) -> None:
    """Keep what took minutes to make. Where there is no room for it the work goes on without."""
    if path is None:
        return
    try:
        with replacing(path) as temporary:
            write(temporary)
    except (OSError, RuntimeError) as error:
        tell(f"{path} could not be written, and will be made again: {error}", sys.stderr)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The file. Whatever is wrong with it is told with its name and what to do."""
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
    """What `torch.save` wrote. Torch itself would not see that a bit of it has changed."""
    with reading(path) as file:
        if damaged := zipfile.ZipFile(file).testzip():
            raise OSError(f"{damaged} has another checksum")
        return dict(torch.load(path, weights_only=True, **options))
