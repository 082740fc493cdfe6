"""Measure conversions of small Llamas, and fit what `bridge.estimate` multiplies their work with.

    python -m benchmarks.speed --measure        run them, add points to benchmarks/speed.json
    python -m benchmarks.speed                  fit those points, write mappings/speed.toml, leave each point out

A point is a process that converts and verifies: processor time and wall time of its start (planning included), of
writing and of verification, and the work that its plan counts. The fit is on processor time, which other work on the
machine moves less; it is held against wall time. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoint import SMALL, make_calibration, make_checkpoint
from bridge.planning.estimate import Machine, Work, probe, read_speeds, spent, stage_waits

Point = dict[str, Any]

ROOT = Path(__file__).parent.parent
POINTS = ROOT / "benchmarks/speed.json"
LLAMA = {"num_attention_heads": 16, "num_key_value_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "400 layers": SMALL | LLAMA | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 400},
    "0.1b": SMALL | LLAMA | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8},
    "0.3b": SMALL | LLAMA | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20},
    "1.1b": SMALL,
}
TINY = ROOT / "examples/models/tiny-llama"
FLOAT16 = "float16"  # no scheme: every tensor is cast
STREAMED = ("none", "fp8_pc_pt", "nvfp4_wo", "int4_wo", "fp8")  # of every size
OTHERS = (
    ("hf", "int8_wo"), ("hf", "fp8_block"), ("hf", "mxfp8"), ("hf", "mxfp4_wo"), ("hf", "int4_mse"),
    ("hf", "nvfp4_wo_mse"), ("hf", "nvfp4_four_over_six"), ("hf", "w4a8_nvfp4_fp8"), ("gguf", "none"), ("gguf", "q8_0"),
    ("gguf", "q4_0"), ("gguf", "q4_k"), ("gguf", "q5_k"), ("gguf", "q6_k"), ("gguf", FLOAT16), ("hf", "int4_awq"),
    ("megatron", "none"), ("torchtitan", "none"), ("trtllm", "fp8_pc_pt"),
)  # fmt: skip
CORES = 2  # of the machine of the points, but for those of one core
ONE_CORE = [(size, "hf", scheme, 1) for size in ("0.3b", "1.1b") for scheme in ("none", "fp8_pc_pt", "nvfp4_wo")]
LEAST = 0.1  # seconds that are added to those of a point before errors are divided by them
HEAD = """# What conversions take on one core of machine B (docs/pages/performance.md), from the page cache.
# Seconds of the processor `once` and for each written `tensor`; nanoseconds for each value, by operation.
# Written by `python -m benchmarks.speed` from the points of benchmarks/speed.json, which the same measures.
# probe: seconds of `bridge.planning.estimate.probe`. error: nine of ten points that were left out of the fit keep it.
# targets: those that make nothing that takes long beside tensors. disk, remote: bytes a second that are assumed; the
# disk is that of the machine, remote 16 connections in requests of 8 MiB, each after 0.1 s at 85 MB/s (Amazon S3)."""
RATES = """targets = ["gguf", "hf", "megatron", "mlx", "torchtitan", "trtllm"]
disk = 0.5e9
remote = 0.67e9"""
STAGES = ("start", "write", "verify")
CALIBRATED = ("int4_awq", "fp8", "nvfp4_four_over_six", "w4a8_nvfp4_fp8")


def cases() -> list[tuple[str, str, str, int]]:
    """Size, target, scheme, cores: what is measured."""
    of = [(size, "hf", scheme) for size in ("tiny", *SHAPES) for scheme in STREAMED]
    rows = ("q4_k", "q5_k", "q6_k")  # of 256 values, which those of the tiny Llama have not
    others = [(size, *other) for size in ("tiny", "0.1b", "0.3b") for other in OTHERS]
    every = of + [(size, *other) for size, *other in others if not (size == "tiny" and other[1] in rows)]
    return [(*case, CORES) for case in every] + ONE_CORE


def measure(work: Path, rounds: int, only: list[str]) -> None:
    """Run each case `rounds` times, in turn; keep the least processor time and wall time of each stage."""
    points = json.loads(POINTS.read_text()) if POINTS.exists() else []
    chosen = [case for case in cases() if not only or {*map(str, case)} & {*only}]
    for _ in range(rounds):
        for size, target, scheme, count in chosen:
            model = TINY if size == "tiny" else work / f"llama-{size}"
            if not model.exists():
                make_checkpoint(model, SHAPES[size], 2 if size == "1.1b" else 1)
            point = one_run(model, size, target, scheme, count, work)
            print(json.dumps(point), flush=True)
            points = _with(points, point)
            POINTS.write_text("[\n" + ",\n".join(f"  {json.dumps(one)}" for one in points) + "\n]\n")


def _with(points: list[dict[str, Any]], point: dict[str, Any]) -> list[dict[str, Any]]:
    def name(one: dict[str, Any]) -> list[Any]:
        return [one.get(key, CORES) for key in ("size", "target", "scheme", "cores")]

    old = next((one for one in points if name(one) == name(point)), None)
    if old and old["work"] == point["work"]:
        point = {
            **point,
            **{what: [min(*pair) for pair in zip(old[what], point[what], strict=True)] for what in STAGES},
        }
    return [one for one in points if one is not old] + [point]


