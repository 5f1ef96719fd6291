"""Parts: what several processes measure, each piece in a file of its own, and how they are merged.

A process claims a unit of work (a block of rows, a shard of a stream) by creating a file, which only one
can; this needs no clock and no server. Claims hold for one start of the run. After a restart the files on
disk decide: a unit that is not complete can be claimed again. A part is written under a temporary name and
has a checksum; one that was cut off is measured again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rholoss.errors import RholossError
from rholoss.il import files
from rholoss.il.hashing import ABSENT
from rholoss.il.ids import Ids, check_bits, check_not_negative, hash_keys

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("sum", "<u4"),
        ("last", "<u2"),  # the unit is complete with this part
        ("keyed", "<u2"),  # ids are string keys
        ("rows", "<u8"),
        ("seconds", "<f8"),
    ]
)
# An id or the hash of a string key; further bits of that hash; the loss; the code of the label. Stored
# column by column, so that keys can be searched without reading the rest.
ENTRY = np.dtype([("key", "<u8"), ("check", "<u4"), ("loss", "<f4"), ("label", "<i4")])
MAGIC = b"rhopart1"
RANGE = 2**22  # rows of the store that are in memory at a time while parts are merged


def entries_of(ids: Ids, loss_n: np.ndarray, label_n: np.ndarray | None = None) -> np.ndarray:
    """The entries of a part, [n]."""
    found = np.empty(len(ids), ENTRY)
    if isinstance(ids, list):
        found["key"], found["check"] = hash_keys(ids), check_bits(ids)
    else:
        check_not_negative(ids)
        found["key"], found["check"] = ids, 0
    found["loss"], found["label"] = loss_n, ABSENT if label_n is None else label_n
    return found


class Parts:
    """The parts in a folder; `start` says which start of the run this is, the same on all ranks."""

    def __init__(self, folder: Path, start: str) -> None:
        self.folder, self.claims = folder, folder / f"claims-{start}"

    def open_claims(self) -> None:
        """Remove the claims of earlier starts. To be called by one rank, before any rank claims."""
        for old in self.folder.glob("claims-*"):
            shutil.rmtree(old)
        self.claims.mkdir()

    def claim(self, unit: str) -> bool:
        """Claim a unit; True for exactly one of the processes that try."""
        try:
            os.close(os.open(self.claims / unit, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def write(
        self,
        unit: str,
        number: int,
        entries: np.ndarray,
        *,
        keyed: bool,
        last: bool,
        seconds: float,
    ) -> None:
        """Keep a part of a unit, sorted; `last` if the unit is complete with it."""
        ordered = entries[np.argsort(entries["key"], kind="stable")]
        content = b"".join(ordered[column].tobytes() for column in ENTRY.names or ())
        header = np.zeros((), HEADER)
        header["magic"], header["sum"], header["last"] = MAGIC, zlib.crc32(content), last
        header["rows"], header["seconds"], header["keyed"] = len(entries), seconds, keyed
        path = self.folder / f"{unit}.{number:06}.part"
        with files.keeping_work(self.folder), files.replacing(path) as temporary:
            # Not flushed to the disk: if a power cut takes it away, the checksum tells.
            temporary.write_bytes(header.tobytes() + content)

    def of(self, unit: str) -> tuple[list[Path], int, bool]:
        """The intact parts of a unit up to the first damaged one, their rows, and whether that is all of it.

        Reads the parts, to compare their checksums.
        """
        found: list[Path] = []
        rows = 0
        for number in range(10**6):
            path = self.folder / f"{unit}.{number:06}.part"
            header = _header(path)
            if header is None or _checksum(path) != header["sum"]:
                return found, rows, False
            found.append(path)
            rows += int(header["rows"])
            if header["last"]:
                return found, rows, True
        raise AssertionError("a unit has at most a million parts")

    def unclaimed(self, units: Iterable[str]) -> Iterator[tuple[str, int, int]]:
        """Claim units that are not complete, one by one; yields name, number of parts, and of rows."""
        for unit in units:
            if self.claim(unit):
                kept, rows, complete = self.of(unit)
                if not complete:
                    yield unit, len(kept), rows


def _header(path: Path) -> Any:
    """The header of a part of the right size, or None."""
    try:
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(HEADER.itemsize), HEADER)[0]
        size = HEADER.itemsize + int(header["rows"]) * ENTRY.itemsize
        return header if header["magic"] == MAGIC and path.stat().st_size == size else None
    except (FileNotFoundError, ValueError, IndexError):
        return None


def _checksum(path: Path) -> int:
    with open(path, "rb") as file:
        file.seek(HEADER.itemsize)
        return zlib.crc32(file.read())


def _read(path: Path, rows: int, low: int, high: int) -> np.ndarray:
    """The entries at these places of a part; nothing else is read, and no file stays open."""
    found, start = np.empty(high - low, ENTRY), HEADER.itemsize
    for column in ENTRY.names or ():
        kind = ENTRY[column]
        found[column] = np.fromfile(path, kind, high - low, offset=start + low * kind.itemsize)
        start += rows * kind.itemsize
    return found


class Merged:
    """All parts of a run as one sorted table, of which a range is in memory at a time.

    Integer ids are cut into ranges of as many rows of the store; keys, by their hashes, into ranges
    that hold about as many.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        headers = {path: _header(path) for path in paths}
        kinds = {bool(header["keyed"]) for header in headers.values() if header["rows"]}
        if len(kinds) != 1:
            raise RholossError(
                "Some ids are whole numbers and some are strings; make them all of one kind."
                if kinds
                else "There is nothing to measure: no shard has a row."
            )
        keyed = self.keyed = kinds.pop()
        self.seconds = float(sum(header["seconds"] for header in headers.values()))
        self.rows = {path: int(h["rows"]) for path, h in headers.items() if h["rows"]}
        self.total = sum(self.rows.values())
        last = [int(_keys(path, rows)[-1]) for path, rows in self.rows.items()]
        self.highest = max(last, default=-1)
        end = 2**64 if keyed else self.highest + 1
        step = -(-end // max(1, -(-self.total // RANGE))) if keyed else RANGE
        self.starts = list(range(0, end, step))
        bounds = np.array(self.starts, np.uint64)
        self.places = {
            path: [*np.searchsorted(_keys(path, rows), bounds).tolist(), rows]
            for path, rows in self.rows.items()
        }

    def ranges(self) -> Iterator[tuple[int, np.ndarray]]:
        """The first key of each range and its entries, sorted, each id once."""
        for number, low in enumerate(self.starts):
            cut = [
                _read(path, self.rows[path], places[number], places[number + 1])
                for path, places in self.places.items()
                if places[number] < places[number + 1]
            ]
            found = np.concatenate(cut) if cut else np.empty(0, ENTRY)
            found = found[np.argsort(found["key"], kind="stable")]
            again = np.flatnonzero(found["key"][1:] == found["key"][:-1]) + 1
            if (found["check"][again] != found["check"][again - 1]).any():
                raise RholossError(
                    "Two of the string keys have the same 64-bit hash, so their losses could not be "
                    "told apart. Use row numbers as ids, or change the keys (a prefix will do)."
                )
            yield low, np.delete(found, again)

    def writers(self, rows: int, *, labels: bool) -> dict[str, files.Writer]:
        """What writes the files of a store: a dense table of so many rows, or sorted keys."""
        wanted: dict[str, tuple[str, Any]] = {"loss": ("loss", np.nan)}
        if self.keyed:
            wanted["keys"] = ("key", None)
        if labels:
            wanted["labels"] = ("label", ABSENT)
        return {kind: self._writer(kind, *column, rows) for kind, column in wanted.items()}

    def _writer(self, kind: str, column: str, absent: Any, rows: int) -> Callable[[BinaryIO], Any]:
        dtype = files.DTYPE[kind]

        def write(file: BinaryIO) -> None:
            written = 0
            for low, found in self.ranges():
                values = found[column].astype(dtype)
                if not self.keyed:
                    values = np.full(min(RANGE, rows - low), absent, dtype)
                    values[(found["key"] - np.uint64(low)).astype(np.int64)] = found[column]
                written += len(values)
                file.write(values.tobytes())
            for low in range(written, rows, RANGE):  # rows behind the last that was measured
                file.write(np.full(min(RANGE, rows - low), absent, dtype).tobytes())

        return write

    def count(self) -> tuple[int, int, int]:
        """Distinct ids, how many of them have a loss that is not NaN, and how many a finite one."""
        ids = measured = finite = 0
        for _, found in self.ranges():
            ids += len(found)
            measured += int(np.count_nonzero(~np.isnan(found["loss"])))
            finite += int(np.count_nonzero(np.isfinite(found["loss"])))
        return ids, measured, finite


def _keys(path: Path, rows: int) -> np.ndarray:
    return np.memmap(path, ENTRY["key"], "r", offset=HEADER.itemsize, shape=(rows,))


def new_start() -> str:
    """A name for one start of a run."""
    return secrets.token_hex(4)
