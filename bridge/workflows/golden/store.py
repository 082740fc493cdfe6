"""The files of a golden: text that a diff shows line by line, sorted by name, and one small safetensors file.

    golden.json           what was converted how, what a run gave, versions, and the history of updates with its reasons
    tensors.jsonl         a line a tensor: shape, dtype, hash, statistics
    origins.jsonl         a line for tensors that are alike but for their layer: expression, format, rows of tables
    files.jsonl           a line a file: bytes, hash
    values.safetensors    samples of every tensor, inputs and outputs of the run
    calibration.safetensors, NAME.toml    what converting once more needs, where the scheme does

It is read as a stranger's: nothing is unpickled, every field is checked, and the whole must hold together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bridge.container import SafetensorsFile, file_bytes
from bridge.dtypes import DTYPES
from bridge.errors import BridgeError, GoldenError
from bridge.golden.digests import positions
from bridge.golden.values import Change, File, Key, Made, Origin, Reference, Rerun, Snapshot, Statistics, Tensor
from bridge.journal import JOURNAL
from bridge.json_data import parse_json
from bridge.output import output_directory
from bridge.paths import check_length
from bridge.values import plain
from bridge.visible import MARK as WRITTEN

T = TypeVar("T")

VERSION = 1
MARK = "golden.json"
LINES = ("tensors.jsonl", "origins.jsonl", "files.jsonl")
VALUES = "values.safetensors"
CALIBRATION = "calibration.safetensors"
MOST = 1 << 30  # bytes of one file: a golden of a million tensors has less
SAMPLES = "samples"  # all of them, one after the other, in the order of tensors.jsonl


@dataclass(frozen=True)
class Golden:
    """A golden as it is kept. `beside`: files that converting it again needs, by name."""

    snapshot: Snapshot
    reference: Reference
    rerun: Rerun
    versions: Mapping[str, str]
    history: tuple[Change, ...] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """sha256 of what was written, as the golden has it: the same wherever the same model was recorded."""
        return _digest(_lines(self.snapshot))

    def statistics(self, keys: Iterable[Key]) -> dict[Key, Statistics]:
        """Statistics of some tensors."""
        found = {key: self.snapshot.tensors[key].statistics for key in keys}
        return {key: statistics for key, statistics in found.items() if statistics}

    def save(self, directory: Path) -> None:
        """Write the golden to `directory`, in the place of another one; it is seen whole or not at all."""
        _refuse_strangers(directory)
        lines = _lines(self.snapshot)
        head = {
            "golden": VERSION,
            "digest": _digest(lines),
            **asdict(self.snapshot.made),
            "rerun": plain(self.rerun),
            "reference": {
                "ran": self.reference.ran,
                "tolerance": self.reference.tolerance,
                "not_run": self.reference.not_run,
            },
            "versions": dict(sorted(self.versions.items())),
            "history": plain(self.history),
        }
        text = json.dumps(head, indent=1, allow_nan=False) + "\n"
        files = {**lines, VALUES: self._values(), **self.beside, MARK: text.encode()}
        with output_directory(directory, self.digest, overwrite=True, resume=False, mark=MARK) as work:
            for name, content in files.items():
                (work.directory / name).write_bytes(content)

    def _values(self) -> bytes:
        samples = [self.snapshot.samples[key].reshape(-1).view(np.uint8) for key in sorted(self.snapshot.tensors)]
        arrays = {SAMPLES: np.concatenate([*samples, np.empty(0, np.uint8)])}
        arrays |= {f"input/{name}": array for name, array in self.reference.inputs.items()}
        arrays |= {f"value/{at:03d}/{name}": array for at, (name, array) in enumerate(self.reference.values.items())}
        return file_bytes({name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())})


def is_golden(directory: Path) -> bool:
    """Whether `directory` is meant to be one."""
    check_length(directory / MARK)
    return (directory / MARK).is_file()


def load(directory: Path) -> Golden:
    """Read a golden; GoldenError says why `directory` is none, or what is wrong with it."""
    if not is_golden(directory):
        if (directory / WRITTEN).is_file():
            raise GoldenError(
                f"{directory}: a written model, no golden; the golden comes first: "
                f"`qbridge golden check GOLDEN {directory}`"
            )
        what = "no golden (no golden.json in it)" if directory.is_dir() else "no directory"
        raise GoldenError(f"{directory}: {what}; `qbridge golden record OUT {directory}` makes one")
    try:
        return _load(directory)
    except _DamagedError as error:
        why = str(error)
    except (BridgeError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise GoldenError(
        f"{directory}: damaged, or a stranger's: {why}\n"
        "  hint   take it from version control again, or remove it and record it anew"
    )


class _DamagedError(Exception):
    """What is wrong, without the directory; `load` adds it."""


def _load(directory: Path) -> Golden:
    head = parse_json(_text(directory / MARK))
    if not isinstance(head, dict) or head.get("golden") != VERSION:
        found = head.get("golden") if isinstance(head, dict) else None
        raise _DamagedError(f"{MARK} has golden = {found!r}, this version of qbridge reads {VERSION}")
    texts = {name: _text(directory / name).encode() for name in LINES}
    if _digest(texts) != head["digest"]:
        raise _DamagedError(f"{', '.join(LINES)} are not those that {MARK} was written with (a merge, an edit?)")
    tensors = {tensor.key: tensor for tensor in _each(texts, "tensors.jsonl", _tensor)}
    origins = {origin.id: origin for origin in _each(texts, "origins.jsonl", _origin)}
    files = {file.name: file for file in _each(texts, "files.jsonl", _file)}
    words = {name: _word(head, name) for name in Made.__match_args__[:-1]}
    made = Made(**words, options=dict(_mapping(head["options"])))
    values = SafetensorsFile(directory / VALUES)
    snapshot = Snapshot(made, tensors, files, origins, _samples(tensors, values))
    rerun = _rerun(_mapping(head["rerun"]))
    names = [CALIBRATION] * rerun.calibrated + [rerun.recipe] * bool(rerun.recipe)
    return Golden(
        snapshot,
        _reference(_mapping(head["reference"]), values),
        rerun,
        {str(name): str(version) for name, version in _mapping(head["versions"]).items()},
        tuple(_change(_mapping(entry)) for entry in head["history"]),
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


def _refuse_strangers(directory: Path) -> None:
    """A golden is replaced as a whole: nobody else's file may lie in its directory."""
    found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    own = {MARK, *LINES, VALUES, CALIBRATION, JOURNAL}
    strangers = [name for name in found if name not in own and not name.endswith(".toml")]
    if strangers:
        raise GoldenError(f"{directory} holds {', '.join(strangers[:3])}: keep a golden in a directory of its own")


