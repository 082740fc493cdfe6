"""Every row counts: each axis of each tensor, each field of each family, each thing that a class does not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bridge.core.errors import SourceError
from bridge.core.values import TensorSpec
from bridge.sources.configs.derive import Declared, hf_config
from bridge.sources.configs.facts import Fact, Given
from bridge.sources.configs.writers import declared_by_megatron
from tests.models.megatron_configs import nemo2
from tests.models.megatron_families import FAMILIES
from tests.sources.weights import native_shapes
from tests.sources.weights.native_shapes import EXPERTS, FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MOE_FFN, ROWS

ROPE = {"rope_type": "default", "rope_theta": 5.0}
DIMS: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu",
    "max_position_embeddings": 77, "rms_norm_eps": 1e-6, "rope_parameters": ROPE,
}  # fmt: skip
LLAMA = DIMS | {"architectures": ["LlamaForCausalLM"]}
QWEN3 = DIMS | {"architectures": ["Qwen3ForCausalLM"]}
MOE: dict[str, Any] = {
    "num_experts": EXPERTS, "moe_intermediate_size": MOE_FFN, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "n_routed_experts": EXPERTS, "moe_intermediate_size": MOE_FFN, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.5, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}  # fmt: skip
# Dialect, tensors, and all that can be said of them: nothing is left to be solved for.
QWEN3_MOE = DIMS | MOE | {"architectures": ["Qwen3MoeForCausalLM"]}
WHOLE: dict[str, tuple[str, Callable[[], dict[str, TensorSpec]], dict[str, Any]]] = {
    "megatron": ("megatron", lambda: native_shapes.megatron(qk_norm=True), QWEN3),
    "megatron-each": ("megatron", lambda: native_shapes.megatron(qk_norm=True, stacked=False), QWEN3),
    "megatron-bias": ("megatron", lambda: native_shapes.megatron(bias=True, stacked=False), LLAMA),
    "megatron-moe": (
        "megatron", lambda: native_shapes.megatron(qk_norm=True, experts=True, stacked=False), QWEN3_MOE,
    ),
    "megatron-latent": ("megatron", native_shapes.megatron_latent, DIMS | LATENT),
    "torchtitan": ("torchtitan", lambda: native_shapes.titan(qk_norm=True), DIMS),
    "torchtitan-old": ("torchtitan", lambda: native_shapes.titan(today=False, qk_norm=True), DIMS),
    "torchtitan-moe": ("torchtitan", lambda: native_shapes.titan(qk_norm=True, experts=True), DIMS | MOE),
    "torchtitan-latent": ("torchtitan", native_shapes.titan_latent, DIMS | LATENT),
    "meta": ("meta", lambda: native_shapes.titan(today=False), DIMS),
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "plain_kind"), [("megatron", "megatron-each"), ("torchtitan", "torchtitan")])
def test_dense_layers_that_config_json_lists_are_those_of_the_tensors(dialect: str, plain_kind: str) -> None:
    routed, plain = WHOLE[f"{dialect}-moe"][1](), WHOLE[plain_kind][1]()
    specs = {name: spec for name, spec in routed.items() if "layers.1." not in name}
    specs |= {name: spec for name, spec in plain.items() if "layers.1." in name}
    entries = QWEN3_MOE | {"tie_word_embeddings": False, "mlp_only_layers": [1]}
    assert hf_config("x", dialect, Declared(), specs, Given(entries, entries)).config["mlp_only_layers"] == [1]
    with pytest.raises(SourceError, match=r"config\.json: mlp_only_layers = \[2\], but the tensors have \(1,\)"):
        hf_config("x", dialect, Declared(), specs, Given(entries | {"mlp_only_layers": [2]}, entries))


def kinds(specs: dict[str, TensorSpec]) -> dict[str, list[str]]:
    """Names by what they are called without layer and expert."""
    found: dict[str, list[str]] = {}
    for name in specs:
        plain = ".".join(part for part in name.split(".") if not part.isdigit()).rstrip("0123456789")
        found.setdefault(plain, []).append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_no_axis_can_differ_unseen(name: str) -> None:
    dialect, make, given = WHOLE[name]
    hf_config("x", dialect, Declared(), make(), given)
    unseen = set()
    for kind, names in kinds(make()).items():
        for axis in range(len(make()[names[0]].shape)):
            specs = make()
            for one in names:
                shape = [extent + (at == axis) for at, extent in enumerate(specs[one].shape)]
                specs[one] = TensorSpec(one, tuple(shape), "bfloat16")
            try:
                hf_config("x", dialect, Declared(), specs, given)
            except SourceError as error:
                assert any(one in str(error) for one in names), (kind, axis)
            else:
                unseen.add(kind)
    assert {kind for kind in unseen if not any(part in kind for part in UNREAD)} == set()


# Vectors that tell nothing that a matrix beside them does not.
UNREAD = ("layer_norm_weight", "linear_proj.bias", "linear_fc1.bias", "expert_bias", "attention_norm", "ffn_norm")


def test_separate_halves_of_a_gated_matrix_tell_that_it_is_gated() -> None:
    specs = native_shapes.megatron()
    for half in "wv":
        name = f"decoder.layers.mlp.linear_fc1.weight_{half}"
        specs[name] = TensorSpec(name, (LAYERS, FFN, HIDDEN), "bfloat16")
    del specs["decoder.layers.mlp.linear_fc1.weight"]
    told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES["llama"]))
    assert hf_config("x", "megatron", told, specs).config["intermediate_size"] == FFN
    with pytest.raises(SourceError, match="contradict each other in `ffn`"):
        name = "decoder.layers.mlp.linear_fc1.weight_v"
        hf_config("x", "megatron", told, specs | {name: TensorSpec(name, (LAYERS, FFN + 1, HIDDEN), "bfloat16")})


def test_latent_queries_need_no_rank() -> None:
    specs = {k: v for k, v in native_shapes.megatron_latent().items() if "linear_q_" not in k}
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}.self_attention.linear_q_proj.weight"
        specs[name] = TensorSpec(name, (HEADS * 20, HIDDEN), "bfloat16")
    assert hf_config("x", "megatron", Declared(), specs, DIMS | LATENT).config["q_lora_rank"] is None
    with pytest.raises(SourceError, match=r"heads \* \(nope_dim \+ rope_dim\) = 114"):
        hf_config("x", "megatron", Declared(), specs, DIMS | LATENT | {"qk_nope_head_dim": 11})


def test_biases_of_torchtitan_make_another_architecture() -> None:
    specs = native_shapes.titan(today=False)
    biases = {f"layers.{n}.attention.wq.bias": (96,) for n in range(LAYERS)}
    more = {f"layers.{n}.{at}.bias": (60,) for n in range(LAYERS) for at in ("attention.wo", "feed_forward.w1")}
    one = specs | {name: TensorSpec(name, shape, "bfloat16") for name, shape in biases.items()}
    every = one | {name: TensorSpec(name, shape, "bfloat16") for name, shape in more.items()}
    assert hf_config("x", "torchtitan", Declared(), one, DIMS).config["architectures"] == ["Qwen2ForCausalLM"]
    config = hf_config("x", "torchtitan", Declared(), every, DIMS).config
    assert (config["architectures"], config["attention_bias"], config["mlp_bias"]) == (["LlamaForCausalLM"], True, True)


# What each class has: LayerNorm (else RMSNorm), matrices in the MLP's first layer, whether the head is always tied.
CLASSES = {
    "LlamaForCausalLM":      (False, 2, False),
    "MistralForCausalLM":    (False, 2, False),
    "Qwen2ForCausalLM":      (False, 2, False),
    "Qwen3ForCausalLM":      (False, 2, False),
    "Qwen3MoeForCausalLM":   (False, 2, False),
    "MixtralForCausalLM":    (False, 2, False),
    "GemmaForCausalLM":      (False, 2, True),
    "Gemma2ForCausalLM":     (False, 2, True),
    "Gemma3ForCausalLM":     (False, 2, True),
    "NemotronForCausalLM":   (True, 1, False),
    "Starcoder2ForCausalLM": (True, 1, False),
    "GPT2LMHeadModel":       (True, 1, False),
    "DeepseekV3ForCausalLM": (False, 2, False),
}  # fmt: skip


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_class_is_not_given_what_it_does_not_do(architecture: str) -> None:
    layer_norm, gates, tied = CLASSES[architecture]
    given = {"architectures": [architecture]}
    other = native_shapes.megatron(layer_norm=not layer_norm, gates=3 - gates, tied=not tied, experts=False)
    with pytest.raises(SourceError) as error:
        hf_config("x", "megatron", declared_by_megatron("context/model.yaml", {"config": {}}), other, given)
    assert f"{architecture} has layer_norm = {layer_norm}, but" in str(error.value)
    assert f"{architecture} has gates = {gates}, but" in str(error.value)
    assert (f"{architecture} has tied = True, but output_layer.weight = False" in str(error.value)) is tied


# Fields that each class reads beside the ones that all have, by transformers' own names.
EVERY = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "num_key_value_heads",
    "head_dim",
}  # fmt: skip
GEMMAS = EVERY - {"hidden_act"} | {"hidden_activation", "query_pre_attn_scalar", "sliding_window"}
READS = {
    "MixtralForCausalLM": EVERY | {"num_local_experts", "num_experts_per_tok"},
    "Qwen3MoeForCausalLM": EVERY - {"intermediate_size"} | set(MOE),
    "GemmaForCausalLM": EVERY,
    "Gemma2ForCausalLM": GEMMAS | {"attn_logit_softcapping", "final_logit_softcapping"},
    "Gemma3ForCausalLM": GEMMAS | {"layer_types"},
    "NemotronForCausalLM": EVERY - {"rms_norm_eps"} | {"norm_eps"},
    "Starcoder2ForCausalLM": EVERY - {"rms_norm_eps"} | {"norm_epsilon"},
    "DeepseekV3ForCausalLM": EVERY - {"num_key_value_heads", "head_dim"} | set(LATENT),
}  # fmt: skip


NORMS = Declared({"centered": Fact(False, "the test")})


@pytest.mark.parametrize("architecture", READS)
def test_each_class_gets_or_asks_for_every_field_it_reads(architecture: str) -> None:
    nothing = {"somewhere.weight": TensorSpec("somewhere.weight", (3, 4), "bfloat16")}
    with pytest.raises(SourceError) as error:
        hf_config("x", "megatron", NORMS, nothing, {"architectures": [architecture]})
    follow = {"num_key_value_heads", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    asked = {line.split(":")[0].strip() for line in str(error.value).splitlines() if line.startswith("    ")}
    assert asked == READS[architecture] - follow - {"tie_word_embeddings"}
