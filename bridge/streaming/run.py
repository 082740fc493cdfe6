"""The stream: runs a plan's steps on threads under a byte budget, each output straight to its place in its file.

Reading, computing and writing overlap because several threads do all three; there are no queues between them. Steps
that share an amax are one task of one thread: it looks at all of them, then codes them. Tasks share nothing, so the
bytes do not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.budget import PIECE, cores, working_set
from bridge.errors import SourceError, WriteError
from bridge.journal import check_joined
from bridge.making import Emit, Maker
from bridge.planning import Output, Step
from bridge.portions import cut
from bridge.progress import BYTES
from bridge.quant.bits import Array
from bridge.quant.scheme import has_tensor_scale
from bridge.remote.threads import readers
from bridge.targets import load_target
from bridge.tensor_file import TensorFile
from bridge.values import TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion
    from bridge.portions import Portion, Spread
    from bridge.sources import Source


@dataclass
class Streamed:
    """What a run leaves to tell: tensor -> its policy, sharing group -> its largest over its smallest amax."""

    policies: dict[str, str] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)

    def add(self, step: Step, told: Mapping[str, Any]) -> None:
        """Take in what one step had to tell; it survives a kill in the journal."""
        if "policy" in told:
            self.policies[step.source] = told["policy"]
        if "spread" in told:
            self.spreads[step.shares] = told["spread"]

    def notes(self) -> tuple[str, ...]:
        """The sharing groups in one sentence."""
        if not self.spreads:
            return ()
        worst = max(self.spreads.values())
        return (f"{len(self.spreads)} groups share one weight scale; their amax differed {worst:.2f} times at most",)


class Budget:
    """Bytes in use by running tasks; a task larger than the budget runs alone."""

    def __init__(self, total: int) -> None:
        self._free, self._total = total, total
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` (at most the whole budget) are free, and hold them."""
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


