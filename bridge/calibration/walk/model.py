"""The model of a walk and ModelOpt's copy, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from itertools import chain
from typing import Any

from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import copy_modules, quantizers_of, register_modules
from bridge.calibration.reference_outputs import refused
from bridge.calibration.schedule import Schedule
from bridge.calibration.walk.blocks import Block, find_blocks
from bridge.calibration.walk.experts import cut
from bridge.calibration.walk.options import Options
from bridge.calibration.walk.skeleton import Skeleton
from bridge.calibration.walk.weights import Ahead, Weights, drop, share
from bridge.sources.live_models.checkpoint_names import live_names, tied_names
from bridge.tracker.raised import raised_in

GIVE = "give batches with the inputs it needs"


class WalkModel:
    """A model whose blocks are read, shared with ModelOpt's copy, and dropped, one at a time.

    `plain`: the unquantized model. `fake`: the copy, which ModelOpt quantizes or a watch hooks. `quantizers`: those of
    the whole model. `cuts`: blocks whose experts are read one by one.
    """

    def __init__(self, job: CalibrationJob, options: Options) -> None:
        source, watch, room = job.source, options.watch, options.room
        self.device = job.device or "cpu"
        model = source.load_skeleton()
        if options.probe:
            options.probe.ready(model)
        self.origins = live_names(model, source.specs)
        self._weights = Weights(source, model, self.origins, self.device)
        self._reads = Ahead(self._weights)
        fake = copy_modules(model)
        quantizers = quantizers_of(job.structure, job.scheme, self.origins, tied_names(model))
        if watch:
            watch.prepare(fake)
            quantizers, modules = (
                replace(quantizers, schedule=Schedule(streams=(0, 1) if watch.learns else (0,))),
                set(watch.modules),
            )
        else:
            register_modules(fake, bool(quantizers.attention))
            modules = {binding.module for binding in quantizers.bindings} | {*quantizers.attention}
        self.quantizers = quantizers
        self.blocks = find_blocks(model, modules)
        self.plain, self.fake = Skeleton(model, self.blocks, self.device), Skeleton(fake, self.blocks, self.device)
        bindings = quantizers.bindings
        self.cuts = cut(self.blocks, self.plain, bindings, self._weights, room, source.where) if room else {}

    def place_rest(self) -> None:
        """Read the modules outside the blocks, which stay in memory."""
        self._weights.place(self.plain.rest, self._weights.read(self.plain.rest))
        share(self.fake.rest, self.plain.rest)

    def read_again(self, block: Block) -> list[tuple[str, Any]]:
        """Put the weights of a whole block in place, and return its modules; the caller drops them."""
        modules = self.plain.inside(block)
        self._weights.place(modules, self._weights.read(modules))
        return modules

    def load(self, block: Block) -> list[tuple[str, Any]]:
        """Put the weights of a block in place, and return its modules; experts that are read one by one are not."""
        modules = self.inside(block)
        self._weights.place(modules, self._reads.take(block.name, modules))
        return modules

    def read_ahead(self, block: Block, visited: Set[Block]) -> None:
        """Begin to read the block that most likely runs after this one."""
        following = next((b for b in self.blocks if b.order > block.order and b not in visited), None)
        if following:
            self._reads.start(following.name, self.inside(following))

    def share(self, block: Block) -> None:
        """Give the copy of a block the weights of the unquantized one."""
        share(self._but_experts(block, self.fake), self.inside(block))

    def unload(self, block: Block) -> None:
        """Free the weights of a block and of its copy."""
        drop(self.inside(block))
        drop(self.fake.inside(block))

    def inside(self, block: Block) -> list[tuple[str, Any]]:
        """The modules of an unquantized block that are read at once: all but experts that are read one by one."""
        return self._but_experts(block, self.plain)

    def _but_experts(self, block: Block, skeleton: Skeleton) -> list[tuple[str, Any]]:
        modules = skeleton.inside(block)
        return self.cuts[block].without(modules) if block in self.cuts else modules

    def raised_in(self, error: Exception, block: Block | None) -> str:
        """The module that raised an error, of the plain model or of ModelOpt's copy; at least the block that ran."""
        both = [side.inside(block) if block else side.rest for side in (self.plain, self.fake)]
        return raised_in(error, chain(*both)) or (block.name if block else "")

    def why_refused(self, inputs: Mapping[str, Any], error: Exception, block: Block | None) -> str:
        """What to say of an error of the model's own code."""
        return f"{refused(self.plain.model, inputs, error, self.raised_in(error, block))}; {GIVE}"

    def close(self) -> None:
        """Wait for a read that has begun, and end the forwards that wait at experts."""
        self._reads.close()
        for experts in self.cuts.values():
            experts.close()
