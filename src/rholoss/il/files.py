"""The directory of a store: `meta.json` and the files that it names.

Each data file gets a new name. They are written and flushed first; then `meta.json` is replaced in one
step. So a write that is cut off at any moment leaves the old store intact. Files that it left behind are
removed by a later write once they are a day old: younger ones may belong to a process that is still writing.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from rholoss.errors import StoreError

META, PARTIAL, JOB = "meta.json", "partial", "job.json"
FORMAT, VERSION = "rholoss-il", 1
SUFFIX = {"loss": "f32", "keys": "u64", "labels": "i32", "weights": "pt"}
DTYPE = {"loss": "<f4", "keys": "<u8", "labels": "<i4"}
OURS = re.compile(
    r"(loss|keys|labels|weights)-[0-9a-f]{16}\.(f32|u64|i32|pt)|meta-[0-9a-f]{16}\.tmp"
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEFT_BEHIND = 24 * 3600  # seconds; younger files may be those of a write that is under way

Writer = Callable[[BinaryIO], Any]


def measured_rows(meta: Mapping[str, Any]) -> str:
    """How many losses a store has, in words; the table of a part of a data set has empty rows."""
    rows = meta["rows"]
    measured = meta.get("measured", rows)
    return f"{rows:,} rows" if measured == rows else f"{measured:,} of {rows:,} rows"


def read_meta(path: Path) -> dict[str, Any]:
    """The checked meta.json of a store."""
    try:
        meta = json.loads((path / META).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(_not_there(path)) from None
    except OSError as error:
        raise StoreError(
            f"{path / META} cannot be read: {error.strerror}. See that you may read the directory and all "
            "files in it."
        ) from None
    except ValueError as error:
        raise StoreError(
            f"{path / META} cannot be read as JSON ({error}). Restore it from a copy, or delete the "
            "directory and measure the losses again with `rholoss il fit`."
        ) from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise StoreError(
            f"{path} is not a store of irreducible losses: its {META} has no format {FORMAT!r}. Give "
            "the directory that `rholoss il fit --out` or `Irreducible.save` wrote."
        )
    if meta.get("version") != VERSION:
        raise StoreError(
            f"{path} has format version {meta.get('version')!r}, but this rholoss reads version "
            f"{VERSION}. Use the rholoss that wrote it ({meta.get('rholoss', 'unknown')}), or measure "
            "the losses again with `rholoss il fit` into another directory."
        )
    files, rows = meta.get("files"), meta.get("rows")
    named = isinstance(files, dict) and "loss" in files and all(map(_is_ours, files.values()))
    if not named or not isinstance(rows, int) or rows < 1:
        raise StoreError(
            f"{path / META} is incomplete: `rows` is {rows!r} and `files` is {files!r}. Restore it "
            "from a copy, or measure the losses again with `rholoss il fit`."
        )
    return meta


def _is_ours(name: Any) -> bool:
    return isinstance(name, str) and OURS.fullmatch(name) is not None


def _is_work(folder: Path) -> bool:
    """Whether a folder holds unfinished work, or nothing. All of it is deleted at the end."""
    return folder.is_dir() and ((folder / JOB).exists() or not any(folder.iterdir()))


def _not_there(path: Path) -> str:
    if _is_work(path / PARTIAL):
        return (
            f"{path} holds work that was cut off before it was complete. Run the same command again: "
            "it goes on where it stopped."
        )
    what = "has no meta.json" if path.exists() else "does not exist"
    return (
        f"{path} is not a store of irreducible losses: it {what}. Give the directory that "
        "`rholoss il fit --out` or `Irreducible.save` wrote."
    )


def data_file(path: Path, meta: Mapping[str, Any], kind: str) -> Path:
    """The path of a data file, whose size (but not content) has been checked."""
    name = path / meta["files"][kind]
    wanted = meta["rows"] * np.dtype(DTYPE[kind]).itemsize if kind in DTYPE else None
    try:
        size = name.stat().st_size
    except OSError:
        raise StoreError(
            f"{name} is missing, though {META} names it. Copy the store again as a whole, or measure "
            "the losses again with `rholoss il fit`."
        ) from None
    if wanted is not None and size != wanted:
        raise StoreError(
            f"{name} has {size:,} bytes, but {meta['rows']:,} rows need {wanted:,}: it was truncated "
            "or replaced. Copy the store again as a whole, or measure the losses again with "
            "`rholoss il fit`."
        )
    return name


def check_target(path: Path) -> None:
    """Raise unless a store can be written to the path: it is new, empty or a store already."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file; give the name of a directory for the store.")
    if (path / META).exists():
        read_meta(path)
        return
    names = [entry.name for entry in path.iterdir()] if path.exists() else []
    work = _is_work(path / PARTIAL)
    foreign = sorted(name for name in names if not (work if name == PARTIAL else _is_ours(name)))
    if foreign:
        raise StoreError(
            f"{path} holds other files ({', '.join(foreign[:3])}) and no store, so nothing was written. "
            "Give a new or empty directory."
        )


