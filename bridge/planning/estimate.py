"""Count a plan's bytes and operations, and estimate its time."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from bridge.core.addresses import is_remote
from bridge.core.errors import TableError, UsageError
from bridge.core.machine import available_memory, cached_share, cores
from bridge.core.mappings import mappings, read_table
from bridge.core.text import duration, size
from bridge.core.values import AFFINE, MSE, NARROW, OURS, WEIGHTED, Numeric
from bridge.planning.memory import extent
from bridge.planning.plan import Layout, Plan, Step
from bridge.quant.describe import numeric_words

COPY, CAST = "copy", "cast"  # operations of tensors that are not quantized: as they are, or to another dtype
SMOOTHED = "smoothed"  # multiplied by a pre-scale before it is coded


@dataclass(frozen=True)
class Work:
    """What a conversion does.

    `read`: bytes of the source, each counted once. `written`: bytes of tensors. `tensors`: how many are written.
    `values`: of each operation, by its name: the format of the codes, `smoothed`, `copy` or `cast`.
    """

    read: int
    written: int
    tensors: int
    values: Mapping[str, int]


def work_of(plan: Plan) -> Work:
    """Count the work of a plan, from its headers alone."""
    values = Counter[str]()
    for step in plan.steps:
        count = sum(prod(extent(part, plan.sources)) for part in step.inputs)  # codes are packed: not of the outputs
        for operation in operations(plan, step):
            values[operation] += count
    read = {part.source for step in plan.steps for part in step.inputs if part.source}
    return Work(
        sum(plan.sources[name].nbytes for name in read),
        sum(step.nbytes for step in plan.steps),
        len(plan.outputs),
        dict(sorted(values.items())),
    )


def operations(plan: Plan, step: Step) -> tuple[str, ...]:
    """The operations that every value of a step goes through: one, or those of its format."""
    if step.layout is Layout.SCALES or not step.source:
        return ()
    if step.format is None or plan.copies(step):
        same = plan.sources[step.source].dtype == step.outputs[0].spec.dtype
        return (COPY if same or step.format else CAST,)
    return (*([SMOOTHED] if step.format.prescales else []), *map(operation_of, step.format.weight))


def operation_of(numeric: Numeric) -> str:
    """The name of what makes codes of a numeric.

    >>> operation_of(Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn", search="mse"))
    'fp4 block 16 e4m3 mse'
    """
    if numeric.search == WEIGHTED and not numeric.two_level:  # few powers of two are tried
        return "fp4 block 16 e4m3 four_over_six"
    # without data a third of it; with an importance matrix 2.6 times, after a calibration that takes far longer
    if numeric.dtype in AFFINE:  # one pass over each group, too, whatever its bits: SmolLM2 took 4 ns a value
        return "int4 block 32"
    if numeric.dtype in NARROW:
        return operation_of(replace(numeric, dtype="int4"))
    search = MSE if numeric.search in OURS else numeric.search
    return " ".join(filter(None, [numeric_words(numeric), search]))


DIRTY = 0.15  # of free memory: Linux lets a writer wait from halfway between its thresholds of 10 and 20 %
PROBES = 40  # of 0.1 ms; the fastest counts, which other work delayed least
MIN_FILE = 1 << 20  # bytes of a file that is asked whether it is in the page cache
START, PROCESSOR, SOURCE, DISK = "start-up", "the processor", "reading the source", "the disk"


@dataclass(frozen=True)
class Machine:
    """What a conversion runs on.

    `speed`: of one core, in multiples of that of the table. `source`, `disk`: bytes a second, of reading the source and
    of reading and writing the output. `cache`: bytes of files that stay in memory; a writer waits from `DIRTY` of it.
    """

    cores: int
    speed: float = 1.0
    source: float = math.inf
    disk: float = math.inf
    cache: int = 0


@dataclass(frozen=True)
class Estimate:
    """How long a conversion takes: seconds of each stage, and of each resource, which threads use at the same time.

    `bound`: what most of the time is spent on: start-up, the processor, reading the source, or the disk. `error`: the
    share that the time may be wrong by where the processor bounds it. `rate`: bytes a second that are assumed of what
    bounds it, else 0. `without`: what the plan does not tell and comes on top.

    >>> import bridge
    >>> plan = bridge.plan("examples/models/tiny-llama", target="hf", quant="int8_wo")
    >>> str(bridge.estimate(plan, machine=Machine(cores=2)))
    'about 1 s, limited by start-up, give or take 25 %'
    """

    stages: dict[str, float]
    waits: dict[str, float]
    bound: str
    error: float
    rate: float = 0.0
    without: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    def __str__(self) -> str:
        assumed = f" at {size(round(self.rate))}/s, which is assumed" if self.rate else ""
        text = f"{duration(self.seconds)}, limited by {self.bound}"
        text += assumed or f", give or take {self.error * 100:.0f} %"
        return f"{text}, without {' and '.join(self.without)}" if self.without else text


@dataclass(frozen=True)
class Speeds:
    """The table `mappings/speed.toml`, which `benchmarks/speed.py` writes.

    `probe`: seconds of what `speed_here` measures. `start`, `write`, `verify`: processor seconds by operation: `once`,
    `tensor`, or for each value. `disk`, `remote`: bytes a second. `error`: see `Estimate`.
    """

    probe: float
    error: float
    disk: float
    remote: float
    targets: tuple[str, ...]
    start: dict[str, float]
    write: dict[str, float]
    verify: dict[str, float]


def read_speeds() -> Speeds:
    """Read the table; TableError for a key that it does not know."""
    table = read_table(mappings() / "speed.toml")
    try:
        return Speeds(**{**table.data, "targets": tuple(table.data["targets"])})
    except (KeyError, TypeError) as error:
        raise TableError(f"{table.name}: {error}") from error


def estimate(plan: Plan, model: Any = None, *, verify: bool = True, machine: Machine | None = None) -> Estimate:
    """Estimate how long converting by `plan` takes here, or on `machine`; reads no weight.

    Args:
        model: what the plan was made of: from a server, from a disk, or in the page cache it is read at other speeds;
            None: from memory.
        verify: with the comparison that `convert` makes unless it is told not to.
        machine: None measures a core for some milliseconds, counts cores, and takes the table's disk.

    Raises:
        UsageError: `plan` is none, or the machine has no cores or rates.

    >>> import bridge
    >>> plan = bridge.plan("examples/models/tiny-llama", target="hf", quant="int8_wo")
    >>> bridge.estimate(plan).bound
    'start-up'
    """
    if not isinstance(plan, Plan):
        raise UsageError(f"plan: {type(plan).__name__} is not a plan; pass what bridge.plan(...) returns")
    if machine and min(machine.cores, machine.speed, machine.source, machine.disk) <= 0:
        raise UsageError(f"machine: cores, speed, source and disk are above 0: {machine}")
    speeds, work, assumes = read_speeds(), work_of(plan), machine is None
    machine = machine or machine_here(model, speeds)
    start = spent(speeds.start, work) / machine.speed
    stages, waits = {"start": start}, {START: start, PROCESSOR: 0.0, SOURCE: 0.0, DISK: 0.0}
    limits = dict(waits)
    fits = work.read + work.written < machine.cache
    for stage, table in {"write": speeds.write, **({"verify": speeds.verify} if verify else {})}.items():
        seconds = stage_waits(stage, table, work, machine, fits)
        limit = max(seconds, key=lambda name: seconds[name])
        stages[stage] = seconds[limit]
        limits[limit] += seconds[limit]
        waits = {name: waits[name] + seconds.get(name, 0.0) for name in waits}
    without = ["the calibration"] if plan.calibration else []
    without += [] if plan.target in speeds.targets else [f"the graph or other files of {plan.target}"]
    bound = max(limits, key=lambda name: limits[name])
    rates = {SOURCE: machine.source, DISK: machine.disk} if assumes else {}
    return Estimate(stages, waits, bound, speeds.error, rates.get(bound, 0.0), tuple(without))


def stage_waits(stage: str, table: dict[str, float], work: Work, machine: Machine, fits: bool) -> dict[str, float]:
    """Seconds that a stage waits for each resource, which threads use at the same time: the longest wait counts.

    Cores share values, which kernels compute; what Python does for a tensor happens on one core at a time. `fits`:
    source and output stay in the page cache, so that verification reads no disk.
    """
    read = work.read / machine.source if stage == "write" or not fits else 0.0
    waiting = max(work.written - DIRTY * machine.cache, 0) if stage == "write" else 0 if fits else work.written
    alone = spent(table, replace(work, values={}))
    processor = (alone + (spent(table, work) - alone) / machine.cores) / machine.speed
    return {PROCESSOR: processor, SOURCE: read, DISK: waiting / machine.disk}


def spent(table: dict[str, float], work: Work) -> float:
    """Processor seconds of some work; an operation that was not measured costs as much as the dearest of its dtype."""
    known = {name: seconds for name, seconds in table.items() if name not in ("once", "tensor")}
    values = 0.0
    for name, count in work.values.items():
        same = [seconds for other, seconds in known.items() if other.split()[0] == name.split()[0]]
        values += count * known.get(name, max(same or known.values(), default=0.0))
    return table.get("once", 0.0) + work.tensors * table.get("tensor", 0.0) + values * 1e-9


def machine_here(model: Any, speeds: Speeds) -> Machine:
    """This machine, and how fast `model` is read on it."""
    here = Machine(cores(), speed_here(speeds.probe), disk=speeds.disk, cache=available_memory())
    if isinstance(model, str) and is_remote(model):
        return replace(here, source=speeds.remote)
    if not isinstance(model, str | Path):
        return here  # in memory
    if not Path(model).exists():  # at the hub
        return replace(here, source=speeds.disk)
    every = [Path(model)] if Path(model).is_file() else sorted(Path(model).rglob("*"))
    missing = 1 - cached_share([path for path in every if path.is_file() and path.stat().st_size >= MIN_FILE])
    return replace(here, source=speeds.disk / missing) if missing else here


def speed_here(reference: float) -> float:
    """How fast a core is in multiples of that of the table: a hash, whose arithmetic needs no import of NumPy."""
    return reference / probe()


def probe() -> float:
    """Seconds of the least of `PROBES` rounds."""
    data, times = bytes(1 << 16), []
    for _ in range(PROBES):
        begin = time.perf_counter()
        hashlib.blake2b(data)
        times.append(time.perf_counter() - begin)
    return min(times)
