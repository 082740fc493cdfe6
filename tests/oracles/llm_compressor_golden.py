"""What llm-compressor's `model_free_ptq` writes for small models, as digests; run as a script it makes them anew.

    pip install --no-deps llmcompressor==0.14.0.1 loguru accelerate
    python -m tests.oracles.llm_compressor_golden

The weights come from NumPy's Philox, so that no release of torch changes them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from bridge.core.dtypes import from_float32
from bridge.core.formats.safetensors import layout
from bridge.core.values import TensorSpec
from tests.models.sources_made import CONFIG, llama_shapes
from tests.tables.checkpoints import headers

GOLDEN = Path(__file__).with_name("llm_compressor.json")
PRESETS = ("FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "NVFP4A16")
EXPERT_PRESETS = ("FP8_DYNAMIC", "W4A16", "NVFP4A16")
IGNORED = ("lm_head", "re:.*embed_tokens")
SHAPES = {**CONFIG, "num_hidden_layers": 2, "dtype": "bfloat16"}
EXPERTS = SHAPES | {"num_hidden_layers": 1, "intermediate_size": 128, "num_experts_per_tok": 2}
MODELS = {
    "llama": SHAPES,
    "mixtral": EXPERTS | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2},
    "qwen3-moe": EXPERTS
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 2}
    | {"moe_intermediate_size": 128},
}


def write_source(root: Path, dtype: str = "bfloat16", model: str = "llama") -> Path:
    """Write the checkpoint that is compressed; normal weights with a few large ones, as real models have."""
    root.mkdir(parents=True, exist_ok=True)
    config = MODELS[model]
    random = np.random.Generator(np.random.Philox(7))
    arrays = {}
    shapes = llama_shapes(config) if model == "llama" else {name: spec.shape for name, spec in headers(config).items()}
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32) * np.float32(0.05)
        values[random.random(shape) < 0.002] *= 20
        arrays[name] = from_float32(values, dtype)
    specs = [TensorSpec(name, array.shape, dtype) for name, array in arrays.items()]
    header, offsets, size = layout(specs, {"format": "pt"}, 8)
    data = bytearray(size)
    data[: len(header)] = header
    for name, array in arrays.items():
        data[offsets[name] : offsets[name] + array.nbytes] = array.tobytes()
    (root / "model.safetensors").write_bytes(data)
    (root / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return root


def digests(directory: Path) -> dict[str, str]:
    """Tensor -> dtype, shape and the beginning of the digest of its bytes."""
    import torch

    found = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        content = hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        found[name] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {content[:16]}"
    return found


def main() -> None:
    from llmcompressor import model_free_ptq

    made: dict[str, Any] = {"llmcompressor": importlib.metadata.version("llmcompressor")}
    made["compressed-tensors"] = importlib.metadata.version("compressed-tensors")
    with tempfile.TemporaryDirectory() as folder:
        source = write_source(Path(folder) / "source")
        for preset in PRESETS:
            out = Path(folder) / preset
            model_free_ptq(source, out, scheme=preset, ignore=IGNORED)
            section = json.loads((out / "config.json").read_text())["quantization_config"]
            made[preset] = {"tensors": digests(out), "quantization_config": section}
        for model in ("mixtral", "qwen3-moe"):
            source, made[model] = write_source(Path(folder) / model, model=model), {}
            for preset in EXPERT_PRESETS:
                out = Path(folder) / f"{model}-{preset}"
                model_free_ptq(source, out, scheme=preset, ignore=(*IGNORED, r"re:.*\.gate$"))
                made[model][preset] = {name: said for name, said in digests(out).items() if ".experts." in name}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
