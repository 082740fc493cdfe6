"""Names and shapes of native tensors, spelled by hand as each project has them; and the models they must become."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from bridge.core.values import TensorSpec

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, ROWS, EXPERTS, MOE_FFN = 3, 60, 88, 6, 2, 16, 144, 5, 36
Q_RANK, KV_RANK, NOPE, ROPE, V_DIM = 28, 20, 12, 8, 14


def megatron(
    *, gates: int = 2, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, tied: bool = False, qkv_bias: bool = False,
    bias: bool = False, layer_norm: bool = False, qk_norm: bool = False, post_norms: bool = False, positions: int = 0,
    experts: bool = False, stacked: bool = True, prefix: str = "", grouped: bool = True,
) -> dict[str, TensorSpec]:  # fmt: skip
    """GPTModel's tensors of dist_checkpointing: homogeneous layers stacked, or one by one."""
    outside: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (ROWS, HIDDEN)}
    outside["decoder.final_layernorm.weight"] = (HIDDEN,)
    if layer_norm:
        outside["decoder.final_layernorm.bias"] = (HIDDEN,)
    if positions:
        outside["embedding.position_embeddings.weight"] = (positions, HIDDEN)
    if not tied:
        outside["output_layer.weight"] = (ROWS, HIDDEN)
    qkv = (HEADS + 2 * kv_heads) * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.linear_qkv.weight": (qkv, HIDDEN),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * head_dim),
    }
    if bias or qkv_bias:
        layer["self_attention.linear_qkv.bias"] = (qkv,)
    if bias:
        layer |= {"self_attention.linear_proj.bias": (HIDDEN,), "mlp.linear_fc1.bias": (gates * FFN,)}
    if qk_norm:
        layer |= {f"self_attention.{side}_layernorm.weight": (head_dim,) for side in "qk"}
    if post_norms:
        layer["self_attention.linear_proj.post_layernorm.weight"] = (HIDDEN,)
    if experts:
        layer["mlp.router.weight"] = (EXPERTS, HIDDEN)
        shapes = {"linear_fc1": (2 * MOE_FFN, HIDDEN), "linear_fc2": (HIDDEN, MOE_FFN)}
        if stacked:
            layer |= {f"mlp.experts.experts.{name}.weight": (EXPERTS, *shape) for name, shape in shapes.items()}
        elif grouped:
            layer |= {f"mlp.experts.{n}.weight{e}": shape for n, shape in shapes.items() for e in range(EXPERTS)}
        else:
            own = "mlp.experts.local_experts"
            layer |= {f"{own}.{e}.{n}.weight": shape for n, shape in shapes.items() for e in range(EXPERTS)}
    else:
        layer |= {"mlp.linear_fc1.weight": (gates * FFN, HIDDEN), "mlp.linear_fc2.weight": (HIDDEN, FFN)}
    return _specs({prefix + name: shape for name, shape in (outside | _layers(layer, stacked)).items()})


def megatron_latent() -> dict[str, TensorSpec]:
    """DeepSeek-V3 in Megatron-Core: latent attention, the first layer dense, shared experts; never stacked."""
    attention = {
        "self_attention.linear_q_down_proj.weight": (Q_RANK, HIDDEN),
        "self_attention.linear_q_up_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        "self_attention.linear_q_up_proj.layer_norm_weight": (Q_RANK,),
        "self_attention.linear_kv_down_proj.weight": (KV_RANK + ROPE, HIDDEN),
        "self_attention.linear_kv_up_proj.weight": (HEADS * (NOPE + V_DIM), KV_RANK),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * V_DIM),
    }
    dense = {"mlp.linear_fc1.weight": (2 * FFN, HIDDEN), "mlp.linear_fc2.weight": (HIDDEN, FFN)}
    routed: dict[str, tuple[int, ...]] = {
        "mlp.router.weight": (EXPERTS, HIDDEN),
        "mlp.router.expert_bias": (EXPERTS,),
        "mlp.shared_experts.linear_fc1.weight": (4 * MOE_FFN, HIDDEN),
        "mlp.shared_experts.linear_fc2.weight": (HIDDEN, 2 * MOE_FFN),
    }
    routed |= {f"mlp.experts.linear_fc1.weight{e}": (2 * MOE_FFN, HIDDEN) for e in range(EXPERTS)}
    routed |= {f"mlp.experts.linear_fc2.weight{e}": (HIDDEN, MOE_FFN) for e in range(EXPERTS)}
    shapes = {"embedding.word_embeddings.weight": (ROWS, HIDDEN), "output_layer.weight": (ROWS, HIDDEN)}
    for number in range(LAYERS):
        own = attention | (routed if number else dense)
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in own.items()}
    return _specs(shapes)


