"""Choices that one run recorded, replayed by others without scoring: for further seeds and sweeps."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from rholoss.engine.cheaper import Cheaper
from rholoss.errors import RholossError
from rholoss.steplog import read_log


class Recorded:
    """The ids that another run chose, step by step: `Trainer(..., scoring=Recorded("chosen.jsonl"))`.

    The trainer trains on the same rows in the same steps. It scores nothing and draws no candidates, so a
    step costs as much as a uniform one. Importance weights are not in a log, and so are not replayed.

    Args:
        log: the path of a log that a `Trainer` or `Selector` wrote, or for each step a list of its ids; all
            steps must have chosen the same number of rows.
    """

    def __init__(self, log: str | os.PathLike[str] | Sequence[Sequence[int]]) -> None:
        if isinstance(log, (str, os.PathLike)):
            steps = [line for line in read_log(log) if line["type"] == "step"]
            where = f"`log`={os.fspath(log)!r}"
            if [line["step"] for line in steps] != list(range(len(steps))):
                raise RholossError(
                    f"{where} does not hold every step from 0 on; record the run again."
                )
            chosen: Sequence[Sequence[int]] = [line["index"] for line in steps]
        else:
            chosen, where = log, "`log`"
        sizes = sorted({len(ids) for ids in chosen})
        if len(sizes) != 1 or sizes[0] == 0:
            raise RholossError(
                f"{where} must hold steps that all chose the same number of rows, but has {len(chosen)} "
                f"steps with {sizes} rows. Record with `drop_last=True`, or by the engine."
            )
        if isinstance(chosen[0][0], str):
            raise RholossError(
                f"{where} holds ids that are not whole numbers ({chosen[0][0]!r} for instance), but in the "
                "engine ids are whole numbers. Record with row numbers."
            )
        self.index = torch.as_tensor(chosen, device="cpu").long()  # [steps, k]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def k(self) -> int:
        """The number of rows that each step chose."""
        return self.index.shape[1]

    def rows(self, ids: Tensor, total_steps: int) -> Tensor:
        """The recorded choices as row numbers [steps, k]; raises if they do not fit the data.

        Args:
            ids: the id of each row of the data.
            total_steps: the length of the run, at most as many steps as were recorded.
        """
        if total_steps > len(self):
            raise RholossError(
                f"`total_steps`={total_steps}, but only {len(self)} steps were recorded; take fewer, or "
                "record a longer run."
            )
        ids = ids.cpu()
        order = ids.argsort()
        again = ids[order][1:][ids[order].diff() == 0]
        if len(again):
            raise RholossError(
                f"{len(again)} rows of the data have the id of another, for instance {int(again[0])}, so "
                "that recorded ids do not say which row was chosen; give each row an id of its own."
            )
        place = torch.searchsorted(ids[order], self.index).clamp(max=len(ids) - 1)
        rows = order[place]
        missing = ids[rows] != self.index
        if missing.any():
            raise RholossError(
                f"{int(missing.sum())} recorded choices have ids that are not in the data, for instance "
                f"{int(self.index[missing][0])}; replay them on the data that they were recorded on."
            )
        return rows


def check_scoring(
    scoring: Cheaper | Recorded | None, overlap: bool | str, others: Sequence[object]
) -> None:
    """Raise if `scoring` is no option, or cannot be combined with `overlap`, or a schedule or a plan."""
    if overlap and isinstance(scoring, Cheaper) and scoring.learns:
        raise RholossError(
            f"`overlap`={overlap!r} cannot be combined with `{type(scoring).__name__}`: it would learn from "
            "a choice that is not trained on yet. Pass overlap=False."
        )
    if isinstance(scoring, Recorded) and (overlap or others != [None, None]):
        raise RholossError(
            "Recorded choices are replayed as they are: `overlap`, `schedule` and `plan` must be left out."
        )
    if scoring is not None and not isinstance(scoring, (Cheaper, Recorded)):
        raise RholossError(
            f"`scoring` is {scoring!r}; pass an option of `rholoss.engine.cheaper`, for instance "
            "Gate(0.5), or Recorded('chosen.jsonl')."
        )
