"""What a command prints when it fails: one line and an exit code, no traceback.

A user's error (`RholossError`, a wrong option) exits with 2, Ctrl-C with 130. Any other error is a bug in
this library or comes from the user's own code. Then the traceback is useful, and is shown.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from rholoss.errors import RholossError

USER_ERROR, INTERRUPTED = 2, 130
TRACEBACK, TRACEBACK_VARIABLE = "--traceback", "RHOLOSS_TRACEBACK"
# Newer versions of typer contain click, older ones depend on it; this finds the class in both.
UsageError: Any = typer.BadParameter.__base__


class Stopped(Exception):
    """The user pressed Ctrl-C; the message says how to continue."""


@contextmanager
def when_stopped(hint: str) -> Iterator[None]:
    """A block after which Ctrl-C prints `hint`: how to continue what the block was doing."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"Stopped. {hint}") from None


class Commands(TyperGroup):
    """A group of commands that prints errors as one line and turns them into exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C raises `Stopped`, with every version of typer."""
        try:
            return TyperGroup.invoke(self, ctx)
        except KeyboardInterrupt:
            raise Stopped("Stopped.") from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit with its code (return the code if not `standalone_mode`)."""
        given = list(sys.argv[1:] if args is None else args)
        shows = TRACEBACK in given or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")
        given = [word for word in given if word != TRACEBACK]  # allowed anywhere in the line
        try:
            with _one_line_warnings():
                done = TyperGroup.main(self, given, "rholoss", complete_var, False, **extra)
            code = done if isinstance(done, int) else 0
        except (RholossError, Stopped, UsageError) as error:
            if shows:
                traceback.print_exc()
            typer.echo(_line(error), err=True)
            code = INTERRUPTED if isinstance(error, Stopped) else USER_ERROR
        if standalone_mode:
            sys.exit(code)
        return code


def _line(error: Exception) -> str:
    """The line to print for an error."""
    if isinstance(error, UsageError):
        path = getattr(getattr(error, "ctx", None), "command_path", "rholoss")
        reason = error.format_message().rstrip(".")
        said = f"Error: {reason}{'' if reason.endswith('?') else '.'} See `{path} --help`."
    else:
        said = str(error) if isinstance(error, Stopped) else f"Error: {error}"
    return " ".join(said.split("\n"))


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """A block in which a warning is printed as one line, without its place in the source."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        typer.echo(f"Warning: {message}", err=True)

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before
