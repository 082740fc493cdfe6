"""Kernels a layer and activation bytes of engines that TensorRT for RTX builds of target trt: a static cost.

    python benchmarks/engines.py                          # all families, fp16 and fp8, SM89 and SM120
    python benchmarks/engines.py --family llama --dump    # the kernels of one layer

A layer's kernels are those of four layers less those of two, halved. No engine is executed: fewer kernels are fewer
launches and fewer trips to memory, not a measured time.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers as T

import bridge
from bridge.core.progress import no_progress
from bridge.targets.trt.engine import run_builder
from bridge.targets.trt.profile import Profile

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 1536,
    "max_position_embeddings": 2048,
}  # fmt: skip
GQA = SIZES | {"num_key_value_heads": 2, "head_dim": 64}
VIEW = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
FAMILIES: dict[str, Callable[[int], Any]] = {
    "llama": lambda n: T.LlamaForCausalLM(T.LlamaConfig(**GQA, num_hidden_layers=n)),
    "qwen3": lambda n: T.Qwen3ForCausalLM(T.Qwen3Config(**GQA, num_hidden_layers=n)),
    "gemma3": lambda n: T.Gemma3ForCausalLM(T.Gemma3TextConfig(**GQA, num_hidden_layers=n, sliding_window=64)),
    "mixtral": lambda n: T.MixtralForCausalLM(T.MixtralConfig(**GQA, num_hidden_layers=n, num_local_experts=8)),
    "bert": lambda n: T.BertForMaskedLM(T.BertConfig(**SIZES, num_hidden_layers=n)),
    "vit": lambda n: T.ViTForImageClassification(T.ViTConfig(**VIEW, num_hidden_layers=n, image_size=224)),
}
# One profile, a prompt: kernels of a second one would be counted again.
PROMPT = Profile(batch=(1, 1, 8), sequence=(1, 128, 512), past_sequence=(0, 128, 1024))
KIND = re.compile(r"LayerType: (\w+)")
NAME = re.compile(r"^Name: ([^,]+)")


def layers_of(graph: Path, architecture: str, profile: Profile = PROMPT) -> tuple[list[str], int]:
    """The lines of an engine's layers that are kernels, and its bytes of activations."""
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "task": "build", "graph": str(graph), "engine": f"{folder}/engine", "capabilities": [architecture],
            "profiles": [asdict(profile)],
        }  # fmt: skip
        built = run_builder(job, no_progress)["built"]
    lines = [line.strip() for line in built["layers"].splitlines() if KIND.search(line)]
    return [line for line in lines if KIND.search(line)[1] not in ("constant", "signal", "wait")], built[
        "activation_bytes"
    ]


def written(family: str, layers: int, scheme: str | None, folder: Path, options: Mapping[str, Any]) -> Path:
    """The graph of a family with so many layers, random weights."""
    torch.manual_seed(0)
    out = folder / f"{family}-{layers}-{scheme}"
    data = {"data": [torch.randint(5, 1000, (2, 32))]} if scheme and family not in ("vit",) else {}
    if scheme and family == "vit":
        data = {"data": [{"pixel_values": torch.randn(2, 3, 224, 224)}]}
    model = FAMILIES[family](layers).eval()
    bridge.convert(model, "trt", scheme, out, dtype="fp16", verify=False, progress=False, **data, **options)
    return out / "model.onnx"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--scheme", nargs="*", default=["none", "fp8"])
    parser.add_argument("--gpu", nargs="*", default=["sm89", "sm120"])
    parser.add_argument("--option", nargs="*", default=[], help="of target trt, as NAME=VALUE")
    parser.add_argument("--dump", action="store_true")
    asked = parser.parse_args()
    options = {
        name: {"true": True, "false": False}.get(value, value) for name, value in (o.split("=") for o in asked.option)
    }
    print(f"{'family':10} {'scheme':8} {'gpu':6} {'kernels':>8} {'a layer':>8} {'activations':>12}  kinds a layer")
    with tempfile.TemporaryDirectory() as folder:
        for family in asked.family:
            for name in asked.scheme:
                scheme = None if name == "none" else name
                graphs = [written(family, n, scheme, Path(folder), options) for n in (2, 4)]
                for gpu in asked.gpu:
                    (few, _), (many, act) = (layers_of(graph, gpu) for graph in graphs)
                    kinds = Counter(KIND.search(line)[1] for line in many)
                    kinds.subtract(KIND.search(line)[1] for line in few)
                    shown = ", ".join(f"{count / 2:g} {kind}" for kind, count in sorted(kinds.items()) if count)
                    a_layer = (len(many) - len(few)) / 2
                    print(f"{family:10} {name:8} {gpu:6} {len(many):8} {a_layer:8g} {act / 1e6:9.1f} MB  {shown}")
                    if asked.dump:
                        print(*(line[:400] for line in few), sep="\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
