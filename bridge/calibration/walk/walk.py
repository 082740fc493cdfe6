"""One walk over the blocks of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

from bridge.calibration.algorithms.codes import chosen_of
from bridge.calibration.data import Data
from bridge.calibration.modelopt import (
    bindings_of,
    calibrate_root,
    copy_modules,
    of_modelopt,
    quiet,
    register_modules,
    simulates,
)
from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.reference_outputs import Answers, refused, runner
from bridge.calibration.schedule import Schedule, schedule_of
from bridge.calibration.statistics import KINDS, MATRICES, Statistics, collect, merge
from bridge.calibration.walk.blocks import Block, find_blocks
from bridge.calibration.walk.experts import cut
from bridge.calibration.walk.fold import fold_weights
from bridge.calibration.walk.forwards import REMEDY, Batch, outputs_of
from bridge.calibration.walk.gauge import Options
from bridge.calibration.walk.nan import blame, broken_tensor, has_nan, why_block_nan, words_of
from bridge.calibration.walk.parked import Parked, storages, to_device
from bridge.calibration.walk.progress import WalkProgress
from bridge.calibration.walk.resume import Partial, damaged, digest_of
from bridge.calibration.walk.skeleton import Skeleton
from bridge.calibration.walk.states import written
from bridge.calibration.walk.weights import Ahead, Weights, drop, drop_quantizers, share
from bridge.calibration.walk.workers.join import check_same_weights, join_answers, joined_counts, joined_statistics
from bridge.calibration.walk.workers.processes import share_of
from bridge.core.errors import BridgeError, CalibrationError, warn
from bridge.core.files.matrices import AppendedFile
from bridge.core.progress import Progress
from bridge.core.values import Structure
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.live_models.checkpoint_names import live_names, tied_names
from bridge.sources.source import Source
from bridge.tracker.raised import raised_in

GIVE = "give batches with the inputs it needs"


class Walk:
    """One walk over the blocks of a model. `seen`: the statistics of the blocks that are done.

    The held-out inputs have forwards through the plain model and through the quantized one, the data one forward for
    each of the scheme's streams of activations.
    """

    def __init__(
        self,
        source: Source,
        structure: Structure,
        scheme: Scheme,
        data: Data,
        device: str,
        report: Progress,
        options: Options = Options(),  # noqa: B008, frozen
        left: Partial | None = None,
    ) -> None:
        self._scheme, self._device, self._ahead, self._left = scheme, device, options.ahead, left
        watch, gauge, workers, room = options.watch, options.gauge, options.workers, options.room
        self._watch, self._gauge, self._workers, self._spill = watch, gauge, workers, options.spill
        self._shared: set[int] = set()
        model = source.load_skeleton()
        if gauge:
            gauge.ready(model)
        self._origins = origins = live_names(model, source.specs)
        self._codes: AppendedFile | None = None
        self._weights = Weights(source, model, origins, device)
        self._reads = Ahead(self._weights)
        fake = copy_modules(model)
        self.bindings, self.attention = bindings_of(structure, scheme, origins, tied_names(model))
        modules = {binding.module for binding in self.bindings} | set(self.attention)
        if watch:
            watch.prepare(fake)
            self._schedule, modules = Schedule(streams=(0,)), set(watch.modules)
        else:
            register_modules(fake, bool(self.attention))
            self._schedule = schedule_of(scheme, [binding.format for binding in self.bindings], bool(self.attention))
        self.blocks = find_blocks(model, modules)
        self.plain, self._fake = Skeleton(model, self.blocks, device), Skeleton(fake, self.blocks, device)
        self._cuts = cut(self.blocks, self.plain, self.bindings, self._weights, room, source.where) if room else {}
        self.seen: Statistics = {kind: {} for kind in KINDS}
        held_out = data.held_out
        self.source_answers = Answers(held_out, model)
        self.answers = Answers(held_out, model) if held_out and not (watch or gauge) and simulates(scheme) else None
        run, run_fake = runner(model, device), runner(fake, device)
        asked = held_out if gauge else self.source_answers.batches
        self._held = [self._batch(at, batch, run) for at, batch in share_of(asked, workers)]
        own = share_of(data.batches, workers)
        self._streams = [[self._batch(at, batch, run_fake) for at, batch in own] for _ in range(self._schedule.count)]
        kept = self.answers.batches if self.answers else ()
        self._quantized = [self._batch(at, batch, run_fake) for at, batch in share_of(kept, workers)]
        runs = len(self._schedule.streams) * len(own) + len(self._held) + len(self._quantized)
        self._progress = WalkProgress(report, {block: self.plain.size(block) for block in self.blocks}, runs)
        self._visited: set[Block] = set()

    def _batch(self, at: int, inputs: Mapping[str, Any], run: Callable[[Mapping[str, Any]], Any]) -> Batch:
        return Batch(at, inputs, run, Parked(self._device, self._shared))

    @property
    def _all(self) -> list[Batch]:
        return [*self._held, *(batch for stream in self._streams for batch in stream), *self._quantized]

    def run(self) -> bool:
        """Go through all blocks; False if the model does not go on from what an earlier run left."""
        try:
            self._weights.place(self.plain.rest, self._weights.read(self.plain.rest))
            share(self._fake.rest, self.plain.rest)
            self._shared |= storages(self.plain.rest, (batch.inputs for batch in self._all))
            for batch in self._all:
                self._go_on(batch)
            if not self._goes_on():
                return False
            while block := self._next():
                seen = self._visit(block)
                merge(self.seen, seen)
                self._keep(block, seen)
            for answers in filter(None, (self.source_answers, self.answers)):
                join_answers(answers, self._workers)
        finally:
            self._reads.close()
            for experts in self._cuts.values():
                experts.close()
            for batch in self._all:
                batch.forward.close()
        return True

    def _next(self) -> Block | None:
        """The first block at which a batch waits, here or in another process; None if all is seen."""
        asked = self._gauge is None and (self._held or not self._watch)
        if not asked and not {b for b in self.blocks if b.quantized} - self._visited:
            return None  # no answer is asked for
        order = min((batch.forward.block.order for batch in self._all if batch.forward.block), default=len(self.blocks))
        first = min(self._workers.agree(order)) if self._workers else order
        return self.blocks[first] if first < len(self.blocks) else None

    def _goes_on(self) -> bool:
        """Take up what an earlier run left; False if the walk, here or in another process, must start again."""
        left = self._left
        if left is None:
            return True
        least = min(self._workers.agree(len(left.blocks))) if self._workers else len(left.blocks)
        taken = left.back_to(least) and (not left.blocks or self._take_up(left))
        taken = all(self._workers.agree(taken)) if self._workers else taken
        if taken and left.blocks:
            warn(f"the calibration continues after block {len(left.blocks)} of {len(self.blocks)}, {left.blocks[-1]}")
        return taken

    def _take_up(self, left: Partial) -> bool:
        """Let the forwards pass the blocks that an earlier run finished; False if they then wait with other inputs."""
        finished = {block for block in self.blocks if block.name in left.blocks}
        try:
            self._pass_over(finished, left)
            for seen in left.statistics():
                merge(self.seen, seen)
        except Exception as error:
            if damaged(error):
                return False
            raise
        self._visited |= finished
        self._progress.skip(finished)
        return self._digest() == left.next

    def _pass_over(self, finished: Set[Block], left: Partial) -> None:
        """Look up what embeddings put out; for other blocks stands what the last of them put out."""
        looked_up = {block for block in finished if block.name != left.blocks[-1] and self.plain.is_embedding(block)}
        while waiting := [b for batch in self._all if (b := batch.forward.block) in finished and b]:
            block = min(waiting, key=lambda block: block.order)
            if block in looked_up:
                modules = self.plain.inside(block)
                self._weights.place(modules, self._weights.read(modules))
                for batch, output in outputs_of(self._waiting(self._all, block), self.plain.modules[block.name]):
                    self._go_on(batch, output)
                drop(modules)
                continue
            for at, batch in enumerate(self._all):
                if batch.forward.block is block:
                    output = to_device(left.output(at), self._device)
                    while batch.forward.block in finished - looked_up:
                        self._go_on(batch, output)

    def _digest(self) -> str:
        def waiting() -> Iterator[tuple[Block, tuple[Any, ...], Mapping[str, Any]]]:
            for forward in (batch.forward for batch in self._all):
                if forward.block:
                    yield forward.block, forward.args, forward.kwargs
                    self._release(forward.args, forward.kwargs)

        return digest_of(waiting())

    def _release(self, *values: Any) -> None:
        if self._spill:
            self._spill.release(*values)

    def _keep(self, block: Block, seen: Statistics) -> None:
        """Write what a block gave, for a run that goes on after this one was killed."""
        if self._left is None or any(batch.forward.block is None for batch in self._all):
            return  # after the last block little is left to do
        digest = self._digest()
        if not digest or not self._left.keep(block, seen, [batch.output for batch in self._all], digest, self._release):
            self._left = None  # the blocks before this one are kept

    def _visit(self, block: Block) -> Statistics:
        """Read a block, run what waits for it, and drop it; return its statistics."""
        if block.quantized and block in self._visited:
            raise CalibrationError(
                f"{block.name} runs more than once in a forward (weights shared by depth), so that its statistics "
                f"cannot be taken block by block; {REMEDY}"
            )
        self._visited.add(block)
        plain, fake = self._inside(block, self.plain), self._inside(block, self._fake)
        self._weights.place(plain, self._reads.take(block.name, plain))
        check_same_weights(block.name, plain, self._workers)
        if self._ahead and (following := self._following(block)):
            self._reads.start(following.name, self._inside(following, self.plain))
        experts = self._cuts.get(block)
        with self._blamed(block=block):
            if experts:  # one reading of the experts is for these and for the first run of the data
                waiting = self._waiting(self._held, block)
                for batch in waiting:
                    batch.parked.fetch()
                experts.begin(waiting, self.plain.modules[block.name])
                experts.hide_weights(self._fake.modules[block.name])
            elif not self._gauge:
                self._pass(self._held, self.plain.modules[block.name], block)
        share(fake, plain)
        seen = self._watched(block) if self._watch else self._calibrated(block)
        drop(plain)
        drop(self._fake.inside(block))
        return seen

    def _watched(self, block: Block) -> Statistics:
        """Run the data through a block without quantizers; what is seen stays with the watch."""
        assert self._watch
        with self._blamed(block=block):
            self._watch.over(self._loop(block))(self._fake.part(block))
        return {kind: {} for kind in KINDS}

    def _calibrated(self, block: Block) -> Statistics:
        """Run ModelOpt on a block, and then the held-out inputs."""
        root = self._fake.part(block)
        bindings = [binding for binding in self.bindings if block.holds(binding.module)]
        attention = {live: ours for live, ours in self.attention.items() if block.holds(live)}
        if self._gauge:
            self._gauge.prepare(root, bindings)
        try:
            calibrated = calibrate_root(root, self._scheme, self._schedule, bindings, attention, self._loop(block))
        except Exception as error:
            if not of_modelopt(error) and isinstance(error, BridgeError | MemoryError | OSError):
                raise
            if why := self._why_failed(block, error):
                raise CalibrationError(why) from error
            error.add_note(f"in {self._raised_in(error, block)}")
            raise
        with quiet():
            if self._gauge:
                self._measure(block, self._gauge.runner(block.name, dict(self.plain.inside(block)), calibrated))
            self._pass((), self.plain.modules[block.name], block)  # those that no run of the data took along
            if self._quantized:
                fold_weights(root, bindings)
            self._pass(self._quantized, root.get_submodule(block.name), block)
        experts = any(binding.site.stacked or binding.expert is not None for binding in bindings)
        seen = joined_counts(collect(calibrated, self._scheme), self._workers, experts)
        self._choose(seen, root, bindings)
        drop_quantizers(root, bindings)
        return seen

    def _choose(self, seen: Statistics, root: Any, bindings: Sequence[QuantizerBinding]) -> None:
        """Write the codes and scales that a block chose to a file, where they stay."""
        found = chosen_of(root, bindings, self._origins)
        seen["weight_amax"] |= found["weight_amax"]
        with written(self._left.directory if self._left else None, "chosen codes"):
            if self._codes is None and any(found[kind] for kind in MATRICES):
                self._codes = self._left.codes if self._left else AppendedFile()
            for kind in MATRICES:
                seen[kind] |= {module: self._codes.append(m) for module, m in found[kind].items() if self._codes}

    def _measure(self, block: Block, run: Callable[..., Any]) -> None:
        for batch in self._waiting(self._held, block):
            batch.parked.fetch()
            with self._blamed(batch, block):
                output = run(batch.inputs, batch.forward.args, batch.forward.kwargs)
            self._progress.step(block)
            self._go_on(batch, output)

    def _inside(self, block: Block, skeleton: Skeleton) -> list[tuple[str, Any]]:
        """The modules of a block that are read at once: all but experts that are read one by one."""
        modules = skeleton.inside(block)
        return self._cuts[block].without(modules) if block in self._cuts else modules

    def _following(self, block: Block) -> Block | None:
        """The block that most likely runs next."""
        return next((b for b in self.blocks if b.order > block.order and b not in self._visited), None)

    def _loop(self, block: Block) -> Callable[[Any], None]:
        """Return ModelOpt's forward_loop for a block: each run has the activations of its stream.

        The last run of a stream gives the activations for the next block.
        """
        streams, runs = self._schedule.streams, 0

        def loop(root: Any) -> None:
            nonlocal runs
            stream, last = streams[runs], streams[runs] not in streams[runs + 1 :]
            runs += 1
            with joined_statistics(root, self._workers):
                self._pass(self._streams[stream], root.get_submodule(block.name), block, last, named=True)

        return loop

    def _pass(
        self, batches: Iterable[Batch], module: Any, block: Block, last: bool = True, named: bool = False
    ) -> None:
        """Run a block for every batch that waits at it; `last`: go on with the outputs. `named`: tell of a NaN."""
        experts, waiting = self._cuts.get(block), self._waiting(batches, block)
        for batch in waiting if experts else ():
            batch.parked.fetch()
        for batch, output in experts.run(waiting, module) if experts else outputs_of(waiting, module, self._watch):
            self._release(batch.forward.args, batch.forward.kwargs)
            self._progress.step(block)
            early = batch in self._held
            if named and not early and has_nan(output):
                raise CalibrationError(self._why_nan(block, batch) or blame(block.name, "NaN"))
            if last or early:
                self._go_on(batch, output)
            else:
                batch.parked.park()

    @staticmethod
    def _waiting(batches: Iterable[Batch], block: Block) -> list[Batch]:
        return [batch for batch in batches if batch.forward.block is block]

    def _why_nan(self, block: Block, batch: Batch) -> str:
        """Which module of the plain block makes a NaN or an infinity of a batch; "" if none does."""
        module, experts = self.plain.modules[block.name], self._cuts.get(block)
        if experts:
            experts.close()
        runs = experts.run([batch], module) if experts else outputs_of([batch], module)
        return why_block_nan(block.name, module, runs, experts.tensors() if experts else ())

    def _why_failed(self, block: Block, error: Exception) -> str:
        """Why ModelOpt's pass failed, by what the plain block does with the same inputs; "" if nothing tells it."""
        for batch in self._waiting((batch for stream in self._streams for batch in stream), block):
            try:
                if why := self._why_nan(block, batch):
                    return why
            except Exception as own:
                return f"{refused(self.plain.model, batch.inputs, own, self._raised_in(own, block))}; {GIVE}"
        experts = self._cuts[block].tensors() if block in self._cuts else ()
        broken = broken_tensor(self._inside(block, self.plain), experts)
        return blame(block.name, "NaN", broken) if broken else words_of(block.name, error)

    def _go_on(self, batch: Batch, output: Any = None) -> None:
        """Let a forward run to its next block; at its end keep the answers."""
        batch.parked.fetch()
        with self._blamed(batch):
            batch.forward.resume(output)
        if batch.forward.block is not None:
            batch.output = output if self._left else None
            batch.parked.park(batch.forward.args, batch.forward.kwargs, batch.output)
            if self._spill:
                self._spill.keep(output, batch.forward.args, batch.forward.kwargs)
        else:
            batch.output = None
            if self._gauge and batch in self._held:
                self._gauge.finish(batch.inputs, batch.forward.result)
            elif batch in self._held:
                self.source_answers.take(batch.at, batch.forward.result)
            elif self.answers and batch in self._quantized:
                self.answers.sampled = self.source_answers.sampled
                self.answers.take(batch.at, batch.forward.result)
            batch.forward.result = None

    @contextmanager
    def _blamed(self, batch: Batch | None = None, block: Block | None = None) -> Iterator[None]:
        """Turn an error of the model's own code into a CalibrationError about its inputs."""
        try:
            yield
        except BridgeError:
            raise
        except Exception as error:
            asked = (batch or next(iter(self._all))).inputs if batch or self._all else {}
            why = refused(self.plain.model, asked, error, self._raised_in(error, block))
            raise CalibrationError(f"{why}; {GIVE}") from error

    def _raised_in(self, error: Exception, block: Block | None) -> str:
        """The module that raised an error, of the plain model or of ModelOpt's copy; at least the block that ran."""
        both = [side.inside(block) if block else side.rest for side in (self.plain, self._fake)]
        return raised_in(error, chain(*both)) or (block.name if block else "")
