"""What inspection costs: processor time of a forward of MiniLM, in multiples of one without.

    python benchmarks/inspection.py [--rounds 9] [--profile CASE] [case ...]

all-MiniLM-L6-v2: hidden 384, 36 matrices, 8 rows of 128 tokens, one thread. A round runs each case once, and a plain
forward before it; a figure is the median quotient of the two, and the least times. `off`: a session in which nothing is
due.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from schemes import directory

import bridge
from bridge.sources.opening import open_source
from bridge.workflows.inspect.routes import BLOCKWISE
from bridge.workflows.inspect.te.stat_names import TENSOR_STATS

ROWS, TOKENS = 8, 128
ALL = [stat for stat in TENSOR_STATS if stat != BLOCKWISE]


def config(feature: str, stats: list[Any], **schedule: Any) -> dict[str, Any]:
    """One feature on the activations of all layers."""
    used = {feature: {"enabled": True, "tensors": ["activation"], "stats": stats, **schedule}}
    return {"all": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": used}}


CASES: dict[str, Any] = {
    "off": config("LogTensorStats", ["cur_amax"], start_step=1000),
    "cur_amax": config("LogTensorStats", ["cur_amax"]),
    "all of LogTensorStats": config("LogTensorStats", ALL),
    "one scheme": config("LogQuantizedTensorStats", ["fp8_sqnr", "fp8_cosine", "fp8_underflows%"]),
    "defaults": None,
}
BOUNDS = {"off": 1.02, "one scheme": 1.9, "all of LogTensorStats": 1.3, "defaults": 4.0}


def seconds(step: Callable[[], Any]) -> float:
    """The processor time of a step."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", choices=CASES, help="the functions that take most of a case, instead")
    parser.add_argument("cases", nargs="*", help=f"of: {', '.join(CASES)}")
    options = parser.parse_args()
    cases = options.cases or list(CASES)
    torch.set_num_threads(1)
    model = open_source(directory("all-MiniLM-L6-v2")).load_model().eval()
    ids = torch.randint(1000, 20000, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    plain = partial(model, input_ids=ids, attention_mask=torch.ones_like(ids))

    def run(case: str) -> float:
        with bridge.inspecting(model, CASES[case]) as session:
            return seconds(plain) if case == "off" else seconds(lambda: (plain(), session.step()))

    with torch.no_grad():
        for case in {*cases, options.profile} - {None}:  # kernels are loaded, and compiled once
            run(case)
        if options.profile:
            with bridge.inspecting(model, CASES[options.profile]) as session, cProfile.Profile() as profile:
                plain()
                session.step()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            return
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(options.rounds):
            for case, found in times.items():
                found.append((seconds(plain), run(case)))
    print("| case | median of quotients | of the least times | bound |\n|---|---|---|---|")
    for case, found in times.items():
        quotient = statistics.median(inspected / alone for alone, inspected in found)
        least = min(inspected for _, inspected in found) / min(alone for alone, _ in found)
        print(f"| {case} | {quotient:.3g} | {least:.3g} | {BOUNDS.get(case, '')} |")


if __name__ == "__main__":
    main()
