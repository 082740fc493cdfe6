"""Encode a plan on several ranks: codes pass between them, not weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bridge.core.machine import cores
from bridge.planning.plan import Step
from bridge.streaming.context import ConversionContext
from bridge.streaming.encode import weight_amax
from bridge.workflows.live.encoding import Groups, Idle, bytes_of, encoded
from bridge.workflows.live.parts import Part, Place, held_by_meetings, parts_of
from bridge.workflows.live.sharded import OwnRows, SharedSource

if TYPE_CHECKING:
    from torch import Tensor

    Pending = tuple[Part, int, Future[list[Tensor]] | None]


class ShardedEncoder:
    """The `Encoder` of a model whose ranks hold parts of its tensors.

    Threads encode what this rank has. Meetings happen in the thread of the caller, in the plan's order, so that all
    ranks have the same ones.
    """

    def __init__(self, context: ConversionContext, source: SharedSource, groups: Groups, memory: int) -> None:
        self._source, self._ranks, self._groups = source, source.ranks, groups
        self._context = context
        self._own = replace(context, source=OwnRows(context.source, source))
        self._parts = parts_of(context.plan, source)
        self._memory = memory - held_by_meetings(self._parts, source)
        self._buffers = Idle()
        self._failed: Exception | None = None

    @property
    def parts(self) -> list[Part]:
        """The steps of the plan, and where each runs."""
        return self._parts

    def run(self, local: bool = False) -> Iterator[tuple[Step, list[Tensor]]]:
        """Yield each step with the bytes of its outputs; at most `memory` bytes are in use at a time.

        `local`: of steps whose rows ranks share as they share the weight, the step of this rank's rows alone.
        """
        pending: deque[Pending] = deque()
        held, self._failed = 0, None
        with ThreadPoolExecutor(cores(), thread_name_prefix="live") as pool:
            try:
                amaxes = self._amaxes(pool)
                for part in self._parts:
                    need = bytes_of(part.step, self._context.plan)
                    while pending and held + need > self._memory:
                        first, taken, future = pending.popleft()
                        yield from self._finished(first, future, amaxes, local)
                        del future
                        held -= taken
                    pending.append((part, need, self._started(pool, part, amaxes, local)))
                    held += need
                while pending:
                    first, _, future = pending.popleft()
                    yield from self._finished(first, future, amaxes, local)
                if not local and any(part.place is Place.HERE for part in self._parts):
                    self._ranks.largest([], self._failed, "the end of the iteration")
            finally:
                self._source.forget()
                for _, _, future in pending:
                    if future:
                        future.cancel()

    def _started(
        self, pool: ThreadPoolExecutor, part: Part, amaxes: dict[str, float], local: bool
    ) -> Future[list[Tensor]] | None:
        """The encoding of what this rank has; None if it has nothing, or all must be gathered first."""
        amax = amaxes.get(self._groups.key(part.step) or "")
        if part.place is Place.HERE:
            return pool.submit(self._encode, part.step, self._context, amax)
        own = self._own_step(part, local)
        return pool.submit(self._encode, own, self._own, amax) if own else None

    def _own_step(self, part: Part, local: bool) -> Step | None:
        """The step that this rank runs of a shared one."""
        if part.place is not Place.OWN:
            return None
        rank = self._ranks.rank
        return part.alone_on(rank) if local and part.alone else part.ranks[rank]

    def _finished(
        self, part: Part, future: Future[list[Tensor]] | None, amaxes: dict[str, float], local: bool
    ) -> Iterator[tuple[Step, list[Tensor]]]:
        if part.place is Place.HERE:
            assert future
            if made := self._here(future, local):
                yield part.step, made
        elif part.place is Place.WHOLE:
            amax = amaxes.get(self._groups.key(part.step) or "")
            made = self._encode(part.step, self._context, amax)
            if not self._failed:
                yield part.step, made
        elif local and part.alone:
            if future and (own := self._own_step(part, local)):
                yield part.yielded(self._ranks.rank, own, future.result())
        else:
            error, mine = self._failed, np.empty(0, np.uint8)
            try:
                mine = np.concatenate([one.cpu().numpy() for one in future.result()]) if future else mine
            except Exception as raised:  # the others learn of it where they wait for these bytes
                error = raised
                if own := part.ranks[self._ranks.rank]:
                    error.add_note(f"rows count from row {(own.inputs[0].rows or (0,))[0]}, the first of this rank")
            arrays = self._ranks.gather(mine, part.sizes, error, part.step.outputs[0].spec.name)
            yield part.step, part.joined(arrays)

    def _here(self, future: Future[list[Tensor]], local: bool) -> list[Tensor] | None:
        """The result of a step that no meeting follows; None after an error, of which the next meeting tells all."""
        try:
            made = future.result()
        except Exception as error:
            if local:
                raise
            self._failed = self._failed or error
        return None if self._failed else made

    def _amaxes(self, pool: ThreadPoolExecutor) -> dict[str, float]:
        """The amax of each group of steps under one scale: one exchange for all of them."""
        keyed = [(key, part) for part in self._parts if (key := self._groups.key(part.step))]
        if not keyed:
            return {}
        futures = [self._measured(pool, part) for _, part in keyed]
        values, error = [0.0] * len(keyed), None
        for number, ((_, part), future) in enumerate(zip(keyed, futures, strict=True)):
            try:
                if part.place is Place.WHOLE:
                    values[number] = self._measure(part.step, self._context)
                elif future:
                    values[number] = future.result()
            except Exception as raised:
                error = error or raised
        most: dict[str, float] = {}
        for (key, _), value in zip(keyed, self._ranks.largest(values, error, "the largest values"), strict=True):
            most[key] = max(value, most.get(key, 0.0))
        return most

    def _measured(self, pool: ThreadPoolExecutor, part: Part) -> Future[float] | None:
        if part.place is Place.HERE:
            return pool.submit(self._measure, part.step, self._context)
        own = part.ranks[self._ranks.rank] if part.place is Place.OWN else None
        return pool.submit(self._measure, own, self._own) if own else None

    def _measure(self, step: Step, context: ConversionContext) -> float:
        with self._buffers.taken() as buffers:
            return weight_amax(step, context, buffers)

    def _encode(self, step: Step, context: ConversionContext, amax: float | None) -> list[Tensor]:
        with self._buffers.taken() as buffers:
            return encoded(step, context, buffers, amax)
