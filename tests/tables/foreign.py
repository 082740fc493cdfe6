"""Megatron's, torchtitan's and Meta's tensors of a Hugging Face checkpoint, by the formulas that they document.

Written out by hand in NumPy, without a table, an op or a rectangle: what tables say is held to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.tables.checkpoints import GPT2, LLAMA, MIXTRAL, QWEN3_MOE

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

_SQUARE = LLAMA | {"hidden_size": 60}
DEEPSEEK: dict[str, Any] = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "moe_intermediate_size": 28, "n_routed_experts": 5,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 18, "q_lora_rank": 26, "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8, "v_head_dim": 11,
}  # fmt: skip
GLM4_MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"], "moe_intermediate_size": 28, "n_routed_experts": 5, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-mqa": LLAMA | {"num_key_value_heads": 1},
    "llama-mha": LLAMA | {"num_key_value_heads": 6},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "mistral": LLAMA | {"architectures": ["MistralForCausalLM"]},
    "qwen2": _SQUARE | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"]},
    "gemma": LLAMA | {"architectures": ["GemmaForCausalLM"]},
    "gemma2": LLAMA | {"architectures": ["Gemma2ForCausalLM"]},
    "gemma3": LLAMA | {"architectures": ["Gemma3ForCausalLM"]},
    "nemotron": LLAMA | {"architectures": ["NemotronForCausalLM"]},
    "starcoder2": _SQUARE | {"architectures": ["Starcoder2ForCausalLM"]},
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "qwen3-moe": QWEN3_MOE,
    "gpt_oss": LLAMA | {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 5, "intermediate_size": 28,
    },
    "deepseek": DEEPSEEK,
    "deepseek-plain": DEEPSEEK | {"q_lora_rank": None},
    "glm4-moe": GLM4_MOE,
    "glm4-moe-plain": GLM4_MOE | {"attention_bias": False, "use_qk_norm": False},
}  # fmt: skip
CENTERED = ("gemma", "gemma2", "gemma3", "nemotron")  # Hugging Face stores their norms less one as well
PADDED = 112  # 97 tokens, a multiple of 16


def megatron(case: str, hf: Tensors) -> Tensors:
    """The state of Megatron-Core's GPTModel with Transformer Engine's names, layers one by one, experts stacked."""
    if case == "gpt2":
        hf = _unfused_gpt2(hf)
    if case == "gpt_oss":
        hf = hf | _unfused_gpt_oss(hf)
    config = CONFIGS[case]
    out = {"embedding.word_embeddings.weight": _padded(hf["model.embed_tokens.weight"])}
    if "lm_head.weight" in hf:
        out["output_layer.weight"] = _padded(hf["lm_head.weight"])
    if "positions" in hf:
        out["embedding.position_embeddings.weight"] = hf["positions"]
    _move(hf, "model.norm", out, "decoder.final_layernorm")
    for layer in range(3):
        old, new = f"model.layers.{layer}", f"decoder.layers.{layer}"
        if case.startswith("deepseek"):
            _latent_attention(hf, f"{old}.self_attn", out, f"{new}.self_attention")
            out[f"{new}.input_layernorm.weight"] = hf[f"{old}.input_layernorm.weight"]
        else:
            _attention(config, hf, f"{old}.self_attn", out, f"{new}.self_attention")
            _move(hf, f"{old}.input_layernorm", out, f"{new}.self_attention.linear_qkv.layer_norm", "_")
        _mlp(case, hf, old, out, new)
    return out


def _attention(config: Mapping[str, Any], hf: Tensors, old: str, out: Tensors, new: str) -> None:
    heads = config.get("num_attention_heads") or config["n_head"]
    groups = config.get("num_key_value_heads") or heads
    for kind in ("weight", "bias"):
        if f"{old}.q_proj.{kind}" in hf:
            q, k, v = (hf[f"{old}.{x}_proj.{kind}"] for x in "qkv")
            out[f"{new}.linear_qkv.{kind}"] = interleaved(q, k, v, heads, groups)
    if f"{old}.sinks" in hf:
        out[f"{new}.core_attention.softmax_offset"] = hf[f"{old}.sinks"]
    _move(hf, f"{old}.o_proj", out, f"{new}.linear_proj")
    _move(hf, f"{old}.q_norm", out, f"{new}.q_layernorm")
    _move(hf, f"{old}.k_norm", out, f"{new}.k_layernorm")


def interleaved(q: Array, k: Array, v: Array, heads: int, groups: int) -> Array:
    """Group i has rows (h + 2) i and on, in heads: its h queries, its key, its value."""
    q, k, v = (x.reshape(n, -1, *x.shape[1:]) for x, n in ((q, heads), (k, groups), (v, groups)))
    h = heads // groups
    made = np.empty((heads + 2 * groups, *q.shape[1:]), q.dtype)
    for i in range(groups):
        for j in range(h):
            made[(h + 2) * i + j] = q[h * i + j]
        made[(h + 2) * i + h] = k[i]
        made[(h + 2) * i + h + 1] = v[i]
    return made.reshape(-1, *made.shape[2:])


def _latent_attention(hf: Tensors, old: str, out: Tensors, new: str) -> None:
    names = {
        "q_proj": "linear_q_proj.", "q_a_proj": "linear_q_down_proj.", "q_b_proj": "linear_q_up_proj.",
        "q_a_layernorm": "linear_q_up_proj.layer_norm_", "kv_a_proj_with_mqa": "linear_kv_down_proj.",
        "kv_b_proj": "linear_kv_up_proj.", "kv_a_layernorm": "linear_kv_up_proj.layer_norm_", "o_proj": "linear_proj.",
    }  # fmt: skip
    for theirs, ours in names.items():
        if f"{old}.{theirs}.weight" in hf:
            out[f"{new}.{ours}weight"] = hf[f"{old}.{theirs}.weight"]


def _mlp(case: str, hf: Tensors, old: str, out: Tensors, new: str) -> None:
    norm = "post_attention_layernorm"
    if case in ("gemma2", "gemma3"):
        norm = "pre_feedforward_layernorm"
        _move(hf, f"{old}.post_attention_layernorm", out, f"{new}.self_attention.linear_proj.post_layernorm")
        _move(hf, f"{old}.post_feedforward_layernorm", out, f"{new}.mlp.linear_fc2.post_layernorm")
    for kind in ("weight", "bias"):
        if experts := _experts(hf, old, kind):
            fused = [np.concatenate([gate, up]) for gate, up, _ in experts]
            out[f"{new}.mlp.experts.experts.linear_fc1.{kind}"] = np.stack(fused)
            out[f"{new}.mlp.experts.experts.linear_fc2.{kind}"] = np.stack([down for _, _, down in experts])
    if _experts(hf, old):
        _move(hf, f"{old}.{norm}", out, f"{new}.pre_mlp_layernorm")
        _move(hf, f"{old}.mlp.gate", out, f"{new}.mlp.router")
        _move(hf, f"{old}.block_sparse_moe.gate", out, f"{new}.mlp.router")
        if f"{old}.mlp.gate.e_score_correction_bias" in hf:
            out[f"{new}.mlp.router.expert_bias"] = hf[f"{old}.mlp.gate.e_score_correction_bias"]
            shared = [hf[f"{old}.mlp.shared_experts.{x}_proj.weight"] for x in ("gate", "up", "down")]
            out[f"{new}.mlp.shared_experts.linear_fc1.weight"] = np.concatenate(shared[:2])
            out[f"{new}.mlp.shared_experts.linear_fc2.weight"] = shared[2]
        return
    _move(hf, f"{old}.{norm}", out, f"{new}.mlp.linear_fc1.layer_norm", "_")
    for kind in ("weight", "bias"):
        if f"{old}.mlp.gate_proj.{kind}" in hf:
            gate, up = (hf[f"{old}.mlp.{x}_proj.{kind}"] for x in ("gate", "up"))
            out[f"{new}.mlp.linear_fc1.{kind}"] = np.concatenate([gate, up])
    for first in ("c_fc", "up_proj"):
        if f"{new}.mlp.linear_fc1.weight" not in out:
            _move(hf, f"{old}.mlp.{first}", out, f"{new}.mlp.linear_fc1")
    for second in ("down_proj", "c_proj"):
        _move(hf, f"{old}.mlp.{second}", out, f"{new}.mlp.linear_fc2")


def _experts(hf: Tensors, old: str, kind: str = "weight") -> list[tuple[Array, Array, Array]]:
    """Gate, up and down of each expert."""
    for stem, names in (("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))):
        if f"{old}.{stem}.experts.0.{names[0]}.{kind}" in hf:
            made = [[hf[f"{old}.{stem}.experts.{e}.{name}.{kind}"] for name in names] for e in range(5)]
            return [(gate, up, down) for gate, up, down in made]
    return []


def _move(hf: Tensors, old: str, out: Tensors, new: str, joint: str = ".") -> None:
    for kind in ("weight", "bias"):
        if f"{old}.{kind}" in hf:
            out[f"{new}{joint}{kind}"] = hf[f"{old}.{kind}"]


def _padded(matrix: Array) -> Array:
    """Megatron's padded rows are not zero: they were trained, too."""
    return np.concatenate([matrix, np.full((PADDED - len(matrix), matrix.shape[1]), -7.0)])


