"""Weights of a model from a file; code in the file is not run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rholoss.errors import RholossError
from rholoss.il import Irreducible

NESTED = ("state_dict", "model_state_dict", "model")  # keys under which scripts save the weights


def load_weights(model: torch.nn.Module, file: Path) -> None:
    """Load the weights of a file into the model; all of them must fit."""
    state = read_weights(file)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise RholossError(
            f"--weights {file} does not fit the model {type(model).__name__}: {' '.join(lines)} Name "
            "the model that was saved."
        ) from None


def read_weights(file: Path) -> dict[str, Any]:
    """The state dict in a safetensors file, a file of `torch.save`, or a store of irreducible losses."""
    if file.is_dir():
        return _of_store(file)
    if not file.is_file():
        raise RholossError(
            f"--weights is {file}, but there is no such file; give the path of the model's weights."
        )
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that torch did not write may raise anything
        reason = str(error).partition("\n")[0].rstrip(" .")
        raise RholossError(
            f"--weights {file} cannot be read as weights alone ({type(error).__name__}: {reason}). Save "
            "them with `torch.save(model.state_dict(), file)` or as safetensors."
        ) from None
    for key in NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise RholossError(
            f"--weights {file} holds a {type(state).__name__}; save `model.state_dict()` instead."
        )
    return dict(state)


def _of_store(store: Path) -> dict[str, Any]:
    """The weights of the model that was fitted for these irreducible losses."""
    il = Irreducible.load(store)
    if "weights" not in il.meta["files"]:
        raise RholossError(
            f"--weights {store} holds losses without the weights of the model (`rholoss il fit` keeps them, "
            "`fit_resident` and `rholoss il score` do not). Give a file with the model's weights; or fit "
            "with `rholoss il fit`, and give what that wrote."
        )
    models = (il.meta.get("split") or {}).get("folds") or 1
    if models > 1:
        raise RholossError(
            f"--weights {store} holds {models} models, one for each fold; save the one that you mean: "
            f"torch.save(Irreducible.load({str(store)!r}).weights(0), 'small.pt')."
        )
    return il.weights()


def _read_safetensors(file: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise RholossError(
            f"--weights {file} needs the package safetensors: pip install 'rholoss[cli]'."
        ) from None
    try:
        return load_file(file)
    except SafetensorError as error:
        raise RholossError(f"--weights {file} cannot be read as safetensors ({error}).") from None
