"""The log of what was chosen: one JSON line a step, written every so many steps.

Chosen ids and scores stay tensors on the device until they are written, so that logging never makes
the training wait. Each line is whole by itself; a line that was cut off by a crash is dropped.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rholoss.errors import RholossError

DIGITS = 6  # of a score


@dataclass(frozen=True)
class Chosen:
    """What one step chose: ids, positions among the candidates, scores and importance weights."""

    index: Any
    position: Tensor
    weight: Tensor | None
    score_B: Tensor | None  # of all candidates

    @property
    def score(self) -> Tensor | None:
        """Scores [k] of the chosen; None where nothing was scored."""
        return None if self.score_B is None else self.score_B.index_select(0, self.position)


class StepLog:
    """Appends steps and marks to a JSON-lines file; without a path it keeps nothing."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise RholossError(
                f"`log`={str(path)!r} is a directory; give the path of a file, for instance "
                f"{str(self.path / 'chosen.jsonl')!r}."
            )
        self._waiting: list[dict[str, Any]] = []

    def check_new(self, step: int) -> None:
        """Raise if a run that starts at this step would write behind another run's steps."""
        if step == 0 and self.path is not None and self.path.exists() and self.path.stat().st_size:
            raise RholossError(
                f"`log`={str(self.path)!r} holds the log of another run. To go on with that run load its "
                "state (`load_state_dict`); for a new one choose another path or delete the file."
            )

    def add(self, step: int, index: Any, score: Tensor | None) -> None:
        """Keep a step until the next flush."""
        scores = {} if score is None else {"score": score}
        self.mark({"type": "step", "step": step, "index": index, **scores})

    def mark(self, record: dict[str, Any], *, write: bool = False) -> None:
        """Keep a record of another kind (an evaluation, the ledger) until the next flush.

        `write`: flush now, so that a verdict can be asked of the log. Not before the first step, which finds
        out whether the log is another run's.
        """
        if self.path is not None:
            self._waiting.append(record)
        if write:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        if self.path is None or not self._waiting:
            return
        lines = [json.dumps(line, default=_plain) + "\n" for line in self._waiting]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+", buffering=0) as file:
            _append(file, "".join(lines).encode())
        self._waiting = []

    def rewind(self, step: int) -> None:
        """Remove what was logged from this step on, because a resumed run will log it again.

        A mark with this number of steps stays: it was made before the step.
        """
        self._waiting = []
        if self.path is None or not self.path.exists():
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w") as file:
            for line in read_log(self.path):
                if line["step"] < step or (line["step"] == step and line["type"] != "step"):
                    file.write(json.dumps(line) + "\n")
        os.replace(temporary, self.path)


def _plain(value: Any) -> Any:
    """Tensors and numpy's numbers as JSON values; a number that is not finite becomes null."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if not isinstance(value, Tensor):
        raise TypeError(f"A {type(value).__name__} cannot be logged: {value!r}")
    listed = value.tolist()
    if value.is_floating_point():
        return [round(number, DIGITS) if math.isfinite(number) else None for number in listed]
    return listed


def _append(file: io.FileIO, content: bytes) -> None:
    """Append lines: all of them or, if the disk is full, none. A last line that was cut off is removed."""
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":  # a crash cut the last line off
            file.seek(0)
            end = file.truncate(file.read().rfind(b"\n") + 1)
    if file.write(content) < len(content):
        file.truncate(end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def read_log(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a log, without a last one that was cut off."""
    with Path(path).open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
