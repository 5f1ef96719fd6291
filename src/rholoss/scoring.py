"""The scorer: runs the model on the candidates and measures what a method needs, and no more.

It does not know the method. Whatever it changes meanwhile (training flags, buffers, random state) is
restored afterwards, except for BatchNorm's running statistics in mode 'train'.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from rholoss import data, losses
from rholoss.core import MONTE_CARLO, draw_seed
from rholoss.errors import RholossError
from rholoss.modes import (
    BATCH_NORM_MODES,
    PRECISIONS,
    KeptBuffer,
    agreed_passes,
    check_materialised,
    kept_buffers,
    kept_random_state,
    own_autocast,
    reshard,
    scored_module,
    scoring_mode,
    unwrapped,
)
from rholoss.quantities import QUANTITIES, Quantity

Cut = Callable[[slice], Any]


class Scorer:
    """Measures quantities of each candidate under a model, such as its loss; float32, without gradients.

    Args:
        loss: the name of a task ('classification', 'multi_label', 'regression', 'tokens', 'causal_lm') or a
            function `(model, batch) -> [B]`, which gets the batch without ids.
        batch_norm: what BatchNorm normalises with: 'train' (statistics of the candidates, which also move
            the running ones, as in the paper), 'batch' (these alone) or 'eval' (the running ones).
        dropout: whether dropout is on while scoring.
        draws: the number of Monte-Carlo dropout passes for entropies (10 in the paper).
        precision: 'bf16' or 'fp16' to run the model under autocast; None keeps what is in force.
        chunk: score at most this many candidates at a time, to save memory; None: all at once.
        compile: run the model through `torch.compile`, compiled apart from training.
        quantities: further quantities, a dict from name to function(logits_KBC, target_B) -> [B].
    """

    def __init__(
        self,
        loss: str | losses.LossFunction = "classification",
        *,
        batch_norm: str = "train",
        dropout: bool = False,
        draws: int = 10,
        precision: str | torch.dtype | None = None,
        chunk: int | None = None,
        compile: bool = False,
        quantities: Mapping[str, Quantity] | None = None,
    ) -> None:
        if batch_norm not in BATCH_NORM_MODES:
            raise RholossError(
                f"`batch_norm` is {batch_norm!r}; choose one of {', '.join(BATCH_NORM_MODES)}."
            )
        sizes = [draws] if chunk is None else [draws, chunk]
        if not all(isinstance(size, numbers.Integral) and size >= 1 for size in sizes):
            raise RholossError(
                f"`draws` and `chunk` must be whole numbers of at least 1, but are {draws!r} and {chunk!r}; "
                "leave `chunk` out to score all candidates at once."
            )
        if precision not in (None, *PRECISIONS, *PRECISIONS.values()):
            raise RholossError(
                f"`precision` is {precision!r}; choose one of {', '.join(PRECISIONS)}, or None."
            )
        self.loss = losses.by_name(loss)
        self.batch_norm, self.dropout, self.chunk = batch_norm, dropout, chunk
        self.draws = int(draws)  # plain: dropout takes no numpy's flags
        self.dtype = PRECISIONS[precision] if isinstance(precision, str) else precision
        self.compile = compile
        self.quantities = {**QUANTITIES, **(quantities or {})}
        self._compiled: tuple[nn.Module, Callable[..., Any]] | None = None
        self._protected: list[str] = []  # buffers that the dry run found to move
        self._dry: bool | None = None  # not None during a dry run; then, whether draws are compared

    def passes(self, needs: frozenset[str]) -> int:
        """The forward passes of each example: one, or `draws` if `needs` has entropies."""
        return self.draws if needs & MONTE_CARLO else 1

    def seed(self, needs: frozenset[str], generator: torch.Generator) -> int:
        """Draw the seed for `measure`; if dropout is off it is 0, and nothing is drawn."""
        return draw_seed(generator) if needs & MONTE_CARLO or self.dropout else 0

    def measure(
        self,
        model: nn.Module,
        batch: Any,
        rows: int,
        needs: frozenset[str],
        *,
        seed: int = 0,
        eager: bool = False,
        cut: Cut | None = None,
    ) -> dict[str, Tensor]:
        """Measure the quantities of a batch; the model's modes and random state are put back afterwards.

        Args:
            model: on the device of the batch.
            batch: without ids.
            rows: the number of examples in it.
            needs: the names of the quantities.
            seed: of dropout draws, see `seed`.
            eager: run the model itself, not its compiled copy.
            cut: a function from a slice of the rows to that part of the batch, for `chunk`; by default what
                has as many rows as the batch is cut.

        Returns:
            A tensor [rows] in float32 for each name.
        """
        base = unwrapped(model)
        run: Any = scored_module(model)
        if eager or self.compile:
            run = base if eager else self._compiled_copy(base)
        draws = self.passes(needs)
        dropout = self.dropout or draws > 1
        # If the whole model is in eval mode, its running statistics must not move.
        norm = "batch" if self.batch_norm == "train" and not base.training else self.batch_norm
        device = data.device_of(base)
        cuts = self._cuts(base, rows, device)
        cut = cut or functools.partial(data.take, batch, rows=rows, strict=False)
        with (
            torch.no_grad(),
            scoring_mode(base, batch_norm=norm, dropout=dropout),
            kept_random_state(device, seed if dropout else None),
            kept_buffers(base, self._protected),
            own_autocast(device, self.dtype),
        ):
            parts = []
            for start, stop in cuts:
                if start == stop:  # another rank has more: FSDP2 needs all ranks in each pass
                    self.forward(run, cut(slice(0, 1)), 1, needs, draws)
                    continue
                part = batch if len(cuts) == 1 else cut(slice(start, stop))
                parts.append(self.forward(run, part, stop - start, needs, draws))
        reshard(base)
        measured = parts[0]
        if len(parts) > 1:
            measured = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        # A row without labels has loss 0: it would be chosen once all others are learnt.
        empty = losses.no_label_counts(batch, self.loss)
        if empty is None or len(empty) != rows:
            return measured
        return {name: value.masked_fill(empty, -torch.inf) for name, value in measured.items()}

    def forward(
        self, run: Any, batch: Any, rows: int, needs: frozenset[str], draws: int
    ) -> dict[str, Tensor]:
        """Measure as `measure` does, but in whatever mode and random state the model is.

        Args:
            run: the model, or what stands for it.
            batch: without ids.
            rows: the number of examples in it.
            needs: the names of the quantities.
            draws: the number of forward passes.
        """
        reads_output = needs - {"loss"}
        if not isinstance(self.loss, losses.Task):
            if reads_output:
                raise RholossError(
                    f"The method needs {', '.join(sorted(reads_output))}, which is read off the model's "
                    "output, but `loss` is a function that returns losses only. Pass a task's name, "
                    "e.g. loss='classification', or a `rholoss.losses.Task`."
                )
            drawn = [losses.check_per_example(self.loss(run, batch), rows) for _ in range(draws)]
            return {"loss": torch.stack(drawn).float().mean(0)}
        outputs, target = [], None
        for _ in range(draws):
            output, target = self.loss.forward(run, batch)
            outputs.append(output)
        assert target is not None
        if self._dry is not None:
            self._check_numbers(outputs, target, needs)
        measured = {}
        if "loss" in needs:
            drawn = [self.loss.per_example(output, target) for output in outputs]
            drawn = [losses.check_per_example(loss_B, rows) for loss_B in drawn]
            measured["loss"] = drawn[0] if draws == 1 else torch.stack(drawn).mean(0)
        if reads_output:
            if outputs[0].ndim != 2 or target.ndim != 1 or target.is_floating_point():
                raise RholossError(
                    f"The method needs {', '.join(sorted(reads_output))}, which is defined for logits "
                    f"[B, C] and integer targets [B], but the model put out {tuple(outputs[0].shape)}. "
                    "Use a method that reads the loss alone: rho, loss, negative_il or uniform."
                )
            logits_KBC = torch.stack(outputs)
            for name in reads_output:
                values = self.quantities[name](logits_KBC, target)
                measured[name] = losses.check_per_example(values, rows, argument=name)
        return measured

    def _cuts(self, base: nn.Module, rows: int, device: torch.device) -> list[tuple[int, int]]:
        """From where to where each pass goes; empty passes keep step with ranks that need more of them."""
        if not self.chunk:
            return [(0, rows)]
        passes = agreed_passes(base, -(-rows // self.chunk), device)
        return [(rows * i // passes, rows * (i + 1) // passes) for i in range(passes)]

    def _compiled_copy(self, model: nn.Module) -> Any:
        if self._compiled is None or self._compiled[0] is not model:
            # Compiled apart from training (the weights are shared): shapes are fixed, and switching between
            # scoring and training does not recompile.
            self._compiled = (model, torch.compile(model, dynamic=False))
        return self._compiled[1]

    def dry_run(
        self,
        model: nn.Module,
        batch: Any,
        rows: int,
        needs: frozenset[str],
        *,
        seed: int = 0,
        cut: Cut | None = None,
        discard: bool = False,
        compare: bool = False,
    ) -> tuple[dict[str, Tensor], float | None]:
        """Measure for the first time, with checks that need a run. Waits for the device.

        Also finds buffers that change although they should not; later passes restore them. Arguments that
        are not listed are those of `measure`.

        Args:
            discard: restore every buffer, for a step that does not score yet. After an error that is done
                in any case.
            compare: raise if a method compares dropout draws and all of them are the same.

        Returns:
            What was measured, and the forward FLOPs of one example (None if they cannot be counted).
        """
        base = unwrapped(model)
        check_materialised(base, "model", parameters=False)  # these get their shapes by scoring
        norms = {
            name
            for name, module in base.named_modules()
            if isinstance(module, _BatchNorm) and (module.training or not base.training)
        }
        self._check_first(needs, rows, bool(norms))
        self._protected = []
        kept = [KeptBuffer(base, name) for name, _ in base.named_buffers()]
        restore, protect = kept, []
        self._dry = compare
        try:
            measured, flops = self._counted(base, batch, rows, needs, kept, seed=seed, cut=cut)
            protect = [b for b in kept if b.name.rpartition(".")[0] not in norms and b.moved()]
            restore = kept if discard or self.batch_norm != "train" else protect
        finally:
            self._dry = None
            for buffer in restore:
                if buffer.moved():  # writing to a buffer breaks a backward pass that still reads it
                    buffer.restore()
        self._protected = [buffer.name for buffer in protect]
        if self.compile:  # in the dry run, where errors are expected and time is not counted
            with kept_buffers(base, [buffer.name for buffer in kept]):
                self.measure(model, batch, rows, needs, seed=seed, cut=cut)
        return measured, flops

    def _check_first(self, needs: frozenset[str], rows: int, normalises: bool) -> None:
        unknown = needs - {"loss"} - set(self.quantities)
        if unknown:
            raise RholossError(
                f"The method needs {', '.join(sorted(unknown))}, which cannot be measured; known are "
                f"loss, irreducible_loss, {', '.join(self.quantities)}. Pass `quantities=`."
            )
        if normalises and self.chunk and self.chunk < rows and self.batch_norm != "eval":
            raise RholossError(
                f"`chunk`={self.chunk} would give BatchNorm the statistics of each chunk rather than of "
                f"all {rows} candidates, and so another choice; pass batch_norm='eval' or no `chunk`."
            )

    def _check_numbers(self, outputs: list[Tensor], target: Tensor, needs: frozenset[str]) -> None:
        assert isinstance(self.loss, losses.Task)
        whole = not target.is_floating_point() and outputs[0].shape[:-1] == target.shape
        if whole and self.loss.per_example in losses.CLASSES:
            losses.check_classes(outputs[0], target)
        # Without dropout each of the two entropies has a meaning, but their difference is rounding noise.
        compared = self._dry and needs >= MONTE_CARLO
        if compared and all(torch.equal(outputs[0], output) for output in outputs[1:]):
            raise RholossError(
                f"The method compares {' and '.join(sorted(MONTE_CARLO))}, but all `draws` "
                f"({len(outputs)}) gave the same output, so that they are equal: BALD needs dropout in the "
                "model, and draws=2 or more. Without dropout use the method 'entropy'."
            )

    def _counted(
        self,
        base: nn.Module,
        batch: Any,
        rows: int,
        needs: frozenset[str],
        kept: list[KeptBuffer],
        **options: Any,
    ) -> tuple[dict[str, Tensor], float | None]:
        """`measure`, eager, with the FLOPs of one example if they can be counted."""
        dynamo = "torch._dynamo" in sys.modules  # slow to import; if it is not, nothing is compiled
        with torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext():
            try:
                with FlopCounterMode(display=False) as counter:
                    measured = self.measure(base, batch, rows, needs, eager=True, **options)
                return measured, counter.get_total_flops() / rows / self.passes(needs)
            except RholossError:
                raise
            except Exception:  # from the counter, which has its limits, or from the model: find out
                pass
            for buffer in kept:
                buffer.restore()
            return self.measure(base, batch, rows, needs, eager=True, **options), None
