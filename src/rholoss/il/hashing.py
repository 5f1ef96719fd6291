"""Hashes of labels and of the content of items: the same on every machine and in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor

from rholoss.data import is_record

ABSENT = -(2**31)  # the label code of an id that was not scored


def content_hash(item: Any) -> str:
    """Hash of a tree of tensors, arrays, images, numbers, strings and None."""
    hasher = hashlib.blake2b(digest_size=8)
    feed(hasher, item)
    return hasher.hexdigest()


def feed(hasher: Any, item: Any, inside: tuple[int, ...] = ()) -> None:
    """Add an item to the hash. An object of unknown kind counts by its type and its attributes."""
    if isinstance(item, PurePath):
        item = item.name  # on another machine the folder is a different one
    if isinstance(item, np.generic):
        item = item.item()
    if isinstance(item, (bool, int, float, str, bytes, type(None))):  # first: there may be millions
        hasher.update(f"{type(item).__name__}:{item!r};".encode())
    elif isinstance(item, Mapping):
        hasher.update(b"{%d" % len(item))
        for key in sorted(item, key=str):
            feed(hasher, str(key))
            feed(hasher, item[key], inside)
    elif is_record(item):
        feed(hasher, {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}, inside)
    elif isinstance(item, (list, tuple)):
        hasher.update(b"[%d" % len(item))
        for value in item:
            feed(hasher, value, inside)
    elif isinstance(item, (Tensor, np.ndarray)) or hasattr(item, "__array_interface__"):
        _feed_array(hasher, numpy_of(item))  # a PIL image has the array interface
    else:
        hasher.update(type(item).__qualname__.encode())
        if id(item) not in inside:  # an object may contain itself
            feed(hasher, _attributes(item), (*inside, id(item)))


def _attributes(item: Any) -> dict[str, Any] | None:
    """The attributes of an object; None if it has none, or if it is a class or a function."""
    if isinstance(item, type) or callable(item):
        return None
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(item, name) for name in slots if hasattr(item, name)}
    return {**found, **getattr(item, "__dict__", {})} or None


def _feed_array(hasher: Any, array: np.ndarray) -> None:
    if array.dtype.kind == "O":  # its bytes are addresses
        feed(hasher, array.tolist())
        return
    hasher.update(f"{array.dtype.str}{array.shape};".encode())
    hasher.update(array.tobytes())


def numpy_of(values: Any) -> np.ndarray:
    """A tensor (of any device and float type), array or list as an array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().to_dense()  # no change unless it is sparse
        narrow = values.is_floating_point() and values.element_size() < 4
        values = (values.float() if narrow else values).numpy()
    return np.asarray(values)


def label_codes(labels: Any) -> tuple[np.ndarray, bool]:
    """An int32 code for each label, and whether the codes are the labels themselves.

    The same labels have the same codes as a list, an array or a tensor of any width.
    """
    try:
        array = numpy_of(labels)
    except ValueError:  # lists of several lengths
        array = np.empty(0, object)
    if array.ndim == 1 and array.dtype.kind in "biu":
        if not len(array) or (array.min() > ABSENT and array.max() < 2**31):
            return array.astype(np.int32), True
        codes = _checksums(str(value).encode() for value in array.tolist())
    elif array.ndim == 1 and array.dtype.kind == "f":
        codes = array.astype(np.float32).view(np.uint32)
    elif array.ndim > 1 and array.dtype.kind in "biuf":
        wide = np.float32 if array.dtype.kind == "f" else np.int64
        codes = _checksums(row.tobytes() for row in array.astype(wide))
    else:
        codes = _checksums(content_hash(label).encode() for label in labels)
    signed = codes.view(np.int32)
    return np.where(signed == ABSENT, np.int32(0), signed), False


def _checksums(rows: Any) -> np.ndarray:
    return np.fromiter((zlib.crc32(row) for row in rows), np.uint32)
