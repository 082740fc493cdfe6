"""Choose the number of rows for `samples="auto"`, before calibration.

Rows are doubled until the model has seen enough. So `samples="auto"` that chose 128 has the bytes of `samples=128`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bridge.calibration.data import MOST_SAMPLES, Data
from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import copy_modules
from bridge.calibration.quantizers import QuantizerBinding, bind
from bridge.calibration.reference_outputs import blaming, runner
from bridge.calibration.requirements import default_samples
from bridge.calibration.statistics import ExpertTokens
from bridge.calibration.walk.options import Watch
from bridge.calibration.walk.states import Spill
from bridge.core.progress import Progress
from bridge.core.values import Format
from bridge.quant.schemes.scheme import is_calibrated

EVERY_EXPERT = 64  # tokens that the router sends to each; fewer leave channels of its input unseen
# Median of |log2| between the channels' maxima of n and of 2n rows. On tiny-llama it is 0.010 from 32 to 64 rows, but
# the divergence of int8_sq falls until 128; higher quantiles do not settle (0.087 at 0.75 from 128 to 256 rows). So the
# default is the least that is chosen, and the rule finds models that need more.
MOVED = 0.05
BLOCKS = 2  # the first ones; later blocks need a run of the whole model


def choose_samples(job: CalibrationJob, by_blocks: bool = False, spill: Spill | None = None) -> Data:
    """Return data with the number of rows that the scheme needs on this model, and why (`chosen`).

    Other data than those of `samples="auto"` are returned as they are. With experts, the model runs until each has
    `EVERY_EXPERT` tokens. For SmoothQuant the first blocks run until their channels' maxima move by less than `MOVED`.
    The scheme's default is the least. `by_blocks`: with one block of the model in memory at a time, and
    activations in `spill`.
    """
    source, sites, scheme, data = job.source, job.structure.sites, job.scheme, job.data
    if data.cut is None:
        return data
    from bridge.calibration.walk.run import watch_by_blocks
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names

    formats = {site.module: scheme.format_of(site) for site in sites}
    used = [s for s in sites if isinstance(f := formats[s.module], Format) and is_calibrated(f)]
    smoothed = {site.module for site in used if getattr(formats[site.module], "algorithm", "") == "smoothquant"}
    layers = sorted({s.layer for s in used if s.module in smoothed and s.layer is not None})[:BLOCKS]
    experts = any(site.stacked or site.expert is not None for site in used)
    if not layers and not experts:
        rows = default_samples(scheme)
        return replace(data.cut(rows), chosen=f"{scheme.algorithm} needs no more than its default")
    model = source.load_skeleton() if by_blocks else source.load_model()
    bindings = bind(used, formats, live_names(model, source.specs), tied_names(model))
    first = {one.module for one in bindings if one.site.layer in layers and one.site.module in smoothed}
    copied = None if by_blocks else copy_modules(model, device=job.device)

    def watch(data: Data) -> _Watch:
        seen = _Watch(bindings, first, experts, stop=not (by_blocks or experts))
        if by_blocks:
            watch_by_blocks(replace(job, data=replace(data, held_out=())), seen, spill)
        else:
            seen.run(partial(_run, data, model, seen), copied)
        return seen

    least = default_samples(scheme)
    return _doubled(data.cut, watch, least // 2 if first else least, job.progress)


def _doubled(cut: Callable[[int], Data], watch: Callable[[Data], _Watch], rows: int, progress: Progress) -> Data:
    before: _Watch | None = None
    while True:
        progress(0, 0, "choose samples")
        data = cut(rows)
        seen = watch(data)
        moved = _moved(before, seen)
        least = min((int(tokens.min()) for tokens in seen.routing.tokens.values()), default=EVERY_EXPERT)
        enough = (not seen.channels or moved < MOVED) and least >= EVERY_EXPERT
        if enough or data.samples < rows or rows >= MOST_SAMPLES:
            break
        rows, before = 2 * rows, seen
    why = [] if enough else ["the text has no more" if data.samples < rows else f"{MOST_SAMPLES} are the most"]
    if seen.routing.tokens:
        why.append(f"each expert has {least} tokens or more")
    if before and seen.channels:
        why.append(f"channel maxima moved by {moved:.3f} (median of log2) from {rows // 2} sequences")
    return replace(data, chosen="; ".join(why))


def _moved(before: _Watch | None, seen: _Watch) -> float:
    """The median over all channels of |log2| of what a maximum was multiplied by."""
    if before is None or not seen.channels:
        return np.inf
    old, new = (np.concatenate([one.channels[name] for name in sorted(seen.channels)]) for one in (before, seen))
    live = (old > 0) | (new > 0)
    with np.errstate(divide="ignore"):
        steps = np.abs(np.log2(new[live]) - np.log2(old[live]))
    return float(np.median(steps)) if steps.size else 0.0


class _Enough(BaseException):
    """All watched modules of a forward have run; no Exception, so that no model's code catches it."""


def _run(data: Data, plain: Any, watch: _Watch, model: Any) -> None:
    """Run a whole model on the batches, each only as far as `watch` looks."""
    run = runner(model)

    def step(batch: Mapping[str, Any]) -> None:
        watch.begin(batch)
        with suppress(_Enough):
            run(batch)

    tried = blaming(step, plain)
    for batch in data.batches:
        tried(batch)


class _Watch(Watch):
    """What one number of rows showed: `channels`, maxima by live module, and `routing`, tokens of experts by layer.

    `first`: the modules whose channels count. `stop`: a forward ends when all of them have run.
    """

    def __init__(
        self, bindings: Collection[QuantizerBinding], first: Collection[str], experts: bool, stop: bool = False
    ) -> None:
        counted = {one.module for one in bindings if one.site.stacked or one.expert is not None} if experts else set()
        super().__init__({*first, *counted})
        self.channels: dict[str, np.ndarray] = {}
        self.routing = ExpertTokens(bindings)
        self._first, self._stop = set(first), stop
        self._left: set[str] = set()

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """All modules are to be seen with the next batch."""
        self._left = set(self._first)

    def run(self, loop: Callable[[Any], None], model: Any) -> None:
        """Run the loop, watched."""
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if name in self._first:
                    hooks.enter_context(module.register_forward_pre_hook(partial(self._keep, name)))
            self.routing.first(loop)(model)

    def _keep(self, name: str, module: Any, inputs: tuple[Any, ...]) -> None:
        """Keep the maximum of each channel of a module's input."""
        if inputs and inputs[0].numel():
            amax = inputs[0].detach().abs().flatten(0, -2).amax(0).float().cpu().numpy()
            self.channels[name] = np.maximum(self.channels[name], amax) if name in self.channels else amax
        self._left.discard(name)
        if self._stop and not self._left:
            raise _Enough
