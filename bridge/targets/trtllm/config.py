"""config.json and quant_cfg.json of a TensorRT-LLM checkpoint.

Keys, their order and their values are those of nvidia-modelopt 0.47 (torch/export/tensorrt_llm_utils.py), without its
errors: transformers 5 keeps RoPE in `rope_parameters`, which ModelOpt's exporter does not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from bridge.core.errors import PlanError
from bridge.core.values import Format
from bridge.planning.plan import Plan
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.meaning import PARTIAL
from bridge.tables.dialects.dialect import Dialect
from bridge.tables.dialects.layout import locate
from bridge.targets.modelopt_format import PRODUCER, class_prefixes, setting, summarize
from bridge.targets.trtllm import companions
from bridge.targets.trtllm.ranks import vocab_multiple

POSITIONS = 2048  # TensorRT-LLM's default
EPSILON = ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
LENGTH = ("n_positions", "max_position_embeddings")
ROPE = ("rope_theta", "partial_rotary_factor")  # of `rope_parameters`; the rest of it is the scaling
RENORMALIZE = 1  # TensorRT-LLM's MoeConfig.ExpertScaleNormalizationMode


def files(plan: Plan, matched: Matched, dialect: Dialect) -> dict[str, bytes]:
    """The JSON files of a checkpoint, with quant_cfg.json if the modules have several formats."""
    tp, pp, dtype = plan.options["tp"], plan.options["pp"], plan.options["dtype"]
    quantization = _quantization(plan, matched, dialect)
    quant_cfg: dict[str, bytes] = {}
    if "quantized_layers" in quantization:
        quant_cfg["quant_cfg.json"] = json.dumps(quantization, indent=4).encode()
        quantization = {key: quantization[key] for key in ("quant_algo", "kv_cache_quant_algo")}
    content: dict[str, Any] = {"producer": PRODUCER, "architecture": plan.architecture, "dtype": dtype}
    content["logits_dtype"] = "float16" if dtype == "bfloat16" else dtype
    multiple = vocab_multiple(step.format for step in plan.quantized if step.format)
    content |= shape(matched, multiple) | _kind(matched, dialect, tp, pp)
    content |= {"mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}, "quantization": quantization}
    if "experts" in matched.names:
        experts, top = matched.names["experts"], matched.names["num_experts_per_tok"]
        content["moe"] = {"num_experts": experts, "top_k": top, "normalization_mode": RENORMALIZE}
        content["mapping"] |= {"moe_tp_size": tp, "moe_ep_size": 1}
    return quant_cfg | {"config.json": json.dumps(content, indent=4).encode()}


def shape(matched: Matched, multiple: int) -> dict[str, Any]:
    """The model's extents for config.json; PlanError if the source's config lacks one."""
    dims, config = matched.names, matched.config
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


def _kind(matched: Matched, dialect: Dialect, tp: int, pp: int) -> dict[str, Any]:
    roles, config = {role for role, _, _ in locate(matched)}, matched.config
    learned = "embed.positions.weight" in roles
    fields = {
        "position_embedding_type": "learned_absolute" if learned else "rope_gpt_neox",
        "share_embedding_table": dialect.shares_head(matched, pp),
        "residual_mlp": False,
        "bias": "attn.o.bias" in roles,
        "rotary_pct": _rope(config).get(PARTIAL) or matched.table.computes.get(PARTIAL) or 1.0,
        "rank": tp * pp - 1,  # the last rank writes the file
        "decoder": dialect.architectures[matched.architecture],
        "rmsnorm": "final.norm.bias" not in roles,
        "lm_head_bias": False,
    }
    biases = _biases(roles, dialect.architectures[matched.architecture])
    return fields | ({} if learned else _rotary(config)) | _multipliers(matched) | biases


def _biases(roles: Collection[str], layout: str) -> dict[str, bool]:
    """Where they are not as the class of TensorRT-LLM has them; its GPT model reads `bias`, and the others not."""
    if layout == "gpt":
        return {}
    given = {"attn_bias": "attn.q.bias" in roles, "mlp_bias": "mlp.up.bias" in roles}
    usual = {"attn_bias": layout == "qwen", "mlp_bias": False}
    return {name: has for name, has in given.items() if has != usual[name]}


def unlike(matched: Matched, dialect: Dialect) -> Iterator[str]:
    """What TensorRT-LLM would compute differently from the model, since its config cannot say so."""
    config, layout = matched.config, dialect.architectures[matched.architecture]
    roles = {role for role, _, _ in locate(matched)}
    if "experts" in matched.names and config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {config['hidden_act']!r}; TensorRT-LLM's experts compute silu"
    if layout in dialect.shared_head and not matched.names.get("tie_word_embeddings"):
        yield f"tie_word_embeddings is false; TensorRT-LLM's {layout} takes the embedding for the head"
    if layout == "gpt" and ("attn.o.bias" in roles) != ("mlp.fc1.bias" in roles):
        yield "attention_bias and mlp_bias differ; TensorRT-LLM's gpt has biases in both or in none"
    if layout == "qwen" and "attn.o.bias" in roles:
        yield "attention_bias is true; TensorRT-LLM's qwen has no bias behind attention"


def _multipliers(matched: Matched) -> dict[str, float]:
    """Granite's, with transformers' defaults, as LLaMAConfig has them: attention's is times the root of a head's width.

    Attention divides by that root. TensorRT-LLM's own converter leaves it out where the multiplier is 1.
    """
    if not matched.architecture.startswith(class_prefixes("multipliers")):
        return {}
    config = matched.config
    return {
        "embedding_multiplier": config.get("embedding_multiplier", 1.0),
        "attention_multiplier": config.get("attention_multiplier", 1.0)
        * math.sqrt(int(str(matched.names["head_dim"]))),
        "residual_multiplier": config.get("residual_multiplier", 1.0),
        "output_multiplier_scale": 1.0 / config.get("logits_scaling", 1.0),
    }


def _activation(config: Mapping[str, Any]) -> str:
    """`hidden_act` as it is; GPT-2's own key loses its variant, since TensorRT-LLM has one gelu."""
    name = str(_field(config, ("hidden_act", "activation_function")))
    return name if config.get("hidden_act") else name.split("_")[0]


