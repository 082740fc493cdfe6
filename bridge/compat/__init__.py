"""Names that scripts for Tripy, NeMo and torchtitan call.

Each is imported at its first use.

from bridge.compat import Quantizer, PruningConfig, load_distillation_config, per_block_cast_to_fp8
"""

from __future__ import annotations

from typing import Any

# Module -> its names; `__init__.pyi` has the same for type checkers.
_NAMES = {
    "fp8_casts": (
        "calculate_scale_shape dequantize_from_fp8 groupwise_activation_quant per_block_cast_to_fp8 "
        "per_token_cast_to_fp8"
    ),
    "nemo": "Quantizer",
    "nemo_configs": "QUANT_CFG_CHOICES ExportConfig QuantizationConfig QuantizerError",
    "nemo_distill": (
        "DistillationConfig adjust_distillation_model_for_mcore get_tensor_shapes_adjust_fn_for_distillation "
        "load_distillation_config teacher_provider"
    ),
    "nemo_prune": "PruningConfig prune prune_language_model",
    "tripy": (
        "convert_to_scale create_forward_loop get_submodule load_quant_weights_from_hf load_weights_from_hf "
        "modelopt_quantize"
    ),
}
HOME = {name: f"bridge.compat.{home}" for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(HOME)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"bridge.compat has no {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(HOME[name]), name)
