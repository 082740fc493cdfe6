"""The covering set: conversions that meet every target, family of schemes and kind of model.

A row whose bytes the weights alone decide is compared by its digests with the pinned versions. Graphs and statistics
come from torch and transformers: there the conversion's own verification decides.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bridge
from bridge.core import ranges
from bridge.core.version import versions
from tests.output_digests import EXAMPLES, digests

LLAMA, GPT2 = EXAMPLES / "tiny-llama", EXAMPLES / "tiny-gpt2"
# Rows: a word for the model, target, scheme, options. First those whose bytes weights decide.
EXACT: tuple[tuple[str, str, str | None, dict[str, Any]], ...] = (
    ("llama", "hf", None, {}), ("llama", "hf", "nvfp4_wo", {}), ("llama", "hf", "mxfp4_wo", {}),
    ("llama", "hf", "fp8_pc_pt", {"format": "compressed-tensors"}), ("llama", "hf", "int8_wo", {}),
    ("llama", "gguf", "q8_0", {}), ("llama", "gguf", "q4_0", {}), ("llama", "trtllm", "int8_wo", {"tp": 2}),
    ("gpt2", "tripy", "int8_wo", {}), ("llama", "megatron", None, {}), ("llama", "torchtitan", None, {}),
    ("memory", "hf", "int8_wo", {}), ("MixtralForCausalLM", "hf", "int8_wo", {}), ("llama", "mlx", "affine4", {}),
)  # fmt: skip
RUN: tuple[tuple[str, str, str | None, dict[str, Any]], ...] = (
    ("llama", "hf", "int8_sq", {}), ("llama", "hf", "fp8", {"kv": "fp8"}), ("llama", "trt", "fp8", {}),
    ("MptForCausalLM", "hf", "int8", {}), ("XGLMForCausalLM", "hf", "int8", {}), ("llama", "ort", "int4_wo", {}),
    ("BertForSequenceClassification", "trt", "int8_wo", {}), ("MixtralForCausalLM", "trt", "int8_wo", {}),
    ("Wav2Vec2ForCTC", "trt", None, {}), ("T5ForConditionalGeneration", "trt", None, {}),
    ("LlavaForConditionalGeneration", "trt", None, {}), ("BambaForCausalLM", "trt", None, {}),
)  # fmt: skip

CALIBRATED = ("int8_sq", "fp8", "int8")


def name(row: tuple[str, str, str | None, dict[str, Any]]) -> str:
    model, target, scheme, options = row
    return " ".join([model, target, scheme or "none", *(f"{key}={value}" for key, value in options.items())])


def source(word: str, models: Path) -> Any:
    """A model by its word; those of the sweep are made once, by the pinned versions, because random numbers differ."""
    import transformers

    if word in ("llama", "gpt2"):
        return LLAMA if word == "llama" else GPT2
    if word == "memory":
        return transformers.AutoModelForCausalLM.from_pretrained(LLAMA)
    if not (models / word).exists():
        from tests.sweep.build import build

        build(word).save_pretrained(models / word)
    return models / word


def batches() -> list[dict[str, Any]]:
    """Token ids below 300, which every model here has: 8 times [1, 64], int64."""
    import torch

    return [{"input_ids": torch.tensor([[(7 * i + j * j) % 290 + 3 for j in range(64)]])} for i in range(8)]


def convert(row: tuple[str, str, str | None, dict[str, Any]], exact: bool, models: Path) -> dict[str, Any]:
    """`digest` and whether it `passed`, or the `error` with its class."""
    word, target, scheme, options = row
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        try:
            model = source(word, models)
            run: dict[str, Any] = {"verify": not exact, "progress": False, **options}
            if scheme in CALIBRATED and not exact:
                run["calib"] = batches()
            report = bridge.convert(model, target, scheme, out, **run)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "refused": isinstance(error, bridge.BridgeError)}
        files = digests(out, models)
        if word == "memory":  # transformers writes its version into the configuration
            files = {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
        whole = json.dumps(files, sort_keys=True)
        return {"digest": hashlib.sha256(whole.encode()).hexdigest(), "passed": exact or report.passed}


def main(models: Path, only: str, tell: Callable[[dict[str, Any]], Any]) -> None:
    """Tell versions first, then each row when it is done."""
    tell({"python": sys.version.split()[0], "versions": versions()})
    for exact, group in ((True, EXACT), (False, RUN)):
        for row in group:
            if any(part in name(row) for part in only.split("|")):
                start = time.monotonic()
                result = {"row": name(row), "exact": exact, **convert(row, exact, models)}
                tell({**result, "seconds": round(time.monotonic() - start, 1)})


if __name__ == "__main__":
    ranges.requirements = lambda extra: []  # what lies outside the ranges is what is tried
    lines, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    main(Path(sys.argv[1]), only, lambda line: print(json.dumps(line), file=lines, flush=True))