def _field(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise PlanError(f"the config does not give `{names[0]}`, which TensorRT-LLM needs; add it to config.json")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's parameters, from any place where a version of transformers writes them."""
    old = {key: config[key] for key in ROPE if config.get(key) is not None}
    return old | (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    scaling = {key: value for key, value in rope.items() if key not in ROPE}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fields = {"rotary_base": rope["rope_theta"]} if "rope_theta" in rope else {}
    return fields | ({"rotary_scaling": scaling} if kind != "default" else {})


def _quantization(plan: Plan, matched: Matched, dialect: Dialect) -> dict[str, Any]:
    """The section `quantization` of the last rank's modules; `quantized_layers` if they have several formats."""
    layers = _modules(plan)
    formats = {module: setting(format_) for module, format_ in layers.items() if format_}
    cache = next((step for step in plan.steps if step.attention), None)
    kv = {"float8_e4m3fn": "FP8", "int8": "INT8"}[cache.kv.dtype] if cache and cache.kv else None
    section: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": kv}
    if len({json.dumps(entry) for entry in formats.values()}) != 1:
        return section | {"quant_algo": "MIXED_PRECISION" if formats else None, "quantized_layers": formats}
    kept = [module for module, format_ in layers.items() if not format_]
    if dialect.shares_head(matched, plan.options["pp"]):
        kept.append("lm_head")
    return section | next(iter(formats.values())) | {"exclude_modules": sorted(summarize(kept, formats))}


def _modules(plan: Plan) -> dict[str, Format | None]:
    """Module of the last rank -> its format, in the order of the layout's rows; None if it is kept."""
    last = f"rank{plan.options['tp'] * plan.options['pp'] - 1}.safetensors"
    return {
        output.spec.name.removesuffix(".weight"): companions.unstacked(step)
        for step in plan.steps
        for output in step.outputs
        if step.site and output.part == "weight" and output.file == last
    }
