"""Build a TensorRT engine from a written ONNX file where `tensorrt` and a GPU are; must never leave half an engine.

Nothing in this file was ever run against TensorRT: the calls follow its Python API as documented for 10.x and 11.x,
and the tests hold them against a stand-in that records them. `trtexec_line` says the same build as a command.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shlex
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import UsageError, WriteError, fold_layers, nearest

INSTALL = 'pip install --extra-index-url https://pypi.nvidia.com "tensorrt>=10.15"'
OLDEST = 10  # before it there is no strongly typed network
Range = tuple[int, int, int]
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
PROFILE_SIDES = ("min", "opt", "max")
TOTAL = "total_sequence"  # the mask's axis: what is cached and what is new
Progress = Callable[[int, int, str], None]


class EngineUnavailable(WriteError):
    """No engine can be built on this machine: the `tensorrt` package or a GPU is missing."""


@dataclass(frozen=True)
class Profile:
    """Least, likeliest and greatest extent of every dynamic axis, by the axis names of our graphs.

    `others` holds axes of other names. `total_sequence` follows from `past` and `sequence` unless it is in there.
    """

    batch: Range = (1, 1, 8)
    sequence: Range = (1, 128, 512)
    past: Range = (0, 128, 1024)
    others: Mapping[str, Range] = field(default_factory=dict)

    @property
    def ranges(self) -> dict[str, Range]:
        total = tuple(a + b for a, b in zip(self.past, self.sequence, strict=True))
        own = {"batch": self.batch, "sequence": self.sequence, "past_sequence": self.past, TOTAL: total}
        return {**own, **self.others}  # type: ignore[dict-item]


@dataclass(frozen=True)
class EngineOptions:
    """What a build may be told. `workspace` in bytes; `strip_weights` leaves weights to a later refit."""

    profile: Profile = field(default_factory=Profile)
    timing_cache: Path | None = None
    version_compatible: bool = False
    refit: bool = False
    strip_weights: bool = False
    workspace: int | None = None


def profile_shapes(onnx_path: Path, profile: Profile) -> dict[str, Shapes]:
    """Return input -> (min, opt, max) for every input with a dynamic axis; UsageError where an axis has no range."""
    import onnx

    from bridge.graph.lint.model import axes

    graph = onnx.load(onnx_path, load_external_data=False).graph
    inputs = {value.name: axes(value.type.tensor_type) for value in graph.input}
    ranges, wrong = (
        profile.ranges,
        [f"{n}: {', '.join(map(str, r))}" for n, r in profile.ranges.items() if not _rises(r)],
    )
    if wrong:
        raise UsageError(f"profile: a range is min <= opt <= max, none negative; not so: {'; '.join(wrong)}")
    dynamic = {name: shape for name, shape in inputs.items() if shape is None or not all(_static(a) for a in shape)}
    known = {axis for shape in dynamic.values() for axis in shape or () if isinstance(axis, str)}
    problems = [f"{name}: axis {axis}" for name, shape in dynamic.items() for axis in _unknown(shape, ranges)]
    if problems:
        raise UsageError(
            f"{onnx_path.name}: no range for {', '.join(fold_layers(problems))}; "
            'give one: Profile(others={"NAME": (min, opt, max)})'
        )
    if strange := sorted(set(profile.others) - known):
        raise UsageError(f"profile: {onnx_path.name} has no dynamic axis {strange[0]!r}; {nearest(strange[0], known)}")
    return {name: _sides(shape or (), ranges) for name, shape in dynamic.items()}


def _rises(extents: Range) -> bool:
    return len(extents) == 3 and 0 <= extents[0] <= extents[1] <= extents[2]


def _static(axis: int | str | None) -> bool:
    return isinstance(axis, int)


def _unknown(shape: tuple[int | str | None, ...] | None, ranges: Mapping[str, Range]) -> list[str]:
    if shape is None:
        return ["(no shape)"]
    return [axis or "(no name)" for axis in shape if not isinstance(axis, int) and axis not in ranges]


def _sides(shape: tuple[int | str | None, ...], ranges: Mapping[str, Range]) -> Shapes:
    least, likely, most = (
        tuple(axis if isinstance(axis, int) else ranges[str(axis)][side] for axis in shape) for side in range(3)
    )
    return least, likely, most


def trtexec_line(
    onnx_path: Path | str,
    engine: Path | str = "model.engine",
    options: EngineOptions | None = None,
    *,
    major: int = 10,
    shown: str = "",
) -> str:
    """Return the `trtexec` command of the same build; `shown` is how the ONNX file is named in it, else as given.

    `major`: TensorRT's major version. From 11 on every network is strongly typed and the flag is left out.

    >>> trtexec_line("model.onnx")  # doctest: +SKIP
    'trtexec --onnx=model.onnx --saveEngine=model.engine --stronglyTyped --minShapes=input_ids:1x1 ...'
    """
    options = options or EngineOptions()
    words = [f"--onnx={shown or onnx_path}", f"--saveEngine={engine}"]
    if major < 11:
        words.append("--stronglyTyped")
    shapes = profile_shapes(Path(onnx_path), options.profile)
    for at, side in enumerate(PROFILE_SIDES):
        if shapes:
            said = ",".join(f"{name}:{'x'.join(map(str, sides[at]))}" for name, sides in shapes.items())
            words.append(f"--{side}Shapes={said}")
    if options.timing_cache is not None:
        words.append(f"--timingCacheFile={options.timing_cache}")
    if options.workspace is not None:
        words.append(f"--memPoolSize=workspace:{options.workspace / 2**20:g}M")
    flags = (
        ("--versionCompatible", options.version_compatible),
        ("--refit", options.refit),
        ("--stripWeights", options.strip_weights),
    )
    words += [flag for flag, wanted in flags if wanted]
    return shlex.join(["trtexec", *words])


def missing() -> str:
    """Return what keeps this machine from building an engine, with the remedy; "" where nothing does."""
    try:
        trt = importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:  # OSError: the package is there, its libraries are not
        return f"the package `tensorrt` cannot be imported ({error}); install it: {INSTALL}"
    if not hasattr(trt, "Builder"):
        return f"the package `tensorrt` has no Builder, it is the placeholder without libraries; install it: {INSTALL}"
    if _major(trt) < OLDEST:
        return f"tensorrt {trt.__version__} is too old for strongly typed Q/DQ networks; install a newer one: {INSTALL}"
    if gpu_count() == 0:
        return "there is no NVIDIA GPU that CUDA can use; build on the machine that will serve (see nvidia-smi there)"
    return ""


def _major(trt: Any) -> int:
    return int(str(trt.__version__).split(".")[0])


def gpu_count() -> int:
    """Ask the CUDA driver itself, so that no framework is needed; 0 without a driver."""
    library = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(library)
        count = ctypes.c_int(0)
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def build_engine(
    onnx_path: Path,
    engine: Path,
    options: EngineOptions | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = lambda done, total, text: None,
) -> Path:
    """Build `engine` from `onnx_path` and return its path; the engine appears whole or not at all.

    EngineUnavailable says what is missing and the command to run elsewhere; WriteError lists the parser's errors.
    """
    options = options or EngineOptions()
    if not onnx_path.is_file():
        raise UsageError(f"{onnx_path}: no such file; build_engine reads a written .onnx")
    if engine.exists() and not overwrite:
        raise WriteError(f"{engine} exists already; choose another name, or pass overwrite=True")
    for path in filter(None, (engine, options.timing_cache)):
        if not path.parent.is_dir():
            raise UsageError(f"{path}: its directory does not exist; create {path.parent}")
    shapes = profile_shapes(onnx_path, options.profile)
    if lack := missing():
        command = trtexec_line(onnx_path, engine, options)
        raise EngineUnavailable(f"no TensorRT engine can be built here: {lack}\n  the same build elsewhere: {command}")
    trt = importlib.import_module("tensorrt")
    log = _logger(trt)
    builder = trt.Builder(log)
    network, parser = _parse(trt, builder, log, onnx_path)
    config = _config(trt, builder, options, shapes)
    cache = _load_cache(config, options.timing_cache)
    phases = Phases(progress)
    config.progress_monitor = _monitor(trt, phases)
    plan = builder.build_serialized_network(network, config)
    if phases.interruption is not None:
        raise phases.interruption
    if plan is None:
        command = trtexec_line(onnx_path, engine, options, major=_major(trt))
        raise WriteError(f"{onnx_path.name}: TensorRT built no engine: {_last(log)}\n  the same build: {command}")
    del parser  # it owns the weights that the network refers to: it must outlive the build
    write_whole(engine, memoryview(plan))
    if options.timing_cache is not None and cache:
        write_whole(options.timing_cache, memoryview(config.get_timing_cache().serialize()))
    return engine


def _parse(trt: Any, builder: Any, log: Any, onnx_path: Path) -> tuple[Any, Any]:
    """10.x must be asked for a strongly typed network, 11 has no other."""
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if _major(trt) < 11 else 0
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, log)
    if parser.parse_from_file(str(onnx_path)):
        return network, parser
    found: dict[str, list[str]] = {}
    for at in range(parser.num_errors):
        error = parser.get_error(at)
        where = error.node_name() or f"node {error.node()}"
        found.setdefault(f"{error.node_operator() or 'graph'}: {error.desc()}", []).append(where)
    lines = [f"{', '.join(fold_layers(where))}: {what}" for what, where in found.items()] or [_last(log)]
    said = "\n  ".join(lines)
    raise WriteError(f"{onnx_path.name}: TensorRT's parser refuses it; `qbridge check` may say why\n  {said}")


def _config(trt: Any, builder: Any, options: EngineOptions, shapes: Mapping[str, Shapes]) -> Any:
    config = builder.create_builder_config()
    flags = (
        ("VERSION_COMPATIBLE", options.version_compatible),
        ("REFIT", options.refit),
        ("STRIP_PLAN", options.strip_weights),
    )
    for name, wanted in flags:
        if wanted:
            config.set_flag(getattr(trt.BuilderFlag, name))
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    if shapes:
        profile = builder.create_optimization_profile()
        for name, (least, likely, most) in shapes.items():
            profile.set_shape(name, least, likely, most)
        if config.add_optimization_profile(profile) < 0:
            raise WriteError(f"TensorRT refuses the optimization profile: {dict(shapes)}; change the ranges of Profile")
    return config


def _load_cache(config: Any, path: Path | None) -> bool:
    """A cache of another GPU or version is refused by TensorRT: begin an empty one, it is only a cache."""
    if path is None:
        return False
    held = path.read_bytes() if path.is_file() else b""
    return any(config.set_timing_cache(config.create_timing_cache(data), False) for data in dict.fromkeys((held, b"")))


def _logger(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        """Keeps errors for our message instead of printing them among progress bars."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    return Log()


