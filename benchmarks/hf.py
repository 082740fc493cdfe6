"""A Llama checkpoint to a quantized one on disk: time and memory against llm-compressor, ModelOpt and `cp`.

    python benchmarks/hf.py                     1.1 B parameters, cp and bridge in turn, then each peer once
    python benchmarks/hf.py --size 8b --no-peer 8 B parameters, 16 GB: time per byte and memory beside the small one
    python benchmarks/hf.py --verify            with the comparison of every tensor, apart

Whole processes, start included, files in the page cache where they fit; `sync` before each. Ratios are between runs
that follow each other; `start` is a conversion of the tiny Llama in examples/models, which is all start-up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
from pathlib import Path

from checkpoint import LARGE, SMALL, make_checkpoint, run, size

ROOT = Path(__file__).parent.parent
SCHEMES = ("fp8_pc_pt", "nvfp4_wo", "int4_wo")

COMPRESSOR = """
import sys
from llmcompressor import model_free_ptq
scheme = {"fp8_pc_pt": "FP8_DYNAMIC", "nvfp4_wo": "NVFP4A16", "int4_wo": "W4A16"}[sys.argv[3]]
model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], scheme=scheme, ignore=["lm_head"], max_workers=2)
"""
MODELOPT = """
import sys, torch
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM
presets = {"fp8_pc_pt": "FP8_DEFAULT_CFG", "nvfp4_wo": "W4A16_NVFP4_CFG", "int4_wo": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
ids = torch.ones(1, 8, dtype=torch.long)
with torch.no_grad():
    model = mtq.quantize(model, getattr(mtq, presets[sys.argv[3]]), lambda m: m(ids))
    export_hf_checkpoint(model, torch.bfloat16, export_dir=sys.argv[2])
"""


def bridge(source: Path, scheme: str, out: Path, verify: bool) -> list[str]:
    """The command line that converts `source`."""
    words = ["convert", str(source), "--target", "hf", "--quant", scheme, "--out", str(out), "--quiet"]
    return [sys.executable, "-m", "bridge", *words, *([] if verify else ["--no-verify"])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench-hf")
    parser.add_argument("--size", choices=("1b", "8b"), default="1b")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    checkpoint = args.work / f"llama-{args.size}"
    if not checkpoint.exists():
        large = args.size == "8b"
        # in a process of its own: a child's largest resident set begins with its parent's
        made = multiprocessing.get_context("spawn").Process(
            target=make_checkpoint, args=(checkpoint, LARGE if large else SMALL, 4 if large else 2)
        )
        made.start()
        made.join()
    out, copy = args.work / "out", args.work / "copy"
    start = statistics.median(
        _timed(bridge(ROOT / "examples/models/tiny-llama", "int8_wo", out, False), out)[0] for _ in range(3)
    )
    print(f"start-up (tiny model): {start:.2f} s")
    for scheme in args.schemes:
        ratios = []
        for _ in range(args.rounds):
            base, _, _ = _timed(["cp", "-r", str(checkpoint), str(copy)], copy)
            wall, peak, anonymous = _timed(bridge(checkpoint, scheme, out, args.verify), out)
            ratios.append((wall - start) / base)
            row = f"{scheme:10} cp {base:5.2f} s  bridge {wall:5.2f} s  {anonymous * 1000:4.0f} MB anonymous"
            print(f"{row}  {peak:4.2f} GB resident  beside start-up {ratios[-1]:.2f} x cp", flush=True)
        print(f"{scheme:10} median {statistics.median(ratios):.2f} x cp, {size(out):.2f} GB written", flush=True)
        for name, code in (("llm-compressor", COMPRESSOR), ("ModelOpt", MODELOPT)):
            if not args.no_peer:
                theirs, most, _ = _timed([sys.executable, "-c", code, str(checkpoint), str(out), scheme], out)
                print(f"{scheme:10} {name} {theirs:5.1f} s  {most:4.2f} GB  {theirs / wall:.0f} x bridge", flush=True)
    shutil.rmtree(copy, ignore_errors=True)


def _timed(command: list[str], out: Path) -> tuple[float, float, float]:
    shutil.rmtree(out, ignore_errors=True)
    return run(command)


if __name__ == "__main__":
    main()