def _unfused_gpt2(hf: Tensors) -> Tensors:
    """GPT-2 under Llama's names, every matrix as [out, in]."""
    out = {"model.embed_tokens.weight": hf["transformer.wte.weight"], "positions": hf["transformer.wpe.weight"]}
    _move(hf, "transformer.ln_f", out, "model.norm")
    for layer in range(3):
        old, new = f"transformer.h.{layer}", f"model.layers.{layer}"
        _move(hf, f"{old}.ln_1", out, f"{new}.input_layernorm")
        _move(hf, f"{old}.ln_2", out, f"{new}.post_attention_layernorm")
        for number, x in enumerate("qkv"):
            part = slice(60 * number, 60 * number + 60)
            out[f"{new}.self_attn.{x}_proj.weight"] = hf[f"{old}.attn.c_attn.weight"][:, part].T
            out[f"{new}.self_attn.{x}_proj.bias"] = hf[f"{old}.attn.c_attn.bias"][part]
        for theirs, ours in (("attn.c_proj", "self_attn.o_proj"), ("mlp.c_fc",) * 2, ("mlp.c_proj",) * 2):
            out[f"{new}.{ours}.weight"] = hf[f"{old}.{theirs}.weight"].T
            out[f"{new}.{ours}.bias"] = hf[f"{old}.{theirs}.bias"]
    return out


