"""Choose the number of rows for `samples="auto"`, before calibration.

Rows are doubled until the model has seen enough. So `samples="auto"` that chose 128 has the bytes of `samples=128`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class _Seen:
    """What one number of rows showed: maxima of channels by live module, tokens of experts by layer."""

    channels: Mapping[str, np.ndarray]
    experts: Mapping[str, np.ndarray]


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
    if by_blocks:
        from bridge.calibration.walk.run import watch_by_blocks

        def watch(data: Data) -> _Seen:
            seen = _Watch(bindings, first, experts)
            watch_by_blocks(replace(job, data=replace(data, held_out=())), seen, spill)
            return _Seen(seen.channels, seen.routing.tokens)
    else:
        copied = copy_modules(model)
        watch = partial(
            _watch, copied if job.device is None else copied.to(job.device), model, bindings, first, experts
        )
    least = default_samples(scheme)
    return _doubled(data.cut, watch, least // 2 if first else least, job.progress)


def _doubled(cut: Callable[[int], Data], watch: Callable[[Data], _Seen], rows: int, progress: Progress) -> Data:
    before: _Seen | None = None
    while True:
        progress(0, 0, "choose samples")
        data = cut(rows)
        seen = watch(data)
        moved = _moved(before, seen)
        least = min((int(tokens.min()) for tokens in seen.experts.values()), default=EVERY_EXPERT)
        enough = (not seen.channels or moved < MOVED) and least >= EVERY_EXPERT
        if enough or data.samples < rows or rows >= MOST_SAMPLES:
            break
        rows, before = 2 * rows, seen
    why = [] if enough else ["the text has no more" if data.samples < rows else f"{MOST_SAMPLES} are the most"]
    if seen.experts:
        why.append(f"each expert has {least} tokens or more")
    if before and seen.channels:
        why.append(f"channel maxima moved by {moved:.3f} (median of log2) from {rows // 2} sequences")
    return replace(data, chosen="; ".join(why))


def _moved(before: _Seen | None, seen: _Seen) -> float:
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


def _watch(
    model: Any, plain: Any, bindings: Collection[QuantizerBinding], first: Collection[str], experts: bool, data: Data
) -> _Seen:
    """Run `model` on the batches; only as far as the modules `first` if no experts are counted."""
    channels: dict[str, np.ndarray] = {}
    routing, run = ExpertTokens(bindings), runner(model)

    def step(batch: Mapping[str, Any]) -> None:
        with suppress(_Enough), _hooked(model, first, channels, stop=not experts):
            run(batch)

    def loop(_: Any) -> None:
        tried = blaming(step, plain)
        for batch in data.batches:
            tried(batch)

    routing.first(loop)(model)
    return _Seen(channels, routing.tokens)


class _Watch:
    """Keeps what `_watch` keeps, of a model that runs block by block."""

    def __init__(self, bindings: Collection[QuantizerBinding], first: Collection[str], experts: bool) -> None:
        self.channels: dict[str, np.ndarray] = {}
        self.routing = ExpertTokens(bindings)
        self._first = first
        counted = {one.module for one in bindings if one.site.stacked or one.expert is not None} if experts else set()
        self.modules = {*first, *counted}

    def prepare(self, model: Any) -> None:
        """Nothing to ready."""

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Nothing depends on the batch."""

    def over(self, loop: Callable[[Any], None]) -> Callable[[Any], None]:
        """The loop, watched."""

        def run(model: Any) -> None:
            held = {name for name, _ in model.named_modules()}
            with _hooked(model, held & set(self._first), self.channels, stop=False):
                self.routing.first(loop)(model)

        return run


@contextmanager
def _hooked(model: Any, modules: Collection[str], channels: dict[str, np.ndarray], stop: bool) -> Iterator[None]:
    """Keep the maximum of each channel of the inputs of `modules`; with `stop`, raise when all of them have run."""
    left = set(modules)

    def keep(name: str, module: Any, inputs: tuple[Any, ...]) -> None:
        if inputs and inputs[0].numel():
            amax = inputs[0].detach().abs().flatten(0, -2).amax(0).float().cpu().numpy()
            channels[name] = np.maximum(channels[name], amax) if name in channels else amax
        left.discard(name)
        if stop and not left:
            raise _Enough

    handles = [model.get_submodule(name).register_forward_pre_hook(partial(keep, name)) for name in sorted(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
