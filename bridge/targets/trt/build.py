"""Build one engine with a TensorRT that this process imports.

As a program it is what `bridge.targets.trt.engine` starts. The calls of the full TensorRT follow its Python API as
documented for 10.x and 11.x: tests compare them with a stand-in that records them, and run them with TensorRT for RTX.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.core.errors import BridgeError, WriteError
from bridge.core.output.temporary import write_whole
from bridge.core.progress import Progress, no_progress
from bridge.core.text import fold_problems
from bridge.targets.trt.compiled import LAYERS
from bridge.targets.trt.products import FULL, RTX, TITLES, EngineUnavailable, major, why_unavailable
from bridge.targets.trt.profile import Profile, Shapes, profile_shapes, trtexec_line

ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+)")


@dataclass(frozen=True)
class Built:
    """What the builder says of an engine: the message with its layers, and bytes of activations ("" and 0 without)."""

    layers: str = ""
    activation_bytes: int = 0


def build_engine(
    onnx_path: Path,
    engine: Path,
    profiles: Sequence[Profile],
    progress: Progress = no_progress,
    *,
    product: str = FULL,
    capabilities: Sequence[str] = (),
    verbose: bool = False,
) -> Built:
    """Build `engine` from `onnx_path` for each of the profiles, in one atomic write.

    capabilities: what TensorRT for RTX builds for, as "sm89"; the full TensorRT builds for this machine's GPU.
    verbose: write all that the builder logs to stderr, not errors alone.

    EngineUnavailable says what is missing; WriteError lists the parser's errors, or the builder's.
    """
    shapes = [profile_shapes(onnx_path, profile) for profile in profiles]
    command = trtexec_line(onnx_path, profiles[0], engine.name)
    if reason := why_unavailable(product):
        raise EngineUnavailable(
            f"no TensorRT engine can be built here: {reason}\n  the same build elsewhere: {command}"
        )
    trt = importlib.import_module(product)
    log = _logger(trt, verbose)
    builder = trt.Builder(log)
    # 10.x needs the flag for a strongly typed network, 11 has no other networks.
    typed = product == RTX or major(trt) < 11
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if typed else 0)
    parser = trt.OnnxParser(network, log)  # owns the weights of the network: it must outlive the build
    if not parser.parse_from_file(str(onnx_path)):
        errors = "\n  ".join(_errors(parser)) or "it gave no reason"
        raise WriteError(f"{onnx_path.name}: TensorRT's parser refuses it; `qbridge check` may say why\n  {errors}")
    config = builder.create_builder_config()
    for bounds_of in shapes:
        _add_profile(builder, config, bounds_of)
    if product == RTX:
        config.num_compute_capabilities = len(capabilities)
        for at, capability in enumerate(capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, capability.upper()), at)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.progress_monitor = monitor = _monitor(trt, progress)
    plan = builder.build_serialized_network(network, config)
    if monitor.stopped is not None:
        raise monitor.stopped
    if plan is None:
        why = "\n  ".join(log.errors) or "it logged why"
        raise WriteError(f"{onnx_path.name}: {TITLES[product]} built no engine: {why}\n  the same build: {command}")
    try:
        write_whole(engine, memoryview(plan))
    except OSError as error:
        raise WriteError(
            f"{engine}: cannot be written: {error.strerror}; free some space, or use another disk"
        ) from error
    return Built(log.layers, log.activation_bytes)


def parse(onnx_path: Path) -> list[str]:
    """What the parser of TensorRT for RTX refuses in a file, a line each; it reads no weight."""
    trt = importlib.import_module(RTX)
    log = _logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if parser.parse_from_file(str(onnx_path)):
        return []
    return _errors(parser) or ["it gave no reason"]


def _add_profile(builder: Any, config: Any, shapes: Mapping[str, Shapes]) -> None:
    if not shapes:
        return
    ranges = builder.create_optimization_profile()
    for name, bounds in shapes.items():
        ranges.set_shape(name, *bounds)
    if config.add_optimization_profile(ranges) < 0:
        raise WriteError(f"TensorRT refuses the optimization profile: {shapes}; change the ranges of Profile")


def _errors(parser: Any) -> list[str]:
    errors = [parser.get_error(number) for number in range(parser.num_errors)]
    return fold_problems(
        (error.node_name() or f"node {error.node()}", f"{error.node_operator() or 'graph'}: {error.desc()}")
        for error in errors
    )


def _logger(trt: Any, verbose: bool = False) -> Any:
    """Keep errors, the list of layers and the bytes of activations; write messages to stderr, errors or all."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.layers, self.activation_bytes = "", 0

        def log(self, severity: Any, message: str) -> None:
            if message.startswith(LAYERS):
                self.layers += message
                return
            if counted := ACTIVATIONS.match(message):
                self.activation_bytes = max(self.activation_bytes, int(counted[1]))
            is_error = severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)
            if is_error:
                self.errors.append(message)
            if verbose or is_error:
                print(message, file=sys.stderr)

    return Logger()


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


def main() -> None:
    """Read a job from stdin, and write messages to stdout, a line of JSON each: "progress", then the answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what TensorRT prints is no answer
    job = json.loads(sys.stdin.read())
    try:
        if job["task"] == "parse":
            answer: dict[str, Any] = {"parsed": parse(Path(job["graph"]))}
        else:
            built = build_engine(
                Path(job["graph"]), Path(job["engine"]), [Profile(**each) for each in job["profiles"]],
                lambda *at: print(json.dumps({"progress": at}), file=answers),
                product=RTX, capabilities=job["capabilities"], verbose=True,
            )  # fmt: skip
            answer = {"built": vars(built)}
    except BridgeError as error:
        answer = {"error": str(error)}
    except ImportError as error:
        answer = {"unavailable": str(error)}
    print(json.dumps(answer), file=answers)
    answers.flush()
    os._exit(0)  # the libraries may crash while they are unloaded


if __name__ == "__main__":
    main()
