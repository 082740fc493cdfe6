"""Snapshot of an output directory: digests and origins of its tensors.

It does not depend on the run (times, paths, threads): the report and other files of `bridge` itself are left out.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.core.arrays import Buffers
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.mappings import Place
from bridge.core.output.names import CARD, ENGINES, WRITES
from bridge.core.progress import BYTES, Progress, no_progress
from bridge.core.text import pattern
from bridge.core.values import TensorSpec
from bridge.planning.plan import Output, Plan, Step
from bridge.quant.describe import format_name, rounding_words
from bridge.streaming.rows import in_threads
from bridge.streaming.written import open_written
from bridge.tables.architectures.arch import load_arch
from bridge.tables.dialects.dialect import dialect_names, load_dialect
from bridge.tables.expressions.grammar import roles_in
from bridge.targets.manifest import load_manifest
from bridge.workflows.golden.digests import Digest, digest_file, digest_tensor
from bridge.workflows.golden.store import File, Key, Made, Origin, Snapshot, Statistics, Tensor

# The model card has measurements, if there were any; each build of a TensorRT engine gives other bytes.
IGNORED = tuple({*WRITES, CARD, *ENGINES})
_INDEX = re.compile(r"\{\w+\}")
_SLAB = re.compile(r"\[\d+\]\.\d+(?=\.)")  # a layer of a stacked tensor, as in the plan's layers[22].3.mlp


class SnapshotReader:
    """An output directory, open for reading; a damaged file is an error, a missing one has no tensors."""

    def __init__(self, directory: Path, progress: Progress = no_progress) -> None:
        self.directory = directory
        self.plan = load_manifest(directory).plan
        self._progress = progress
        self._files = {
            name: open_written(directory / name, self.plan) for name in self.plan.files if (directory / name).is_file()
        }
        self._specs = {(name, key): spec for name, file in self._files.items() for key, spec in file.specs.items()}

    def snapshot(self, statistics: bool = False) -> Snapshot:
        """Read the whole directory once."""
        digests = self._digest(self._specs, statistics)
        planned = origins_of(self.plan)
        origins = {key: planned.get(key, Origin(key[1])) for key in self._specs}
        ids = {origin: origin.id for origin in dict.fromkeys(origins.values())}
        tensors = {
            key: Tensor(spec.name, key[0], spec.shape, spec.dtype, digest.hash, ids[origins[key]], digest.statistics)
            for key, spec in self._specs.items()
            for digest in [digests[key]]
        }
        samples = {key: digest.sample for key, digest in digests.items()}
        plan = self.plan
        words = sorted({rounding_words(step.format, step.coding.bound) for step in plan.quantized if step.format})
        made = Made(
            plan.target, plan.architecture, plan.scheme, plan.scheme_digest, plan.digest, plan.options,
            "; ".join(words), plan.rotation,
        )  # fmt: skip
        return Snapshot(made, tensors, self._file_hashes(), {id_: origin for origin, id_ in ids.items()}, samples)

    def statistics(self, keys: Iterable[Key]) -> dict[Key, Statistics]:
        """Statistics of some tensors, which are read again."""
        digests = self._digest({key: self._specs[key] for key in keys}, True)
        return {key: digest.statistics for key, digest in digests.items() if digest.statistics}

    def _digest(self, specs: Mapping[Key, TensorSpec], statistics: bool) -> dict[Key, Digest]:
        total, done, lock = sum(spec.nbytes for spec in specs.values()), [0], threading.Lock()

        def one(key: Key, buffers: Buffers) -> Digest:
            digest = digest_tensor(self._files[key[0]], specs[key], buffers, statistics)
            with lock:
                done[0] += specs[key].nbytes
                self._progress(done[0], total, BYTES[2])
            return digest

        by_size = sorted(specs, key=lambda key: -specs[key].nbytes)  # so that no thread begins a large one last
        return dict(zip(by_size, in_threads(one, by_size, self.directory), strict=True))

    def _file_hashes(self) -> dict[str, File]:
        paths = {path.relative_to(self.directory).as_posix(): path for path in self.directory.rglob("*")}
        names = sorted(
            name for name, path in paths.items() if path.is_file() and not any(fnmatchcase(name, g) for g in IGNORED)
        )

        def one(name: str, buffers: Buffers) -> File:
            path, weights = paths[name], self._files.get(name)
            size = path.stat().st_size
            if weights is None:
                return File(name, size, digest_file(path, buffers))
            if not isinstance(weights, SafetensorsFile):
                return File(name, size, "", header=True)  # its index is a file of its own
            begin = min((entry.offset for entry in weights.header.entries.values()), default=size)
            return File(name, size, digest_file(path, buffers, begin), header=True)

        return dict(zip(names, in_threads(one, names, self.directory), strict=True))


def origins_of(plan: Plan) -> dict[Key, Origin]:
    """File and name of every planned tensor -> its origin."""
    rows = _Rows(plan)
    origins: dict[Key, Origin] = {}
    known: dict[Origin, Origin] = {}  # layers share their origins
    for step in plan.steps:
        weight_format, from_rows = format_name(step.format) if step.format else "", rows.of(step)
        for output in step.outputs:
            name, made = _pattern(output.spec.name), _pattern(output.expression)
            origin = Origin(name, output.part, weight_format, made, from_rows)
            origins[output.key] = known.setdefault(origin, origin)
    return origins


def _pattern(text: str) -> str:
    """`text` with {} for the numbers of layers and experts."""
    return pattern(_SLAB.sub(".{}", text))


class _Rows:
    """The table rows of a plan, by tensor name."""

    def __init__(self, plan: Plan) -> None:
        arch = load_arch(plan.architecture)
        self._prefix = arch.prefix if arch else ""
        own = [row for row in arch.rows if plan.architecture in (row.only or (plan.architecture,))] if arch else []
        self._arch = {_INDEX.sub("{}", row.name): row for row in own}
        self._written: Callable[[Step], Iterable[str]] = lambda step: ()
        if plan.target in dialect_names():
            self._written = _written_rows(plan)
        self._read = _read_rows(plan) if plan.dialect in dialect_names() else {}

    def of(self, step: Step) -> tuple[str, ...]:
        """The target's row first, then the architecture's, then the rows that read the source's dialect."""
        names = [_pattern(part.source) for part in step.inputs if part.source]
        spelled = [spelling for name in names for spelling in (name, self._prefix + name)]
        sources = [self._arch[name] for name in spelled if name in self._arch]
        foreign = [
            text for row in sources if row.expr for role in roles_in(row.expr) for text in self._read.get(role, ())
        ]
        return tuple(dict.fromkeys((*self._written(step), *(_text(row.place) for row in sources), *foreign)))


