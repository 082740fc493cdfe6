"""Build a TensorRT engine from a written ONNX file.

This code was never run against TensorRT: the calls follow its Python API as documented for 10.x and 11.x, and the
tests compare them with a stand-in that records them. `trtexec_line` gives the same build as a command.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError, WriteError
from bridge.core.output.temporary import write_whole
from bridge.core.progress import Progress, no_progress
from bridge.core.text import fold_layers, fold_problems, nearest
from bridge.sources.configs.positions import context_length, image_positions

INSTALL = 'pip install --extra-index-url https://pypi.nvidia.com "tensorrt>=10.15"'
OLDEST = 10  # older versions have no strongly typed network
Range = tuple[int, int, int]
# Axes of denoisers: tokens of a prompt, and of a packed image (1024 x 1024 has 4096).
DENOISER: dict[str, Range] = {"text_tokens": (1, 77, 512), "image_tokens": (1, 4096, 16384)}
# At 16 kHz: from 50 ms over ten seconds to half a minute; of spectra, a hundred frames a second.
SOUND: dict[str, Range] = {"samples": (800, 160_000, 480_000), "spectrum_frames": (5, 500, 1500)}
# Rows of features that stand for images or sound in a text; none in a text alone.
ROWS: dict[str, Range] = {"image_rows": (0, 576, 9216), "audio_rows": (0, 750, 3000)}
# Of images of any size. Pixels: multiples of both 28 and 32, and Mistral 3's processor makes sides of up to 1540.
# Patches: SigLIP 2's processor makes 256, of up to 1024 that it was trained with.
SIGHT: dict[str, Range] = {
    "image_tiles": (1, 5, 37),  # LLaVA-OneVision has up to 6 x 6, and the image itself
    "image_patches": (16, 1024, 16384),
    "image_height": (224, 448, 1568),
    "image_width": (224, 448, 1568),
    "patches": (1, 256, 1024),
}
IMAGES: Range = (1, 1, 4)  # of a row, for layers of cross-attention; a text alone has one of zeros
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class EngineUnavailable(WriteError):
    """No engine can be built on this machine: the `tensorrt` package or a GPU is missing."""


@dataclass(frozen=True)
class Profile:
    """Minimum, optimum and maximum extent of every dynamic axis, by the axis names of our graphs.

    `others`: axes of other names. `total_sequence` follows from `past` and `sequence` unless `others` has it.
    `image_positions`: keys that layers of cross-attention have of an image.
    """

    batch: Range = (1, 1, 8)
    sequence: Range = (1, 128, 512)
    past: Range = (0, 128, 1024)
    image_positions: int = 0
    others: Mapping[str, Range] = field(default_factory=dict)

    @property
    def ranges(self) -> dict[str, Range]:
        total = tuple(a + b for a, b in zip(self.past, self.sequence, strict=True))
        own = {"batch": self.batch, "sequence": self.sequence, "past_sequence": self.past}
        own |= {"encoder_sequence": self.sequence, "text_batch": self.batch, "image_batch": self.batch}
        own |= {"audio_batch": self.batch, "images": IMAGES}
        least, optimum, most = (count * self.image_positions for count in IMAGES)
        own["image_positions"] = (least, optimum, most)
        return {**own, **SOUND, **DENOISER, **ROWS, **SIGHT, "total_sequence": total, **self.others}  # type: ignore[dict-item]


def profile_of(config: Mapping[str, Any], cache: bool) -> Profile:
    """The engine's default shapes, limited by the model's positions, which past and sequence share."""
    limit, positions = context_length(config), image_positions(config)
    if limit is None:
        return Profile(image_positions=positions)
    most = min(512, max(limit // 2, 1) if cache else limit)
    left = min(1024, limit - most)
    sequence, past = (1, min(128, most), most), (0, min(128, left), left)
    return Profile(sequence=sequence, past=past, image_positions=positions)


def profile_shapes(onnx_path: Path, profile: Profile) -> dict[str, Shapes]:
    """Return input -> (min, opt, max) for every input with a dynamic axis; UsageError if an axis has no range."""
    import onnx

    from bridge.targets.onnx.lint.model import axes

    graph = onnx.load(onnx_path, load_external_data=False).graph
    inputs = {value.name: axes(value.type.tensor_type) for value in graph.input}
    ranges = profile.ranges
    wrong = [
        f"{n}: {', '.join(map(str, r))}" for n, r in ranges.items() if len(r) != 3 or not 0 <= r[0] <= r[1] <= r[2]
    ]
    if wrong:
        raise UsageError(f"profile: a range needs 0 <= min <= opt <= max; wrong: {'; '.join(wrong)}")
    dynamic = {
        name: shape for name, shape in inputs.items() if shape is None or not all(isinstance(a, int) for a in shape)
    }
    known = {axis for shape in dynamic.values() for axis in shape or () if isinstance(axis, str)}
    problems = [f"{name}: axis {axis}" for name, shape in dynamic.items() for axis in _unknown(shape, ranges)]
    if problems:
        raise UsageError(
            f"{onnx_path.name}: no range for {', '.join(fold_layers(problems))}; "
            'give one: Profile(others={"NAME": (min, opt, max)})'
        )
    if unknown := sorted(set(profile.others) - known):
        raise UsageError(f"profile: {onnx_path.name} has no dynamic axis {unknown[0]!r}; {nearest(unknown[0], known)}")
    return {name: _bounds(shape or (), ranges) for name, shape in dynamic.items()}


def _unknown(shape: tuple[int | str | None, ...] | None, ranges: Mapping[str, Range]) -> list[str]:
    if shape is None:
        return ["(no shape)"]
    return [axis or "(no name)" for axis in shape if not isinstance(axis, int) and axis not in ranges]


def _bounds(shape: tuple[int | str | None, ...], ranges: Mapping[str, Range]) -> Shapes:
    least, optimum, most = (
        tuple(axis if isinstance(axis, int) else ranges[str(axis)][bound] for axis in shape) for bound in range(3)
    )
    return least, optimum, most


def trtexec_line(onnx_path: Path, profile: Profile, engine: str = "model.engine") -> str:
    """Return the `trtexec` command of the same build, to be run in the directory of the ONNX file.

    Since TensorRT 11 every network is strongly typed, and `--stronglyTyped` can be left out.

    >>> trtexec_line(Path("model.onnx"), Profile())  # doctest: +SKIP
    'trtexec --onnx=model.onnx --saveEngine=model.engine --stronglyTyped --minShapes=input_ids:1x1 ...'
    """
    words = ["trtexec", f"--onnx={onnx_path.name}", f"--saveEngine={engine}", "--stronglyTyped"]
    shapes = profile_shapes(onnx_path, profile)
    for number, bound in enumerate(("min", "opt", "max")):
        if shapes:
            extents = ",".join(f"{name}:{'x'.join(map(str, bounds[number]))}" for name, bounds in shapes.items())
            words.append(f"--{bound}Shapes={extents}")
    return shlex.join(words)


def why_unavailable() -> str:
    """Why this machine cannot build an engine, with the remedy; "" if it can."""
    try:
        trt = importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:  # OSError: the package is installed, its libraries are not
        return f"the package `tensorrt` cannot be imported ({error}); install it: {INSTALL}"
    if not hasattr(trt, "Builder"):
        return f"the package `tensorrt` is the placeholder without libraries (it has no Builder); install it: {INSTALL}"
    if _major(trt) < OLDEST:
        return f"tensorrt {trt.__version__} is too old for strongly typed Q/DQ networks; install a newer one: {INSTALL}"
    if gpu_count() == 0:
        return "CUDA finds no NVIDIA GPU; build on the machine that will serve (see nvidia-smi there)"
    return ""


def _major(trt: Any) -> int:
    return int(str(trt.__version__).split(".")[0])


def gpu_count() -> int:
    """Number of GPUs by the CUDA driver itself, without a framework; 0 without a driver."""
    try:
        cuda, count = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"), ctypes.c_int(0)
        failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def build_engine(onnx_path: Path, engine: Path, profile: Profile, progress: Progress = no_progress) -> None:
    """Build `engine` from `onnx_path`, in one atomic write.

    EngineUnavailable says what is missing; WriteError lists the parser's errors. TensorRT's own logger writes all other
    messages to stderr.
    """
    shapes = profile_shapes(onnx_path, profile)
    if reason := why_unavailable():
        raise EngineUnavailable(
            f"no TensorRT engine can be built here: {reason}\n"
            f"  the same build elsewhere: {trtexec_line(onnx_path, profile, engine.name)}"
        )
    trt = importlib.import_module("tensorrt")
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    # 10.x needs the flag for a strongly typed network, 11 has no other networks.
    network = builder.create_network(
        1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if _major(trt) < 11 else 0
    )
    parser = trt.OnnxParser(network, log)  # owns the weights of the network: it must outlive the build
    if not parser.parse_from_file(str(onnx_path)):
        errors = "\n  ".join(_errors(parser)) or "it gave no reason"
        raise WriteError(f"{onnx_path.name}: TensorRT's parser refuses it; `qbridge check` may say why\n  {errors}")
    config = builder.create_builder_config()
    if shapes:
        ranges = builder.create_optimization_profile()
        for name, bounds in shapes.items():
            ranges.set_shape(name, *bounds)
        if config.add_optimization_profile(ranges) < 0:
            raise WriteError(f"TensorRT refuses the optimization profile: {shapes}; change the ranges of Profile")
    config.progress_monitor = monitor = _monitor(trt, progress)
    plan = builder.build_serialized_network(network, config)
    if monitor.stopped is not None:
        raise monitor.stopped
    if plan is None:
        command = trtexec_line(onnx_path, profile, engine.name)
        raise WriteError(f"{onnx_path.name}: TensorRT built no engine; it logged why\n  the same build: {command}")
    try:
        write_whole(engine, memoryview(plan))
    except OSError as error:
        raise WriteError(
            f"{engine}: cannot be written: {error.strerror}; free some space, or use another disk"
        ) from error


def _errors(parser: Any) -> list[str]:
    errors = [parser.get_error(number) for number in range(parser.num_errors)]
    return fold_problems(
        (error.node_name() or f"node {error.node()}", f"{error.node_operator() or 'graph'}: {error.desc()}")
        for error in errors
    )


def _monitor(trt: Any, progress: Progress) -> Any:
    """Report the steps of the outermost phase; phases nest."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outermost, self.steps = "", 0
            self.stopped: BaseException | None = None  # raised by the caller: it must not pass through TensorRT

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.outermost, self.steps = phase_name, num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            """Return False to stop TensorRT."""
            try:
                if phase_name == self.outermost and self.stopped is None:
                    progress(step + 1, self.steps, phase_name)
            except BaseException as error:  # also KeyboardInterrupt
                self.stopped = error
            return self.stopped is None

        def phase_finish(self, phase_name: str) -> None:
            pass

    return Monitor()