def _text(path: Path) -> str:
    if path.stat().st_size > MOST:
        raise _DamagedError(f"{path.name} has more than {MOST} bytes")
    return path.read_text(encoding="utf-8")


def _each(texts: Mapping[str, bytes], name: str, parse: Callable[[Any], T]) -> Iterable[T]:
    for number, line in enumerate(texts[name].decode().splitlines(), 1):
        try:
            yield parse(parse_json(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _DamagedError(f"{name}:{number}: not a line that a golden has ({error})") from error


def _tensor(row: Any) -> Tensor:
    shape, statistics = row["shape"], row["statistics"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or row["dtype"] not in DTYPES:
        raise ValueError(f"shape {shape!r}, dtype {row['dtype']!r}")
    words = {name: _word(row, name) for name in ("name", "file", "dtype", "hash", "origin")}
    return Tensor(**words, shape=tuple(shape), statistics=_statistics(statistics) if statistics else None)


def _statistics(row: Mapping[str, Any]) -> Statistics:
    least, most, mean = (None if row[name] is None else float(row[name]) for name in ("min", "max", "mean"))
    return Statistics(least, most, mean, int(row["nonfinite"]))


def _origin(row: Any) -> Origin:
    rows = row["rows"]
    if not isinstance(rows, list) or not all(isinstance(text, str) for text in rows):
        raise ValueError(f"rows {rows!r}")
    return Origin(**{name: _word(row, name) for name in ("tensors", "part", "format", "made")}, rows=tuple(rows))


def _file(row: Any) -> File:
    return File(_word(row, "name"), int(row["bytes"]), _word(row, "hash"), row["header"] is True)


def _change(row: Mapping[str, Any]) -> Change:
    words = {name: _word(row, name) for name in ("date", "reason", "qbridge")}
    return Change(**words, moved=tuple(str(line) for line in row["moved"]))


def _reference(row: Mapping[str, Any], values: SafetensorsFile) -> Reference:
    inputs = {name.removeprefix("input/"): values.read(name) for name in values.specs if name.startswith("input/")}
    kept = {name.split("/", 2)[2]: values.read(name) for name in sorted(values.specs) if name.startswith("value/")}
    return Reference(inputs, kept, _word(row, "ran"), float(row["tolerance"]), _word(row, "not_run"))


def _samples(tensors: Mapping[Key, Tensor], values: SafetensorsFile) -> dict[Key, np.ndarray]:
    flat, found, at = values.read(SAMPLES).view(np.uint8).reshape(-1), {}, 0
    for key in sorted(tensors):
        kind = np.dtype(DTYPES[tensors[key].dtype].storage)
        end = at + len(positions(key[1], int(np.prod(tensors[key].shape, dtype=object)))) * kind.itemsize
        found[key] = flat[at:end].copy().view(kind)
        at = end
    if at != flat.size:
        raise _DamagedError(f"{VALUES} has {flat.size} bytes of samples, the tensors ask for {at}")
    return found


def _rerun(row: Mapping[str, Any]) -> Rerun:
    """Its recipe is a file of the golden's own directory: whoever made the golden names no other."""
    quant, kv = (row[name] if row[name] is None else _word(row, name) for name in ("quant", "kv"))
    if quant is not None and Path(quant).name != quant:
        raise ValueError(f"quant {quant!r}")
    return Rerun(quant, kv, row["calibrated"] is True, _word(row, "refused"))


def _word(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row[name], str):
        raise TypeError(f"{name} is {row[name]!r}")
    return str(row[name])


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value
