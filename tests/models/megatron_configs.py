"""The configurations that NeMo 1, NeMo 2 and Megatron-LM write beside the weights of a family, in their spelling."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from tests.models.megatron_families import PADDED, VOCAB, Family

DIVISIBLE = 72  # 131 pads to 144 with one rank and with two
ACTIVATIONS = {  # megatron's function: what NeMo 2 writes, what NeMo 1 says when gated and when not
    "silu": ("torch.nn.functional.silu", "fast-swiglu", None),
    "gelu": ("torch.nn.functional.gelu", None, "gelu"),
    "fast_gelu": ("megatron.core.activations.fast_gelu", "fast-geglu", None),
    "squared_relu": ("megatron.core.activations.squared_relu", None, "squared-relu"),
    "quick_gelu": ("megatron.core.fusions.fused_bias_geglu.quick_gelu", None, None),
}


def nemo1(family: Family, tp: int, pp: int) -> dict[str, Any]:
    """model_config.yaml. Its Gemma adds one to the norms instead of centring them at zero."""
    config, model = family.config, family.model
    _, gated, plain = ACTIVATIONS[family.activation]
    norm = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm1p" if family.zero_centred else "layernorm"}
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    written = {
        "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
        "mcore_gpt": True,
        "precision": 32,
        **{field: config[field] for field in same},
        "encoder_seq_length": family.positions,
        "max_position_embeddings": family.positions,
        "normalization": norm[config["normalization"]],
        "layernorm_epsilon": config["layernorm_epsilon"],
        "activation": gated if config["gated_linear_unit"] else plain,
        "bias": config["add_bias_linear"],
        "qkv_bias": config["add_qkv_bias"],
        "position_embedding_type": model["position_embedding_type"],
        "rotary_percentage": model["rotary_percent"],
        "rotary_base": model["rotary_base"],
        "share_embeddings_and_output_weights": family.tied,
        "make_vocab_size_divisible_by": DIVISIBLE,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "tokenizer": {"library": "huggingface", "type": "example/of-nothing", "model": None},
    }
    if family.hf["model_type"] == "gemma":
        written["apply_embedding_scaling"] = True
    if model.get("rope_scaling"):
        written["scale_positional_embedding"] = True
    if "num_moe_experts" in config:
        written |= {"num_moe_experts": config["num_moe_experts"], "moe_router_topk": config["moe_router_topk"]}
        written |= {"moe_ffn_hidden_size": config["moe_ffn_hidden_size"]}
    return written


def nemo2(family: Family) -> dict[str, Any]:
    """context/model.yaml: nested `_target_` mappings, functions with `_call_: false`; NeMo dumps defaults as well."""
    module, _, name = family.nemo.partition(".")
    root = f"nemo.collections.llm.gpt.model.{module}"
    function = {"_target_": ACTIVATIONS[family.activation][0], "_call_": False}
    dtype = {"_target_": "torch.float32", "_call_": False}
    config = {
        "_target_": f"{root}.{name.replace('Model', 'Config')}",
        "layernorm_zero_centered_gamma": family.zero_centred,
        **family.config,
        **{field: value for field, value in family.model.items() if field not in ("max_sequence_length", "vocab_size")},
        "activation_func": function,
        "params_dtype": dtype,
        "autocast_dtype": None,
        "seq_length": family.positions,
        "vocab_size": VOCAB,
        "make_vocab_size_divisible_by": DIVISIBLE,
        "init_method": None,
    }
    tokenizer = {
        "_target_": "nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer",
        "pretrained_model_name": "example/of-nothing",
    }
    return {"_target_": f"{root}.{name}", "config": config, "tokenizer": tokenizer, "model_transform": None}


def megatron_lm(family: Family, tp: int, pp: int) -> Namespace:
    """`args` of Megatron-LM's common.pt and model_optim_rng.pt."""
    config, model = family.config, family.model
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    same += ("normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "attention_dropout", "hidden_dropout")
    return Namespace(
        **{field: config[field] for field in same},
        **{field: model[field] for field in ("position_embedding_type", "rotary_percent", "rotary_base")},
        group_query_attention=config["num_query_groups"] != config["num_attention_heads"],
        norm_epsilon=config["layernorm_epsilon"],
        apply_layernorm_1p=family.zero_centred,
        swiglu=config["gated_linear_unit"],
        squared_relu=family.activation == "squared_relu",
        untie_embeddings_and_output_weights=not family.tied,
        use_rope_scaling=model.get("rope_scaling", False),
        rope_scaling_factor=model.get("rope_scaling_factor", 8.0),
        max_position_embeddings=family.positions,
        seq_length=family.positions,
        vocab_size=None,
        padded_vocab_size=PADDED,
        make_vocab_size_divisible_by=DIVISIBLE,
        num_experts=config.get("num_moe_experts"),
        moe_ffn_hidden_size=config.get("moe_ffn_hidden_size"),
        moe_router_topk=config.get("moe_router_topk", 2),
        moe_grouped_gemm=config.get("moe_grouped_gemm", False),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        transformer_impl="transformer_engine",
        iteration=100,
    )
