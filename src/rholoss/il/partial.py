"""Unfinished work on a store, so that a run that was cut off continues where it stopped.

It is kept in `partial/` inside the directory of the store: `job.json` describes the work, and for each model
there is a file of fitted weights and a file of records, one for each scored batch. A record has a checksum:
one that was cut off, or never reached the disk, is measured again. It also has its first row, so nothing is
mixed up if two processes do the same work at once.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rholoss.errors import StoreError
from rholoss.il import files

FITTED = ".pt"
WORK = (FITTED, ".scored", ".part")


class Partial:
    """The unfinished work in a directory; keeps nothing if `out` is None.

    Work of another `job` (other data, arguments, model or code) is thrown away. `said` is a sentence about
    what was found, if anything. With `joins`, for a process that joins the work of another one, nothing is
    thrown away: on a shared file system it may not see all of it yet.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None,
        job: Mapping[str, Any],
        batch_size: int,
        *,
        joins: bool = False,
    ) -> None:
        self.path = None if out is None else Path(out) / files.PARTIAL
        self.record = np.dtype(
            [("sum", "<u4"), ("first", "<i8"), ("seconds", "<f8"), ("loss", "<f4", (batch_size,))]
        )
        self.said = ""
        if self.path is None or joins:
            return
        before, job = self._job(), json.loads(json.dumps(job))
        work = sorted(path for path in self.path.glob("*") if path.suffix in WORK)
        if before == job:
            self.said = self._going_on(work) if work else ""
            return
        if work and isinstance(before, dict):
            other = [name for name in job if job[name] != before.get(name)]
            self.said = (
                f"Starting over: the unfinished work in {self.path} was of another job and is thrown away "
                f"(not the same: {', '.join(other)})."
            )
        with files.keeping_work(self.path):
            self.clear()
            self.path.mkdir(parents=True)
            text = json.dumps(job, indent=1).encode()
            files.write_file(self.path / files.JOB, lambda file: file.write(text))

    def _job(self) -> Any:
        try:
            return json.loads((self.path / files.JOB).read_bytes())  # type: ignore[operator]
        except (OSError, ValueError):
            return None

    def _going_on(self, work: list[Path]) -> str:
        fitted = [path for path in work if path.suffix == FITTED]
        what = f"{len(fitted)} fitted model(s)" if fitted else "scored points"
        last = datetime.fromtimestamp(max(path.stat().st_mtime for path in fitted or work))
        return (
            f"Going on from {self.path} ({what}, the last of {last.isoformat(' ', 'minutes')}); delete it "
            "to start over."
        )

    def records(self, name: str) -> np.ndarray:
        """The batches that a model has scored so far, in their order: fields `loss` and `seconds`."""
        if self.path is None or not (self.path / f"{name}.scored").exists():
            return np.empty(0, self.record)
        found = np.fromfile(self.path / f"{name}.scored", self.record)
        whole = [_checksum(row) == row["sum"] for row in found]
        kept = len(whole) if all(whole) else whole.index(False)
        with files.keeping_work(self.path):
            os.truncate(self.path / f"{name}.scored", kept * self.record.itemsize)
        size = self.record["loss"].shape[0]
        batches: dict[int, Any] = {}
        for row in found[:kept]:
            batches.setdefault(int(row["first"]) // size, row)
        unbroken = itertools.takewhile(batches.__contains__, itertools.count())
        return np.array([batches[number] for number in unbroken], self.record)

    def append(self, name: str, first: int, loss: np.ndarray, seconds: float) -> None:
        """Keep the losses of one more batch, whose first row is the `first` of those to be scored."""
        if self.path is None:
            return
        row = np.full((), 0, self.record)
        row["loss"] = np.nan
        row["loss"][: len(loss)] = loss
        row["first"], row["seconds"] = first, seconds
        row["sum"] = _checksum(row)
        with files.keeping_work(self.path), open(self.path / f"{name}.scored", "ab") as file:
            file.write(row.tobytes())

    def fitted(self, name: str) -> dict[str, Any] | None:
        """What `keep_fitted` kept of a model."""
        if self.path is None or not (self.path / f"{name}{FITTED}").exists():
            return None
        try:
            return files.read_weights(self.path / f"{name}{FITTED}")
        except StoreError:
            return None  # it is fitted again

    def keep_fitted(self, name: str, fitted: dict[str, Any]) -> None:
        """Keep the weights of a fitted model and what is known about it."""
        if self.path is not None:
            with (
                files.keeping_work(self.path),
                files.replacing(self.path / f"{name}{FITTED}") as temporary,
            ):
                files.write_file(temporary, files.weights_writer(fitted))

    def clear(self) -> None:
        """Throw the work away."""
        if self.path is not None and self.path.exists():
            shutil.rmtree(self.path)


def _checksum(row: Any) -> int:
    return zlib.crc32(row["first"].tobytes() + row["loss"].tobytes())
