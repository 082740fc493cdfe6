"""Run a plan's steps on threads, under a byte budget.

Each output is written straight to its place in its file. Reading, computing and writing overlap because several threads
do all three; there are no queues between them. Steps that share an amax are one task of one thread: it reads all of
them for their amax, then codes them. Tasks share nothing, so the bytes do not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from bridge.core.arrays import Buffers
from bridge.core.errors import SourceError, WriteError
from bridge.core.machine import cores
from bridge.core.output.journal import check_joined
from bridge.core.progress import BYTES
from bridge.core.remote.readers import readers
from bridge.core.values import TensorSpec
from bridge.planning.drafts import drafts_among
from bridge.planning.memory import PIECE, working_set
from bridge.planning.plan import Output, Step
from bridge.quant.codec.arrays import Array
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.sources.source import Source
from bridge.streaming.context import ConversionContext, Executor, Partition, Sink, StepResult
from bridge.streaming.encode import weight_amax, write_step
from bridge.streaming.tensor_file import TensorFile

MAX_PARTITIONS = 8  # per process: the last to end waits for little, and a killed one loses little
MIN_PARTITION = 64 << 20  # bytes of a partition if a process gets several: starting one takes 0.1 s and more


class Budget:
    """Bytes in use by running tasks. A task larger than the budget runs alone."""

    def __init__(self, total: int) -> None:
        self._free, self._total = total, total
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` (at most the whole budget) are free, and use them."""
        nbytes = min(nbytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()


@dataclass
class Summary:
    """The results of all steps: tensor -> its policy, sharing group -> its largest over its smallest amax."""

    policies: dict[str, str] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)

    def add(self, step: Step, result: StepResult) -> None:
        if result.policy:
            self.policies[step.source] = result.policy
        if result.spread is not None:
            self.spreads[step.shares] = result.spread

    def notes(self) -> tuple[str, ...]:
        if not self.spreads:
            return ()
        worst = max(self.spreads.values())
        return (f"in {len(self.spreads)} groups weights share one scale; their amax differ by up to {worst:.2f} times",)


class Tasks:
    """Steps of a plan, grouped into tasks; each worker takes from its own output file as long as there is one.

    Two writers of one file wait for its lock (0.78 against 0.41 thread-seconds for 1.2 GB on ext4); a worker whose file
    is done helps the others. Within a file tasks follow the source, so that a disk reads forward.
    """

    def __init__(self, steps: Iterable[Step], source: Source) -> None:
        groups: dict[tuple[str, ...], list[Step]] = {}
        for number, step in enumerate(steps):
            key = ("shares", step.shares) if step.shares else ("step", str(number))
            groups.setdefault(key, []).append(step)
        self._queues: dict[str, deque[list[Step]]] = {}
        for task in sorted(groups.values(), key=lambda task: _place(task[0], source)):
            self._queues.setdefault(task[0].outputs[0].file, deque()).append(task)
        self._lock = threading.Lock()

    def take(self, worker: int) -> list[Step] | None:
        """The next task for worker number `worker`; None if all are taken."""
        with self._lock:
            names = list(self._queues)
            for turn in range(len(names)):
                queue = self._queues[names[(worker + turn) % len(names)]]
                if queue:
                    return queue.popleft()
        return None

    def __iter__(self) -> Iterator[list[Step]]:
        """Tasks that are not taken, file by file."""
        return chain.from_iterable(self._queues.values())


def run(context: ConversionContext, directory: Path, stop: threading.Event) -> Summary:
    """Run all steps of the plan into their files in `directory`; the first error, or `stop`, ends the run."""
    plan, summary = context.plan, Summary()
    check_ties(context)
    record = _Record(context, summary, lambda key, result: context.work.mark(key, result.record()))
    tasks, files = Tasks(plan.steps, context.source), _files(context, directory)

    def sink(output: Output, array: Array, at: int) -> None:
        files[output.file].write(output.spec.name, array, at)
        record.count(array.nbytes)

    if context.executor:
        _run_partitions(context, context.executor, tasks, record, stop)
    else:
        _run_tasks(context, tasks, sink, record, stop)
    return Summary(dict(sorted(summary.policies.items())), summary.spreads)


