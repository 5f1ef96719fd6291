"""What a trainer saves, and how another one continues from it."""

from __future__ import annotations

import copy
import dataclasses
import warnings
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rholoss.engine.cheaper import Proxy
from rholoss.errors import RholossError
from rholoss.il.live import LiveIrreducible
from rholoss.naming import named

if TYPE_CHECKING:
    from rholoss.engine.trainer import Trainer

STATE_VERSION = 3
OF_A_DEVICE = ("capturable", "fused", "foreach")  # settings for how an optimizer runs on a device


def saved(trainer: Trainer) -> dict[str, Any]:
    """Everything that a resumed run needs, also torch's global random state, from which dropout draws.

    All of it is a copy, so that the state does not change while the run goes on.
    """
    body, overlapped, source = trainer.body, trainer.overlapped, trainer.source
    live = {
        "version": STATE_VERSION,
        "made": _made(trainer),
        "seed": trainer.seed,
        "step": trainer.step,
        "total_steps": trainer.total_steps,
        "rates": body.lr_T.cpu(),
        "stop": trainer.schedule.stop,
        "planned_stop": trainer.planned_stop,
        "reducible": trainer.reducible,
        "rows": trainer.rows.state_dict(),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "order": body.order.state_dict(),
        "uniform_order": body.uniform_order.state_dict(),
        "generator": trainer.device_generator.get_state(),
        "random": _random_states(trainer.data.device),
        "waiting": overlapped.waiting if overlapped else [],
        "before": body.ahead.before if body.ahead else [],
        "irreducible": None if source is None else source.state_dict(),
        "ledger": trainer.ledger.state_dict(),
        "scoring": body.scoring.state_dict(),
        "row_weight": body.row_weight,
    }
    return copy.deepcopy(live)


def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Make a trainer continue from a saved state; its step is then captured again.

    Everything is checked before anything is changed. What is loaded is a copy, because the run changes its
    tensors in place.
    """
    _check(trainer, state)
    state = copy.deepcopy(state)
    for _, _, optimizer, part in _learners(trainer, state):
        _run_as_here(optimizer, part["optimizer"])
    body, device = trainer.body, trainer.data.device
    if state["scoring"] is not None:
        body.scoring.load_state_dict(state["scoring"])
    if len(state["rates"]) == len(body.lr_T):  # else this run has its own rates
        trainer.total_steps = state["total_steps"]
        body.lr_T.copy_(state["rates"])
    # The trainer's own schedule, but with the stop of the saved run, where `catch_up` may have set it.
    trainer.schedule = dataclasses.replace(trainer.schedule, stop=state["stop"])
    trainer.seed = trainer.rows.seed = state["seed"]
    trainer.rows.load_state_dict(state["rows"])
    trainer.start_from(state["step"])
    trainer.reducible = state["reducible"]
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    for group in trainer.optimizer.param_groups:
        group["lr"] = body.lr
    body.order.load_state_dict(state["order"])
    body.uniform_order.load_state_dict(state["uniform_order"])
    _set_random(trainer, state)
    if trainer.overlapped is not None:
        trainer.overlapped.waiting = [t.to(device) for t in state["waiting"]]
    if body.ahead is not None:
        torch._foreach_copy_(body.ahead.before, [t.to(device) for t in state["before"]])
    if trainer.source is not None and state["irreducible"] is not None:
        trainer.source.load_state_dict(state["irreducible"])
        trainer.stand()
    trainer.ledger.load_state_dict(state["ledger"])
    if body.row_weight is not None:
        body.row_weight.copy_(state["row_weight"])
    trainer.log.rewind(trainer.step)
    for captured in trainer.captured.values():
        captured.forget()


def _made(trainer: Trainer) -> dict[str, Any]:
    """What a trainer must have in common with the one that saved the state, by names for messages."""
    losses = None if trainer.body.live is None else "a live model's"
    if trainer.body.irreducible is not None and trainer.source is not None:
        losses = trainer.source.digest()
    scoring, recorded = trainer.body.scoring, trainer.rows.recorded
    told = ", ".join(f"{name}={value!r}" for name, value in scoring.options.items())
    return {
        "method": trainer.method.name,
        "rows": len(trainer.data),
        "candidates": trainer.candidates,
        "chosen rows": trainer.k,
        "plan": trainer.rows.plan is not None,
        "highest id": int(trainer.data.ids.max()),  # gives the size of tables by id
        "rule of the plan": named(trainer.rows.plan),
        "scoring": f"{type(scoring).__name__}({told})",
        "overlap": "ahead" if trainer.body.ahead else trainer.overlapped is not None,
        "weights that are looked ahead to": len(trainer.body.ahead.before)
        if trainer.body.ahead
        else 0,
        "batch_norm": trainer.body.scorer.batch_norm,
        "draws": trainer.body.draws,
        "catch_up": trainer.catch_up,
        "start and drop of the schedule": (trainer.schedule.start, trainer.schedule.drop),
        "recorded choices": None
        if recorded is None
        else zlib.crc32(recorded.cpu().numpy().tobytes()),
        **{
            f"optimizer of the {name}": type(optimizer).__name__
            for name, _, optimizer, _ in _learners(trainer, None)
        },
        "loss": trainer.body.task.name,
        **({} if losses is None else {"irreducible losses": losses}),
    }


def _check(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Raise if a saved state does not fit the trainer."""
    if state.get("version") != STATE_VERSION:
        raise RholossError(
            f"The saved state has version {state.get('version')!r}, but this trainer reads "
            f"{STATE_VERSION}; use the version of rholoss that saved it."
        )
    own_scoring, scoring = trainer.body.scoring.state_dict() or {}, state["scoring"] or {}
    if own_scoring.keys() != scoring.keys():
        raise RholossError(
            f"The saved state has {', '.join(scoring) or 'no state'} of cheaper scoring, but this trainer "
            f"scores by `{type(trainer.body.scoring).__name__}`, which keeps "
            f"{', '.join(own_scoring) or 'nothing'}; pass `scoring` as it was."
        )
    if isinstance(trainer.source, LiveIrreducible) and "model" not in (state["irreducible"] or {}):
        raise RholossError(
            "The saved state has no live model, but this trainer has a `LiveIrreducible`; pass "
            "`irreducible` as it was."
        )
    own = _made(trainer)
    for name, value in state["made"].items():
        if name in own and value != own[name]:  # only some runs have irreducible losses
            raise RholossError(
                f"The saved state has {name} {value!r}, but this trainer has {own[name]!r}; make the "
                "trainer as it was when the state was saved."
            )
    for name, model, optimizer, part in _learners(trainer, state):
        _check_learner(name, model, optimizer, part)
    planned = state.get("planned_stop", trainer.planned_stop)
    if planned != trainer.planned_stop:
        warnings.warn(
            f"The schedule of the saved run scores up to step {planned}, that of this trainer up to step "
            f"{trainer.planned_stop}. That of the saved run, step {state['stop']}, is kept. Pass `schedule` "
            "as it was.",
            stacklevel=4,
        )


