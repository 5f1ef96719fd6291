"""The user's own objects, named by import path: `module:attribute`, as uvicorn does it.

A data set is used as it is if it has rows (`__getitem__`); otherwise it is called without arguments. A model
is named as a class or function that makes one. If no new models have to be made, an existing `nn.Module` can
be named too. In all functions `path` is the import path, and `option` the option that it was given for, which
error messages name.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rholoss import losses
from rholoss.errors import RholossError
from rholoss.il.ids import Ids, as_ids
from rholoss.indexed import ids_of_rows
from rholoss.streams import Stream

SEE_WHERE = "Add --traceback to see where."


def load(path: str, option: str) -> Any:
    """Import the object that `module:attribute` names; the current directory is searched too."""
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise RholossError(
            f"{option} is {path!r}; give it as module:attribute, e.g. mytask:train for `train` in "
            "mytask.py."
        )
    if module_name.endswith(".py") or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip("./" + os.sep).replace(os.sep, ".")
        raise RholossError(
            f"{option} is {path!r}, which names a file; give the module's name: {dotted}:{attribute}."
        )
    found = _import(module_name, path, option)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise RholossError(_no_attribute(found, name, path, option))
        found = getattr(found, name)
    return found


def _import(module_name: str, path: str, option: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise RholossError(
                f"{option} is {path!r}, but there is no module {error.name!r} in {here} or among the "
                "installed ones; run the command in the directory that holds it."
            ) from None
        raise _failed(option, path, "could not be imported", error) from error
    except (Exception, SystemExit) as error:
        raise _failed(option, path, "could not be imported", error) from error


def _failed(option: str, path: str, what: str, error: BaseException) -> RholossError:
    """The error to raise when the user's own code has raised one: which, and in which line."""
    if isinstance(error, RholossError):
        return RholossError(f"{option} {path}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    where = f" at {os.path.relpath(own[-1].filename)}:{own[-1].lineno}" if own else ""
    return RholossError(
        f"{option} {path} {what}: {type(error).__name__}: {error}{where}. {SEE_WHERE}"
    )


def _no_attribute(holder: Any, name: str, path: str, option: str) -> str:
    """The message for a name that is not in its module, with similar names that are."""
    names = [known for known in dir(holder) if not known.startswith("_")]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    what = getattr(holder, "__name__", type(holder).__name__)
    hint = f"Did you mean {' or '.join(near)}?" if near else "Define it there."
    return f"{option} is {path!r}, but {what} has no attribute {name!r}. {hint}"


def call(made: Any, path: str, option: str) -> Any:
    """Call a class or function without arguments, and return what it makes."""
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise RholossError(
            f"{option} {path} cannot be called without arguments ({error}); name a function without "
            "arguments that returns it."
        ) from None
    except ValueError:
        pass  # a built-in without a signature: the call below finds out
    try:
        return made()
    except Exception as error:
        raise _failed(option, path, "failed when it was called", error) from error


def dataset(path: str, option: str, *, stream: bool = False) -> Any:
    """The data set at `path`, or the one that a function there makes; with `stream` also a `Stream`."""
    found = load(path, option)
    if (isinstance(found, type) or not hasattr(found, "__getitem__")) and callable(found):
        found = call(found, path, option)
    if stream and isinstance(found, Stream):
        return found
    if isinstance(found, Mapping) and 0 not in found:
        raise RholossError(
            f"{option} {path} is a {type(found).__name__} of {', '.join(map(repr, list(found)[:5]))}, which "
            "is no data set; name a function that returns one of them."
        )
    rows = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    if not rows or isinstance(found, nn.Module):  # a Sequential has both
        raise RholossError(
            f"{option} {path} is a {type(found).__name__}, which is no data set: it needs `__len__` and "
            "`__getitem__`. Name the data set itself (not a loader), or a function that returns it."
        )
    return found


def ids(points: Any) -> Ids:
    """The id of each row of a data set."""
    return as_ids(ids_of_rows(points), "--data")


def factory(path: str, option: str) -> Callable[[], nn.Module]:
    """The class or function at `path`, which makes a new model at each call."""
    found = load(path, option)
    if isinstance(found, nn.Module):
        raise RholossError(
            f"{option} {path} is a {type(found).__name__} that exists already, but fitting needs new "
            "models; name a class or a function that makes one. For a model that is fitted already use "
            "`rholoss il score`."
        )
    if not callable(found):
        raise RholossError(
            f"{option} {path} is a {type(found).__name__}; name a class or a function that makes a "
            "model."
        )

    def make() -> Any:
        return call(found, path, option)

    return make


def model(path: str, option: str) -> nn.Module:
    """The model at `path`, or the one that a class or function there makes."""
    found = load(path, option)
    if not isinstance(found, nn.Module) and callable(found):
        found = call(found, path, option)
    if not isinstance(found, nn.Module):
        raise RholossError(
            f"{option} {path} is a {type(found).__name__}, not a torch.nn.Module; name a model, or a "
            "class or a function that makes one."
        )
    return found


def loss(name: str) -> str | losses.LossFunction:
    """The loss: a task's name, or the function (model, batch) -> [B] at an import path."""
    if ":" not in name:
        losses.by_name(name)
        return name
    return function(name, "--loss")


def function(path: str, option: str) -> Callable[..., Any]:
    """The function at `path`."""
    found = load(path, option)
    if not callable(found):
        raise RholossError(
            f"{option} {path} is a {type(found).__name__}, not a function; name a function."
        )
    return found


def collate(path: str | None) -> Callable[..., Any] | None:
    """The collate function for a loader; None if none is named."""
    return None if path is None else function(path, "--collate")


def labels(path: str | None) -> Any:
    """The labels at `path`, a list, array or tensor, or what a function there returns; None if not named."""
    if path is None:
        return None
    option = "--labels"
    found = load(path, option)
    if not hasattr(found, "__len__") and callable(found):
        found = call(found, path, option)
    if not hasattr(found, "__len__"):
        raise RholossError(
            f"{option} {path} is a {type(found).__name__}; name a list, array or tensor with one label "
            "for each row."
        )
    return found


def device(name: str | None) -> torch.device | None:
    """The device of this name, checked to work here; None for the default."""
    if name is None:
        return None
    try:
        where = torch.device(name)
        torch.zeros(1, device=where).item()  # `item` also fails on 'meta'
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise RholossError(
            f"--device is {name!r}, which cannot be used here ({reason}); give cpu, or leave it out."
        ) from None
    return where
