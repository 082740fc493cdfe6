"""Collect llama.cpp's importance matrix: the mean square of each matrix's inputs.

The plain model runs, without ModelOpt. Like every statistic here it counts all tokens of the data, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bridge.calibration.algorithms.codes import with_weights_digest
from bridge.calibration.importance.watch import PRODUCTS, ExpertCalls
from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import copy_modules, loop_over, provenance_of
from bridge.calibration.policies import Measured, settle_importance
from bridge.calibration.quantizers import QuantizerBinding, bind
from bridge.calibration.reference_outputs import answer_of, held_out_of, reads_held_out
from bridge.calibration.requirements import check_device
from bridge.calibration.statistics import ExpertTokens
from bridge.calibration.walk.options import Watch
from bridge.calibration.walk.states import Spill
from bridge.core.errors import CalibrationError
from bridge.core.files.matrices import Matrix
from bridge.core.text import fold_layers
from bridge.quant.calibration import Applied, Calibration, of_expert

ROWS = 1024  # of an input that are squared at once in float64
STACKED = (*PRODUCTS, torch.bmm, torch.Tensor.bmm)


def measure_importance(
    job: CalibrationJob, added_to: Calibration | None = None, by_blocks: bool = False, spill: Spill | None = None
) -> Calibration:
    """Run the model and return the mean square of the input of every site with a weighted format.

    `added_to`: other statistics of the same model and data, which are returned too. `by_blocks`: with one block of the
    model in memory at a time, and activations in `spill`. The model is not changed.

    Raises:
        CalibrationError: there are no data, the model cannot be run on them, or a statistic cannot be used.
    """
    source, scheme, data = job.source, job.scheme, job.data
    check_device(scheme, job.device)
    if not data.batches and data.forward_loop is None:
        raise CalibrationError(f"scheme {scheme.name} needs statistics of activations: {data.missing}")
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names

    model, sites = source.load_skeleton() if by_blocks else source.load_model(), job.structure.sites
    formats = {site.module: form for site in sites if (form := scheme.format_of(site))}
    weighted = [s for s in sites if getattr(formats[s.module], "watched", False) and s.layout != "conv"]
    origins = live_names(model, source.specs)
    bindings = bind(weighted, formats, origins, tied_names(model))
    watch, held = InputSquares(bindings), None
    if any(one.format.ordered for one in bindings):
        from bridge.calibration.importance.columns import ColumnCodes
        from bridge.calibration.importance.learned import LearnedCodes

        kind = LearnedCodes if any(one.format.learned for one in bindings) else ColumnCodes
        watch = kind(bindings, origins, scheme, job.structure.groups)
    if by_blocks:
        from bridge.calibration.walk.run import watch_by_blocks

        seen = data if added_to is None else replace(data, held_out=())
        partial = job.partial if added_to is None else None  # what ModelOpt's walk keeps there is another run
        model, answers = watch_by_blocks(replace(job, data=seen, partial=partial), watch, spill)
        held = held_out_of(data, answers, None) if seen.held_out else None
    else:
        copied = copy_modules(model, device=job.device)
        watch.prepare(copied)
        watch.run(loop_over(data, model, job.progress), copied)
    squares, applied = settle_importance(watch.measured(model), scheme.policies, job.needed)
    applied = (*applied, *watch.applied)
    if added_to is not None:
        chosen = {*added_to.chosen, *watch.codes}
        return replace(
            added_to,
            provenance=with_weights_digest(added_to.provenance, source, job.structure, chosen),
            input_square=squares,
            weight_codes={**added_to.weight_codes, **watch.codes},
            block_scales={**added_to.block_scales, **watch.block_scales},
            weight_amax={**added_to.weight_amax, **watch.weight_amax},
            scale_factor=watch.factors,
            learned_loss=watch.losses,
            applied=(*added_to.applied, *applied),
        )
    provenance = provenance_of(job, model, ("qbridge", "torch", "transformers"))
    provenance = with_weights_digest(provenance, source, job.structure, watch.codes)
    if not by_blocks and reads_held_out(model, data):
        held = answer_of(model, data)
    return Calibration(
        provenance, input_square=squares, weight_codes=watch.codes, block_scales=watch.block_scales,
        weight_amax=watch.weight_amax, scale_factor=watch.factors, learned_loss=watch.losses,
        expert_tokens=watch.tokens, applied=applied, held_out=held,
    )  # fmt: skip


class InputSquares(Watch):
    """Sums over the inputs of the live matrices of bindings, in float64, in the order of the tokens, padding included.

    Linear layers are seen by hooks. transformers holds the experts of a layer in one module; in its eager
    implementation each expert is a product with a part of a stacked weight, or all are one with the whole stack
    (Llama 4), which is zero for tokens that other experts get. `modules`: the live modules that
    are watched. `tokens`: those of each expert. `codes`, `block_scales`, `weight_amax`: of the modules whose codes a
    subclass chooses.
    """

    def __init__(self, bindings: Iterable[QuantizerBinding]) -> None:
        self._bindings = list(bindings)
        experts = any(_is_expert(one) for one in self._bindings)
        super().__init__({one.module for one in self._bindings}, experts)
        self._sums: dict[tuple[str, str, int], np.ndarray] = {}
        self._tokens: dict[tuple[str, str, int], int] = {}
        self._plain = dict.fromkeys((one.module, one.parameter) for one in self._bindings if not _is_expert(one))
        self._stacks = dict.fromkeys((one.module, one.parameter) for one in self._bindings if _is_expert(one))
        self._routing = ExpertTokens(self._bindings)
        self.tokens = self._routing.tokens
        self.codes: dict[str, Matrix] = {}
        self.block_scales: dict[str, np.ndarray] = {}
        self.weight_amax: dict[str, np.ndarray] = {}
        self.factors: dict[str, np.ndarray] = {}  # of the scales of their blocks, if a subclass learns them
        self.losses: dict[str, np.ndarray] = {}
        self.applied: list[Applied] = []  # to what a subclass chooses

    def run(self, loop: Callable[[Any], None], model: Any) -> None:
        """Run the loop, watched; its model may be a part that holds some of the modules."""
        held = dict(model.named_modules())
        experts: dict[int, tuple[str, str, int]] = {}  # address of an expert's weight -> its key
        for module, name in self._stacks:
            if module in held:
                weight = getattr(held[module], name)
                size = weight.stride(0) * weight.element_size()
                experts |= {weight.data_ptr() + at * size: (module, name, at) for at in range(len(weight))}
        with ExitStack() as hooks, torch.no_grad(), ExpertCalls(experts, self._of_expert, STACKED):
            for module, name in self._plain:
                if module in held:
                    register = held[module].register_forward_pre_hook
                    hooks.enter_context(register(lambda _, args, key=(module, name, -1): self._add(key, args[0])))
            self._routing.first(loop)(model)

    def _of_expert(self, key: tuple[str, str, int], values: Any, output: Any) -> None:
        if values.ndim < 3:
            self._add(key, values)
            return
        for at, rows in enumerate(values):  # a product of whole stacks
            self._add((*key[:2], at), rows[rows.abs().amax(-1) > 0])

    def _add(self, key: tuple[str, str, int], values: Any) -> None:
        rows = values.detach().reshape(-1, values.shape[-1])
        for part in rows.split(ROWS):
            wide = part.to("cpu", torch.float64).numpy()
            # NumPy adds row after row: the sum does not depend on the number of threads, as torch's may
            sums = np.square(wide).sum(axis=0)
            self._sums[key] = self._sums[key] + sums if key in self._sums else sums
        self._tokens[key] = self._tokens.get(key, 0) + len(rows)

    def measured(self, model: Any) -> dict[str, Measured]:
        """What was seen, by checkpoint module."""
        seen = {(module, name) for module, name, _ in self._tokens}
        stacked = (one for one in self._bindings if _is_expert(one))
        if hidden := [one.site.module for one in stacked if (one.module, one.parameter) not in seen]:
            raise CalibrationError(
                f"{', '.join(fold_layers(dict.fromkeys(hidden)))}: this model computes its experts in a way that shows "
                'no input of a single one; keep them with a recipe (quant = "none")'
            )
        sites: dict[str, list[QuantizerBinding]] = {}
        modules = dict(model.named_modules())
        for one in self._bindings:
            every = range(len(getattr(modules[one.module], one.parameter))) if one.joint else (one.expert,)
            for number in every:
                name = of_expert(one.site.module, number if one.site.stacked else None)
                sites.setdefault(name, []).append(replace(one, expert=number))
        return {name: self.measured_of(own, modules) for name, own in sites.items()}

    def measured_of(self, bindings: Sequence[QuantizerBinding], modules: Mapping[str, Any]) -> Measured:
        """What was seen of one site; of one that is several live matrices, all of them together."""
        found = None
        for one in bindings:
            key = (one.module, one.parameter, -1 if one.expert is None else one.expert)
            shape = getattr(modules[one.module], one.parameter).shape
            zero = np.zeros(int(shape[0] if one.site.layout == "in_out" else shape[-2 if one.joint else -1]))
            found = found or Measured(zero, 0, one.expert is not None)
            sums, tokens = self._sums.get(key, zero), self._tokens.get(key, 0)
            found = replace(found, sums=found.sums + sums, tokens=found.tokens + tokens)
        assert found
        return found


def _is_expert(binding: QuantizerBinding) -> bool:
    """Whether a live module has its weight in a stack."""
    return binding.expert is not None or binding.joint
