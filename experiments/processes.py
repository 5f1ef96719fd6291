"""Runs shared out among processes: each claims a run before it begins it, and the first claim counts.

On one GPU they run at the same time if NVIDIA's multi-process service is on
(`nvidia-cuda-mps-control -d`), and take turns without it.
"""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None  # type: ignore[assignment]

# Signals that ask a process to end; the second comes when its terminal is closed.
ENDS = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
ALL = "all"  # the name that is locked if only one command at a time may add to a file of results
# Options that share runs out, or limit the time: they do not belong to the recorded command of a run.
SHARED = r" --(claims|store|seconds|limit|side-by-side|processes)[ =]\S+"


def claim(folder: Path, key: object) -> bool:
    """Whether this process is the one that makes the run with this key: the first to ask for it."""
    try:
        file_of(folder, key).open("x").close()
    except FileExistsError:
        return False
    return True


def file_of(folder: Path, key: object) -> Path:
    """The file that stands for the key, which may be of any kind."""
    return folder / hashlib.sha256(repr(key).encode()).hexdigest()


class UnderWay:
    """The runs that this process is making, made known to others that add to the same results.

    A file beside the results has one byte for each name, which is locked. A process that ends releases its
    locks, even if it was killed.
    """

    def __init__(self, results: Path) -> None:
        results = results.resolve()
        results.parent.mkdir(parents=True, exist_ok=True)
        self._file = results.with_name(f".{results.name}.lock").open("ab")
        self._mine: set[str] = set()

    def __enter__(self) -> UnderWay:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()  # which lets go of all

    def begin(self, name: str) -> bool:
        """Take the name, unless another process has it; returns whether this one has it now."""
        if fcntl is not None:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(name))
            except (BlockingIOError, PermissionError):
                return False
        self._mine.add(name)
        return True

    def only(self, names: Iterable[str]) -> None:
        """Release all names but these."""
        for name in self._mine - set(names):
            if fcntl is not None:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _place(name))
            self._mine.remove(name)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


@contextmanager
def alone(results: Path) -> Iterator[None]:
    """A block during which other commands that use it are refused if they add to the same results."""
    with UnderWay(results) as under_way:
        if not under_way.begin(ALL):
            raise SystemExit(
                f"--out {results}: another command is adding runs to it. Wait until that is through, or "
                "give --out another file."
            )
        yield


@contextmanager
def claims() -> Iterator[Path]:
    """A folder for the claims of the processes of one command. A later command asks anew."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def share(number: int, module: str, words: Sequence[str]) -> None:
    """`python -m module words` so many times, and wait for all."""
    command = [sys.executable, "-m", module, *words]
    # In groups of their own: Ctrl-C in a terminal reaches this process, which then ends each of them once.
    with on_ends(lambda signal_number, _: sys.exit(128 + signal_number)):
        parts: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(number):
                parts.append(subprocess.Popen(command, process_group=0))
            failed = sum(part.wait() != 0 for part in parts)
        except BaseException:  # interrupted or terminated: nobody is left to wait for them
            for part in parts:
                part.terminate()
            for part in parts:
                part.wait()
            raise
    if failed:
        raise SystemExit(f"{failed} of {number} processes failed; run the command again.")


@contextmanager
def on_ends(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """A block in which a request to end calls `handler`, unless it is ignored (`nohup`)."""
    before = {number: signal.getsignal(number) for number in ENDS}
    heard = [number for number, was in before.items() if was is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def unshared(command: str) -> str:
    """A command without the options that share it out."""
    return re.sub(SHARED, "", command)
