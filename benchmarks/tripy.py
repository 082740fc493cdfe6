"""A Llama checkpoint to a Tripy state dict on disk: time and memory against the upstream way and `cp`.

    python benchmarks/tripy.py                            1.1 B parameters, cp and bridge in turn, then upstream once
    python benchmarks/tripy.py --layers 2 --no-peer       fewer layers of the same shape
    python benchmarks/tripy.py --size 8b --no-peer        8 B parameters: time per byte and memory beside the small one

Whole processes, start included, files in the page cache where they fit; `sync` before each. `cp` copies the file that
bridge wrote: floats, as many bytes as the source has in a 16-bit dtype. Upstream is what Tripy's nanoGPT example does
up to the state dict (transformers, ModelOpt, a loop over its tensors), which then saves it as safetensors; its int4
weights are not the model's (see tests/targets/tripy/test_parity.py), its time is. `start` is a conversion of the
tiny Llama.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
from pathlib import Path

from checkpoint import LARGE, SMALL, make_calibration, make_checkpoint, run, size

ROOT = Path(__file__).parent.parent
SCHEMES = ("int8_wo", "int4_wo", "fp8")
DTYPES = ("fp16", "bf16")

UPSTREAM = """
import sys, torch
import modelopt.torch.quantization as mtq
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
presets = {"fp8": "FP8_DEFAULT_CFG", "int8_wo": "INT8_WEIGHT_ONLY_CFG", "int4_wo": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"}
source, out, scheme, dtype = sys.argv[1:]
dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
ids = torch.ones(1, 8, dtype=torch.long)
with torch.no_grad():
    model = mtq.quantize(model, getattr(mtq, presets[scheme]), lambda m: m(ids))
bound, state = {"fp8": 448.0, "int8_wo": 127.0, "int4_wo": 7.0}[scheme], {}
for name, tensor in model.state_dict().items():
    if name.endswith("quantizer._amax"):
        scale = tensor.float() / bound
        if scheme == "int4_wo":
            owner = model.get_submodule(name.removesuffix(".weight_quantizer._amax"))
            scale = scale.reshape(-1, owner.in_features)
        tensor, name = scale.squeeze().to(dtype), name.removesuffix("quantizer._amax") + "scale"
    state[name] = tensor.contiguous()
import os
os.makedirs(out)
save_file(state, f"{out}/model.safetensors")
"""


def bridge(source: Path, scheme: str, dtype: str, out: Path, calibration: Path | None) -> list[str]:
    """The command line that converts `source`."""
    words = ["convert", str(source), "--target", "tripy", "--quant", scheme, "--dtype", dtype, "--out", str(out)]
    given = ["--calib", str(calibration)] if calibration else []
    return [sys.executable, "-m", "bridge", *words, *given, "--quiet", "--no-verify"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench-tripy")
    parser.add_argument("--size", choices=("1b", "8b"), default="1b")
    parser.add_argument("--layers", type=int, default=0, help="other than the model's own number")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    config = LARGE if args.size == "8b" else SMALL
    layers = args.layers or int(config["num_hidden_layers"])
    checkpoint = args.work / f"llama-{args.size}-{layers}"
    if not checkpoint.exists():
        # in a process of its own: a child's largest resident set begins with its parent's
        made = multiprocessing.get_context("spawn").Process(
            target=make_checkpoint,
            args=(checkpoint, config | {"num_hidden_layers": layers}, 4 if args.size == "8b" else 2),
        )
        made.start()
        made.join()
    out, copy, calibration = args.work / "out", args.work / "copy", args.work / f"amax-{layers}.safetensors"
    if not calibration.exists():
        make_calibration(checkpoint, calibration)
    tiny = bridge(ROOT / "examples/models/tiny-llama", "int8_wo", "fp16", out, None)
    start = statistics.median(_timed(tiny, out)[0] for _ in range(3))
    print(f"start-up (tiny model): {start:.2f} s; source {size(checkpoint):.2f} GB")
    for scheme in args.schemes:
        for dtype in args.dtypes:
            command = bridge(checkpoint, scheme, dtype, out, calibration if scheme == "fp8" else None)
            ratios = []
            for _ in range(args.rounds):
                wall, peak, anonymous = _timed(command, out)
                base, _, _ = _timed(["cp", "-r", str(out), str(copy)], copy)
                ratios.append((wall - start) / base)
                row = f"{scheme:8} {dtype} cp {base:5.2f} s  bridge {wall:5.2f} s  {anonymous * 1000:4.0f} MB anonymous"
                print(f"{row}  {peak:4.2f} GB resident  beside start-up {ratios[-1]:.2f} x cp", flush=True)
            print(f"{scheme:8} {dtype} median {statistics.median(ratios):.2f} x cp, {size(out):.2f} GB", flush=True)
            if not args.no_peer:
                peer = [sys.executable, "-c", UPSTREAM, str(checkpoint), str(copy), scheme, dtype]
                theirs, most, own = _timed(peer, copy)
                row = f"{scheme:8} {dtype} upstream {theirs:5.1f} s  {own:4.2f} GB anonymous  {most:4.2f} GB resident"
                print(f"{row}  {theirs / wall:.0f} x bridge", flush=True)
    shutil.rmtree(copy, ignore_errors=True)


def _timed(command: list[str], out: Path) -> tuple[float, float, float]:
    shutil.rmtree(out, ignore_errors=True)
    return run(command)


if __name__ == "__main__":
    main()
