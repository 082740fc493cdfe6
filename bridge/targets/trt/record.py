"""`engine.json`: the engines of a directory, and what each was built from."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.core.errors import VerifyError
from bridge.core.output.temporary import write_whole
from bridge.core.parsing.limited import parse_json
from bridge.core.parsing.typed_json import typed
from bridge.core.text import fold_layers, size
from bridge.targets.onnx.files import WEIGHTS
from bridge.targets.trt.compiled import DEQUANTIZED

RECORD = "engine.json"
REMEDY = "choose smaller blocks if one covers all of `in`, else another scheme (see the table of target trt)"


@dataclass(frozen=True)
class Engine:
    """One engine: who built it, from what and for what, and what each quantized matrix was compiled to."""

    file: str
    product: str
    """"TensorRT for RTX" or "TensorRT"."""
    version: str
    architectures: tuple[str, ...]
    """What it runs on: "sm89", "sm120"; "this GPU" of the full TensorRT."""
    bound_to: str
    """What must be as it was for the engine to run."""
    graph: str
    graph_sha256: str
    engine_sha256: str
    bytes: int
    activation_bytes: int
    """What TensorRT counts for the largest shapes of the profiles; 0 if it was not told."""
    profiles: tuple[dict[str, Any], ...]
    matrices: dict[str, str] = field(default_factory=dict)
    """Quantized matrix -> "FP8" for codes on both sides, "weight-only INT4", or "dequantized"."""

    @property
    def compiled(self) -> dict[str, int]:
        """What matrices were compiled to -> how many of them."""
        return dict(Counter(self.matrices.values()))

    @property
    def line(self) -> str:
        """ "TensorRT for RTX 1.7.1.116 for sm89, 1.2 GB, 0.3 GB of activations; 154 of 154 matrices run in FP8"."""
        text = f"{self.product} {self.version} for {', '.join(self.architectures)}, {size(self.bytes)}"
        summary = f"; {self.summary}" if self.summary else ""
        return f"{text}, {size(self.activation_bytes)} of activations{summary}"

    @property
    def summary(self) -> str:
        """ "154 of 154 matrices run in FP8"; "" without quantized matrices."""
        total = len(self.matrices)
        return ", ".join(
            f"{count} of {total} matrices {'are dequantized' if what == DEQUANTIZED else f'run in {what}'}"
            for what, count in Counter(self.compiled).most_common()
        )


@dataclass(frozen=True)
class Engines:
    """What `engine.json` says. An engine that it does not name does not count."""

    weights_sha256: str
    engines: tuple[Engine, ...]
    kept: tuple[str, ...] = ()
    """Files of engines that an earlier build made and that are valid still. It is not in `engine.json`."""
    removed: tuple[str, ...] = ()
    """Files of engines that belonged to another graph or to other weights, or were changed. It is not there either."""

    def save(self, directory: Path) -> None:
        """Write `engine.json`, last of all files."""
        data = {"weights_sha256": self.weights_sha256, "engines": [asdict(engine) for engine in self.engines]}
        write_whole(directory / RECORD, (json.dumps(data, indent=1) + "\n").encode())

    def lines(self) -> list[str]:
        """What a user reads: a line for each engine, old and new, and the warnings about new ones."""
        gone = [f"{name}: removed: it was changed, or is of another graph or of other weights" for name in self.removed]
        every = [f"{one.file}: {'kept: ' if one.file in self.kept else ''}{one.line}" for one in self.engines]
        return [*gone, *every, *(f"warning: {text}" for text in self.warnings)]

    @property
    def warnings(self) -> list[str]:
        """A line for each new engine with quantized matrices whose codes no product reads."""
        found = []
        for engine in self.engines:
            if engine.file in self.kept:
                continue
            dequantized = [name for name, what in engine.matrices.items() if what == DEQUANTIZED]
            if dequantized:
                names = ", ".join(fold_layers(dequantized))
                found.append(f"{engine.file}: {names} {'are' if len(dequantized) > 1 else 'is'} dequantized; {REMEDY}")
        return found

    def still_valid(self, directory: Path, weights_sha256: str) -> tuple[Engine, ...]:
        """The engines that are there as they were built, of these weights and of today's graphs."""
        if weights_sha256 != self.weights_sha256:
            return ()
        return tuple(engine for engine in self.engines if not _problems(engine, directory))


def load_engines(directory: Path) -> Engines | None:
    """Read `engine.json`; None if there is none, VerifyError if it cannot be read."""
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        return typed(Engines, {**parse_json(path.read_bytes()), "kept": [], "removed": []})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise VerifyError(f"{path}: cannot be read ({error}); build the engines again") from error


def altered_engines(directory: Path) -> list[str]:
    """A line for each engine that is missing, was changed, or is of another graph or of other weights."""
    try:
        record = load_engines(directory)
    except VerifyError as error:
        return [f"error [engine] {error}"]
    if record is None:
        return []
    found = [f"error [engine] {problem}" for engine in record.engines for problem in _problems(engine, directory)]
    weights = directory / WEIGHTS
    if record.weights_sha256 and weights.is_file() and digest_of(weights) != record.weights_sha256:
        found.append(f"error [engine] {WEIGHTS}: are other weights than the engines have; build the engines again")
    return found


def _problems(engine: Engine, directory: Path) -> list[str]:
    """Why an engine does not count; a graph that is elsewhere, as beside engines in a directory of their own, may."""
    found = []
    gpus = f" --gpu {','.join(engine.architectures)}" if engine.product == "TensorRT for RTX" else ""
    again = f"build it again: qbridge engine {directory}{gpus}"
    own = (engine.file, engine.engine_sha256, "was changed or cut")
    for name, expected, what in (own, (engine.graph, engine.graph_sha256, "is another graph")):
        at = directory / Path(name).name
        if not at.is_file():
            found += [f"{name}: is missing; {again}"] if name == engine.file else []
        elif digest_of(at) != expected:
            found.append(f"{name}: {what} since the engine was built; {again}")
    return found


def digest_of(path: Path) -> str:
    """The SHA-256 of a file; "" if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_digests(engine: Engine, folder: Path) -> Engine:
    """The same with digest and bytes of its file in a folder."""
    path = folder / engine.file
    return replace(engine, engine_sha256=digest_of(path), bytes=path.stat().st_size)