def _last(log: Any) -> str:
    return "; ".join(log.errors[-3:]) or "it logged no reason"


class Phases:
    """TensorRT's phases nest and report from several threads: the outermost counts, the innermost gives the text.

    An exception must not cross into TensorRT: it is kept, the build is cancelled, and the caller raises it.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.lock = threading.Lock()
        self.parents: dict[str, str | None] = {}
        self.steps: dict[str, tuple[int, int]] = {}
        self.interruption: BaseException | None = None

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        with self.lock:
            self.parents[phase] = parent
            self.steps[phase] = (0, steps)
            self._tell(phase)

    def step(self, phase: str, step: int) -> bool:
        """Note a finished step; False asks TensorRT to stop."""
        with self.lock:
            if phase in self.steps:
                self.steps[phase] = (step + 1, self.steps[phase][1])
            self._tell(phase)
            return self.interruption is None

    def finish(self, phase: str) -> None:
        with self.lock:
            self.parents.pop(phase, None)
            self.steps.pop(phase, None)

    def _tell(self, phase: str) -> None:
        root = phase
        while (parent := self.parents.get(root)) in self.steps:
            root = str(parent)
        done, total = self.steps.get(root, (0, 0))
        try:
            if self.interruption is None:
                self.progress(done, total, phase)
        except BaseException as error:  # KeyboardInterrupt too
            self.interruption = error


def _monitor(trt: Any, phases: Phases) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return phases.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return Monitor()


def write_whole(path: Path, data: memoryview) -> None:
    """Write beside the target and rename; WriteError and no trace where the disk is full."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError(
                f"{path}: cannot be written: {error.strerror}; free some space, or use another disk"
            ) from error
        raise
