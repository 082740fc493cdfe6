"""What `bridge` cannot start from, recognized and explained; never reads a tensor for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bridge.errors import SourceError
from bridge.json_data import load_json
from bridge.sources.shards import named
from bridge.values import TensorSpec

# Suffix of a tensor that only a quantized checkpoint holds -> who writes it.
COMPANIONS = {
    ".weight_scale_inv": "block-scaled FP8 (as DeepSeek publishes)",
    ".weight_scale": "ModelOpt or compressed-tensors",
    ".weight_scale_2": "ModelOpt NVFP4",
    ".input_scale": "ModelOpt or compressed-tensors",
    ".weight_packed": "compressed-tensors",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".SCB": "bitsandbytes int8",
    ".absmax": "bitsandbytes 4-bit",
    ".quant_map": "bitsandbytes 4-bit",
    "_blocks": "MXFP4 (as gpt-oss is published)",
    "._amax": "ModelOpt (calibrated, not exported)",
}
LOW_BIT = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
REMEDY = (
    "start from the unquantized checkpoint, or dequantize it first (transformers: dequantize=True, save_pretrained)"
)


def quantized(root: Path | None, config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return why this checkpoint counts as quantized already; empty for a plain one."""
    if isinstance(section := config.get("tripy"), Mapping) and "snapped" in section:  # bridge.tripy.config
        return ["target tripy wrote this; give the checkpoint that it was made from"]
    found = []
    for key in ("quantization_config", "compression_config"):
        for part, holder in (("config.json", config), *((f"config.json, {k}", v) for k, v in config.items())):
            if isinstance(holder, Mapping) and holder.get(key):
                found.append(f"{part} has {key}: {_method(holder[key])}")
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        if root is not None and (root / name).is_file():
            found.append(f"{name}: {_method(_load(root / name))}")
    by_writer: dict[str, list[str]] = {}
    for name, spec in specs.items():
        writer = next((who for suffix, who in COMPANIONS.items() if name.endswith(suffix)), None)
        if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" not in specs:
            writer = None
        if writer is None and spec.dtype in LOW_BIT:
            writer = f"{spec.dtype} values"
        if writer is not None:
            by_writer.setdefault(writer, []).append(name)
    found += [f"{named(names)}: {writer}" for writer, names in by_writer.items()]
    return [f"already quantized ({'; '.join(found)}); {REMEDY}"] if found else []


def _load(path: Path) -> Any:
    try:
        return load_json(path)
    except (ValueError, OSError):
        return {}


def _method(section: Any) -> str:
    """Return the words that tell which quantizer wrote it, as far as it says so."""
    if not isinstance(section, Mapping):
        return "unknown method"
    inner = section.get("quantization")
    flat = {**(inner if isinstance(inner, Mapping) else {}), **section}
    words = [
        f"{k}={flat[k]}" for k in ("quant_method", "quant_algo", "bits", "format", "kv_cache_quant_algo") if flat.get(k)
    ]
    return ", ".join(words) or "unknown method"


def other_dialect(root: Path) -> str | None:
    """Say what a directory without Hugging Face weights is, if it is anything known."""
    names = {path.name for path in root.iterdir()}
    if any((root / pattern).is_file() for pattern in _NEMO2):
        return (
            f"weights/ is a distributed checkpoint, as of NeMo 2, but context/, which says of what model, is missing: "
            f"copy it as well, or give {root / 'weights'} with config="
        )
    for what, present in _DIALECTS:
        if any(_matches(pattern, names) for pattern in present):
            return what
    return None


def one_checkpoint(root: Path) -> None:
    """SourceError where a directory holds checkpoints of several kinds, of which none is meant before the others."""
    every = [min((path for pattern in patterns for path in root.glob(pattern)), default=None) for patterns in _FORMS]
    found = [path.relative_to(root).as_posix() for path in every if path]
    if len(found) > 1:
        raise SourceError(
            f"{root}: holds {len(found)} checkpoints of several kinds ({', '.join(found)}); give the path of one, or "
            "move the others away"
        )


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(Path(name).match(pattern) for name in names)


_NEMO2 = ("weights/.metadata", "weights/metadata.json")
# What each way to lay out weights in other dialects is known by.
_FORMS = (
    (".metadata", "*.distcp"),
    ("iter_[0-9]*/",),
    ("step-[0-9]*/.metadata",),
    _NEMO2,
    ("model_weights/.metadata", "model_weights/metadata.json"),
    ("model_weights.ckpt", "mp_rank_*/", "tp_rank_*/"),
    ("consolidated.*.pth",),
    ("*.nemo",),
)
_DIALECTS = (
    ("an adapter without its base model; merge it: peft's merge_and_unload()", ("adapter_config.json",)),
    ("a diffusers pipeline (model_index.json): give the directory of one of its models", ("model_index.json",)),
    ("a TensorRT-LLM checkpoint: give the Hugging Face checkpoint it came from", ("rank0.safetensors",)),
    ("a GGUF model: give the Hugging Face checkpoint it came from", ("*.gguf",)),
    ("TensorFlow or Flax weights: save them as safetensors with transformers 4", ("tf_model*.h5", "flax_model*")),
    ("an ONNX model: give the checkpoint it was exported from", ("*.onnx",)),
    ("a training run: give one of its checkpoint-* directories", ("checkpoint-[0-9]*",)),
    ("files of torch's, none by a name of Hugging Face's: call that of the model's state_dict() pytorch_model.bin",
     ("*.pt", "*.pth", "*.ckpt")),
)  # fmt: skip
