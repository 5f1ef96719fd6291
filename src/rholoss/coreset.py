"""Offline selection: score the whole data set once with a proxy and keep the best part.

With the method 'entropy' this is SVP (selection via proxy, maximum entropy; Coleman et al., 2020), which
the paper compares with. With 'rho' and irreducible losses it is a reducible-loss filter between two
fixed models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from rholoss import core, data, methods
from rholoss.core import Method, Stats
from rholoss.errors import RholossError, TooFewFiniteScoresError
from rholoss.indexed import WithIndex
from rholoss.losses import LossFunction
from rholoss.progress import Bar
from rholoss.scoring import Scorer
from rholoss.sources import Table, as_table, raise_unmeasured


def coreset(
    proxy: nn.Module,
    dataset: Any,
    *,
    keep: float = 0.1,
    method: str | Method = "entropy",
    irreducible: Any = None,
    loss: str | LossFunction = "classification",
    batch_size: int = 512,
    num_workers: int = 0,
    draws: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> WithIndex:
    """Choose a part of the data set once, before training: the points that a trained proxy scores highest.

    Args:
        proxy: a trained model. It runs in eval mode and is left as it was.
        dataset: the data to choose from, without augmentation.
        keep: the share of it to keep, in (0, 1].
        method: how to score and pick: a name from `rholoss.METHODS`, or a `Method`.
        irreducible: losses by id, for methods that read them: what `fit_irreducible` returned, or a tensor;
            each point must have one.
        loss: the name of a task, or a function (model, batch) -> [B].
        batch_size: points at a time.
        num_workers: of the loader.
        draws: 1 takes the proxy's own prediction; more average Monte-Carlo dropout draws.
        seed: of methods that draw.
        progress: show a progress bar.

    Returns:
        The chosen rows, highest score first, with the ids that they have in the whole data set.
    """
    method = methods.by_name(method)
    _check(method, keep, irreducible, draws)
    indexed = dataset if isinstance(dataset, WithIndex) else WithIndex(dataset)
    if len(indexed) == 0:
        raise RholossError(
            "`dataset` is empty, so nothing can be chosen from it; pass one that has rows."
        )
    scorer = Scorer(loss, batch_norm="eval", draws=draws)
    loader = DataLoader(indexed, batch_size=batch_size, num_workers=num_workers)
    table = None if irreducible is None else as_table(irreducible)
    stats = _measure_all(proxy, loader, scorer, method, table, progress)
    k = core.num_selected(len(indexed), keep)
    selection, score_N = core.choose(method, stats, k, core.step_generator(seed, 0))
    if selection.weight is not None:
        raise RholossError(
            f"The method {method.name!r} samples rows by importance, some of them more than once, which is "
            "for training with weights and not for a part of the data; take 'grad_norm' or another method."
        )
    num_finite = int(score_N.isfinite().sum())
    if num_finite < k:
        raise TooFewFiniteScoresError(
            f"Only {num_finite} of {len(indexed)} points have a finite score, but {k} are to be kept; "
            "look at the proxy's losses."
        )
    rows = selection.position.tolist()
    return WithIndex(Subset(indexed.dataset, rows), [indexed.ids[row] for row in rows])


def _check(method: Method, keep: float, irreducible: Any, draws: int) -> None:
    if not 0 < keep <= 1:
        raise RholossError(
            f"`keep` must be in (0, 1], but is {keep}; 0.1 keeps a tenth of the data."
        )
    if "irreducible_loss" in method.needs and irreducible is None:
        raise RholossError(
            f"The method {method.name!r} needs irreducible losses; pass `irreducible=` what "
            "`fit_irreducible` returned."
        )
    if method.needs >= core.MONTE_CARLO and draws < 2:
        raise RholossError(
            f"The method {method.name!r} compares the draws of Monte-Carlo dropout, but `draws` is {draws}; "
            "pass draws=10, and a proxy with dropout."
        )


def _measure_all(
    proxy: nn.Module,
    loader: DataLoader[Any],
    scorer: Scorer,
    method: Method,
    table: Table | None,
    progress: bool,
) -> Stats:
    needs, device = method.needs - {"irreducible_loss"}, data.device_of(proxy)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in method.needs}
    index: list[Any] = []
    with Bar(len(loader), "scoring with the proxy", enabled=progress) as bar:
        for step, batch in enumerate(loader):
            ids = data.find_index(batch)
            body = data.without_index(data.to_device(batch, device))
            measured = scorer.measure(proxy, body, len(ids), needs, seed=step) if needs else {}
            if table is not None and "irreducible_loss" in method.needs:
                measured["irreducible_loss"] = torch.as_tensor(table.lookup(ids))
                raise_unmeasured(ids, measured["irreducible_loss"])
            for name, values in measured.items():
                parts[name].append(values.cpu())
            index.extend(ids.tolist() if isinstance(ids, torch.Tensor) else ids)
            bar.advance()
    return Stats(index, {name: torch.cat(values) for name, values in parts.items()})
