"""Ctrl-C takes effect at the end of a step, so that the trainer is left in a complete state."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def whole_steps() -> Iterator[Callable[[], None]]:
    """A block that holds Ctrl-C back until the function that it yields is called; a second one acts at once.

    This applies only in the main thread, and only if Python's own handler is installed: a program with
    another handler keeps it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    asked = False

    def hold(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def let_through() -> None:
        if asked:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
