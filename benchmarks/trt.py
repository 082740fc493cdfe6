"""A 1.1 B-parameter Llama to FP8 ONNX: time, memory and size, against ModelOpt with torch.onnx and against `cp`.

    python benchmarks/trt.py            both sides, in turn, in this order: cp, bridge twice, peer
    python benchmarks/trt.py --no-peer  without the peer, which needs 8 GB and a minute

"first" has an empty cache and makes the graph, "second" reads it. Whole processes, start included; processor time is
user and system time of all their threads, peak memory their largest resident set. The checkpoint has random weights
(bf16, 2.2 GB, two shards) and is made once in `--work`; the calibration is given, as in a batch conversion.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
from pathlib import Path

from checkpoint import SMALL, make_calibration, make_checkpoint, run, size

PEER = """
import sys, torch
import modelopt.torch.quantization as mtq
import transformers.masking_utils
transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None  # aten::diff has no translation
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.config.use_cache = False
ids = torch.ones(1, 8, dtype=torch.long)
model = mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda m: m(ids))
for module in model.modules():  # the exporter wants amax as constants, not as parameters of the graph
    if getattr(module, "_amax", None) is not None:
        amax = module._amax
        del module._amax
        module.__dict__["_amax"] = amax
class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, ids):
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
from modelopt.torch.quantization.utils import export_torch_mode
with torch.no_grad(), export_torch_mode():
    torch.onnx.export(Logits(model), (ids,), sys.argv[2] + "/model.onnx", dynamo=False, opset_version=20,
                      input_names=["input_ids"], output_names=["logits"])
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=Path("out/bench-trt"))
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint, calibration = args.work / f"llama-{args.layers}", args.work / f"fp8-{args.layers}.safetensors"
    if not checkpoint.exists():
        make_checkpoint(checkpoint, {**SMALL, "num_hidden_layers": args.layers})
    if not calibration.exists():
        make_calibration(checkpoint, calibration)
    ours, theirs, copy = args.work / "bridge", args.work / "peer", args.work / "copy"
    cache = args.work / "cache"
    os.environ["XDG_CACHE_HOME"] = str(cache.absolute())
    command = [sys.executable, "-m", "bridge", "convert", str(checkpoint), "--target", "trt", "--quant", "fp8"]
    command += ["--out", str(ours), "--calib", str(calibration), "--no-verify", "--quiet"]
    for _ in range(args.rounds):
        for path in (ours, theirs, copy):
            shutil.rmtree(path, ignore_errors=True)
        base, _, _ = run(["cp", "-r", str(checkpoint), str(copy)])
        print(f"cp      {base:6.1f} s                       {size(copy):.2f} GB")
        shutil.rmtree(cache, ignore_errors=True)
        for which in ("first", "second"):
            shutil.rmtree(ours, ignore_errors=True)
            before = processor()
            wall, peak, _ = run(command)
            row = f"{which:6}  {wall:6.1f} s  {processor() - before:6.1f} s CPU  {peak:5.2f} GB  {size(ours):.2f} GB"
            print(f"{row}   {wall / base:.1f} x cp", flush=True)
        if not args.no_peer:
            theirs.mkdir()
            before = processor()
            wall_peer, peak_peer, _ = run([sys.executable, "-c", PEER, str(checkpoint), str(theirs)])
            row = f"peer    {wall_peer:6.1f} s  {processor() - before:6.1f} s CPU  {peak_peer:5.2f} GB"
            print(f"{row}  {size(theirs):.2f} GB   {wall_peer / wall:.1f} x second", flush=True)


def processor() -> float:
    """Seconds of processor time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
