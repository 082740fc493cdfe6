"""SHA-256 of every file that models convert to: what a change without effect on bytes is held against.

    python -m tests.output_digests before.json                      # record
    python -m tests.output_digests after.json before.json           # record, and compare: exit 1 where a byte differs
    python -m tests.output_digests after.json before.json --only trt  # rows with this in their name

Reports are left out, since they hold seconds, and model cards, which are prose.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import bridge

EXAMPLES = Path(__file__).parent.parent / "examples" / "models"
MODELS = ("tiny-llama", "tiny-gpt2")
TARGETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hf", {}), ("hf", {"format": "compressed-tensors"}), ("gguf", {}), ("megatron", {}), ("torchtitan", {}),
    ("tripy", {}), ("trt", {}), ("ort", {}), ("trtllm", {}), ("trtllm", {"tp": 2}),
)  # fmt: skip
SCHEMES = (
    "none", "fp8", "fp8_pc_pt", "fp8_block", "int8", "int8_sq", "int8_wo", "int4_wo", "int4_awq", "w4a8_awq",
    "nvfp4", "nvfp4_wo", "mxfp8", "mxfp4_wo",
)  # fmt: skip
# The other schemes meet two targets that write them, not all.
MORE = (
    "int4_awq_clip", "int4_awq_full", "int4_gptq", "int4_mse", "nvfp4_awq", "nvfp4_experts_only",
    "nvfp4_four_over_six", "nvfp4_gptq", "nvfp4_input_scale1", "nvfp4_local_hessian", "nvfp4_mlp_only", "nvfp4_mse",
    "nvfp4_wo_mse", "q4_0", "q4_0_imatrix", "q4_k", "q4_k_imatrix", "q5_k", "q5_k_imatrix", "q6_k", "q6_k_imatrix",
    "q8_0", "w4a8_nvfp4_fp8",
)  # fmt: skip
CACHES = ("fp8", "fp8_cast", "int8", "nvfp4")
# A graph a kind of family: what its export replaces and what its files beside the graph say.
DECODERS = ("gemma3", "mixtral", "qwen3_moe", "opt", "gpt_neox", "gpt_oss", "llama4")
ENCODERS = ("bert-classifier", "vit", "resnet")
SEQ2SEQ = ("t5", "whisper", "trocr", "moonshine")
TASKS = ("wav2vec2", "ast", "clip", "siglip2", "owlv2", "clipseg", "clap-fused", "vit-masked", "nomic")
HYBRIDS = ("BambaForCausalLM", "KimiLinearForCausalLM", "Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM")
UNCOMPARED = {"report.json", "report.html", "README.md"}

Convert = Callable[[], dict[str, str]]


def digests(directory: Path, made: Path) -> dict[str, str]:
    """Path below `directory` -> SHA-256, of every file but reports and model cards; the path `made`, which is of this
    run, is left out of the bytes.
    """
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name not in UNCOMPARED)
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes().replace(str(made).encode(), b"")).hexdigest()
        for p in files
    }


@cache
def calibration(model: Path, scheme: str, kv: str | None) -> Any:
    """The statistics of a scheme, or None where it needs none or the model cannot have it."""
    import torch

    batches = [{"input_ids": torch.tensor([[(7 * i + j * j) % 500 + 3 for j in range(64)]])} for i in range(8)]
    try:
        return bridge.calibrate(model, scheme, batches, kv=kv)
    except bridge.BridgeError:
        return None


def convert(model: Path, target: str, scheme: str = "none", **options: Any) -> dict[str, str]:
    """The digests of one conversion; the class of the error where it is refused."""
    quant = None if scheme == "none" else scheme
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        try:
            calib = quant and calibration(model, quant, options.get("kv"))
            bridge.convert(model, target, quant, out, verify=False, calib=calib, **options)
        except bridge.BridgeError as error:
            return {"refused": type(error).__name__, "_why": str(error)[:400]}
        return digests(out, model.parent)


def rows(scratch: Path) -> Iterator[tuple[str, Convert]]:
    """The name of each conversion, and what does it; models that are not examples are made below `scratch`."""
    for model in MODELS:
        for target, options in TARGETS:
            for scheme in SCHEMES:
                yield row(model, EXAMPLES / model, target, scheme, **options)
    llama = EXAMPLES / "tiny-llama"
    for scheme in MORE:
        for target in ("hf", "gguf" if scheme.startswith("q") else "trt"):
            yield row("tiny-llama", llama, target, scheme)
    for kv in CACHES:
        for target, scheme in (("hf", "fp8"), ("trt", "fp8"), ("trtllm", "fp8")):
            yield row("tiny-llama", llama, target, scheme, kv=kv)
    for name, make in sources(scratch):
        for target, scheme in (("hf", "none"), ("hf", "fp8"), ("trt", "int8_wo"), ("gguf", "q8_0"), ("trtllm", "fp8")):
            yield name + f" {target} {scheme}", lambda m=make, t=target, s=scheme: convert(m(), t, s)
    for name, make in graphs(scratch):
        for target in ("trt", "ort") if name in DECODERS else ("trt",):
            yield name + f" {target}", lambda m=make, t=target: convert(m(), t, "none")


def row(name: str, model: Path, target: str, scheme: str, **options: Any) -> tuple[str, Convert]:
    """A conversion of a directory, with its name."""
    words = (name, target, scheme, *(f"{k}={v}" for k, v in options.items()))
    return " ".join(words), lambda: convert(model, target, scheme, **options)


def sources(scratch: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """tiny-llama as the checkpoints of trainers, and pruned."""

    def made(name: str, make: Callable[[Path], Any]) -> tuple[str, Callable[[], Path]]:
        def path() -> Path:
            if not (out := scratch / name).exists():
                make(out)
                for report in UNCOMPARED:  # carried along, their seconds would change the bytes of a plan
                    (out / report).unlink(missing_ok=True)
            return out

        return name, path

    llama = EXAMPLES / "tiny-llama"
    for target in ("megatron", "torchtitan"):
        yield made(f"from-{target}", lambda out, t=target: bridge.convert(llama, t, None, out, verify=False))
    yield made("pruned", lambda out: bridge.prune(llama, {"ffn": "50%"}, out, samples=8, verify=False))
    yield made("pruned-layers", lambda out: bridge.prune(llama, out=out, drop_layers=[1], verify=False))


def graphs(scratch: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Small random models, one a kind of family."""
    import torch

    from tests.models import crossing_family, seeing_family, seq2seq_families, task_families, tiled_family, trt_families
    from tests.sweep import build

    def saved(name: str, save: Callable[[Path], Any]) -> tuple[str, Callable[[], Path]]:
        def path() -> Path:
            save(out := scratch / name)
            return out

        return name, path

    for names, model in (
        (DECODERS, trt_families.decoder), (ENCODERS, trt_families.encoder), (SEQ2SEQ, seq2seq_families.seq2seq),
        (TASKS, task_families.task_model), (HYBRIDS, partial(build.build, dtype=torch.float32)),
    ):  # fmt: skip
        for name in names:
            yield saved(name, lambda out, m=model, n=name: m(n).save_pretrained(out))
    yield saved("llava", seeing_family.save_llava)
    yield saved("llava-next", tiled_family.save_llava_next)
    yield saved("mllama", crossing_family.save_mllama)


def main(out: Path, before: Path | None, only: str) -> int:
    """Record to `out`; compare with `before`. Returns how many conversions differ."""
    result: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for key, conversion in rows(Path(scratch)):
            if only in key:
                result[key] = conversion()
                print(key, len(result[key]), result[key].get("_why", "")[:60], flush=True)
                out.write_text(json.dumps(result, indent=1))
    differ = 0
    for key, files in json.loads(before.read_text()).items() if before else ():
        if only not in key:
            continue
        for name in sorted((set(files) | set(result[key])) - {"_why"}):
            if files.get(name) != result[key].get(name):
                print("DIFFERS", key, name)
                differ += 1
    print(f"{len(result)} conversions, {sum(len(f) for f in result.values())} files, {differ} differ")
    return differ


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="a part of the names of the conversions to do")
    options = parser.parse_args()
    sys.exit(bool(main(options.out, options.before, options.only)))