def run_partition(context: ConversionContext, directory: Path, partition: Partition) -> dict[str, StepResult]:
    """Run some steps of the plan for a run in another process, which made the files and keeps the journal.

    Returns the result of each step that was not done before, by its key.
    """
    results: dict[str, StepResult] = {}
    wanted, work = set(partition.steps), context.work
    steps = [step for step in context.plan.steps if _key(step) in wanted]
    files = _files(context, directory, steps)

    def sink(output: Output, array: Array, at: int) -> None:
        check_joined(directory, work.identity)
        files[output.file].write(output.spec.name, array, at)

    record = _Record(context, Summary(), results.__setitem__)
    _run_tasks(context, Tasks(steps, context.source), sink, record, threading.Event())
    return results


def _run_partitions(
    context: ConversionContext, executor: Executor, tasks: Tasks, record: _Record, stop: threading.Event
) -> None:
    """Let other processes run the tasks that a killed run had not finished."""
    steps = {_key(step): step for task in tasks for step in task}
    unfinished = [task for task in tasks if not all([record.is_done(step) for step in task])]
    sizes = [(tuple(map(_key, task)), sum(step.nbytes for step in task)) for task in unfinished]
    for results in executor.run(context, cut(sizes, context.work.done, executor.processes), stop):
        for key, result in results.items():
            record.done(steps[key], result)
            record.count(steps[key].nbytes)


