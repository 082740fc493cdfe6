"""A Llama checkpoint to a quantized one on disk: time and memory against llm-compressor, ModelOpt and `cp`.

    python benchmarks/hf.py                     1.1 B parameters, cp and bridge in turn, then each peer once
    python benchmarks/hf.py --size 8b --no-peer 8 B parameters, 16 GB: time per byte and memory beside the small one
    python benchmarks/hf.py --verify            with the comparison of every tensor
    python benchmarks/hf.py --read              and `qbridge verify` against a read of both sides

Whole processes, files in the page cache where they fit; `sync` before each. Each round measures the start-up, which is
the same command for the weights of the tiny Llama of examples/models; then `cp`; then bridge. Ratios leave out
the start-up and are between runs of one round: of seconds, and of processor time, which other work on the machine
changes less. `fp8`, with one scale a tensor, and `int4_awq` are given a calibration file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from checkpoint import LARGE, SMALL, make_calibration, make_checkpoint, run, size

ROOT = Path(__file__).parent.parent
CALIBRATED = ("fp8", "int4_awq")
SCHEMES = ("fp8_pc_pt", "nvfp4_wo", "int4_wo", *CALIBRATED)
READ = """
import sys
for name in sys.argv[1:]:
    with open(name, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
"""

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
presets = {
    "fp8": "FP8_DEFAULT_CFG", "fp8_pc_pt": "FP8_DEFAULT_CFG", "nvfp4_wo": "W4A16_NVFP4_CFG",
    "int4_wo": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "int4_awq": "INT4_AWQ_CFG",
}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
ids = torch.ones(1, 8, dtype=torch.long)
with torch.no_grad():
    model = mtq.quantize(model, getattr(mtq, presets[sys.argv[3]]), lambda m: m(ids))
    export_hf_checkpoint(model, torch.bfloat16, export_dir=sys.argv[2])
"""


def bridge(source: Path, scheme: str, out: Path, verify: bool) -> list[str]:
    """The command line that converts `source`."""
    words = ["convert", str(source), "--target", "hf", "--quant", scheme, "--out", str(out), "--quiet"]
    words += ["--calib", str(calibration_of(source, scheme))] if scheme in CALIBRATED else []
    return [sys.executable, "-m", "bridge", *words, *([] if verify else ["--no-verify"])]


def calibration_of(source: Path, scheme: str) -> Path:
    """Where the calibration of a checkpoint for a scheme is kept."""
    return source.with_name(f"{source.name}.{scheme}.calib.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench-hf")
    parser.add_argument("--size", choices=("1b", "8b"), default="1b")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--read", action="store_true")
    args = parser.parse_args()
    checkpoint, tiny = args.work / f"llama-{args.size}", args.work / "tiny"
    if not checkpoint.exists():
        large = args.size == "8b"
        # in a process of its own: a child's largest resident set begins with its parent's
        _apart(make_checkpoint, checkpoint, LARGE if large else SMALL, 4 if large else 2)
    shutil.rmtree(tiny, ignore_errors=True)
    tiny.mkdir()
    for name in ("config.json", "model.safetensors"):  # a tokenizer would make `verify` run the model
        shutil.copy(ROOT / "examples/models/tiny-llama" / name, tiny)
    for scheme in args.schemes:
        for source in (checkpoint, tiny) if scheme in CALIBRATED else ():
            if not (calibration := calibration_of(source, scheme)).exists():
                _apart(make_calibration, source, calibration, scheme)
    for scheme in args.schemes:
        _compare(scheme, checkpoint, tiny, args)
    shutil.rmtree(args.work / "copy", ignore_errors=True)


def _compare(scheme: str, checkpoint: Path, tiny: Path, args: argparse.Namespace) -> None:
    """Print the rounds of one scheme."""
    out, copy = args.work / "out", args.work / "copy"
    ratios, wall = [], 0.0
    for _ in range(args.rounds):
        start, start_processor, _, _ = _timed(bridge(tiny, scheme, out, args.verify), out)
        base, base_processor, _, _ = _timed(["cp", "-r", str(checkpoint), str(copy)], copy)
        wall, processor, peak, anonymous = _timed(bridge(checkpoint, scheme, out, args.verify), out)
        ratios.append(((wall - start) / base, (processor - start_processor) / base_processor))
        print(
            f"{scheme:10} start-up {start:5.2f} s ({start_processor:4.2f})  cp {base:5.2f} s ({base_processor:4.2f})  "
            f"bridge {wall:5.2f} s ({processor:4.2f} of the processor)  {anonymous * 1000:4.0f} MB anonymous  "
            f"{peak:4.2f} GB resident  beside start-up {ratios[-1][0]:.2f} x cp, {ratios[-1][1]:.2f} of processor time",
            flush=True,
        )
    seconds, processor = (statistics.median(column) for column in zip(*ratios, strict=True))
    least = [min(column) for column in zip(*ratios, strict=True)]
    print(
        f"{scheme:10} median {seconds:.2f} x cp (least {least[0]:.2f}), {processor:.2f} of processor time "
        f"(least {least[1]:.2f}), {size(out):.2f} GB written",
        flush=True,
    )
    if args.read:
        _compare_verification(scheme, checkpoint, tiny, args)
    for name, code in (("llm-compressor", COMPRESSOR), ("ModelOpt", MODELOPT)):
        if not args.no_peer and not (name == "llm-compressor" and scheme in CALIBRATED):
            theirs, _, most, _ = _timed([sys.executable, "-c", code, str(checkpoint), str(out), scheme], out)
            print(f"{scheme:10} {name} {theirs:5.1f} s  {most:4.2f} GB  {theirs / wall:.0f} x bridge", flush=True)


def _compare_verification(scheme: str, checkpoint: Path, tiny: Path, args: argparse.Namespace) -> None:
    """Print the rounds of `qbridge verify` of what was written, against one read of it and of its source."""
    out, small = args.work / "out", args.work / "small"
    _timed(bridge(tiny, scheme, small, False), small)
    files = [str(path) for root in (checkpoint, out) for path in sorted(root.glob("*.safetensors"))]
    ratios = []
    for _ in range(args.rounds):
        start, start_processor, _, _ = _measured(_verification(small, tiny))
        base, base_processor, _, _ = _measured([sys.executable, "-S", "-c", READ, *files])
        wall, processor, _, _ = _measured(_verification(out, checkpoint))
        ratios.append(((wall - start) / base, (processor - start_processor) / base_processor))
        row = (
            f"{scheme:10} start-up {start:5.2f} s ({start_processor:4.2f})  read {base:5.2f} s ({base_processor:4.2f})"
        )
        row += f"  verify {wall:5.2f} s ({processor:4.2f} of the processor)  beside start-up {ratios[-1][0]:.2f} x one"
        print(f"{row} read of both sides, {ratios[-1][1]:.2f} of processor time", flush=True)


def _verification(out: Path, source: Path) -> list[str]:
    return [sys.executable, "-m", "bridge", "verify", str(out), "--against", str(source), "--quiet"]


def _apart(work: Callable[..., None], *given: object) -> None:
    made = multiprocessing.get_context("spawn").Process(target=work, args=given)
    made.start()
    made.join()


def _timed(command: list[str], out: Path) -> tuple[float, float, float, float]:
    shutil.rmtree(out, ignore_errors=True)
    return _measured(command)


def _measured(command: list[str]) -> tuple[float, float, float, float]:
    """Seconds, processor time, peak resident set and peak anonymous memory in GB of a whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall, peak, anonymous = run(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, processor, peak, anonymous


if __name__ == "__main__":
    main()
