"""A progress bar with elapsed and remaining time: rich on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

# Seconds between two lines in a log file or a notebook; at least this share of the time so far, so that
# hours of work do not fill a log.
LINE_EVERY, LINE_SHARE = 5.0, 0.02
WIDE = 100  # columns of a terminal that has room for a bar, too


def clock(seconds: float) -> str:
    """Seconds as 0:07, 12:40 or 1:02:03."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def say(text: str) -> None:
    """A line on stderr, where progress is shown; nothing for an empty one."""
    if text:
        print(text, file=sys.stderr, flush=True)


class Bar:
    """Progress of a piece of work, on stderr; `enabled=False` prints nothing at all.

    >>> with Bar(3, "fitting", enabled=False) as bar:
    ...     for _ in range(3):
    ...         bar.advance(note="loss 0.31")
    """

    def __init__(self, total: int, description: str, enabled: bool = True) -> None:
        self.total, self.description, self.enabled = total, description, enabled
        self.done, self.note = 0.0, ""
        self._rich: Any = None
        self._task: Any = None
        self._printed = -1.0

    def __enter__(self) -> Bar:
        self._started = self._last = time.monotonic()
        if self.enabled and sys.stderr.isatty():
            self._rich, self._task = _start_rich(self.total, self.description)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._printed not in (-1, self.done):  # nothing at all for work that took a moment
            self._print()

    def advance(self, n: float = 1, note: str | None = None) -> None:
        """`n` more are done (may be a fraction); `note` replaces the text after the bar."""
        self.done += n
        self.note = self.note if note is None else note
        if self._rich is not None:
            self._rich.update(self._task, completed=self.done, note=self.note)
        elif self.enabled:
            now = time.monotonic()
            if now - self._last >= max(LINE_EVERY, LINE_SHARE * (now - self._started)):
                self._print()

    def line(self) -> str:
        """The state of the work in one line."""
        elapsed = time.monotonic() - self._started
        left = elapsed / self.done * max(self.total - self.done, 0) if self.done else 0.0
        share = f"{100 * self.done / self.total:.0f} %" if self.total else f"{self.done:g}"
        times = f"{clock(elapsed)} elapsed, {clock(left)} left"
        return ", ".join(
            part for part in (f"{self.description}: {share}", self.note, times) if part
        )

    def _print(self) -> None:
        self._last, self._printed = time.monotonic(), self.done
        print(self.line(), file=sys.stderr, flush=True)


def _start_rich(total: int, description: str) -> tuple[Any, Any]:
    """A started bar and its task, or nothing where rich is missing or another bar is on show."""
    try:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.markup import escape
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column
    except ImportError:
        return None, None
    console = Console(stderr=True)
    wide = console.width >= WIDE
    bar = Progress(
        TextColumn("{task.description}"),
        # Bar and note share what the others leave; else rich would cut the share and the times.
        *([BarColumn(None, table_column=Column(ratio=1))] if wide else []),
        TaskProgressColumn(),
        *([TimeElapsedColumn(), TextColumn("elapsed,")] if wide else []),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn("{task.fields[note]}", markup=False, table_column=Column(ratio=3, no_wrap=True)),
        console=console,
        expand=True,
    )
    task = bar.add_task(escape(description), total=total, note="")
    try:
        bar.start()
    except LiveError:
        return None, None
    return bar, task
