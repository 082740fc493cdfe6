"""Build the engines of a written directory.

Each build is a process of its own, since a builder can crash. What was built before stays until all is built.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError, VerifyError, WriteError, reason
from bridge.core.machine import available_memory
from bridge.core.output.directory import check_disk
from bridge.core.output.temporary import temporary_directory
from bridge.core.progress import Progress, no_progress
from bridge.core.text import size
from bridge.targets.onnx.files import WEIGHTS, graphs
from bridge.targets.trt.build import Built, build_engine
from bridge.targets.trt.compiled import compiled_modules, quantized_modules
from bridge.targets.trt.products import FULL, INSTALL_RTX, RTX, TITLES, EngineUnavailable, rtx_version, why_unavailable
from bridge.targets.trt.profile import Profile, Range, check_axes, dynamic_axes, load_graph, profiles_of, trtexec_line
from bridge.targets.trt.record import Engine, Engines, digest_of, load_engines, with_digests

ENDING = ".engine"
BOUND = {
    RTX: "this version of TensorRT for RTX, these architectures, these weights: neither refittable nor stripped",
    FULL: "this version of TensorRT and this GPU",
}
# Peak memory of a build over the bytes of weights, 3.3 (FP8) and 4 (INT4) times for 1.1 B parameters; the libraries.
MEMORY, LIBRARIES = 4, 700 << 20


def build_engines(
    directory: Path,
    config: Mapping[str, Any],
    architectures: Sequence[str] = (),
    *,
    out: Path | None = None,
    memory: int | None = None,
    ranges: Mapping[str, Range] = {},
    progress: Progress = no_progress,
    name_them: Callable[[Engines], None] = lambda made: None,
) -> Engines:
    """Build an engine of each graph; `engine.json` is written last.

    An engine for other architectures that is valid still stays, and so does its row.

    config: the model's, whose positions limit the profiles.  architectures: what TensorRT for RTX builds for; without
    any the full TensorRT builds for this machine's GPU.  out: a directory for the engines, which must not be there
    and appears whole; by default they are beside the graphs.  memory: bytes that a build for RTX may take.  ranges: of
    axes, instead of those of the default profiles.  name_them: is given engines that are beside their graphs, before
    another process may build there.

    Raises:
        EngineUnavailable: the TensorRT that builds is not installed, or no GPU is there for the full one.
        UsageError: the build needs more memory than is allowed, or free; no graph has an axis.
        WriteError: the parser or the builder refuses a graph, or crashed; another process builds in this directory.
    """
    product = RTX if architectures else FULL
    if reason_why := why_unavailable(product):
        named = "" if product == RTX else f"\n  or {_named_instead()}"
        raise EngineUnavailable(f"{directory}: no engine can be built here: {reason_why}{named}")

    def build(graph: Path, profiles: Sequence[Profile], engine: Path) -> Built:
        if product == FULL:
            return build_engine(graph, engine, profiles, progress, product=FULL)
        job = {
            "task": "build", "graph": str(graph), "engine": str(engine), "capabilities": list(architectures),
            "profiles": [asdict(profile) for profile in profiles],
        }  # fmt: skip
        return Built(**run_builder(job, progress)["built"])

    if product == RTX:
        weights = directory / WEIGHTS
        check_memory(weights.stat().st_size if weights.exists() else 0, memory)
    version = rtx_version() if architectures else str(importlib.import_module(FULL).__version__)
    ending = f".{'+'.join(architectures)}{ENDING}" if architectures else ENDING
    about = (TITLES[product], version, tuple(architectures) or ("this GPU",), BOUND[product])
    return _built(directory, _profiles(directory, config, ranges), ending, about, build, out, name_them)


def _named_instead() -> str:
    """How to build without a GPU, for a build that names none."""
    install = "" if rtx_version() else f", once it is installed: {INSTALL_RTX}"
    return f"name the GPU that will serve (--gpu rtx4090): TensorRT for RTX builds for it without one{install}"


def _profiles(
    directory: Path, config: Mapping[str, Any], ranges: Mapping[str, Range]
) -> dict[Path, tuple[Profile, ...]]:
    """The profiles of each graph; UsageError if no graph has an axis that a range is given for."""
    loaded = {path: load_graph(path) for path in graphs(directory)}
    check_axes(ranges, {axis for graph in loaded.values() for axis in dynamic_axes(graph)})
    return {path: profiles_of(config, graph, ranges) for path, graph in loaded.items()}


def _built(
    directory: Path,
    profiles_by_graph: Mapping[Path, tuple[Profile, ...]],
    ending: str,
    about: tuple[str, str, tuple[str, ...], str],
    build: Callable[[Path, Sequence[Profile], Path], Built],
    out: Path | None,
    name_them: Callable[[Engines], None],
) -> Engines:
    """Build all engines aside, then put them in their places and record them."""
    sources = [*graphs(directory), directory / WEIGHTS]
    before = [_state(path) for path in sources]
    weights_sha256 = digest_of(directory / WEIGHTS)
    with _alone(directory), temporary_directory(directory if out is None else out.parent) as work:
        check_disk(directory if out is None else out, sum(size_ for _, size_ in before), "the engines")
        new = work / "engines"
        new.mkdir()
        made = []
        for graph, profiles in profiles_by_graph.items():
            engine, digest = new / f"{graph.stem}{ending}", digest_of(graph)
            built = build(graph, profiles, engine)
            matrices = compiled_modules(built.layers, quantized_modules(graph)) if built.layers else {}
            rows = tuple(asdict(profile) for profile in profiles)
            row = Engine(engine.name, *about, graph.name, digest, "", 0, built.activation_bytes, rows, matrices)
            made.append(with_digests(row, new))
        if [_state(path) for path in sources] != before:
            raise WriteError(f"{directory}: was replaced while its engines were built; build them again")
        if out is not None:
            record = Engines(weights_sha256, tuple(made))
            record.save(new)
            try:
                new.rename(out)
            except OSError as error:
                raise WriteError(f"{out}: cannot be made: {reason(error)}; choose another directory") from error
            return record
        record = _published(directory, new, Engines(weights_sha256, tuple(made)))
        name_them(record)
        return record


def _published(directory: Path, new: Path, made: Engines) -> Engines:
    """Put new engines beside their graphs; those of the old record that are not valid any more are removed."""
    try:
        old = load_engines(directory)
    except VerifyError:
        old = None
    names = {engine.file for engine in made.engines}
    named = {Path(engine.file).name for engine in old.engines} if old else set()
    foreign = [name for name in sorted(names - named) if (directory / name).exists()]
    if foreign:
        raise WriteError(
            f"{directory / foreign[0]}: no readable engine.json beside it names it, so it may be another program's and "
            "is not replaced; remove it, or build into a new directory (--out)"
        )
    stay = [one for one in old.still_valid(directory, made.weights_sha256) if one.file not in names] if old else []
    for name in sorted(names):
        (new / name).replace(directory / name)
    removed = named - names - {engine.file for engine in stay}
    kept = tuple(engine.file for engine in stay)
    record = Engines(made.weights_sha256, (*stay, *made.engines), kept, tuple(sorted(removed)))
    record.save(directory)
    for name in removed:
        (directory / name).unlink(missing_ok=True)
    return record


def trtexec_lines(directory: Path, config: Mapping[str, Any]) -> str:
    """The content of trtexec.txt: a line for each graph, for prompts and single tokens in one profile."""
    lines = (
        trtexec_line(path, profiles_of(config, load_graph(path))[0], path.with_suffix(ENDING).name)
        for path in graphs(directory)
    )
    return "".join(f"{line}\n" for line in lines)


def build_memory(weights: int) -> int:
    """Bytes that a build takes at most, of a graph with so many bytes of weights."""
    return LIBRARIES + MEMORY * weights


def check_memory(weights: int, memory: int | None) -> None:
    """UsageError if a build of so many bytes of weights takes more bytes than is allowed, or free."""
    need, free = build_memory(weights), available_memory()
    if need > (limit := free if memory is None else min(memory, free)):
        what = "are free" if limit == free else "are allowed (--memory)"
        raise UsageError(
            f"building an engine takes up to {size(need)}, {MEMORY} times the weights and {size(LIBRARIES)} for "
            f"libraries, and {size(limit)} {what}; build on a larger machine: an engine is for its GPU, not for the "
            "machine that builds it"
        )


def parser_findings(path: Path) -> list[str] | None:
    """A line for each graph of a directory, or of a file, that the parser of TensorRT for RTX refuses; None without it.

    It is asked once while the files do not change.
    """
    if why_unavailable(RTX):
        return None
    found = []
    for graph in graphs(path) if path.is_dir() else [path]:
        found += [f"error [parser] {graph.name}: {line}" for line in _parsed(graph, _state(graph))]
    return found


@functools.lru_cache(maxsize=8)
def _parsed(graph: Path, state: Any) -> tuple[str, ...]:
    try:
        return tuple(run_builder({"task": "parse", "graph": str(graph)}, no_progress)["parsed"])
    except WriteError as error:  # a crash, or libraries that do not load
        return (str(error),)


def _state(path: Path) -> tuple[Any, int]:
    """What tells a file from one that replaced it, and its bytes."""
    try:
        stat = path.stat()
    except OSError:
        return None, 0
    return (stat.st_ino, stat.st_mtime_ns), stat.st_size


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold a directory for one builder at a time; WriteError if another process builds there."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise WriteError(f"{directory}: another process builds engines of it; wait for it") from None
    finally:
        os.close(handle)


def run_builder(job: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """The answer of a process that builds or parses; if it fails its log stays, and the error names it."""
    answer: dict[str, Any] = {}
    command = [sys.executable, "-P", "-m", "bridge.targets.trt.build"]  # -P: not the code of the current directory
    handle, log = tempfile.mkstemp(prefix="qbridge-engine-", suffix=".log")  # nobody else can have made it
    kept = False
    try:
        with (
            os.fdopen(handle, "w") as messages,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True, env=_environment()
            ) as child,
        ):
            assert child.stdin and child.stdout
            try:
                child.stdin.write(json.dumps(job))
                child.stdin.close()
                for line in child.stdout:
                    answer = json.loads(line) if line.endswith("\n") else {}  # cut by a kill
                    if "progress" in answer:
                        progress(*answer["progress"])
            except BrokenPipeError:
                pass  # it ended before it read its job
            except BaseException:
                child.kill()
                raise
        name = Path(job["graph"]).name
        if "unavailable" in answer:
            raise EngineUnavailable(
                f"{name}: TensorRT for RTX cannot be loaded: {answer['unavailable']}; {INSTALL_RTX}"
            )
        if "error" in answer:
            kept = True
            raise WriteError(f"{answer['error']}\n  its log: {log}")
        if "built" not in answer and "parsed" not in answer:
            kept = True
            how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
            raise WriteError(f"{name}: TensorRT for RTX crashed ({how}) and left nothing\n  its log: {log}")
        return answer
    finally:
        if not kept:
            Path(log).unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    """This process's variables, with the places where it finds modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
