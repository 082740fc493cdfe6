"""ModelOpt's own answer: presets run as they are (norm quantizers off), statistics and fake-quantized outputs read off.

Independent of `bridge.calibration.modelopt`: the presets come from ModelOpt, the statistics are read from its
modules here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.schemes.load import load_scheme
from bridge.sources.live_models.checkpoint_names import live_modules, live_names
from tests.oracles.plain_fp4 import on_a_cpu

PRESETS = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "int8_plain": "INT8_DEFAULT_CFG",
    "int8": "INT8_SMOOTHQUANT_CFG",  # our default smooths, with the alpha of mappings/schemes/int8.toml
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int8_wo": "INT8_WEIGHT_ONLY_CFG",
    "int4_wo": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "int4_awq_clip": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int4_awq_full": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "fp8_block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "nvfp4_wo": "W4A16_NVFP4_CFG",
    "nvfp4_input_scale1": "NVFP4_DEFAULT_CFG",
    "nvfp4_act_headroom": "NVFP4_DEFAULT_CFG",  # general/ptq/nvfp4_act_headroom-kv_fp8_cast.yaml
    "int4_mse": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int4_gptq": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "nvfp4_gptq": "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",  # static weights; general/ptq/nvfp4_default-kv_none-gptq.yaml
    "nvfp4_local_hessian": "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",
    "nvfp4_mse": "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "nvfp4_wo_mse": "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "nvfp4_four_over_six": "NVFP4_FOUR_OVER_SIX_CFG",
    "nvfp4_awq": "NVFP4_AWQ_LITE_CFG",
    "w4a8_nvfp4_fp8": "W4A8_NVFP4_FP8_CFG",
    "nvfp4_mlp_only": "NVFP4_MLP_ONLY_CFG",
    "nvfp4_experts_only": "NVFP4_EXPERTS_ONLY_CFG",
}
# ModelOpt has it as a recipe for experts: general/ptq/nvfp4_experts_only_input_scale1-kv_fp8_cast.yaml.
CONSTANT = {"nvfp4_input_scale1": 2688.0}
# Quantizers without a weight: TensorRT gains nothing from them. Heads: we keep them, ModelOpt knows only `lm_head`.
OFF = ("nn.LayerNorm", "nn.MaxPool2d", "nn.AvgPool2d", "nn.AdaptiveAvgPool2d")
HEADS = ("*classifier*", "cls.predictions.decoder*")
KV: dict[str, dict[str, Any]] = {
    "fp8": {"num_bits": (4, 3), "axis": None},
    "fp8_cast": {"num_bits": (4, 3), "axis": None, "use_constant_amax": True},  # configs/ptq/units/kv_fp8_cast.yaml
    "fp8_448": {"num_bits": (4, 3), "axis": None, "constant_amax": 448.0},
    "int8": {"num_bits": 8, "axis": None},
}


@dataclass
class Answer:
    """A fake-quantized copy of a model, and the statistics it was made with, in checkpoint names."""

    model: Any
    calibration: Calibration
    live: dict[str, str]  # checkpoint module -> live module of a Linear, Conv1D or Conv2d

    def quantized_inputs(self, call: Callable[[Any], Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Checkpoint module -> (what its input quantizer got, what it returned), both float32, for one call."""
        seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        hooks = []
        for ours, live in self.live.items():
            quantizer = getattr(self.model.get_submodule(live), "input_quantizer", None)
            if quantizer is None or not quantizer.is_enabled:
                continue

            def hook(_: Any, args: Any, out: Any, ours: str = ours) -> None:
                seen[ours] = (args[0].detach().float().numpy().copy(), out.detach().float().numpy().copy())

            hooks.append(quantizer.register_forward_hook(hook))
        with torch.no_grad():
            call(self.model)
        for handle in hooks:
            handle.remove()
        return seen

    def weight(self, ours: str) -> np.ndarray:
        """The weight that ModelOpt's fake-quantized module multiplies with, float32, in its own layout [out, in]."""
        module = self.model.get_submodule(self.live[ours])
        with torch.no_grad():
            return module.weight_quantizer(module.weight).float().numpy()


