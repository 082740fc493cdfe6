"""Sensitivity's ranking of units on a real model, against each unit quantized alone by other code.

    python benchmarks/leave_one_out.py                   twelve units of SmolLM2-135M: half an hour of one core
    python benchmarks/leave_one_out.py --model tiny-llama --units 6

`sensitivity` measures `int4_wo` on held-out rows of the calibration text. Beside it, one unit at a time, the source in
float32 with that unit's matrices rounded here (amax / 7, the largest block of 128 and 64 that divides a row), and its
KL on windows of the text of benchmarks/quality.py, which calibrates nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.evaluation.models import Bench
from benchmarks.quality import BUILD
from bridge.api.request import data_of
from bridge.api.sensitivity.job import Question, make_job
from bridge.api.sensitivity.measure import make_bench
from bridge.core.progress import no_progress

WINDOWS = 3


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """INT4 of a matrix [out, in], to nearest."""
    size = 128 if weight.shape[1] % 128 == 0 else 64
    blocks = weight.unflatten(1, (-1, size))
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-12)
    return (torch.round(blocks / scale).clamp(-8, 7) * scale).flatten(1)


def alone(bench: Bench, weights: Iterable[str]) -> float:
    """The KL of the source with these matrices rounded."""
    parameters = [bench.plain().get_parameter(name) for name in weights]
    before = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = rounded(parameter.data)
    try:
        return bench.figures(bench.plain())["kl"]
    finally:
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data


def main(model: str, count: int, build: Path) -> float:
    """Print both costs of each unit; return the rank correlation."""
    torch.set_num_threads(1)
    build.mkdir(parents=True, exist_ok=True)
    bench = Bench(model, build)
    bench.windows = bench.windows[:: len(bench.windows) // WINDOWS][:WINDOWS]
    bench.kept_as = f"{model}-{WINDOWS}"
    job = make_job(bench.source, Question("int4_wo"))
    made = make_bench(job, data_of(bench.source, bench.calibration and str(bench.calibration)), None, no_progress)
    bench.figures()  # keeps what the source puts out, before its weights change
    units = job.units[:: max(1, len(job.units) // count)][:count]
    ours = made.measure([made.variant({unit.name: 0}) for unit in units]).nats
    theirs = [alone(bench, [site.weight for site in unit.sites]) for unit in units]
    for unit, one, other in zip(units, ours, theirs, strict=True):
        print(f"| {unit.name} | {one:.4f} | {other:.4f} |", flush=True)
    correlation = float(spearmanr(ours, theirs).statistic)
    print(f"rank correlation {correlation:.3f}")
    return correlation


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--build", type=Path, default=BUILD)
    asked = parser.parse_args()
    main(asked.model, asked.units, asked.build)
