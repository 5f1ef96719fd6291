"""An interrupt waits for the end of the step, so that what is left behind is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def whole_steps() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C is held back until the function that this yields is called; a second one is not.

    Only where Python's own handler is in force, in the main thread: whoever has another one wants it.
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