def _unfused_gpt_oss(hf: Tensors) -> Tensors:
    """The experts of gpt-oss one by one, under Qwen3-MoE's names, every matrix as [out, in]."""
    out: Tensors = {}
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp"
        _move(hf, f"{mlp}.router", out, f"{mlp}.gate")
        for e in range(5):
            fused, down = hf[f"{mlp}.experts.gate_up_proj"][e].T, hf[f"{mlp}.experts.down_proj"][e].T
            bias = hf[f"{mlp}.experts.gate_up_proj_bias"][e]
            for name, weight, own in (
                ("gate_proj", fused[::2], bias[::2]),
                ("up_proj", fused[1::2], bias[1::2]),
                ("down_proj", down, hf[f"{mlp}.experts.down_proj_bias"][e]),
            ):
                out |= {f"{mlp}.experts.{e}.{name}.weight": weight, f"{mlp}.experts.{e}.{name}.bias": own}
    return out


def paired(matrix: Array, heads: int) -> Array:
    """Within a head of size d, row 2 i + p is Hugging Face's row p (d / 2) + i."""
    d = len(matrix) // heads
    made = np.empty_like(matrix)
    for head in range(heads):
        for i in range(d // 2):
            for p in (0, 1):
                made[head * d + 2 * i + p] = matrix[head * d + p * (d // 2) + i]
    return made


def torchtitan(case: str, hf: Tensors, old: bool = False) -> Tensors:
    """torchtitan's tensors; `old`: as 0.2 names them."""
    out = {"tok_embeddings.weight": hf["model.embed_tokens.weight"], "norm.weight": hf["model.norm.weight"]}
    out["output.weight" if old else "lm_head.weight"] = hf["lm_head.weight"]
    qkv = "" if old else "qkv_linear."
    names = {
        "self_attn.v_proj.weight": f"attention.{qkv}wv.weight",
        **{f"self_attn.{x}_proj.bias": f"attention.{qkv}w{x}.bias" for x in "qkv"},
        "self_attn.o_proj.bias": "attention.wo.bias",
        "self_attn.sinks": "attention.sinks",
        "mlp.router.weight": "moe.router.gate.weight",
        "mlp.router.bias": "moe.router.gate.bias",
        "self_attn.o_proj.weight": "attention.wo.weight",
        "self_attn.q_norm.weight": "attention.q_norm.weight",
        "self_attn.k_norm.weight": "attention.k_norm.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
        "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
        "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
        "self_attn.q_a_proj.weight": "attention.wq_a.weight",
        "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
        "self_attn.q_b_proj.weight": "attention.wq_b.weight",
        "mlp.gate_proj.weight": "feed_forward.w1.weight",
        "mlp.up_proj.weight": "feed_forward.w3.weight",
        "mlp.down_proj.weight": "feed_forward.w2.weight",
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "mlp.gate.weight": "moe.router.gate.weight",
        "mlp.gate.e_score_correction_bias": "moe.expert_bias" if old else "moe.expert_bias_E",
        "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
        "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
        "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
    }
    for layer in range(3):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        for name, titan in names.items():
            if f"{theirs}.{name}" in hf:
                out[f"{ours}.{titan}"] = hf[f"{theirs}.{name}"]
        for x, heads in (("q", 6), ("k", CONFIGS[case]["num_key_value_heads"])):
            matrix = hf.get(f"{theirs}.self_attn.{x}_proj.weight")
            if matrix is not None:
                stem = "" if case.startswith("deepseek") else qkv
                made = paired(matrix, heads) if case.startswith("llama") else matrix
                out[f"{ours}.attention.{stem}w{x}.weight"] = made
        stacks = {"gate_up_proj": "mlp1_weight_EGD", "gate_up_proj_bias": "mlp1_bias_EG"}
        stacks |= {"down_proj": "mlp2_weight_EDF", "down_proj_bias": "mlp2_bias_ED"}
        for name, titan in stacks.items() if case == "gpt_oss" else ():  # as published: rows of gate and up take turns
            where = f"experts.{titan.rpartition('_')[0]}" if old else f"routed_experts.inner_experts.{titan}"
            tensor = hf[f"{theirs}.mlp.experts.{name}"]
            out[f"{ours}.moe.{where}"] = tensor.swapaxes(1, 2) if tensor.ndim == 3 else tensor
        for at, names_of in enumerate(("w1_EFD", "w3_EFD", "w2_EDF")):
            if experts := _experts(hf, theirs):
                name = f"experts.{names_of[:2]}" if old else f"routed_experts.inner_experts.{names_of}"
                out[f"{ours}.moe.{name}"] = np.stack([expert[at] for expert in experts])
    return out


def meta(hf: Tensors) -> Tensors:
    """Meta's Llama: torchtitan's first names, and a buffer."""
    return torchtitan("llama", hf, old=True) | {"rope.freqs": np.zeros(5)}