def cut(
    tasks: Sequence[tuple[tuple[str, ...], int]], done: Mapping[str, Mapping[str, Any]], processes: int
) -> list[Partition]:
    """Group tasks (the keys of their steps, and their bytes); partitions that run at once are far from each other.

    Neighbours write to one file: two processes in one file wait for its lock.
    """
    total = sum(nbytes for _, nbytes in tasks)
    size = total / processes / min(max(total // processes // MIN_PARTITION, 1), MAX_PARTITIONS)
    partitions: list[Partition] = []
    keys: list[str] = []
    taken = 0
    for number, (names, nbytes) in enumerate(tasks, 1):
        keys += names
        taken += nbytes
        if taken >= size * (len(partitions) + 1) or number == len(tasks):
            partitions.append(Partition(tuple(keys), {key: done[key] for key in keys if key in done}))
            keys = []
    stride = -(-len(partitions) // processes)
    return [partition for first in range(stride) for partition in partitions[first::stride]]


def _run_tasks(context: ConversionContext, tasks: Tasks, sink: Sink, record: _Record, stop: threading.Event) -> None:
    plan, budget = context.plan, Budget(max(context.memory, 1))

    def work(number: int) -> None:
        buffers = Buffers()
        try:
            while not stop.is_set() and (task := tasks.take(number)) is not None:
                with budget.taken(max(working_set(step, plan.sources) for step in task)):
                    _run_task(task, context, buffers, sink, record, stop)
        except BaseException:
            stop.set()
            raise

    workers = context.workers or cores()
    with readers(workers, context.source, name="stream") as pool:
        futures = [pool.submit(work, number) for number in range(workers)]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            raise
        for future in done:
            future.result()


def _run_task(
    task: list[Step], context: ConversionContext, buffers: Buffers, sink: Sink, record: _Record, stop: threading.Event
) -> None:
    """Run the steps of one task, except those that a killed run had finished."""
    unfinished = [step for step in task if not record.is_done(step)]
    shared = [step for step in task if step.format and has_tensor_scale(step.format)] if unfinished else []
    amaxes = [weight_amax(step, context, buffers) for step in shared]
    largest = max(amaxes, default=None)
    spread = max(amaxes) / min(amaxes) if len(amaxes) > 1 and min(amaxes) > 0 else None
    for step in unfinished:
        if stop.is_set():
            return
        nbytes = [0]

        def counted(output: Output, array: Array, at: int, nbytes: list[int] = nbytes) -> None:
            nbytes[0] += array.nbytes
            sink(output, array, at)

        result = replace(write_step(step, context, buffers, largest, counted), spread=spread)
        if nbytes[0] != step.nbytes:
            raise WriteError(
                f"{step.source}: the plan has {step.nbytes} bytes, the step wrote {nbytes[0]}: a bug in qbridge"
            )
        record.done(step, result)


class _Record:
    """The journal, the summary and the progress of a run, from all workers."""

    def __init__(self, context: ConversionContext, summary: Summary, mark: Callable[[str, StepResult], None]) -> None:
        self._context, self._summary, self._mark = context, summary, mark
        self._total = sum(step.nbytes for step in context.plan.steps)
        self._bytes = 0
        self._lock = threading.Lock()

    def is_done(self, step: Step) -> bool:
        """Whether a killed run had written the step; if so, it is counted and summed up again."""
        record = self._context.work.done.get(_key(step))
        if record is None:
            return False
        with self._lock:
            self._summary.add(step, StepResult(record.get("policy", ""), record.get("spread")))
        self.count(step.nbytes)
        return True

    def done(self, step: Step, result: StepResult) -> None:
        with self._lock:
            self._summary.add(step, result)
            self._mark(_key(step), result)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._bytes += nbytes
            self._context.progress(self._bytes, self._total, BYTES[0])


def _files(context: ConversionContext, directory: Path, steps: Iterable[Step] | None = None) -> dict[str, TensorFile]:
    """Create the files of the plan; with `steps`, open only the files that they write to, and create none."""
    settings, files = context.files, context.plan.files
    names = files if steps is None else {output.file for step in steps for output in step.outputs}
    for name in names if steps is None else ():
        (directory / name).parent.mkdir(exist_ok=True)  # a part of a pipeline has a folder
    return {
        name: TensorFile(directory / name, files[name], settings.metadata, settings.align, create=steps is None)
        for name in names
    }


def _place(step: Step, source: Source) -> tuple[str, int]:
    return source.place(step.source) if step.source else ("", 0)


def _key(step: Step) -> str:
    return "/".join(step.outputs[0].key)


def check_ties(context: ConversionContext) -> None:
    """SourceError if the config ties two tensors that the checkpoint stores with different values."""
    plan, source = context.plan, context.source
    for alias, canonical in (plan.tied | plan.untied).items():
        specs = plan.sources
        if {alias, canonical} <= set(specs) and not equal_bits(source, specs[alias], source, specs[canonical]):
            if drafts_among([alias], source.config):
                raise SourceError(
                    f"{alias} and {canonical} differ: target {plan.target} has one tensor for both, with which "
                    "the draft layer would draft other tokens; use drafts='drop' (--drafts drop)"
                )
            raise SourceError(
                f"{alias} and {canonical} differ, but the config ties them: which one is meant?\n"
                '  hint   "tie_word_embeddings": false in config.json, or in config=, keeps both'
            )


class RowReader(Protocol):
    """What reads rows of its tensors: a source, or the weights of one."""

    def read_rows(self, name: str, begin: int, end: int) -> Array: ...


def equal_bits(one: RowReader, spec: TensorSpec, other: RowReader, of: TensorSpec) -> bool:
    """Whether two stored tensors, `spec` of `one` and `of` of `other`, have equal bits; read in pieces."""
    if (spec.shape, spec.dtype) != (of.shape, of.dtype):
        return False
    rows = spec.shape[0] if spec.shape else 1
    count = max(PIECE * rows // max(spec.nbytes, 1), 1)
    for first in range(0, rows, count):
        stop = min(first + count, rows)
        a, b = one.read_rows(spec.name, first, stop), other.read_rows(of.name, first, stop)
        if a.tobytes() != b.tobytes():
            return False
    return True