def titan(
    *, qk_norm: bool = False, experts: bool = False, today: bool = True, tied: bool = False
) -> dict[str, TensorSpec]:
    """Torchtitan's Llama 3 and Qwen3, in names of today or of 0.2; Meta's files have the latter."""
    qkv = "attention.qkv_linear." if today else "attention."
    layer: dict[str, tuple[int, ...]] = {
        f"{qkv}wq.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{qkv}wk.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{qkv}wv.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attention.wo.weight": (HIDDEN, HEADS * HEAD_DIM),
        "attention_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
    }
    if qk_norm:
        layer |= {f"attention.{side}_norm.weight": (HEAD_DIM,) for side in "qk"}
    if experts:
        own = {"w1": (MOE_FFN, HIDDEN), "w2": (HIDDEN, MOE_FFN), "w3": (MOE_FFN, HIDDEN)}
        new = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}
        where = "moe.routed_experts.inner_experts." if today else "moe.experts."
        layer |= {where + (new[n] if today else n): (EXPERTS, *shape) for n, shape in own.items()}
        layer["moe.router.gate.weight"] = (EXPERTS, HIDDEN)
    else:
        layer |= {f"feed_forward.{n}.weight": (FFN, HIDDEN) for n in ("w1", "w3")}
        layer["feed_forward.w2.weight"] = (HIDDEN, FFN)
    shapes = {"tok_embeddings.weight": (ROWS, HIDDEN), "norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight" if today else "output.weight"] = (ROWS, HIDDEN)
    shapes |= {f"layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    return _specs(shapes)


def titan_latent() -> dict[str, TensorSpec]:
    """Torchtitan's DeepSeek-V3, the first layer dense."""
    attention: dict[str, tuple[int, ...]] = {
        "attention.wq_a.weight": (Q_RANK, HIDDEN),
        "attention.q_norm.weight": (Q_RANK,),
        "attention.wq_b.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        "attention.wkv_a.weight": (KV_RANK + ROPE, HIDDEN),
        "attention.kv_norm.weight": (KV_RANK,),
        "attention.wkv_b.weight": (HEADS * (NOPE + V_DIM), KV_RANK),
        "attention.wo.weight": (HIDDEN, HEADS * V_DIM),
    }
    dense = {"feed_forward.w1.weight": (FFN, HIDDEN), "feed_forward.w2.weight": (HIDDEN, FFN)}
    routed = {
        "moe.router.gate.weight": (EXPERTS, HIDDEN),
        "moe.expert_bias": (EXPERTS,),
        "moe.experts.w1": (EXPERTS, MOE_FFN, HIDDEN),
        "moe.experts.w2": (EXPERTS, HIDDEN, MOE_FFN),
        "moe.experts.w3": (EXPERTS, MOE_FFN, HIDDEN),
        "moe.shared_experts.w1.weight": (2 * MOE_FFN, HIDDEN),
        "moe.shared_experts.w2.weight": (HIDDEN, 2 * MOE_FFN),
    }
    shapes = {"tok_embeddings.weight": (ROWS, HIDDEN), "output.weight": (ROWS, HIDDEN), "norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        own = attention | (routed if number else dense)
        shapes |= {f"layers.{number}.{name}": shape for name, shape in own.items()}
    return _specs(shapes)


def built(config: dict[str, Any]) -> dict[str, TensorSpec]:
    """The parameters of the transformers model that a config.json makes, without memory for them."""
    known = {name: value for name, value in config.items() if name != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **known)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    assert type(model).__name__ == config["architectures"][0]
    return {name: TensorSpec(name, tuple(p.shape), "float32") for name, p in model.named_parameters()}


def _layers(layer: dict[str, tuple[int, ...]], stacked: bool) -> dict[str, tuple[int, ...]]:
    if stacked:
        return {f"decoder.layers.{name}": (LAYERS, *shape) for name, shape in layer.items()}
    return {f"decoder.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}


def _specs(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()}
