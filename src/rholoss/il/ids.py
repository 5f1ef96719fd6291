"""Ids as they come (tensors, arrays, lists, keys) in one of two forms, and hashes of string keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rholoss.errors import RholossError

Ids = np.ndarray | list[str]  # int64 [n], or string keys
SHOWN = 5  # ids in a message


def as_ids(ids: Any, argument: str = "ids") -> Ids:
    """The ids as an int64 array or a list of strings; anything else is an error."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    if hasattr(ids, "__array__"):  # an array, or a column of pandas or pyarrow
        array = np.asarray(ids)
        ids = array.tolist() if array.dtype.kind in "OUT" else array
    listed = isinstance(ids, Sequence) and not isinstance(ids, str)
    if listed and len(ids) and isinstance(ids[0], str):
        if all(isinstance(key, str) for key in ids):
            return list(ids)
    else:
        try:
            array = np.asarray(ids) if len(ids) else np.empty(0, np.int64)
        except (TypeError, ValueError):  # no length, or lists of several lengths
            array = np.empty((0, 0))
        fits = array.dtype != np.uint64 or not len(array) or array.max() < 2**63
        if array.ndim == 1 and array.dtype.kind in "iu" and fits:
            return array.astype(np.int64, copy=False)
    shape = f" {tuple(ids.shape)} {ids.dtype}" if isinstance(ids, np.ndarray) else ""
    raise RholossError(
        f"`{argument}` must be whole numbers or strings, one for each point (numbers below 2**63), but is "
        f"a {type(ids).__name__}{shape} that starts with {_start(ids)}."
    )


def _start(ids: Any) -> str:
    try:
        return ", ".join(repr(i) for i in list(ids)[:3]) or "nothing"
    except TypeError:
        return repr(ids)


def plain_id(id_: Any) -> str | int:
    """An id as JSON has it."""
    return id_ if isinstance(id_, str) else int(id_)


def shown(ids: Any) -> str:
    """The first of the ids, for a message: `3, 17, 40, 41, 58, ...`."""
    some = [repr(plain_id(id_)) for id_ in ids[:SHOWN]]
    return ", ".join(some) + (", ..." if len(ids) > SHOWN else "")


def shown_at(ids: Any, places: np.ndarray) -> str:
    """`shown` for the ids at these places."""
    return shown([ids[place] for place in places[: SHOWN + 1]])


def key_hash(key: str) -> int:
    """64 bits of BLAKE2b of the key: the same on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(_bytes(key), digest_size=8).digest(), "little")


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogateescape")  # a file name need not be UTF-8


def hash_keys(keys: Sequence[str]) -> np.ndarray:
    """The hashes of the keys, uint64 [n]."""
    return np.fromiter((key_hash(key) for key in keys), np.uint64, len(keys))


def check_bits(keys: Sequence[str]) -> np.ndarray:
    """32 more bits of each key's hash, uint32 [n]: they tell two keys from one that came twice."""
    digests = (hashlib.blake2b(_bytes(key), digest_size=4).digest() for key in keys)
    return np.fromiter(
        (int.from_bytes(digest, "little") for digest in digests), np.uint32, len(keys)
    )


def check_not_negative(ids: np.ndarray) -> None:
    """Raise if an id cannot be the number of a row."""
    if len(ids) and ids.min() < 0:
        raise RholossError(
            f"`ids` has negative numbers ({shown(ids[ids < 0])}); give row numbers from 0, or strings."
        )


def check_distinct(ids: Ids) -> None:
    """Raise if an id occurs twice, or if two string keys have the same hash."""
    codes = hash_keys(ids) if isinstance(ids, list) else ids
    order = np.argsort(codes, kind="stable")
    same = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    if not len(same):
        return
    first, second = ids[order[same[0]]], ids[order[same[0] + 1]]
    if first == second:
        raise RholossError(
            f"`ids` holds {len(same)} ids more than once, among them {shown_at(ids, order[same])}. Give one "
            "loss for each id."
        )
    raise RholossError(
        f"The keys {first!r} and {second!r} in `ids` have the same 64-bit hash, so their losses "
        "could not be told apart. Change one of them, or use row numbers as ids."
    )
