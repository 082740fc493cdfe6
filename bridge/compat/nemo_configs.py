"""Read both configs of NeMo's `Quantizer`, of NeMo 1 or 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError
from bridge.core.text import nearest

SCHEMES = {
    "int8": "int8",
    "int8_sq": "int8_sq",
    "fp8": "fp8",
    "int4_awq": "int4_awq",
    "w4a8_awq": "w4a8_awq",
    "int4": "int4_wo",
    "nvfp4": "nvfp4",
    "block_fp8": "fp8_block",
}
PRESETS = {  # algorithm -> ModelOpt's preset
    "int8": "INT8_DEFAULT_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "fp8": "FP8_DEFAULT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "block_fp8": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
}
DTYPES = {16: "fp16", "16": "fp16", "bf16": "bf16"}
FORMATS = ("trtllm", "hf")
KV_FORMATS = ("fp8", "nvfp4")
NEMO_1 = {  # NeMo 1's key -> NeMo 2's
    "calib_dataset": "calibration_dataset",
    "num_calib_size": "calibration_dataset_size",
    "save_path": "path",
    "inference_tensor_parallel": "inference_tp",
    "inference_pipeline_parallel": "inference_pp",
    "sample_output": "generate_sample",
}
COUNTS = ("calibration_dataset_size", "calibration_seq_len", "calibration_batch_size")
RANKS = ("inference_tp", "inference_pp")


@cache
def presets() -> dict[str, Any]:
    """NeMo's `QUANT_CFG_CHOICES`: algorithm -> ModelOpt's own preset, without those that ModelOpt does not have."""
    from bridge.calibration.modelopt import modelopt

    mtq = modelopt()
    return {name: getattr(mtq, preset) for name, preset in PRESETS.items() if hasattr(mtq, preset)}


def __getattr__(name: str) -> Any:
    if name == "QUANT_CFG_CHOICES":  # importing ModelOpt takes seconds
        return presets()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class QuantizerError(UsageError, AssertionError):
    """A wrong config or call. NeMo asserts in these cases, so its users catch AssertionError."""


@dataclass
class QuantizationConfig:
    """NeMo 2's class, with its defaults."""

    algorithm: str | None = "fp8"
    awq_block_size: int | None = 128
    sq_alpha: float | None = 0.5
    enable_kv_cache: bool | None = None
    kv_cache_qformat: str = "fp8"
    calibration_dataset: str = "cnn_dailymail"
    calibration_dataset_size: int = 512
    calibration_batch_size: int = 64
    calibration_seq_len: int = 128


@dataclass
class ExportConfig:
    """NeMo 2's class, with its defaults."""

    path: str | Path
    export_format: str = "trtllm"
    dtype: str | int = "bf16"
    decoder_type: str | None = None
    inference_tp: int = 1
    inference_pp: int = 1
    generate_sample: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.path, str):  # Quantizer reports any other type together with the other problems
            self.path = Path(self.path)


QUANTIZATION = (*QuantizationConfig.__dataclass_fields__, "decoder_type", "calib_dataset", "num_calib_size")
EXPORT = (
    *ExportConfig.__dataclass_fields__, "compress", "save_path", "inference_tensor_parallel",
    "inference_pipeline_parallel", "sample_output",
)  # fmt: skip


def read(quantization_config: Any, export_config: Any) -> tuple[dict[str, Any], dict[str, Any] | None, str | None]:
    """Read mappings (OmegaConf's too) or objects with attributes; QuantizerError lists all problems.

    Returns both configs with NeMo 2's keys (None if no export config was given), and the decoder's type.
    """
    problems: list[str] = []
    quantization = _values(quantization_config, "quantization_config", QUANTIZATION, "algorithm", problems)
    export = None if export_config is None else _values(export_config, "export_config", EXPORT, "path", problems)
    problems += _wrong_quantization(quantization)
    problems += _wrong_export(export or {})
    decoders = {str(config["decoder_type"]) for config in (quantization, export or {}) if config.get("decoder_type")}
    if len(decoders) > 1:
        problems.append(f"decoder_type is {' and '.join(sorted(decoders))}: set it once")
    if problems:
        raise QuantizerError("\n  ".join(["Quantizer: the configs cannot be used", *problems]))
    return quantization, export, next(iter(decoders), None)


