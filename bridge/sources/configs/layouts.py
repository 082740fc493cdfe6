"""Names and shapes of the tensors of Megatron-Core, torchtitan and Meta."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bridge.core.values import TensorSpec
from bridge.sources.configs.extents import Layout, Named

_MEGATRON = {
    "embedding.word_embeddings.weight":                ("rows", "hidden"),
    "embedding.position_embeddings.weight":            ("positions", "hidden"),
    "output_layer.weight":                             ("rows", "hidden"),
    "decoder.final_layernorm.weight":                  ("hidden",),
    "layer.mlp.linear_fc1.weight":                     ("gates * ffn", "hidden"),
    "layer.mlp.linear_fc1.weight_w":                   ("ffn", "hidden"),
    "layer.mlp.linear_fc1.weight_v":                   ("ffn", "hidden"),
    "layer.mlp.linear_fc2.weight":                     ("hidden", "ffn"),
    "layer.mlp.router.weight":                         ("experts", "hidden"),
    "layer.mlp.experts.linear_fc1.weight":             ("gates * moe_ffn", "hidden"),
    "layer.mlp.experts.linear_fc1.bias":               ("gates * moe_ffn",),
    "layer.mlp.experts.linear_fc1.weight_w":           ("moe_ffn", "hidden"),
    "layer.mlp.experts.linear_fc1.weight_v":           ("moe_ffn", "hidden"),
    "layer.mlp.experts.linear_fc2.weight":             ("hidden", "moe_ffn"),
    "layer.mlp.shared_experts.linear_fc1.weight":      ("gates * shared_ffn", "hidden"),
    "layer.mlp.shared_experts.linear_fc2.weight":      ("hidden", "shared_ffn"),
}  # fmt: skip
_MEGATRON_ATTENTION = {
    "layer.self_attention.linear_qkv.weight":          ("(heads + 2 * kv_heads) * head_dim", "hidden"),
    "layer.self_attention.linear_qkv.bias":            ("(heads + 2 * kv_heads) * head_dim",),
    "layer.self_attention.core_attention.softmax_offset": ("heads",),
    "layer.self_attention.linear_proj.weight":         ("hidden", "heads * head_dim"),
    "layer.self_attention.q_layernorm.weight":         ("head_dim",),
    "layer.self_attention.k_layernorm.weight":         ("head_dim",),
}  # fmt: skip
_MEGATRON_LATENT = {
    "layer.self_attention.linear_q_proj.weight":       ("heads * (nope_dim + rope_dim)", "hidden"),
    "layer.self_attention.linear_q_down_proj.weight":  ("q_rank", "hidden"),
    "layer.self_attention.linear_q_up_proj.weight":    ("heads * (nope_dim + rope_dim)", "q_rank"),
    "layer.self_attention.linear_kv_down_proj.weight": ("kv_rank + rope_dim", "hidden"),
    "layer.self_attention.linear_kv_up_proj.weight":   ("heads * (nope_dim + v_dim)", "kv_rank"),
    "layer.self_attention.linear_proj.weight":         ("hidden", "heads * v_dim"),
}  # fmt: skip
_MEGATRON_PRESENT = {
    "no tied":     ("output_layer.weight",),
    "learned":     ("position_embeddings.weight",),
    "layer_norm":  ("final_layernorm.bias",),
    "qkv_bias":    ("linear_qkv.bias",),
    "o_bias":      ("linear_proj.bias",),
    "mlp_bias":    ("linear_fc1.bias",),
    "qk_norm":     (".q_layernorm.weight",),
    "post_norms":  (".post_layernorm.weight",),
    "sinks":       (".softmax_offset",),
    "expert_bias": ("router.expert_bias",),
    "mla":         ("linear_kv_down_proj.weight",),
}  # fmt: skip

# Torchtitan's names of 0.2, which are Meta's too, and those of today.
_TITAN = {
    "tok_embeddings.weight":                                ("vocab", "hidden"),
    "output.weight":                                        ("vocab", "hidden"),
    "norm.weight":                                          ("hidden",),
    "layer.feed_forward.w1.weight":                         ("ffn", "hidden"),
    "layer.feed_forward.w2.weight":                         ("hidden", "ffn"),
    "layer.feed_forward.w3.weight":                         ("ffn", "hidden"),
    "layer.moe.router.gate.weight":                         ("experts", "hidden"),
    "layer.moe.experts.w1":                                 ("experts", "moe_ffn", "hidden"),
    "layer.moe.experts.w2":                                 ("experts", "hidden", "moe_ffn"),
    "layer.moe.experts.w3":                                 ("experts", "moe_ffn", "hidden"),
    "layer.moe.experts.mlp1_weight":                        ("experts", "gates * moe_ffn", "hidden"),
    "layer.moe.experts.mlp2_weight":                        ("experts", "hidden", "moe_ffn"),
    "layer.moe.shared_experts.w1.weight":                   ("shared_ffn", "hidden"),
    "layer.moe.shared_experts.w2.weight":                   ("hidden", "shared_ffn"),
}  # fmt: skip
_TITAN_ATTENTION = {
    "layer.attention.wq.weight":                            ("heads * head_dim", "hidden"),
    "layer.attention.wk.weight":                            ("kv_heads * head_dim", "hidden"),
    "layer.attention.wv.weight":                            ("kv_heads * head_dim", "hidden"),
    "layer.attention.wo.weight":                            ("hidden", "heads * head_dim"),
    "layer.attention.sinks":                                ("heads",),
    "layer.attention.q_norm.weight":                        ("head_dim",),
    "layer.attention.k_norm.weight":                        ("head_dim",),
}  # fmt: skip
_TITAN_LATENT = {
    "layer.attention.wq.weight":                            ("heads * (nope_dim + rope_dim)", "hidden"),
    "layer.attention.wq_a.weight":                          ("q_rank", "hidden"),
    "layer.attention.q_norm.weight":                        ("q_rank",),
    "layer.attention.wq_b.weight":                          ("heads * (nope_dim + rope_dim)", "q_rank"),
    "layer.attention.wkv_a.weight":                         ("kv_rank + rope_dim", "hidden"),
    "layer.attention.kv_norm.weight":                       ("kv_rank",),
    "layer.attention.wkv_b.weight":                         ("heads * (nope_dim + v_dim)", "kv_rank"),
    "layer.attention.wo.weight":                            ("hidden", "heads * v_dim"),
}  # fmt: skip
_TITAN_PRESENT = {
    "no tied":     ("output.weight", "lm_head.weight"),
    "qkv_bias":    (".wq.bias",),
    "o_bias":      (".wo.bias",),
    "mlp_bias":    (".w1.bias", ".mlp1_bias", ".mlp1_bias_EG"),
    "qk_norm":     (".attention.q_norm.weight",),
    "mla":         (".wkv_a.weight",),
    "sinks":       (".attention.sinks",),
}  # fmt: skip
_GATED = {"gates": 2, "layer_norm": False, "activation": "silu", "centered": False}
_SINKS = {"activation": "quick_gelu", "up_offset": 1.0}  # of models with attention sinks

_MEGATRON_NAME = re.compile(
    r"(?:module\.|model\.)*(?:"  # NeMo 2, NeMo 1, and both at once
    r"(?P<outside>(?:embedding|output_layer|decoder\.final_layernorm)\..*)|"
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<inside>.*))"
)
_MEGATRON_EXPERT = re.compile(
    r"mlp\.experts\.(?:(?P<kind>local_experts|experts)\.(?:(?P<e>\d+)\.)?)?(?P<rest>linear_fc[12]\.\w+?)(?P<last>\d+)?"
)
_TITAN_NAME = re.compile(r"layers\.(?P<layer>\d+)\.(?P<inside>.*)")
# Torchtitan's name of today -> of 0.2.
_TITAN_OLD = {
    "lm_head.": "output.",
    "layer.attention.qkv_linear.": "layer.attention.",
    "layer.moe.routed_experts.inner_experts.w1_EFD": "layer.moe.experts.w1",
    "layer.moe.routed_experts.inner_experts.w2_EDF": "layer.moe.experts.w2",
    "layer.moe.routed_experts.inner_experts.w3_EFD": "layer.moe.experts.w3",
    "layer.moe.routed_experts.inner_experts.mlp1_weight_EGD": "layer.moe.experts.mlp1_weight",
    "layer.moe.routed_experts.inner_experts.mlp2_weight_EDF": "layer.moe.experts.mlp2_weight",
}


def layout_of(dialect: str, specs: Mapping[str, TensorSpec]) -> Layout:
    """Return the layout of `megatron`, `torchtitan` or `meta`; latent attention has its own tensors."""
    if dialect == "megatron":
        latent = any(name.endswith(_MEGATRON_PRESENT["mla"]) for name in specs)
        axes = _MEGATRON | (_MEGATRON_LATENT if latent else _MEGATRON_ATTENTION)
        dense, routed = "layer.mlp.linear_fc2.weight", "layer.mlp.router.weight"
        return Layout(_megatron_name, axes, _MEGATRON_PRESENT, {}, dense, routed)
    latent = any(name.endswith(_TITAN_PRESENT["mla"]) for name in specs)
    axes = _TITAN | (_TITAN_LATENT if latent else _TITAN_ATTENTION)
    dense, routed = "layer.feed_forward.w2.weight", "layer.moe.router.gate.weight"
    always = _GATED | (_SINKS if any(name.endswith(_TITAN_PRESENT["sinks"]) for name in specs) else {})
    return Layout(_titan_name, axes, _TITAN_PRESENT, always, dense, routed)


def _megatron_name(name: str) -> Named:
    match = _MEGATRON_NAME.fullmatch(name)
    if not match:
        return Named(name)
    if match["outside"]:
        return Named(match["outside"])
    layer = _number(match["layer"])
    leading = () if match["layer"] else ("layers",)
    expert = _MEGATRON_EXPERT.fullmatch(match["inside"])
    if not expert:
        return Named(f"layer.{match['inside']}", layer, None, leading)
    index = expert["e"] or expert["last"]
    if index is None:
        leading = (*leading, "experts")
    return Named(f"layer.mlp.experts.{expert['rest']}", layer, _number(index), leading)


def _titan_name(name: str) -> Named:
    match = _TITAN_NAME.fullmatch(name)
    template = f"layer.{match['inside']}" if match else name
    for new, old in _TITAN_OLD.items():
        if template.startswith(new):
            template = old + template.removeprefix(new)
    return Named(template, _number(match["layer"] if match else None))


def _number(index: str | None) -> int | None:
    """Read a layer's or an expert's number; Python refuses the longest, whose first digits are too large anyway."""
    return int(index[:12]) if index else None
