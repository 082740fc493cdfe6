"""SHA-256 of every file that the example models convert to, a target and a scheme at a time.

    python -m tests.output_digests before.json              # record
    python -m tests.output_digests after.json before.json   # record, and compare: exit 1 where a byte differs

Reports are left out: they hold seconds.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import bridge

ROOT = Path(__file__).parent.parent
MODELS = ("tiny-llama", "tiny-gpt2")
TARGETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hf", {}), ("hf", {"format": "compressed-tensors"}), ("gguf", {}), ("megatron", {}), ("torchtitan", {}),
    ("tripy", {}), ("trt", {}), ("trtllm", {}), ("trtllm", {"tp": 2}),
)  # fmt: skip
SCHEMES = (
    "none", "fp8", "fp8_pc_pt", "fp8_block", "int8", "int8_sq", "int8_wo", "int4_wo", "int4_awq", "w4a8_awq",
    "nvfp4", "nvfp4_wo", "mxfp8", "mxfp4_wo",
)  # fmt: skip
TIMED = {"report.json", "report.html"}


def digests(directory: Path) -> dict[str, str]:
    """Path below `directory` -> SHA-256, of every file but the reports."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name not in TIMED)
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def convert(model: Path, target: str, scheme: str, options: dict[str, Any]) -> dict[str, str]:
    """The digests of one conversion; the class of the error where it is refused."""
    text = [{"input_ids": [[(7 * i + j * j) % 500 + 3 for j in range(64)]]} for i in range(8)]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        import torch

        batches = [{k: torch.tensor(v) for k, v in row.items()} for row in text]
        try:
            needs = scheme in ("fp8", "int8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4", "fp8_pc_pt", "mxfp8")
            bridge.convert(
                model, target, None if scheme == "none" else scheme, out, verify=False,
                calib=batches if needs else None, **options,
            )  # fmt: skip
        except bridge.BridgeError as error:
            return {"refused": type(error).__name__, "_why": str(error)[:400]}
        return digests(out)


def main(out: Path, before: Path | None = None) -> int:
    """Record to `out`; compare with `before`. Returns how many conversions differ."""
    result = {}
    for model in MODELS:
        for target, options in TARGETS:
            for scheme in SCHEMES:
                key = " ".join((model, target, scheme, *(f"{k}={v}" for k, v in options.items())))
                result[key] = convert(ROOT / "examples/models" / model, target, scheme, options)
                print(key, len(result[key]), result[key].get("_why", "")[:60], flush=True)
        out.write_text(json.dumps(result, indent=1))
    differ = 0
    for key, files in json.loads(before.read_text()).items() if before else ():
        for name in sorted((set(files) | set(result[key])) - {"_why"}):
            if files.get(name) != result[key].get(name):
                print("DIFFERS", key, name)
                differ += 1
    print(f"{len(result)} conversions, {sum(len(f) for f in result.values())} files, {differ} differ")
    return differ


if __name__ == "__main__":
    sys.exit(bool(main(*map(Path, sys.argv[1:]))))
