"""The log of what was chosen: one JSON line a step, written every so many steps.

Chosen ids and scores stay tensors on the device until they are written, so that logging never makes
the training wait. Each line is whole by itself; a line that was cut off by a crash is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor


def _numbers(values: Any, digits: int | None = None) -> list[Any]:
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    return listed if digits is None else [round(value, digits) for value in listed]


class StepLog:
    """Appends steps and marks to a JSON-lines file; without a path it keeps nothing."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self._waiting: list[tuple[int, Any, Tensor | None]] = []
        self._lines: list[dict[str, Any]] = []
        self._mended = False

    def add(self, step: int, index: Any, score: Tensor | None) -> None:
        """Keep a step until the next flush."""
        if self.path is not None:
            self._waiting.append((step, index, score))

    def mark(self, record: dict[str, Any]) -> None:
        """Keep a record of another kind (an evaluation, the ledger) until the next flush."""
        if self.path is not None:
            self._lines.append(record)

    def flush(self) -> None:
        """Write what is waiting."""
        if self.path is None or not (self._waiting or self._lines):
            return
        steps: list[dict[str, Any]] = []
        for step, index, score in self._waiting:
            line: dict[str, Any] = {"type": "step", "step": step, "index": _numbers(index)}
            if score is not None:
                line["score"] = _numbers(score, digits=6)
            steps.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._mended:
            _drop_partial_line(self.path)
            self._mended = True
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in steps + self._lines))
        self._waiting, self._lines = [], []

    def rewind(self, step: int) -> None:
        """Forget what was logged from this step on: a resumed run will do it again."""
        self._waiting, self._lines = [], []
        if self.path is None or not self.path.exists():
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w") as file:
            for line in read_log(self.path):
                if line["step"] < step:
                    file.write(json.dumps(line) + "\n")
        os.replace(temporary, self.path)


def _drop_partial_line(path: Path) -> None:
    """Cut off what a crash left of a last line, so that the next one starts on a line of its own."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def read_log(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a log, without a last one that was cut off."""
    with Path(path).open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
