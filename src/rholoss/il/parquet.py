"""Irreducible losses as Parquet files: a column of ids, a column of losses (pyarrow, optional)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rholoss.data import INDEX, IRREDUCIBLE
from rholoss.errors import RholossError, StoreError
from rholoss.il.files import replacing
from rholoss.il.ids import as_ids

if TYPE_CHECKING:
    from rholoss.il.store import Irreducible


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RholossError(
            "Parquet files need pyarrow: install it with pip install 'rholoss[parquet]'."
        ) from None
    return pyarrow, pyarrow.parquet


def read(path: str | os.PathLike[str], id_column: str, loss_column: str) -> tuple[Any, np.ndarray]:
    """Ids and losses of a Parquet file or folder; an empty cell is a loss that was not measured."""
    pyarrow, parquet = _pyarrow()
    try:
        found = parquet.ParquetDataset(path)
        names = found.schema.names
        missing = [name for name in (id_column, loss_column) if name not in names]
        if missing:
            raise StoreError(
                f"{os.fspath(path)} has no column {missing[0]!r}, but {', '.join(names)}. Pass "
                "`id_column=` and `loss_column=`."
            )
        table = found.read(columns=[id_column, loss_column])
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise StoreError(f"{os.fspath(path)} cannot be read as Parquet: {error}") from None
    ids = table.column(id_column)
    whole = pyarrow.types.is_integer(ids.type)
    try:
        losses = table.column(loss_column).to_numpy().astype(np.float32)
    except (TypeError, ValueError):
        kind = table.column(loss_column).type
        raise StoreError(
            f"The column {loss_column!r} of {os.fspath(path)} holds no numbers, but {kind}. Pass "
            "`loss_column=`, the one with the losses."
        ) from None
    return (ids.to_numpy() if whole else ids.to_pylist()), losses


def write(il: Irreducible, path: str | os.PathLike[str], ids: Any) -> None:
    """Write the measured ids and their losses, under a temporary name first."""
    pyarrow, parquet = _pyarrow()
    if ids is None and il.keys is not None:
        raise RholossError(
            "The store keeps hashes of its string keys only; pass the keys to write as `ids`."
        )
    listed = as_ids(np.arange(len(il)) if ids is None else ids)
    value_n = il.lookup(listed).numpy()
    measured = np.flatnonzero(~np.isnan(value_n))
    kept = [listed[i] for i in measured] if isinstance(listed, list) else listed[measured]
    table = pyarrow.table({INDEX: kept, IRREDUCIBLE: value_n[measured]})
    try:
        with replacing(Path(path)) as temporary:
            parquet.write_table(table, temporary)
    except OSError as error:
        raise StoreError(
            f"{os.fspath(path)} could not be written: {error.strerror or error}. Give a directory that "
            "exists and has room."
        ) from None
