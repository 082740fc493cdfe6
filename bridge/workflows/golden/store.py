"""The values of a golden, and its files.

    golden.json           conversion, run, versions, and the history of updates with their reasons
    tensors.jsonl         one line per tensor: shape, dtype, hash, statistics
    origins.jsonl         one line for tensors that differ only in their layer: expression, format, table rows
    files.jsonl           one line per file: bytes, hash
    values.safetensors    samples of every tensor, inputs and outputs of the run
    calibration.safetensors, NAME.toml    to convert again, if the scheme needs them

Text files are sorted and have one entry per line, for readable diffs. The files are untrusted: nothing is unpickled,
every field is checked, and all files must agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bridge.core.addresses import check_length
from bridge.core.dtypes import DTYPES
from bridge.core.errors import BridgeError, GoldenError
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes
from bridge.core.output.directory import output_directory
from bridge.core.output.names import JOURNAL, MANIFEST
from bridge.core.parsing.limited import parse_json
from bridge.core.parsing.typed_json import typed
from bridge.core.records import later, plain
from bridge.quant.codec.arrays import Array

T = TypeVar("T")
Key = tuple[str, str]  # file and name, unique in a model

VERSION = 1
MARK = "golden.json"
LINES = ("tensors.jsonl", "origins.jsonl", "files.jsonl")
VALUES = "values.safetensors"
CALIBRATION = "calibration.safetensors"
MAX_FILE = 1 << 30  # bytes; a golden of a million tensors has less
SAMPLES = "samples"  # the samples of all tensors, in the order of tensors.jsonl
SAMPLE = 64  # elements of each tensor
EDGE = 8  # of them from each end


@dataclass(frozen=True)
class Statistics:
    """Of the finite values of a tensor; None if there are none. Equal on every machine, to the last digit."""

    min: float | None
    max: float | None
    mean: float | None
    nonfinite: int


@dataclass(frozen=True)
class Tensor:
    """A stored tensor; `hash` is the XXH3 of its bytes, `origin` the id of its `Origin`."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    hash: str
    origin: str = ""
    statistics: Statistics | None = None

    @property
    def key(self) -> Key:
        return self.file, self.name


@dataclass(frozen=True)
class File:
    """A file and the XXH3 of its bytes; of a file with tensors, only of its header (`header`)."""

    name: str
    bytes: int
    hash: str
    header: bool = False


@dataclass(frozen=True)
class Origin:
    """How tensors were made that differ only in their layer, whose number is {} here.

    `part`: see `bridge.planning.plan.Output`. `format`: of the weight, "" if it is not quantized. `made`: the plan's
    expression. `rows`: the table rows it came from, the target's first.
    """

    tensors: str
    part: str = "weight"
    format: str = ""
    made: str = ""
    rows: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """A hash of the content, so that a change of one origin does not change the lines of the others."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]

    @property
    def kind(self) -> str:
        """The kind of a `Difference` of such a tensor's values."""
        if "scale" in self.part:
            return "scales"
        return "codes" if self.format else "weights"


@dataclass(frozen=True)
class Made:
    """The parts of the plan that decide the bytes; its digest covers more: source tensors, notes, memory."""

    target: str
    architecture: str
    scheme: str
    scheme_digest: str
    plan_digest: str
    options: dict[str, Any]
    rounding: str = ""
    """The rules by which codes are chosen, as `describe.rounding_words` names them; "" in older goldens."""
    rotation: str = later("")


@dataclass(frozen=True)
class Snapshot:
    """The bytes of a written model. `samples`: a few elements of each tensor, at `positions`."""

    made: Made
    tensors: Mapping[Key, Tensor]
    files: Mapping[str, File]
    origins: Mapping[str, Origin]
    samples: Mapping[Key, Array]

    def origin(self, tensor: Tensor) -> Origin:
        return self.origins.get(tensor.origin, Origin(tensor.name))


@dataclass(frozen=True)
class Reference:
    """The results of a run of the model on fixed inputs; `not_run` says why there was no run.

    `values`: float32 samples of the model's output ("output") and of the inputs and outputs of its first matrices
    ("MODULE input", "MODULE output"). `ran`: what was run, if not the written file itself. `tolerance`: the allowed
    difference of another run, relative L2.
    """

    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    ran: str = ""
    tolerance: float = 0.0
    not_run: str = ""


