from bridge.compat.fp8_casts import calculate_scale_shape as calculate_scale_shape
from bridge.compat.fp8_casts import dequantize_from_fp8 as dequantize_from_fp8
from bridge.compat.fp8_casts import groupwise_activation_quant as groupwise_activation_quant
from bridge.compat.fp8_casts import per_block_cast_to_fp8 as per_block_cast_to_fp8
from bridge.compat.fp8_casts import per_token_cast_to_fp8 as per_token_cast_to_fp8
from bridge.compat.nemo import Quantizer as Quantizer
from bridge.compat.nemo_configs import QUANT_CFG_CHOICES as QUANT_CFG_CHOICES
from bridge.compat.nemo_configs import ExportConfig as ExportConfig
from bridge.compat.nemo_configs import QuantizationConfig as QuantizationConfig
from bridge.compat.nemo_configs import QuantizerError as QuantizerError
from bridge.compat.nemo_distill import DistillationConfig as DistillationConfig
from bridge.compat.nemo_distill import adjust_distillation_model_for_mcore as adjust_distillation_model_for_mcore
from bridge.compat.nemo_distill import (
    get_tensor_shapes_adjust_fn_for_distillation as get_tensor_shapes_adjust_fn_for_distillation,
)
from bridge.compat.nemo_distill import load_distillation_config as load_distillation_config
from bridge.compat.nemo_distill import teacher_provider as teacher_provider
from bridge.compat.nemo_prune import PruningConfig as PruningConfig
from bridge.compat.nemo_prune import prune as prune
from bridge.compat.nemo_prune import prune_language_model as prune_language_model
from bridge.compat.tripy import convert_to_scale as convert_to_scale
from bridge.compat.tripy import create_forward_loop as create_forward_loop
from bridge.compat.tripy import get_submodule as get_submodule
from bridge.compat.tripy import load_quant_weights_from_hf as load_quant_weights_from_hf
from bridge.compat.tripy import load_weights_from_hf as load_weights_from_hf
from bridge.compat.tripy import modelopt_quantize as modelopt_quantize