def one_run(model: Path, size: str, target: str, scheme: str, count: int, work: Path) -> dict[str, Any]:
    """Convert and verify in a process of its own on some cores; seconds of the processor and the wall of each stage."""
    import bridge
    from bridge.planning.estimate import work_of

    quant = None if scheme in ("none", FLOAT16) else scheme
    plan = bridge.plan(model, target, quant, **_options(scheme))
    out, calib = work / "out", ""
    shutil.rmtree(out, ignore_errors=True)
    if scheme in CALIBRATED:
        calib = str(work / f"{size}-{scheme}.safetensors")
        if not Path(calib).exists():
            make_calibration(model, Path(calib), scheme)
    stages = work / "stages.json"
    words = ["convert", str(model), "--target", target, "--out", str(out), "--quiet", *_words(scheme, calib)]
    load, begin = os.getloadavg()[0], time.perf_counter()
    command = ["taskset", "-c", f"0-{count - 1}", sys.executable, "-m", "benchmarks.speed_one", str(stages), *words]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = status
    if status:
        sys.exit(f"{model} to {target} in {scheme} failed")
    seconds = json.loads(stages.read_text())
    rest = [usage.ru_utime + usage.ru_stime, wall]
    for stage in STAGES[1:]:
        rest = [total - spent for total, spent in zip(rest, seconds[stage], strict=True)]
    seconds[STAGES[0]] = rest
    return {
        "size": size, "target": target, "scheme": scheme, "cores": count, "load": round(load, 1),
        **{stage: [round(value, 3) for value in seconds[stage]] for stage in STAGES}, "work": asdict(work_of(plan)),
    }  # fmt: skip


def _options(scheme: str) -> dict[str, Any]:
    return {"dtype": "fp16"} if scheme == FLOAT16 else {}


def _words(scheme: str, calib: str) -> list[str]:
    quant = [] if scheme in ("none", FLOAT16) else ["--quant", scheme]
    dtype = ["--dtype", "fp16"] if scheme == FLOAT16 else []
    return [*quant, *dtype, *(["--calib", calib] if calib else [])]


def fit(points: Sequence[Point], stage: str) -> dict[str, float]:
    """Processor time of a stage: seconds once and of a tensor, nanoseconds of a value in each operation.

    Least squares of relative errors; nothing takes less than no time.
    """
    names = ["once", "tensor"]
    names += sorted({name for point in points for name in point["work"]["values"]}) if stage != "start" else []
    seconds = np.array([point[stage][0] for point in points])
    columns = np.array([[_count(point["work"], name) for name in names] for point in points])
    weighted, ones = columns / (seconds + LEAST)[:, None], seconds / (seconds + LEAST)
    scale, kept, found = weighted.max(axis=0), list(range(len(names))), np.zeros(len(names))
    while True:
        found[:] = 0
        found[kept] = np.linalg.lstsq((weighted / scale)[:, kept], ones, rcond=None)[0]
        if found.min() >= 0:
            return {name: float(value) for name, value in zip(names, found / scale, strict=True)}
        kept.remove(int(found.argmin()))


def _count(work: dict[str, Any], name: str) -> float:
    if name == "once":
        return 1.0
    return float(work["tensors"]) if name == "tensor" else work["values"].get(name, 0) * 1e-9


def left_out(points: Sequence[Point]) -> list[tuple[Point, float, float]]:
    """Each point with its seconds and what a fit of all other points predicts."""
    found = []
    for point in points:
        others = [other for other in points if other is not point]
        work = Work(**point["work"])
        if not {*work.values} <= {name for other in others for name in other["work"]["values"]}:
            continue  # no other point has measured what it does
        fits = {stage: fit(others, stage) for stage in STAGES}
        found.append((point, wall(point), predicted(fits, work, point.get("cores", CORES))))
    return found


def wall(point: Point) -> float:
    """The seconds that a point took."""
    return sum(point[stage][1] for stage in STAGES)


def predicted(fits: Mapping[str, dict[str, float]], work: Work, count: int = CORES) -> float:
    """The seconds that some work takes on so many cores of the machine of the points, by fits of the stages."""
    waits = [stage_waits(stage, fits[stage], work, Machine(count), fits=True) for stage in STAGES[1:]]
    return spent(fits[STAGES[0]], work) + sum(max(seconds.values()) for seconds in waits)


def table(points: Sequence[Point], probed: float) -> str:
    """The text of `mappings/speed.toml`."""
    errors = [abs(seconds / real - 1) for _, real, seconds in left_out(points)]
    lines = [HEAD, f"probe = {probed:.3g}", f"error = {error_of(errors):.2f}", RATES]
    for stage in STAGES:
        lines += ["", f"[{stage}]"]
        lines += [f"{json.dumps(n) if ' ' in n else n} = {value:.3g}" for n, value in fit(points, stage).items()]
    return "\n".join(lines) + "\n"


def error_of(errors: Sequence[float]) -> float:
    """The error that nine of ten points keep, in steps of 5 %."""
    return math.ceil(sorted(errors)[math.ceil(0.9 * len(errors)) - 1] * 20) / 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bench-speed")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    if args.measure:
        args.work.mkdir(exist_ok=True)
        measure(args.work, args.rounds, args.only)
    points = json.loads(POINTS.read_text())
    for point, real, seconds in left_out(points):
        name = f"{point['size']:10} {point['target']:10} {point['scheme']:20} {point.get('cores', CORES)} cores"
        print(f"{name} {real:6.2f} s, left out {seconds:6.2f} s ({seconds / real - 1:+.0%})")
    (ROOT / "mappings/speed.toml").write_text(
        table(points, min(probe() for _ in range(20)) if args.measure else read_speeds().probe)
    )


if __name__ == "__main__":
    main()
