"""What a selector saves, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rholoss.errors import RholossError

if TYPE_CHECKING:
    from rholoss.selector import Selector

STATE_VERSION = 1


def saved(select: Selector) -> dict[str, Any]:
    """Everything that a resumed run needs to make the same choices."""
    return {
        "version": STATE_VERSION,
        "method": select.method.name,
        "seed": select.seed,
        "ranks": select.ranks.size,
        "step": select.step,
        "off": select.off,
        "not_finite": select.guard.not_finite,
        "ledger": select.ledger.state_dict(),
        "irreducible": None if select.source is None else select.source.state_dict(),
        **_decides(select),
    }


def in_common(select: Selector) -> dict[str, Any]:
    """What processes that choose together must have in common, by the names that messages give it."""
    return {
        "`method`": select.method.name,
        "`keep` and `k`": [select.keep, select.k],
        "`seed`": select.seed,
        "the irreducible losses": None if select.source is None else select.source.digest(),
    }


def same_on_ranks(select: Selector) -> dict[str, Any]:
    """What must be the same on all ranks of torch.distributed before the first step."""
    steps = {"the number of steps done": select.step}
    return {"`choice`": select.ranks.choice, **in_common(select), **steps}


def restore(select: Selector, state: Mapping[str, Any]) -> None:
    """Take a selector to where the state was saved; its log is cut back to that step."""
    live = select.source is not None and select.source.state_dict() is not None
    told = {"ranks": 1, **state, "live model": state.get("irreducible") is not None}
    own = {"version": STATE_VERSION, "method": select.method.name, "live model": live}
    if not select.ranks.chooses_together:  # else the choice does not depend on it
        own["ranks"] = select.ranks.size
    _check_same(told, own)
    check_decides(state, _decides(select))
    select.seed, select.step, select.off = state["seed"], state["step"], state["off"]
    select._checked = False  # the model may be another now: its first step is a dry run again
    select.guard.not_finite = state["not_finite"]
    select.ledger.load_state_dict(state["ledger"])
    if select.source is not None and live:
        select.source.load_state_dict(state["irreducible"])
    select.log.rewind(select.step)


def _decides(select: Selector) -> dict[str, Any]:
    """What choices depend on, besides the method and the model's weights."""
    source = select.source if select.reads_irreducible else None
    return {
        "keep": select.keep,
        "k": select.k,
        "losses": None if source is None else source.digest(),
        "candidates": None if select.sampler is None else select.sampler.about(),
    }


def _check_same(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise unless the saved state and this selector agree in what they must have in common."""
    for name, value in own.items():
        if saved.get(name) != value:
            raise RholossError(
                f"The saved state has {name} {saved.get(name)!r}, but this selector has "
                f"{value!r}; make the selector as it was when the state was saved."
            )


def check_decides(saved: Mapping[str, Any], own: Mapping[str, Any], within: str = "") -> None:
    """Raise if something that choices depend on has changed since the state was saved.

    None stands for not known: older states do not hold everything, and some sources have no digest.
    """
    for name, value in own.items():
        if isinstance(value, Mapping):
            check_decides(saved.get(name) or {}, value, f"[{name!r}]")
        elif None not in (value, saved.get(name)) and saved[name] != value:
            raise RholossError(
                f"The saved state has state{within}[{name!r}] = {saved[name]!r}, but now it is {value!r}, so "
                "that other rows would be chosen than in the run that was saved. Make it as it was; or, if "
                f"the change is on purpose, take that entry out: `del state{within}[{name!r}]`."
            )