def _learners(
    trainer: Trainer, state: Mapping[str, Any] | None
) -> list[tuple[str, nn.Module, torch.optim.Optimizer, Any]]:
    """For each model that learns: a name, the model, its optimizer, and the part of the state for both."""
    found: list[tuple[str, nn.Module, torch.optim.Optimizer, Any]] = []
    found.append(("model", trainer.model, trainer.optimizer, state))
    scoring, source, part = trainer.body.scoring, trainer.source, state or {}
    if isinstance(scoring, Proxy) and scoring.model is not None:
        found.append(("proxy", scoring.model, scoring.optimizer, part.get("scoring")))
    if isinstance(source, LiveIrreducible):
        found.append(("live model", source.model, source.optimizer, part.get("irreducible")))
    return found


def _check_learner(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Raise unless the saved weights fit the model, and the saved optimizer has groups of the same sizes."""
    own, saved = (_shapes(weights) for weights in (model.state_dict(), state["model"]))
    for weight in [*own, *saved]:
        if own.get(weight) != saved.get(weight):
            raise RholossError(
                f"The saved state's {name} has {saved.get(weight, 'nothing')} for `{weight}`, but this "
                f"trainer's has {own.get(weight, 'nothing')}; make the {name} as it was when the state "
                "was saved."
            )
    own_groups, groups = optimizer.param_groups, state["optimizer"]["param_groups"]
    own_sizes, sizes = ([len(group["params"]) for group in g] for g in (own_groups, groups))
    if own_sizes != sizes:
        raise RholossError(
            f"The saved state's optimizer of the {name} has groups of {sizes} parameters, but this "
            f"trainer's has {own_sizes}; make the optimizer as it was when the state was saved."
        )


def _shapes(weights: Mapping[str, Any]) -> dict[str, str]:
    """The shape of each entry of a model's state, in words."""
    return {
        name: f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"
        for name, value in weights.items()
    }


def _run_as_here(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give a saved optimizer's state this optimizer's settings for its device in place of the saved."""
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        group.update({name: own[name] for name in OF_A_DEVICE if name in own})


def _random_states(device: torch.device) -> list[Tensor]:
    """Torch's global random states: the host's, and on a GPU also the device's."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random(trainer: Trainer, state: Mapping[str, Any]) -> None:
    generator, device = trainer.device_generator, trainer.data.device
    if len(state["generator"]) == len(generator.get_state()):  # else from another device
        generator.set_state(state["generator"].cpu())
    host, *others = state["random"]
    torch.set_rng_state(host.cpu())
    if others and device.type == "cuda":
        torch.cuda.set_rng_state(others[0].cpu(), device)