def _read_rows(plan: Plan) -> dict[str, list[str]]:
    """Role -> the rows of the source's dialect that contain it."""
    dialect, rows = load_dialect(plan.dialect), dict[str, list[str]]()
    for row in dialect.rows:
        if row.only in ("", dialect.architectures.get(plan.architecture, "")):
            for role in row.roles:
                rows.setdefault(role, []).append(_text(row.place))
    return rows


def _written_rows(plan: Plan) -> Callable[[Step], Iterator[str]]:
    dialect = load_dialect(plan.target)
    word = dialect.architectures.get(plan.architecture, "")
    rows: dict[str, list[tuple[str, str]]] = {}
    for row in dialect.rows:
        if row.written and row.only in ("", word):
            rows.setdefault(_INDEX.sub("{}", row.name), []).append((str(row.expr), _text(row.place)))

    def find(step: Step) -> Iterator[str]:
        output: Output | None = next((output for output in step.outputs if output.part == "weight"), None)
        named = rows.get(_pattern(output.spec.name), []) if output else []
        exact = [text for expression, text in named if output and expression in output.expression]
        yield from exact or [text for _, text in named]

    return find


def _text(place: Place) -> str:
    """File and row, without the line number, which changes with other rows."""
    row = re.split(r"\s+#", place.row)[0]
    return f"{place.file}: {' '.join(row.split())}"
