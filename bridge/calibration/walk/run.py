"""Calibrate block by block, with the bytes of the whole model.

Each block is read, runs every batch, leaves its statistics and is dropped. ModelOpt's code runs on each with the
activations that the whole model has there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from bridge.calibration.algorithms.codes import collect_codes, with_weights_digest
from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import calibrate_root, of_modelopt, provenance_of, quiet
from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.reference_outputs import Answers, held_out_of
from bridge.calibration.statistics import (
    CODES,
    KINDS,
    MATRICES,
    SCALES,
    WATCHED,
    Statistics,
    collect,
    merge,
    settle_statistics,
)
from bridge.calibration.walk.block_errors import BlockErrors, BlockProbe
from bridge.calibration.walk.blocks import Block
from bridge.calibration.walk.diagnose import blame, broken_tensor, why_modelopt_refused
from bridge.calibration.walk.forwards import REMEDY
from bridge.calibration.walk.model import WalkModel
from bridge.calibration.walk.options import Options, Watch
from bridge.calibration.walk.resume import Partial, WalkJournal, unfinished
from bridge.calibration.walk.states import Spill
from bridge.calibration.walk.streams import Streams
from bridge.calibration.walk.weights import drop_quantizers
from bridge.calibration.walk.workers.join import check_same_weights, joined_counts, joined_statistics
from bridge.core.errors import BridgeError, CalibrationError
from bridge.core.machine import returning_pages
from bridge.quant.calibration import Calibration

PIECE = 4 << 20  # elements; ModelOpt's FP8 takes some 12 bytes an element: 2.8 GB for a matrix of Llama 70B at once


def calibrate_by_blocks(job: CalibrationJob, options: Options = Options()) -> Calibration:  # noqa: B008, frozen
    """Return the calibration of a model, with one block of its weights in memory at a time.

    The directory `job.partial` is removed at the end.
    """
    with torch.no_grad(), returning_pages(), unfinished(job) as partial:
        while not (walk := Walk(job, options, partial)).run():
            assert partial, "only a walk that continues another one has to start again"
            partial.start_again()
    model, streams, source = walk.model, walk.streams, job.source
    statistics, applied = settle_statistics(walk.seen, model.quantizers, job)
    chosen = {*statistics[CODES], *statistics[SCALES]}
    provenance = with_weights_digest(provenance_of(job, model.plain.model), source, job.structure, chosen)
    held = held_out_of(job.data, streams.source_answers, streams.answers) if job.data.held_out else None
    return Calibration(provenance=provenance, **statistics, applied=tuple(applied), held_out=held)


def watch_by_blocks(job: CalibrationJob, watch: Watch, spill: Spill | None = None) -> tuple[Any, Answers]:
    """Run the data through the unquantized model for `watch`; return the model, without weights, and its answers.

    A watch that learns goes on where a killed run ended.
    """
    kept = unfinished(job) if watch.learns else nullcontext()
    with torch.no_grad(), returning_pages(), kept as partial:
        while not (walk := Walk(job, Options(watch=watch, spill=spill), partial)).run():
            assert partial, "only a walk that continues another one has to start again"
            partial.start_again()
        watch.end(walk.seen)
    return walk.model.plain.model, walk.streams.source_answers


def measure_block_errors(job: CalibrationJob, units: Mapping[str, Sequence[str]], ahead: bool = False) -> BlockErrors:
    """Calibrate block by block, and measure each block on the held-out inputs. `units`: name -> checkpoint modules.

    `ahead`: read the next block while one runs: memory holds two.

    Raises:
        CalibrationError: the model cannot be cut into blocks, or a statistic cannot be used.
    """
    probe = BlockProbe(units)
    with torch.no_grad():
        walk = Walk(job, Options(ahead, probe=probe))
        walk.run()
    settle_statistics(walk.seen, walk.model.quantizers, job)
    return probe.measured


class Walk:
    """One walk over the blocks of a model. `seen`: the statistics of the blocks that are done."""

    def __init__(self, job: CalibrationJob, options: Options = Options(), partial: Partial | None = None) -> None:  # noqa: B008, frozen
        self._job, self._options = job, options
        self.model = WalkModel(job, options)
        self.streams = Streams(job, options, self.model, keeps_outputs=partial is not None)
        self._journal = WalkJournal(partial, self.model, self.streams, job.workers)
        self.seen: Statistics = {kind: {} for kind in (*KINDS, WATCHED)}
        self._visited: set[Block] = set()

    def run(self) -> bool:
        """Go through all blocks; False if the model does not go on from what an earlier run left."""
        try:
            self.model.place_rest()
            self.streams.start()
            if not self._journal.resume(self.seen, self._visited):
                return False
            while block := self._next():
                seen = self._visit(block)
                merge(self.seen, seen)
                self._journal.keep(block, seen)
            self.streams.join_answers()
        finally:
            self.model.close()
            self.streams.close()
        return True

    def _next(self) -> Block | None:
        """The block to visit next; None if all is seen."""
        outputs_wanted = self._options.probe is None and (self.streams.held or not self._options.watch)
        if not outputs_wanted and not {b for b in self.model.blocks if b.quantized} - self._visited:
            return None
        return self.streams.next_block()

    def _visit(self, block: Block) -> Statistics:
        """Read a block, run what waits for it, and drop it; return its statistics."""
        if block.quantized and block in self._visited:
            raise CalibrationError(
                f"{block.name} runs more than once in a forward (weights shared by depth), so that its statistics "
                f"cannot be taken block by block; {REMEDY}"
            )
        self._visited.add(block)
        model, streams = self.model, self.streams
        check_same_weights(block.name, model.load(block), self._job.workers)
        if self._options.ahead:
            model.read_ahead(block, self._visited)
        with streams.blamed(block=block):
            if block in model.cuts:
                streams.begin_held(block)
                model.cuts[block].hide_weights(model.fake.modules[block.name])
            elif not self._options.probe:
                streams.run(streams.held, model.plain.modules[block.name], block)
        model.share(block)
        seen = self._watched(block, self._options.watch) if self._options.watch else self._calibrated(block)
        model.unload(block)
        return seen

    def _watched(self, block: Block, watch: Watch) -> Statistics:
        """Run the data through a block without quantizers; what is seen stays with the watch, unless it learns."""
        loop, root = self._loop(block), self.model.fake.part(block)
        seen: Statistics = {kind: {} for kind in (*KINDS, WATCHED)}
        outputs: list[Any] = []
        module, streams = root.get_submodule(block.name), self.streams
        with streams.blamed(block=block), ExitStack() as hooks:
            if watch.learns:
                hooks.enter_context(module.register_forward_hook(lambda *made: outputs.append(made[-1])))
            watch.run(loop, root)
        if watch.learns:
            waiting = streams.waiting(streams.data[1], block)
            for batch in waiting:
                batch.offloaded.restore()
            chosen = watch.learn(module, block.name, outputs, waiting)
            self._journal.keep_codes(chosen, seen)
            seen |= {kind: arrays for kind, arrays in chosen.items() if kind not in MATRICES}
            with streams.blamed(block=block):
                loop(root)
        return seen

    def _calibrated(self, block: Block) -> Statistics:
        """Run ModelOpt on a block, and then the held-out inputs."""
        job, model, streams, probe = self._job, self.model, self.streams, self._options.probe
        root, plain = model.fake.part(block), model.plain.modules[block.name]
        quantizers = model.quantizers.inside(block.holds)
        bindings = quantizers.bindings
        if probe:
            probe.prepare(root, bindings)
        try:
            calibrated = calibrate_root(root, quantizers, self._loop(block))
        except Exception as error:
            if not of_modelopt(error) and isinstance(error, BridgeError | MemoryError | OSError):
                raise
            if why := self._why_failed(block, error):
                raise CalibrationError(why) from error
            error.add_note(f"in {model.raised_in(error, block)}")
            raise
        with quiet():
            if probe:
                streams.probe(block, probe.runner(block.name, dict(model.plain.inside(block)), calibrated))
            streams.run((), plain, block)  # those that no run of the data took along
            if streams.quantized:
                fold_weights(root, bindings)
            streams.run(streams.quantized, root.get_submodule(block.name), block)
        experts = any(binding.site.stacked or binding.expert is not None for binding in bindings)
        seen = joined_counts(collect(calibrated), job.workers, experts)
        self._keep_codes(seen, root, bindings)
        drop_quantizers(root, bindings)
        return seen

    def _keep_codes(self, seen: Statistics, root: Any, bindings: Sequence[QuantizerBinding]) -> None:
        """Write the codes and scales that a block chose to a file, where they stay."""
        chosen = collect_codes(root, bindings, self.model.origins)
        seen["weight_amax"] |= chosen["weight_amax"]
        self._journal.keep_codes(chosen, seen)

    def _loop(self, block: Block) -> Callable[[Any], None]:
        """Return ModelOpt's forward_loop for a block: each run has the activations of its stream.

        The last run of a stream gives the activations for the next block.
        """
        order, runs = self.model.quantizers.schedule.streams, 0

        def loop(root: Any) -> None:
            nonlocal runs
            stream, last = order[runs], order[runs] not in order[runs + 1 :]
            runs += 1
            with joined_statistics(root, self._job.workers):
                module = root.get_submodule(block.name)
                self.streams.run(self.streams.data[stream], module, block, last, stop_at_nan=True)

        return loop

    def _why_failed(self, block: Block, error: Exception) -> str:
        """Why ModelOpt's pass failed, by what the plain block does with the same inputs; "" if it runs on them."""
        model, streams = self.model, self.streams
        for batch in streams.waiting((batch for stream in streams.data for batch in stream), block):
            try:
                if why := streams.why_nan(block, batch):
                    return why
            except Exception as own:
                return model.why_refused(batch.inputs, own, block)
        experts = model.cuts[block].tensors() if block in model.cuts else ()
        broken = broken_tensor(model.inside(block), experts)
        return blame(block.name, "NaN", broken) if broken else why_modelopt_refused(block.name, error)


def fold_weights(root: Any, bindings: Iterable[QuantizerBinding]) -> None:
    """Replace weights by what ModelOpt's quantizers make of them, and switch these off: the model computes the same.

    Only where every row is quantized by itself (one amax for all, or one for each row); a quantizer of blocks stays on.
    """
    for binding in bindings:
        module = root.get_submodule(binding.module)
        weight: Any = module._parameters.get("weight")
        quantizer: Any = getattr(module, "weight_quantizer", None)
        amax: Any = getattr(quantizer, "_amax", None)
        if weight is None or amax is None or quantizer.block_sizes or not quantizer.is_enabled:
            continue
        each = amax.numel() > 1
        if each and tuple(amax.shape) != (weight.shape[0], *(1,) * (weight.ndim - 1)):
            continue
        step = max(1, PIECE * weight.shape[0] // max(1, weight.numel()))
        for begin in range(0, weight.shape[0], step):
            if each:
                quantizer._buffers["_amax"] = amax[begin : begin + step]
            rows = weight.data[begin : begin + step]
            rows.copy_(quantizer(rows))
        quantizer._buffers["_amax"] = amax
        quantizer.disable()