def ask(
    model: Any,
    scheme: str,
    forward_loop: Callable[[Any], None],
    kv: str | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Answer:
    """Quantize a copy of `model` with ModelOpt's preset for `scheme`; norm and embedding quantizers off.

    `changes`: patterns of quantizers -> what is changed of them after that, `{"enable": False}` say.
    """
    import modelopt.torch.quantization as mtq

    origins = live_names(model)
    modules = live_modules(origins)
    config = copy.deepcopy(getattr(mtq, PRESETS[scheme]))
    for entry in config["quant_cfg"]:
        if scheme in CONSTANT and entry["quantizer_name"] == "*input_quantizer":
            entry["cfg"]["constant_amax"] = CONSTANT[scheme]
    silent = [{"quantizer_name": "*", "parent_class": kind, "enable": False} for kind in OFF]
    silent += [{"quantizer_name": name, "enable": False} for name in HEADS]
    silent += [{"quantizer_name": name, **change} for name, change in (changes or {}).items()]
    config["quant_cfg"] = [*config["quant_cfg"], *silent]
    if kv:
        config["quant_cfg"].append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": KV[kv]})
        config["algorithm"] = config["algorithm"] or "max"  # presets with nothing to calibrate name none
    if scheme == "int8":
        config["algorithm"] = {"method": "smoothquant", "alpha": dict(load_scheme("int8").options)["alpha"]}
    if "awq" in scheme:
        method = {"int4_awq_clip": "awq_clip", "int4_awq_full": "awq_full"}.get(scheme, "awq_lite")
        config["algorithm"] = {"method": method, "debug": True} | ({} if method == "awq_clip" else {"alpha_step": 0.1})
    if scheme in ("int4_mse", "nvfp4_act_headroom"):
        config["algorithm"] = {"int4_mse": "mse"}.get(scheme, scheme)
    if scheme.endswith("gptq"):
        config["algorithm"] = {"method": "gptq"}
    if scheme == "nvfp4_wo_mse":
        config["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
    with on_a_cpu():
        quantized = mtq.quantize(copy.deepcopy(model), config, forward_loop)
    input_amax: dict[str, np.ndarray] = {}
    smoothing: dict[str, np.ndarray] = {}
    awq: dict[str, np.ndarray] = {}
    pre_scale: dict[str, np.ndarray] = {}
    clips: dict[str, np.ndarray] = {}
    kv_amax: dict[str, dict[str, np.ndarray]] = {"k": {}, "v": {}}
    live: dict[str, str] = {}
    for name, module in quantized.named_modules():
        ours = modules.get(name, ())
        if hasattr(module, "input_quantizer") and hasattr(module, "weight_quantizer") and len(ours) == 1:
            live[ours[0]] = name
            amax = getattr(module.input_quantizer, "_amax", None)
            if amax is not None and amax.numel() == 1:
                input_amax[ours[0]] = _array(amax).reshape(())
            before = getattr(module.input_quantizer, "_amax_for_smoothing", None)
            if before is not None:
                smoothing[ours[0]] = _array(before).reshape(-1)
            applied = getattr(module.input_quantizer, "_pre_quant_scale", None)
            if scheme == "int8" and applied is not None:  # float32 models: not rounded
                pre_scale[ours[0]] = _array(applied).reshape(-1)
            found = getattr(module, "awq_lite", None)
            if found is not None and getattr(found, "best_scale", None) is not None:
                awq[ours[0]] = _array(found.best_scale).reshape(-1)
            if getattr(module, "awq_clip", None) is not None:
                clips[ours[0]] = _clip(module.awq_clip)
        for part, key in (("gate_up_proj", "gate_up_proj_input_quantizer"), ("down_proj", "down_proj_input_quantizer")):
            quantizer = getattr(module, key, None)
            if quantizer is None or getattr(quantizer, "_amax", None) is None:
                continue
            for tensor, origin in origins.items():
                if any(p.live == f"{name}.{part}" for p in origin.parts):
                    input_amax[tensor.removesuffix(".weight")] = _array(quantizer._amax).reshape(())
        for letter in "kv":
            quantizer = getattr(module, f"{letter}_bmm_quantizer", None)
            if quantizer is not None and getattr(quantizer, "_amax", None) is not None:
                kv_amax[letter][ours[0] if len(ours) == 1 else name] = _array(quantizer._amax).reshape(())
    provenance = Provenance(scheme, "", type(model).__name__, "", "float32", "", 0, 0)
    calibration = Calibration(provenance, input_amax, smoothing, awq, pre_scale, kv_amax["k"], kv_amax["v"], {}, clips)
    return Answer(quantized.eval(), calibration, live)


def _clip(search: Any) -> np.ndarray:
    """The part of its own amax that ModelOpt's of each block is: the one of its ratios that gives it."""
    of = torch.full(search.w_amax.shape, torch.nan)
    for ratio in search.loss:
        of = torch.where(of.isnan() & (search.w_amax * ratio == search.best_clip_val), ratio, of)
    return _array(of).reshape(next(iter(search.loss.values())).shape)


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()
