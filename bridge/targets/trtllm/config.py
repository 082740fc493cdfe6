"""config.json and quant_cfg.json of a TensorRT-LLM checkpoint, from a plan; reads no weight.

Keys, their order and their values are those of nvidia-modelopt 0.47 (torch/export/tensorrt_llm_utils.py), whose
errors are not repeated: transformers 5 keeps RoPE in `rope_parameters`, where its exporter does not look.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bridge.errors import PlanError
from bridge.planning import Plan
from bridge.tables.dialect import Dialect
from bridge.tables.match import Matched
from bridge.tables.slices import locate
from bridge.trtllm import companions
from bridge.trtllm.ranks import vocab_multiple
from bridge.unified.exclude import summarize
from bridge.unified.modelopt import PRODUCER, setting
from bridge.values import Format

POSITIONS = 2048  # what TensorRT-LLM takes where a config names none
EPSILON = ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
LENGTH = ("n_positions", "max_position_embeddings")
ROPE = ("rope_theta", "partial_rotary_factor")  # of `rope_parameters`; the rest of it is the scaling
RENORMALIZE = 1  # TensorRT-LLM's MoeConfig.ExpertScaleNormalizationMode


def files(plan: Plan, config: Mapping[str, Any], matched: Matched, dialect: Dialect) -> dict[str, bytes]:
    """The JSON files of a checkpoint; quant_cfg.json where config.json cannot tell the formats in one word."""
    tp, pp, dtype = plan.options["tp"], plan.options["pp"], plan.options["dtype"]
    quantization = _quantization(plan, matched, dialect)
    found: dict[str, bytes] = {}
    if "quantized_layers" in quantization:
        found["quant_cfg.json"] = json.dumps(quantization, indent=4).encode()
        quantization = {key: quantization[key] for key in ("quant_algo", "kv_cache_quant_algo")}
    said: dict[str, Any] = {"producer": PRODUCER, "architecture": plan.architecture, "dtype": dtype}
    said["logits_dtype"] = "float16" if dtype == "bfloat16" else dtype
    multiple = vocab_multiple(step.format for step in plan.quantized if step.format)
    said |= shape(config, matched, multiple) | _kind(config, matched, dialect, tp, pp)
    said |= {"mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}, "quantization": quantization}
    if "experts" in matched.names:
        experts, top = matched.names["experts"], config["num_experts_per_tok"]
        said["moe"] = {"num_experts": experts, "top_k": top, "normalization_mode": RENORMALIZE}
        said["mapping"] |= {"moe_tp_size": tp, "moe_ep_size": 1}
    return found | {"config.json": json.dumps(said, indent=4).encode()}


def shape(config: Mapping[str, Any], matched: Matched, multiple: int) -> dict[str, Any]:
    """What config.json says of the model's extents; PlanError where the source's config does not tell."""
    dims = matched.names
    experts = "experts" in dims
    return {
        "num_hidden_layers": dims["layers"],
        "num_attention_heads": dims["heads"],
        "num_key_value_heads": dims["kv_heads"],
        "hidden_size": dims["hidden"],
        "norm_epsilon": _field(config, EPSILON),
        "vocab_size": -(-int(str(dims["vocab"])) // multiple) * multiple,
        "max_position_embeddings": next((config[key] for key in LENGTH if config.get(key)), POSITIONS),
        "hidden_act": "swiglu" if experts else _activation(config),
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "head_size": dims["head_dim"],
        "intermediate_size": dims["moe_ffn" if experts else "ffn"],
    }


def _kind(config: Mapping[str, Any], matched: Matched, dialect: Dialect, tp: int, pp: int) -> dict[str, Any]:
    roles = {role for role, _, _ in locate(matched)}
    learned = "embed.positions.weight" in roles
    said = {
        "position_embedding_type": "learned_absolute" if learned else "rope_gpt_neox",
        "share_embedding_table": dialect.shares_head(matched, pp),
        "residual_mlp": False,
        "bias": "attn.o.bias" in roles,
        "rotary_pct": _rope(config).get("partial_rotary_factor", 1.0),
        "rank": tp * pp - 1,  # the last wrote it
        "decoder": dialect.architectures[matched.architecture],
        "rmsnorm": "final.norm.bias" not in roles,
        "lm_head_bias": False,
    }
    return said | ({} if learned else _rotary(config))


def _activation(config: Mapping[str, Any]) -> str:
    """`hidden_act` word for word; GPT-2's own key loses its variant, since TensorRT-LLM has one gelu."""
    said = str(_field(config, ("hidden_act", "activation_function")))
    return said if config.get("hidden_act") else said.split("_")[0]


def _field(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise PlanError(f"the config does not give `{names[0]}`, which TensorRT-LLM must be told; add it to config.json")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's parameters, wherever a version of transformers wrote them."""
    old = {key: config[key] for key in ROPE if config.get(key) is not None}
    return old | (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    scaling = {key: value for key, value in rope.items() if key not in ROPE}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    said = {"rotary_base": rope["rope_theta"]} if "rope_theta" in rope else {}
    return said | ({"rotary_scaling": scaling} if kind != "default" else {})


def _quantization(plan: Plan, matched: Matched, dialect: Dialect) -> dict[str, Any]:
    """What each module of the last rank is, which speaks for all; `quantized_layers` where one word does not do."""
    layers = _modules(plan)
    formats = {module: setting(format_) for module, format_ in layers.items() if format_}
    cache = next((step for step in plan.steps if step.attention), None)
    kv = None
    if cache and cache.kv:
        kv = {"float8_e4m3fn": "FP8", "int8": "INT8"}[cache.kv.dtype]
    said: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": kv}
    if len({json.dumps(found) for found in formats.values()}) != 1:
        return said | {"quant_algo": "MIXED_PRECISION" if formats else None, "quantized_layers": formats}
    kept = [module for module, format_ in layers.items() if not format_]
    if dialect.shares_head(matched, plan.options["pp"]):
        kept.append("lm_head")
    return said | next(iter(formats.values())) | {"exclude_modules": sorted(summarize(kept, formats))}


def _modules(plan: Plan) -> dict[str, Format | None]:
    """Module of the last rank -> its format, in the order of the layout's rows; None for one that is kept."""
    last = f"rank{plan.options['tp'] * plan.options['pp'] - 1}.safetensors"
    return {
        output.spec.name.removesuffix(".weight"): companions.unstacked(step)
        for step in plan.steps
        for output in step.outputs
        if step.site and output.part == "weight" and output.file == last
    }
