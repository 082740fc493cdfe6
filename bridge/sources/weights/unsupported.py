"""Recognize and explain unsupported inputs, from headers and file names only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.dtypes import FLOATS
from bridge.core.errors import SourceError
from bridge.core.output.names import STEM
from bridge.core.parsing.limited import load_json
from bridge.core.text import named
from bridge.core.values import TensorSpec

# Suffix of a tensor that only quantized checkpoints have -> its writer.
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
    """Return why this checkpoint is quantized already; empty for a plain one."""
    if isinstance(section := config.get("tripy"), Mapping) and "snapped" in section:  # bridge.targets.tripy.section
        return ["target tripy wrote this; give the checkpoint that it was made from"]
    reasons = []
    for key in ("quantization_config", "compression_config"):
        for part, holder in (("config.json", config), *((f"config.json, {k}", v) for k, v in config.items())):
            if isinstance(holder, Mapping) and holder.get(key):
                reasons.append(f"{part} has {key}: {_method(holder[key])}")
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        if root is not None and (root / name).is_file():
            reasons.append(f"{name}: {_method(_load(root / name))}")
    by_writer: dict[str, list[str]] = {}
    for name, spec in specs.items():
        writer = next((who for suffix, who in COMPANIONS.items() if name.endswith(suffix)), None)
        if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" not in specs:
            writer = None
        if writer is None and spec.dtype in LOW_BIT:
            writer = f"{spec.dtype} values"
        if writer is not None:
            by_writer.setdefault(writer, []).append(name)
    dtypes = {spec.dtype for spec in specs.values()}
    if reasons and not by_writer and dtypes <= {*FLOATS, "int64", "bool"}:
        return [
            f"{'; '.join(reasons)}; but its tensors have plain {named(dtypes)} values: if they are those of the "
            "unquantized model, remove this, which another model or run left; if not, get the quantized ones"
        ]
    reasons += [f"{named(names)}: {writer}" for writer, names in by_writer.items()]
    return [f"already quantized ({'; '.join(reasons)}); {REMEDY}"] if reasons else []


def _load(path: Path) -> Any:
    try:
        return load_json(path)
    except (ValueError, OSError):
        return {}


def _method(section: Any) -> str:
    """Return the words of a section that tell its quantizer."""
    if not isinstance(section, Mapping):
        return "unknown method"
    inner = section.get("quantization")
    flat = {**(inner if isinstance(inner, Mapping) else {}), **section}
    words = [
        f"{k}={flat[k]}" for k in ("quant_method", "quant_algo", "bits", "format", "kv_cache_quant_algo") if flat.get(k)
    ]
    return ", ".join(words) or "unknown method"


def diffusion_weights(root: Path) -> str:
    """Say which weights a directory of a diffusers model has instead of those that are read."""
    names = sorted(path.name for path in root.glob(f"{STEM}*"))
    variants = sorted({name.split(".")[1].partition("-")[0] for name in names} - {"safetensors", "bin", STEM})
    if variants:
        return (
            f"only weights of the variant {', '.join(variants)} ({named(names)}); rename them to {STEM}.safetensors, "
            f"or load them with diffusers (variant={variants[0]!r}) and save the model without one"
        )
    return f"no weights of a diffusers model: neither {STEM}*.safetensors nor {STEM}.bin; get it again"


def other_dialect(root: Path) -> str | None:
    """Say what a directory without Hugging Face weights is, if it is a known format."""
    if any((root / pattern).is_file() for pattern in _NEMO2):
        return (
            f"weights/ is a distributed checkpoint, as of NeMo 2, but context/, which says of what model, is missing: "
            f"copy it as well, or give {root / 'weights'} with config="
        )
    return next((what for what, patterns in _DIALECTS if any(any(root.glob(name)) for name in patterns)), None)


def one_checkpoint(root: Path) -> None:
    """SourceError if a directory has checkpoints of several kinds."""
    every = [min((path for pattern in patterns for path in root.glob(pattern)), default=None) for patterns in _LAYOUTS]
    firsts = [path.relative_to(root).as_posix() for path in every if path]
    if len(firsts) > 1:
        raise SourceError(
            f"{root}: holds {len(firsts)} checkpoints of several kinds ({', '.join(firsts)}); give the path of one, or "
            "move the others away"
        )


_NEMO2 = ("weights/.metadata", "weights/metadata.json")
# The file names of each layout of weights in other dialects.
_LAYOUTS = (
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
    ("a TensorRT-LLM checkpoint: give the Hugging Face checkpoint it came from", ("rank0.safetensors",)),
    ("TensorFlow or Flax weights: save them as safetensors with transformers 4", ("tf_model*.h5", "flax_model*")),
    ("an ONNX model: give the checkpoint it was exported from", ("*.onnx",)),
    ("a training run: give one of its checkpoint-* directories", ("checkpoint-[0-9]*",)),
    ("files of torch without Hugging Face names: name the one with the model's state_dict() pytorch_model.bin",
     ("*.pt", "*.pth", "*.ckpt")),
)  # fmt: skip