@dataclass(frozen=True)
class Rerun:
    """The arguments of `bridge.convert`, besides target and options, that write the model again.

    `quant`: a scheme, or the file of a recipe in the golden's directory. `calibrated`: the golden has a calibration
    file. `refused`: why the model cannot be converted again. `group`, `zero_points`: of its blocks, if they are not
    those of the scheme.
    """

    quant: str | None = None
    kv: str | None = None
    calibrated: bool = False
    refused: str = ""
    group: int | None = later(None)
    zero_points: bool = later(False)

    @property
    def recipe(self) -> str:
        """The file of the recipe, "" if `quant` is not a recipe."""
        return self.quant if self.quant and self.quant.endswith(".toml") else ""


@dataclass(frozen=True)
class Change:
    """An update of a golden: date, reason, versions before and after, and what had moved."""

    date: str
    reason: str
    qbridge: str
    moved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Golden:
    """A stored golden. `extra_files`: files that another conversion needs, by name."""

    snapshot: Snapshot
    reference: Reference
    rerun: Rerun
    versions: Mapping[str, str]
    history: tuple[Change, ...] = ()
    extra_files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of the snapshot: the same wherever the same model was recorded."""
        return _digest(_lines(self.snapshot))

    def statistics(self, keys: Iterable[Key]) -> dict[Key, Statistics]:
        return {key: statistics for key in keys if (statistics := self.snapshot.tensors[key].statistics)}

    def save(self, directory: Path) -> None:
        """Write the golden to `directory`, replacing an older one; readers never see a partial golden."""
        _check_own_files(directory)
        lines = _lines(self.snapshot)
        head = {
            "golden": VERSION,
            "digest": _digest(lines),
            **plain(self.snapshot.made),
            "rerun": plain(self.rerun),
            "reference": {name: getattr(self.reference, name) for name in ("ran", "tolerance", "not_run")},
            "versions": dict(sorted(self.versions.items())),
            "history": plain(self.history),
        }
        text = json.dumps(head, indent=1, allow_nan=False) + "\n"
        files = {**lines, VALUES: self._values(), **self.extra_files, MARK: text.encode()}
        with output_directory(directory, self.digest, overwrite=True, resume=False, mark=MARK) as work:
            for name, content in files.items():
                (work.directory / name).write_bytes(content)

    def _values(self) -> bytes:
        samples = [self.snapshot.samples[key].reshape(-1).view(np.uint8) for key in sorted(self.snapshot.tensors)]
        arrays = {SAMPLES: np.concatenate([*samples, np.empty(0, np.uint8)])}
        arrays |= {f"input/{name}": array for name, array in self.reference.inputs.items()}
        arrays |= {f"value/{i:03d}/{name}": array for i, (name, array) in enumerate(self.reference.values.items())}
        return file_bytes({name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())})


def is_golden(directory: Path) -> bool:
    """Whether `directory` is a golden, possibly a damaged one."""
    check_length(directory / MARK)
    return (directory / MARK).is_file()


def load(directory: Path) -> Golden:
    """Read a golden; GoldenError if `directory` is not a golden or is damaged."""
    if not is_golden(directory):
        if (directory / MANIFEST).is_file():
            raise GoldenError(
                f"{directory}: a written model, not a golden; the golden comes first: "
                f"`qbridge golden check GOLDEN {directory}`"
            )
        what = "not a golden (no golden.json in it)" if directory.is_dir() else "no such directory"
        raise GoldenError(f"{directory}: {what}; `qbridge golden record OUT {directory}` makes one")
    read = directory.stat().st_ino
    try:
        return _load(directory)
    except _DamagedError as error:
        why = str(error)
    except (BridgeError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    if not directory.exists() or directory.stat().st_ino != read:
        return load(directory)  # another run published a golden between two files
    raise GoldenError(
        f"{directory}: damaged, or not written by qbridge: {why}\n"
        "  hint   restore it from version control, or remove it and record it again"
    )


class _DamagedError(Exception):
    """A problem, without the directory; `load` adds it."""


def _load(directory: Path) -> Golden:
    head = parse_json(_text(directory / MARK))
    if not isinstance(head, dict) or head.get("golden") != VERSION:
        version = head.get("golden") if isinstance(head, dict) else None
        raise _DamagedError(f"{MARK} has golden = {version!r}, this version of qbridge reads {VERSION}")
    texts = {name: _text(directory / name).encode() for name in LINES}
    if _digest(texts) != head["digest"]:
        raise _DamagedError(f"{', '.join(LINES)} do not match the digest in {MARK} (a merge, an edit?)")
    tensors = {tensor.key: tensor for tensor in _each(texts, "tensors.jsonl", _tensor)}
    origins = {origin.id: origin for origin in _each(texts, "origins.jsonl", _origin)}
    files = {file.name: file for file in _each(texts, "files.jsonl", lambda row: typed(File, row))}
    made = typed(Made, {"rounding": "", **{name: head[name] for name in Made.__match_args__ if name in head}})
    values = SafetensorsFile(directory / VALUES)
    snapshot = Snapshot(made, tensors, files, origins, _samples(tensors, values))
    rerun = typed(Rerun, head["rerun"])
    if rerun.quant and Path(rerun.quant).name != rerun.quant:
        raise _DamagedError(f"{MARK} has the recipe {rerun.quant!r}: a golden names files of its own directory only")
    names = [CALIBRATION] * rerun.calibrated + [rerun.recipe] * bool(rerun.recipe)
    return Golden(
        snapshot,
        _reference(head["reference"], values),
        rerun,
        typed(dict[str, str], head["versions"]),
        typed(tuple[Change, ...], head["history"]),
        {name: (directory / name).read_bytes() for name in names},
    )


def _lines(snapshot: Snapshot) -> dict[str, bytes]:
    tensors = [plain(snapshot.tensors[key]) for key in sorted(snapshot.tensors)]
    used = {tensor.origin for tensor in snapshot.tensors.values()}
    origins = [origin for id_, origin in snapshot.origins.items() if id_ in used]
    origins.sort(key=lambda origin: (origin.tensors, origin.id))
    files = [plain(snapshot.files[name]) for name in sorted(snapshot.files)]
    rows = (tensors, [{"id": origin.id, **plain(origin)} for origin in origins], files)
    return {
        name: "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in lines).encode()
        for name, lines in zip(LINES, rows, strict=True)
    }


def _digest(texts: Mapping[str, bytes]) -> str:
    return hashlib.sha256(b"\0".join(texts[name] for name in LINES)).hexdigest()


def _check_own_files(directory: Path) -> None:
    """A golden is replaced as a whole, so its directory may hold no other files."""
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    own = {MARK, *LINES, VALUES, CALIBRATION, JOURNAL}
    others = [name for name in names if name not in own and not name.endswith(".toml")]
    if others:
        raise GoldenError(f"{directory} holds {', '.join(others[:3])}: keep a golden in a directory of its own")


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_FILE:
        raise _DamagedError(f"{path.name} has more than {MAX_FILE} bytes")
    return path.read_text(encoding="utf-8")


def _each(texts: Mapping[str, bytes], name: str, parse: Callable[[Any], T]) -> Iterable[T]:
    for number, line in enumerate(texts[name].decode().splitlines(), 1):
        try:
            yield parse(parse_json(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _DamagedError(f"{name}:{number}: not a line of a golden ({error})") from error


def _tensor(row: Any) -> Tensor:
    tensor = typed(Tensor, row)
    if tensor.dtype not in DTYPES or min(tensor.shape, default=0) < 0:
        raise ValueError(f"shape {tensor.shape}, dtype {tensor.dtype!r}")
    return tensor


def _origin(row: Any) -> Origin:
    return typed(Origin, {name: value for name, value in row.items() if name != "id"})


def _reference(row: Mapping[str, Any], values: SafetensorsFile) -> Reference:
    inputs = {name.removeprefix("input/"): values.read(name) for name in values.specs if name.startswith("input/")}
    samples = {name.split("/", 2)[2]: values.read(name) for name in sorted(values.specs) if name.startswith("value/")}
    return Reference(
        inputs, samples, typed(str, row["ran"]), typed(float, row["tolerance"]), typed(str, row["not_run"])
    )


def _samples(tensors: Mapping[Key, Tensor], values: SafetensorsFile) -> dict[Key, np.ndarray]:
    flat, samples, begin = values.read(SAMPLES).view(np.uint8).reshape(-1), {}, 0
    for key in sorted(tensors):
        kind = np.dtype(DTYPES[tensors[key].dtype].storage)
        end = begin + len(positions(key[1], int(np.prod(tensors[key].shape, dtype=object)))) * kind.itemsize
        samples[key] = flat[begin:end].copy().view(kind)
        begin = end
    if begin != flat.size:
        raise _DamagedError(f"{VALUES} has {flat.size} bytes of samples, the tensors need {begin}")
    return samples


def positions(name: str, size: int, count: int = SAMPLE) -> np.ndarray:
    """Indices of a tensor's samples: from both ends, and others derived from its name."""
    if size <= count:
        return np.arange(size)
    edge = min(EDGE, count // 4)
    drawn = np.frombuffer(hashlib.shake_256(name.encode()).digest(8 * (count - 2 * edge)), "<u8") % size
    return np.array(sorted({*range(edge), *range(size - edge, size), *drawn.tolist()}))