def _values(config: Any, where: str, known: tuple[str, ...], needed: str, problems: list[str]) -> dict[str, Any]:
    """The values of a config by NeMo 2's keys; a mapping's unknown keys are problems."""
    if config is None:
        problems.append(f"{where} is None")
        return {}
    if isinstance(config, Mapping):
        problems += [f"{where}: {key!r} is unknown; {nearest(str(key), known)}" for key in config if key not in known]
        given = {key: config[key] for key in known if key in config}
    else:  # an object may have methods, so only known names are read
        given = {key: getattr(config, key) for key in known if hasattr(config, key)}
    problems += [f"{where}: {key!r} and {NEMO_1[key]!r} mean the same" for key in given if NEMO_1.get(key) in given]
    values = {NEMO_1.get(key, key): value for key, value in given.items()}
    if needed not in values:
        old = next((f" ({key} in NeMo 1)" for key, new in NEMO_1.items() if new == needed), "")
        kind = "" if isinstance(config, Mapping) else f" ({type(config).__name__})"
        problems.append(f"{where}{kind} has no {needed}{old}; give a mapping, or an object with attributes")
    return values


def _wrong_quantization(config: Mapping[str, Any]) -> list[str]:
    problems = _wrong_algorithm(config.get("algorithm"))
    block, alpha = config.get("awq_block_size"), config.get("sq_alpha")
    if block is not None and (type(block) is not int or block < 0):
        problems.append(f"awq_block_size is {block!r}; expected a whole number: how many values share a scale")
    if alpha is not None and (type(alpha) not in (int, float) or not 0 < alpha <= 1):
        problems.append(f"sq_alpha is {alpha!r}; expected a number in (0, 1]")
    if config.get("enable_kv_cache") not in (None, True, False):
        problems.append(f"enable_kv_cache is {config['enable_kv_cache']!r}; expected true, false or null")
    if config.get("kv_cache_qformat", "fp8") not in KV_FORMATS:
        kv = str(config["kv_cache_qformat"])
        problems.append(f"kv_cache_qformat {kv!r} is unknown; {nearest(kv, KV_FORMATS)}")
    if not isinstance(dataset := config.get("calibration_dataset"), str | Path | None):
        problems.append(f"calibration_dataset is {dataset!r}; expected a file or a dataset id")
    return problems + _wrong_counts(config, COUNTS)


def _wrong_algorithm(name: Any) -> list[str]:
    if name is None or (isinstance(name, str) and name in SCHEMES):
        return []
    if isinstance(name, Mapping) or str(name).endswith((".json", ".yaml", ".yml", ".toml")):
        return [
            f"algorithm {str(name)!r}: ModelOpt configs are not supported; write a recipe (TOML: a scheme as base, and "
            "rules) and call bridge.convert(model, target, quant='recipe.toml', calib=forward_loop)"
        ]
    return [f"algorithm {name!r} is unknown; {nearest(str(name), SCHEMES)}; or null"]


def _wrong_export(config: Mapping[str, Any]) -> list[str]:
    problems, path = _wrong_counts(config, RANKS), config.get("path")
    if "path" in config and (not path or not isinstance(path, str | Path)):
        what = "names no directory to write" if not path else f"has the path {path!r}"
        problems.append(f"export_config {what}: set path (save_path in NeMo 1) to a directory")
    dtype, form = config.get("dtype", "bf16"), config.get("export_format", "trtllm")
    if type(dtype) not in (int, str) or dtype not in DTYPES:
        problems.append(f"dtype {dtype!r} is unknown; known: 16, '16', 'bf16'")
    if form == "nemo":
        problems.append(
            "export_format 'nemo' is NeMo's checkpoint with ModelOpt's state, which is not written; 'hf' and 'trtllm' "
            "write the quantized model, and bridge.convert(model, 'megatron', out=...) plain weights for Megatron-Core"
        )
    elif form not in FORMATS:
        problems.append(f"export_format {form!r} is unknown; {nearest(str(form), FORMATS)}")
    split = [key for key in RANKS if type(config.get(key, 1)) is int and config.get(key, 1) > 1]
    if form == "hf" and split:
        problems.append(
            f"{' and '.join(split)}: a Hugging Face checkpoint is not split, its runtime does that; leave it out"
        )
    if config.get("compress") not in (None, True, False):
        problems.append(f"compress is {config['compress']!r}; expected true or false")
    return problems


def _wrong_counts(config: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [
        f"{key} is {config[key]!r}; expected a positive whole number"
        for key in keys
        if config.get(key) is not None and (type(config[key]) is not int or config[key] < 1)
    ]
