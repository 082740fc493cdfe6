"""Build the engines of a written directory.

Each build is a process of its own, since a builder can crash.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError, WriteError
from bridge.core.machine import available_memory
from bridge.core.output.temporary import temporary_directory, write_whole
from bridge.core.progress import Progress, no_progress
from bridge.core.text import fold_layers, size
from bridge.targets.onnx.files import WEIGHTS, graphs
from bridge.targets.trt.build import build_engine
from bridge.targets.trt.compiled import Compiled, compiled_modules, quantized_modules, summary
from bridge.targets.trt.products import FULL, RTX, TITLES, EngineUnavailable, rtx_version, why_unavailable
from bridge.targets.trt.profile import Profile, profiles_of, trtexec_line

RECORD = "engine.json"
ENDING = ".engine"
BOUND = "this version of TensorRT for RTX, these architectures, these weights: neither refittable nor stripped"
BOUND_HERE = "this version of TensorRT and this GPU"
# Peak memory of a build over the bytes of weights, 3.3 (FP8) and 4 (INT4) times for 1.1 B parameters; the libraries.
MEMORY, LIBRARIES = 4, 700 << 20
REMEDY = "choose smaller blocks if one covers all of `in`, else a scheme with kernels (`qbridge show runtimes`)"


@dataclass(frozen=True)
class Engine:
    """One engine: what it was built from and for, and what each quantized matrix was compiled to.

    `activation_bytes`: what TensorRT counts for the largest shapes of its profiles.
    """

    file: str
    graph: str
    graph_sha256: str
    engine_sha256: str
    bytes: int
    activation_bytes: int
    profiles: tuple[Mapping[str, Any], ...]
    compiled: Mapping[str, int] = field(default_factory=dict)
    dequantized: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """ "154 of 154 matrices run in FP8"; "" without quantized matrices."""
        kinds = (Compiled("", kind) for kind, count in self.compiled.items() for _ in range(count))
        return summary(kinds)


@dataclass(frozen=True)
class Engines:
    """What `engine.json` says: the engines of a directory. An engine that it does not name does not count."""

    product: str
    version: str
    architectures: tuple[str, ...]
    weights_sha256: str
    engines: tuple[Engine, ...]
    bound_to: str = BOUND

    def save(self, directory: Path) -> None:
        """Write `engine.json`, last of all files."""
        write_whole(directory / RECORD, (json.dumps(asdict(self), indent=1) + "\n").encode())

    def lines(self) -> list[str]:
        """What a user reads: a line for each engine, and the warnings."""
        made = [
            f"{engine.file}: {size(engine.bytes)}, {size(engine.activation_bytes)} of activations"
            + (f"; {engine.summary}" if engine.summary else "")
            for engine in self.engines
        ]
        builder = f"{self.product} {self.version}, {', '.join(self.architectures)}"
        return [builder, *made, *(f"warning: {text}" for text in self.warnings)]

    @property
    def warnings(self) -> list[str]:
        """A line for each graph whose quantized matrices no product reads as codes."""
        return [
            f"{engine.graph}: TensorRT dequantizes {', '.join(fold_layers(engine.dequantized))}, which costs memory "
            f"traffic and saves no products; {REMEDY}"
            for engine in self.engines
            if engine.dequantized
        ]


def build_engines(
    directory: Path,
    config: Mapping[str, Any],
    architectures: Sequence[str],
    *,
    out: Path | None = None,
    memory: int | None = None,
    progress: Progress = no_progress,
) -> Engines:
    """Build an engine of each graph of a directory for some architectures with TensorRT for RTX; `engine.json` is last.

    config: the model's, whose positions limit the profiles.  out: where engines go, by default beside the graphs.
    memory: bytes that the build may take.

    Raises:
        EngineUnavailable: TensorRT for RTX is not installed.
        UsageError: the build needs more memory than is allowed, or free.
        WriteError: the parser or the builder refuses a graph, or crashed.
    """
    if reason := why_unavailable(RTX):
        raise EngineUnavailable(f"no engine can be built here: {reason}")
    check_memory(directory, memory)
    target = out or directory
    (target / RECORD).unlink(missing_ok=True)  # it would name engines that are replaced now
    tag = "+".join(architectures)
    engines = []
    for graph in graphs(directory):
        engine, profiles = target / f"{graph.stem}.{tag}{ENDING}", profiles_of(config, graph)
        job = {
            "task": "build", "graph": str(graph), "engine": str(engine), "capabilities": list(architectures),
            "profiles": [asdict(profile) for profile in profiles],
        }  # fmt: skip
        built = _in_child(job, engine.with_suffix(".log"), progress)["built"]
        engines.append(_record(graph, engine, profiles, built))
    return _save(directory, target, Engines(TITLES[RTX], rtx_version(), tuple(architectures), "", tuple(engines)))


def _save(directory: Path, target: Path, record: Engines) -> Engines:
    weights = directory / WEIGHTS
    record = replace(record, weights_sha256=_sha256(weights) if weights.exists() else "")
    record.save(target)
    return record


def build_here(directory: Path, config: Mapping[str, Any], progress: Progress = no_progress) -> Engines:
    """Build model.engine of each graph with the full TensorRT, for the GPU of this machine; `engine.json` is last."""
    (directory / RECORD).unlink(missing_ok=True)
    engines = []
    for graph in graphs(directory):
        engine, profiles = graph.with_suffix(ENDING), profiles_of(config, graph)
        built = build_engine(graph, engine, profiles, progress, product=FULL)
        engines.append(_record(graph, engine, profiles, vars(built)))
    version = str(importlib.import_module(FULL).__version__)
    return _save(directory, directory, Engines(TITLES[FULL], version, ("this GPU",), "", tuple(engines), BOUND_HERE))


def trtexec_lines(directory: Path, config: Mapping[str, Any]) -> str:
    """The content of trtexec.txt: a line for each graph."""
    lines = (
        trtexec_line(path, profiles_of(config, path)[0], path.with_suffix(ENDING).name) for path in graphs(directory)
    )
    return "".join(f"{line}\n" for line in lines)


def build_memory(weights: int) -> int:
    """Bytes that a build takes at most, of a graph with so many bytes of weights."""
    return LIBRARIES + MEMORY * weights


def check_memory(directory: Path, memory: int | None) -> None:
    """UsageError if a build takes more bytes than is allowed, or free."""
    weights = directory / WEIGHTS
    need, free = build_memory(weights.stat().st_size if weights.exists() else 0), available_memory()
    if need > (limit := free if memory is None else min(memory, free)):
        what = "are free" if limit == free else "are allowed (--memory)"
        raise UsageError(
            f"{directory}: building an engine takes up to {size(need)}, {MEMORY} times its weights, and {size(limit)} "
            f"{what}; build on a larger machine: the engine is for a GPU, not for the machine that builds it"
        )


def parser_findings(path: Path) -> list[str]:
    """A line for each graph of a directory, or of a file, that the parser of TensorRT for RTX refuses, if installed."""
    if why_unavailable(RTX):
        return []
    found = []
    with temporary_directory() as folder:
        for graph in graphs(path) if path.is_dir() else [path]:
            answer = _in_child({"task": "parse", "graph": str(graph)}, folder / "parse.log", no_progress)
            found += [f"error [parser] {graph.name}: {line}" for line in answer["parsed"]]
    return found


def altered_engines(directory: Path) -> list[str]:
    """A line for each engine of `engine.json` that is missing, was changed, or is of another graph or other weights."""
    path = directory / RECORD
    if not path.is_file():
        return []
    try:
        record = json.loads(path.read_text())
        rows = [(row["file"], row["engine_sha256"], row["graph"], row["graph_sha256"]) for row in record["engines"]]
        weights = record["weights_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"error [engine] {RECORD}: cannot be read ({error!r}); build the engines again"]
    found = []
    for file, engine, graph, digest in rows:
        for name, expected, what in ((file, engine, "was changed or cut"), (graph, digest, "is another graph")):
            at = directory / Path(name).name
            if not at.is_file():
                found.append(f"error [engine] {name}: is missing; build the engines again")
            elif _sha256(at) != expected:
                found.append(f"error [engine] {name}: {what} since the engine was built; build the engines again")
    at = directory / WEIGHTS
    if weights and at.is_file() and _sha256(at) != weights:
        found.append(f"error [engine] {WEIGHTS}: are other weights than the engines have; build the engines again")
    return found


def _record(graph: Path, engine: Path, profiles: Sequence[Profile], built: Mapping[str, Any]) -> Engine:
    compiled = compiled_modules(built["layers"], quantized_modules(graph)) if built["layers"] else ()
    return Engine(
        engine.name, graph.name, _sha256(graph), _sha256(engine), engine.stat().st_size, built["activation_bytes"],
        tuple(asdict(profile) for profile in profiles), dict(Counter(each.computes for each in compiled)),
        tuple(each.module for each in compiled if not each.is_quantized),
    )  # fmt: skip


def _in_child(job: Mapping[str, Any], log: Path, progress: Progress) -> dict[str, Any]:
    """The answer of a process that builds or parses; its log stays if it fails."""
    answer: dict[str, Any] = {}
    command = [sys.executable, "-P", "-m", "bridge.targets.trt.build"]  # -P: not the code of the current directory
    with log.open("w") as messages, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True
    ) as child:  # fmt: skip
        assert child.stdin and child.stdout
        try:
            child.stdin.write(json.dumps(job))
            child.stdin.close()
            for line in child.stdout:
                answer = json.loads(line)
                if "progress" in answer:
                    progress(*answer["progress"])
        except BaseException:
            child.kill()
            log.unlink(missing_ok=True)
            raise
    if "error" in answer:
        raise WriteError(f"{answer['error']}\n  its log: {log}")
    if "built" not in answer and "parsed" not in answer:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
        name = Path(job["graph"]).name
        raise WriteError(f"{name}: the builder of TensorRT crashed ({how}) and left no engine\n  its log: {log}")
    log.unlink(missing_ok=True)
    return answer


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