class Tasks:
    """Steps of a plan as tasks; each worker takes from an output file of its own while there is one.

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
        """The next task for worker number `worker`, None when all are taken."""
        with self._lock:
            names = list(self._queues)
            for turn in range(len(names)):
                queue = self._queues[names[(worker + turn) % len(names)]]
                if queue:
                    return queue.popleft()
        return None

    def __iter__(self) -> Iterator[list[Step]]:
        """Those that are not taken, file by file."""
        return chain.from_iterable(self._queues.values())


def run(conversion: Conversion, directory: Path, stop: threading.Event) -> Streamed:
    """Run all steps of the plan into their files in `directory`; the first error, or `stop`, ends the run."""
    plan, streamed = conversion.plan, Streamed()
    _check_ties(conversion)
    tasks, tell = Tasks(plan.steps, conversion.source), _Tell(conversion, streamed, conversion.work.mark)
    files = _files(conversion, directory)

    def emit(output: Output, array: Array, at: int) -> None:
        files[output.file].write(output.spec.name, array, at)
        tell.written(array.nbytes)

    if conversion.spread:
        _spread(conversion, conversion.spread, tasks, tell, stop)
    else:
        _run(conversion, tasks, emit, tell, stop)
    return Streamed(dict(sorted(streamed.policies.items())), streamed.spreads)


def run_portion(conversion: Conversion, directory: Path, portion: Portion) -> dict[str, Mapping[str, Any]]:
    """Run some steps of the plan for a run in another process, which made the files and keeps the journal.

    Returns what there is to tell of each step that was not done before, by its key.
    """
    told: dict[str, Mapping[str, Any]] = {}
    wanted, work = set(portion.steps), conversion.work
    steps = [step for step in conversion.plan.steps if _key(step) in wanted]
    files = _files(conversion, directory, steps)

    def emit(output: Output, array: Array, at: int) -> None:
        check_joined(directory, work.identity)
        files[output.file].write(output.spec.name, array, at)

    tell = _Tell(conversion, Streamed(), told.__setitem__)
    _run(conversion, Tasks(steps, conversion.source), emit, tell, threading.Event())
    return told


def _spread(conversion: Conversion, spread: Spread, tasks: Tasks, tell: _Tell, stop: threading.Event) -> None:
    """Let other processes run the tasks that a killed run had not finished."""
    steps = {_key(step): step for task in tasks for step in task}
    open_ = [task for task in tasks if not all([tell.finished(step) for step in task])]
    sizes = [(tuple(map(_key, task)), sum(step.nbytes for step in task)) for task in open_]
    for told in spread.run(conversion, cut(sizes, conversion.work.done, spread.processes), stop):
        for key, what in told.items():
            tell.done(steps[key], what)
            tell.written(steps[key].nbytes)


def _run(conversion: Conversion, tasks: Tasks, emit: Emit, tell: _Tell, stop: threading.Event) -> None:
    """Run tasks on threads under the budget of a conversion."""
    plan, budget = conversion.plan, Budget(max(conversion.memory, 1))

    def work(number: int) -> None:
        maker = Maker(conversion)
        try:
            while not stop.is_set() and (task := tasks.take(number)) is not None:
                with budget.taken(max(working_set(step, plan.sources) for step in task)):
                    _do(task, maker, emit, tell, stop)
        except BaseException:
            stop.set()
            raise

    workers = conversion.workers or cores()
    with readers(workers, conversion.source, name="stream") as pool:
        futures = [pool.submit(work, number) for number in range(workers)]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            raise
        for future in done:
            future.result()


def _do(task: list[Step], maker: Maker, emit: Emit, tell: _Tell, stop: threading.Event) -> None:
    """Run the steps of one task, those that a killed run had finished excepted."""
    open_ = [step for step in task if not tell.finished(step)]
    amaxes = [maker.amax(step) for step in task if step.format and has_tensor_scale(step.format)] if open_ else []
    largest = max(amaxes, default=None)
    spread = {"spread": max(amaxes) / min(amaxes)} if len(amaxes) > 1 and min(amaxes) > 0 else {}
    for step in open_:
        if stop.is_set():
            return
        made = [0]

        def counted(output: Output, array: Array, at: int, made: list[int] = made) -> None:
            made[0] += array.nbytes
            emit(output, array, at)

        told = maker.make(step, largest, counted) | spread
        if made[0] != step.nbytes:
            raise WriteError(f"{step.source}: the plan has {step.nbytes} bytes, the step made {made[0]}: a bug of ours")
        tell.done(step, told)


class _Tell:
    """The journal, the progress and what is to be told, from all workers."""

    def __init__(self, conversion: Conversion, streamed: Streamed, mark: Callable[[str, Mapping[str, Any]], None]):
        self._conversion, self._streamed, self._mark = conversion, streamed, mark
        self._total = sum(step.nbytes for step in conversion.plan.steps)
        self._bytes = 0
        self._lock = threading.Lock()

    def finished(self, step: Step) -> bool:
        """True for what a killed run had written, which is counted and told again."""
        told = self._conversion.work.done.get(_key(step))
        if told is None:
            return False
        with self._lock:
            self._streamed.add(step, told)
        self.written(step.nbytes)
        return True

    def done(self, step: Step, told: Mapping[str, Any]) -> None:
        with self._lock:
            self._streamed.add(step, told)
            self._mark(_key(step), told)

    def written(self, nbytes: int) -> None:
        with self._lock:
            self._bytes += nbytes
            self._conversion.progress(self._bytes, self._total, BYTES[0])


def _files(conversion: Conversion, directory: Path, steps: Iterable[Step] | None = None) -> dict[str, TensorFile]:
    """Make the files of the plan; with `steps` none is made, and only those that they write to are known."""
    target, files = load_target(conversion.plan.target), conversion.plan.files
    names = files if steps is None else {output.file for step in steps for output in step.outputs}
    return {
        name: TensorFile(directory / name, files[name], target.metadata, target.align, create=steps is None)
        for name in names
    }


def _place(step: Step, source: Source) -> tuple[str, int]:
    return source.place(step.source) if step.source else ("", 0)


def _key(step: Step) -> str:
    return "/".join(step.outputs[0].key)


def _check_ties(conversion: Conversion) -> None:
    """A tensor that the config ties and the checkpoint stores twice must be one tensor; SourceError where it is two."""
    plan, source = conversion.plan, conversion.source
    for alias, canonical in (plan.tied | plan.untied).items():
        if {alias, canonical} <= set(plan.sources) and not _equal(source, plan.sources[alias], plan.sources[canonical]):
            raise SourceError(
                f"{alias} and {canonical} differ, but the config ties them: which one is meant?\n"
                '  hint   "tie_word_embeddings": false in config.json, or in config=, keeps both'
            )


def _equal(source: Source, one: TensorSpec, other: TensorSpec) -> bool:
    """True where two stored tensors are equal to the bit; read in pieces."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = one.shape[0] if one.shape else 1
    count = max(PIECE * rows // max(one.nbytes, 1), 1)
    for first in range(0, rows, count):
        stop = min(first + count, rows)
        a, b = (source.read_rows(spec.name, first, stop) for spec in (one, other))
        if a.tobytes() != b.tobytes():
            return False
    return True