def beside(path: Path) -> Path:
    """The first of `path`-2, `path`-3, ... that does not exist: the name of another store."""
    path = path if path.name else path.absolute()
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(other for other in numbered if not other.exists())


def write_store(
    path: Path, meta: Mapping[str, Any], writers: Mapping[str, Writer]
) -> dict[str, Any]:
    """Write the data files, then meta.json; remove what earlier writes left. Returns the meta."""
    check_target(path)
    before = set(read_meta(path)["files"].values()) if (path / META).exists() else set()
    files = {kind: f"{kind}-{secrets.token_hex(8)}.{SUFFIX[kind]}" for kind in writers}
    meta = {"format": FORMAT, "version": VERSION, **meta, "files": files}
    text = _json(meta)
    temporary = path / f"meta-{secrets.token_hex(8)}.tmp"
    try:
        path.mkdir(parents=True, exist_ok=True)
        for kind, write in writers.items():
            write_file(path / files[kind], write)
        write_file(temporary, lambda file: file.write(text))
        os.replace(temporary, path / META)
    except OSError as error:
        with suppress(OSError):  # nothing can be removed where nothing could be written
            for name in [*files.values(), temporary.name]:
                (path / name).unlink(missing_ok=True)
        raise StoreError(
            f"The store could not be written to {path}: {error.strerror or error}. What was there "
            f"before is unchanged. {_way_out(error)} or give another directory, and save again."
        ) from error
    flush_directory(path)
    left = {entry.name for entry in path.iterdir() if _is_ours(entry.name) and _is_old(entry)}
    for name in (before | left) - set(files.values()):
        (path / name).unlink(missing_ok=True)
    return meta


def _json(meta: Mapping[str, Any]) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, (np.generic, np.ndarray)):
            return value.tolist()
        raise StoreError(
            f"{META} cannot hold {value!r}, a {type(value).__name__}: it is for numbers, strings, lists and "
            "dicts. Nothing was written."
        )

    return json.dumps(meta, indent=1, default=plain).encode()


def _is_old(entry: Path) -> bool:
    try:
        return time.time() - entry.stat().st_mtime > LEFT_BEHIND
    except OSError:  # gone by now
        return False


def write_file(path: Path, write: Writer) -> None:
    """Write a file and flush it to the disk."""
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def array_writer(values: np.ndarray, kind: str) -> Writer:
    """Writes the array as little-endian numbers."""
    wide = np.ascontiguousarray(values, DTYPE[kind])
    return lambda file: file.write(wide.data.cast("B"))


def weights_writer(weights: Any) -> Writer:
    """Writes tensors and numbers for `torch.load(weights_only=True)`."""
    buffer = io.BytesIO()  # writing directly, torch would not report a full disk as such
    torch.save(weights, buffer)
    return lambda file: file.write(buffer.getbuffer())


def read_weights(path: Path) -> Any:
    """What `weights_writer` wrote; no code in it is run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes may raise anything
        raise StoreError(
            f"{path} cannot be read as weights ({type(error).__name__}): it was truncated or replaced. Copy "
            "the store again as a whole, or fit the model again with `rholoss il fit`."
        ) from error


def flush_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _way_out(error: OSError) -> str:
    if error.errno in FULL:
        return "Free some space"
    return "See that you may write there and that no other process works in it"


@contextmanager
def keeping_work(folder: Path) -> Iterator[None]:
    """Say what to do where unfinished work cannot be written to the folder."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"Unfinished work could not be kept in {folder}: {error.strerror or error}. "
            f"{_way_out(error)} and run the same command again: it goes on where it stopped."
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` when the block is done, and is removed if it fails."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
