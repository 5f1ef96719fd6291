"""Names of losses and transforms that are the same in every process, and hashes of functions' code."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from rholoss.losses import Task


def named(thing: Any) -> str:
    """A name for a function, a loss or a transform that is the same in the next process."""
    if isinstance(thing, str):
        return thing
    if isinstance(thing, Task):
        return thing.name
    if hasattr(thing, "__qualname__"):
        return f"{thing.__module__}.{thing.__qualname__}"
    return without_addresses(thing)[:500]


def without_addresses(thing: Any) -> str:
    """The `repr` of a thing, without addresses in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))


def code_hash(thing: Any) -> str | None:
    """A hash that changes with what a function does; None if there is no code to read (built-ins, objects).

    It covers the function's code, defaults and closure, and the functions, numbers and strings of its own
    module that it uses. It is the same in every process with one version of Python.
    """
    if not isinstance(thing, (FunctionType, MethodType, functools.partial)):
        return None
    return hashlib.blake2b(repr(_plain(thing, set())).encode(), digest_size=8).hexdigest()


def _plain(thing: Any, seen: set[Any]) -> Any:
    """The parts of a thing that enter its hash, as nested lists of numbers and strings."""
    if isinstance(thing, (bool, int, float, complex, str, bytes, type(None))):
        return thing
    if isinstance(thing, MethodType):
        return _plain(thing.__func__, seen)
    if isinstance(thing, functools.partial):
        return _plain((thing.func, thing.args, *sorted(thing.keywords.items())), seen)
    if isinstance(thing, tuple):
        return [_plain(part, seen) for part in thing]
    if isinstance(thing, frozenset):
        return sorted(repr(_plain(part, seen)) for part in thing)
    if isinstance(thing, CodeType):
        return [thing.co_code, thing.co_names, _plain(thing.co_consts, seen)]
    if isinstance(thing, FunctionType) and thing not in seen:
        seen.add(thing)
        closed = tuple(cell.cell_contents for cell in thing.__closure__ or () if _filled(cell))
        keywords = tuple(sorted((thing.__kwdefaults__ or {}).items()))
        parts = (thing.__code__, thing.__defaults__, keywords, closed, *_called(thing))
        return [_plain(part, seen) for part in parts]
    return type(thing).__qualname__


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a function may use a name that is only defined after it
        return False
    return True


def _called(function: FunctionType) -> Iterator[Any]:
    """The functions and constants of the same module that a function names."""
    for name in sorted(set(_names(function.__code__))):
        found = function.__globals__.get(name)
        own = isinstance(found, FunctionType) and found.__module__ == function.__module__
        if own or isinstance(found, (bool, int, float, complex, str, bytes, tuple)):
            yield found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
