"""Result lines: one JSON object a run, appended as it finishes; what is already there is not run again."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

from rholoss.errors import RholossError

RESULTS = Path(__file__).parent / "results"
# Options that say where things lie on this machine, and are no part of the command that is recorded.
PLACES = ("--out", "--data", "--visits")


class Recorded:
    """A dataclass of plain values that is written into result lines, and found again in them."""

    def key(self) -> str:
        """Names the run; two are the same run if they have the same key."""
        return "|".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """The run that a line is the result of. A field that is newer than the line has its default."""
        return cls(
            **{field.name: record[field.name] for field in fields(cls) if field.name in record}
        )


def read(*paths: Path) -> Iterator[dict[str, Any]]:
    """All lines of these files, of those that exist. A line cut short by a kill is passed over."""
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def missing(path: Path, fields: Sequence[str], asked: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cells that have no line yet; how many is told. A cell is a tuple of the values of these fields."""
    have, cells = {tuple(line[name] for name in fields) for line in read(path)}, list(asked)
    todo = [cell for cell in cells if cell not in have]
    also = "" if todo else f"; `--out FILE` makes them again, in another file than {path}"
    print(f"{len(todo)} runs to do, {len(cells) - len(todo)} have their line{also}", flush=True)
    return todo


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; the file takes the place of `path` if all goes well."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def save(path: Path, text: str) -> Path:
    """Write a page, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text)
    return path


def page_of(lines: Path) -> Path:
    """Where the page of these lines goes: README.md beside `runs.jsonl`, else the file's name with .md.

    Lines may lie anywhere, and what is called README.md there may be of something else.
    """
    return lines.with_name("README.md") if lines.name == "runs.jsonl" else lines.with_suffix(".md")


def append(path: Path, record: dict[str, Any]) -> None:
    """Append one line and flush it to the disk. If that fails it is printed, as it may be hours of work."""
    try:
        line = json.dumps(record, allow_nan=False) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell() and not _ends_with_newline(file):
                line = "\n" + line  # a kill cut the last line short: do not add to it
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        print(json.dumps(record), file=sys.stderr, flush=True)
        raise RholossError(
            f"The line of a run that is through could not be written to {path}: {error}. It was printed "
            "instead; put it at the end of that file, or the run is made again."
        ) from error


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


def about(module: str) -> dict[str, Any]:
    """Device, versions, date, and the command that was given to `python -m <module>`."""
    import numpy as np
    import torch

    return {
        "device": device(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),  # other sums on a CPU, so other numbers
        "date": str(datetime.date.today()),
        "command": " ".join([f"python -m {module}", *_quoted(without_places(sys.argv[1:]))]),
    }


def device() -> str:
    """What runs here."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def of_this_device(
    known: Iterable[Path], out: Path, timed: Callable[[dict[str, Any]], bool] = lambda line: True
) -> list[dict[str, Any]]:
    """Lines of these files and of `out`; where `timed` says that the budget is seconds, of this device only.

    Seconds of different devices cannot be compared. So timed lines of another device do not count as done,
    and `out` must have none of them, or its tables would mix the two.
    """
    here = device()
    others = sorted({line["device"] for line in read(out) if timed(line)} - {here})
    if others:
        raise SystemExit(
            f"--out {out} has runs of {', '.join(others)}, whose seconds are not those of {here}: give "
            "--out another file."
        )
    lines = read(*dict.fromkeys([*known, out]))
    return [line for line in lines if line["device"] == here or not timed(line)]


def without_places(words: list[str]) -> list[str]:
    """A command without the options that name places on this machine."""
    kept, skip = [], False
    for word in words:
        if skip or word.startswith(tuple(f"{place}=" for place in PLACES)):
            skip = False
        elif word in PLACES:
            skip = True
        else:
            kept.append(word)
    return kept


def _quoted(words: list[str]) -> list[str]:
    return [f'"{word}"' if " " in word else word for word in words]
