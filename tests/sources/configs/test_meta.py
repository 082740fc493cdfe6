"""Meta's params.json, and torchtitan's checkpoints without any configuration, become config.json."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bridge.core.errors import SourceError
from bridge.core.values import TensorSpec
from bridge.sources.configs.derive import Declared, hf_config
from bridge.sources.configs.meta import declared_by_meta
from tests.sources.weights import native_shapes
from tests.sources.weights.native_shapes import FFN, HIDDEN, MOE_FFN, ROWS

# The files as Meta published them; width of the MLP, factor of rope and longest sequence as the models have them.
THREE: dict[str, Any] = {"n_kv_heads": 8, "vocab_size": 128256, "norm_eps": 1e-05, "rope_theta": 500000.0}
SCALED = THREE | {"use_scaled_rope": True}
TWO: dict[str, Any] = {"norm_eps": 1e-05, "vocab_size": -1}


def params(
    dim: int, layers: int, heads: int, multiple: int, more: dict[str, Any], by: float | None = None
) -> dict[str, Any]:
    own = {"dim": dim, "n_layers": layers, "n_heads": heads, "multiple_of": multiple, **more}
    return own if by is None else own | {"ffn_dim_multiplier": by}


PUBLISHED: dict[str, tuple[dict[str, Any], int, float | None, int | None]] = {
    "7B":       (params(4096, 32, 32, 256, TWO | {"norm_eps": 1e-06}),        11008, None, None),
    "2-13B":    (params(5120, 40, 40, 256, TWO),                              13824, None, None),
    "2-70B":    (params(8192, 80, 64, 4096, TWO | {"n_kv_heads": 8}, 1.3),    28672, None, None),
    "3-8B":     (params(4096, 32, 32, 1024, THREE, 1.3),                      14336, None, 8192),
    "3-70B":    (params(8192, 80, 64, 4096, THREE, 1.3),                      28672, None, 8192),
    "3.1-8B":   (params(4096, 32, 32, 1024, SCALED, 1.3),                     14336, 8.0,  131072),
    "3.1-70B":  (params(8192, 80, 64, 4096, SCALED, 1.3),                     28672, 8.0,  131072),
    "3.1-405B": (params(16384, 126, 128, 4096, SCALED, 1.2),                  53248, 8.0,  131072),
    "3.2-1B":   (params(2048, 16, 32, 256, SCALED, 1.5),                      8192,  32.0, 131072),
    "3.2-3B":   (params(3072, 28, 24, 256, SCALED, 1.0),                      8192,  32.0, 131072),
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 60, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "head_dim": 16, "multiple_of": 11,
    "ffn_dim_multiplier": 0.55, "norm_eps": 1e-5, "rope_theta": 5000.0, "vocab_size": -1, "max_seq_len": 77,
}  # fmt: skip


def files(own: dict[str, Any], ffn: int) -> dict[str, TensorSpec]:
    """The joined tensors of a Llama of Meta's, two layers spelled out and the last."""
    dim, heads = own["dim"], own["n_heads"]
    width = own.get("n_kv_heads", heads) * (dim // heads)
    rows = own["vocab_size"] if own["vocab_size"] > 0 else 32000
    layer = {
        "attention.wq": (dim, dim),
        "attention.wk": (width, dim),
        "attention.wv": (width, dim),
        "attention.wo": (dim, dim),
    }
    layer |= {"feed_forward.w1": (ffn, dim), "feed_forward.w2": (dim, ffn), "feed_forward.w3": (ffn, dim)}
    shapes = {f"layers.{n}.{k}.weight": s for n in (0, 1, own["n_layers"] - 1) for k, s in layer.items()}
    shapes |= {"tok_embeddings.weight": (rows, dim), "output.weight": (rows, dim), "norm.weight": (dim,)}
    return {name: TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_need_nothing_that_is_not_in_their_files(name: str) -> None:
    own, ffn, factor, context = PUBLISHED[name]
    given = None if context else {"max_position_embeddings": 2048}
    config = hf_config(name, "meta", declared_by_meta(own), files(own, ffn), given).config
    assert config["intermediate_size"] == ffn
    assert config["head_dim"] == (64 if name == "3.2-1B" else 128)
    assert config["num_key_value_heads"] == own.get("n_kv_heads", own["n_heads"])
    assert config["max_position_embeddings"] == (context or 2048)
    rope = config["rope_parameters"]
    assert (rope["rope_theta"], rope.get("factor")) == (own.get("rope_theta", 10000.0), factor)
    assert rope["rope_type"] == ("llama3" if factor else "default")
    assert (config["architectures"], config["hidden_act"]) == (["LlamaForCausalLM"], "silu")


@pytest.mark.parametrize("name", ["7B", "2-70B"])
def test_the_longest_sequence_of_older_ones_is_asked_for(name: str) -> None:
    own, ffn, _, _ = PUBLISHED[name]
    with pytest.raises(SourceError, match=r'config=\{"max_position_embeddings": ...\}'):
        hf_config(name, "meta", declared_by_meta(own), files(own, ffn))


def test_transformers_builds_what_the_files_hold() -> None:
    specs = native_shapes.titan(today=False)
    config = hf_config("x", "meta", declared_by_meta(TINY), specs).config
    made = native_shapes.built(config)
    pairs = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wo": "self_attn.o_proj"}
    pairs |= {"feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}
    for theirs, ours in pairs.items():
        assert made[f"model.layers.2.{ours}.weight"].shape == specs[f"layers.2.{theirs}.weight"].shape
    assert made["lm_head.weight"].shape == specs["output.weight"].shape == (ROWS, HIDDEN)
    assert config["vocab_size"] == ROWS


def test_a_scaling_without_its_factor_is_asked_for() -> None:
    told, specs = declared_by_meta(TINY | {"use_scaled_rope": True}), native_shapes.titan(today=False)
    with pytest.raises(SourceError, match=r"rope_parameters: .*Llama 3.1 and 3.3 have .*'factor': 8.0.*3.2 factor 32"):
        hf_config("x", "meta", told, specs)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    assert hf_config("x", "meta", told, specs, {"rope_parameters": rope}).config["rope_parameters"] == rope
    scaling = {"rope_scaling": {name: value for name, value in rope.items() if name != "rope_theta"}}
    assert hf_config("x", "meta", told, specs, scaling).config["rope_parameters"] == rope
    own = declared_by_meta(TINY | {"use_scaled_rope": True, "rope_scaling_factor": 16})
    assert rope.items() <= hf_config("x", "meta", own, specs).config["rope_parameters"].items()


def test_a_width_that_the_tensors_do_not_have_is_a_contradiction() -> None:
    told = declared_by_meta(TINY | {"multiple_of": 32, "n_layers": 4, "n_heads": 5})
    with pytest.raises(SourceError) as error:
        hf_config("x", "meta", told, native_shapes.titan(today=False))
    for line in (
        "params.json: dim, multiple_of, ffn_dim_multiplier = 96, but the tensors have 88",
        "params.json: n_layers = 4, but the tensors have 3",
        "heads * head_dim = 80 (params.json: head_dim = 16, params.json: n_heads = 5), but the tensors have 96",
    ):
        assert line in str(error.value)


def test_keys_of_other_models_are_not_passed_over() -> None:
    told = declared_by_meta(TINY | {"moe": {"num_experts": 8}, "vision_chunk_size": 448, "use_biases": True})
    with pytest.raises(SourceError, match=r"moe = .* is unknown(.|\n)*vision_chunk_size(.|\n)*use_biases") as error:
        hf_config("x", "meta", told, native_shapes.titan(today=False))
    assert "3 problems" in str(error.value)


def test_mistrals_own_files_have_a_window() -> None:
    own = {k: v for k, v in TINY.items() if k not in ("multiple_of", "ffn_dim_multiplier")}
    told = declared_by_meta(own | {"hidden_dim": 88, "vocab_size": ROWS, "sliding_window": 33})
    config = hf_config("x", "meta", told, native_shapes.titan(today=False)).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 33)


ANSWERS: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 77, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
}  # fmt: skip


def asked(specs: dict[str, TensorSpec], given: Any = None) -> list[str]:
    with pytest.raises(SourceError) as error:
        hf_config("x", "torchtitan", Declared(), specs, given)
    [names] = re.findall(r"config=\{(.*?)\}", str(error.value))
    return re.findall(r'"(\w+)"', names)


@pytest.mark.parametrize("today", [True, False])
def test_torchtitans_llama_needs_its_heads_and_three_more(today: bool) -> None:
    specs = native_shapes.titan(today=today)
    assert sorted(asked(specs)) == ["max_position_embeddings", "num_attention_heads", "rms_norm_eps", "rope_parameters"]
    config = hf_config("x", "torchtitan", Declared(), specs, ANSWERS | {"num_attention_heads": 6}).config
    assert (config["head_dim"], config["num_key_value_heads"], config["vocab_size"]) == (16, 2, ROWS)
    assert native_shapes.built(config)["model.layers.0.self_attn.k_proj.weight"].shape == (32, HIDDEN)


@pytest.mark.parametrize("today", [True, False])
def test_torchtitans_qwen3_tells_its_heads_by_its_norms(today: bool) -> None:
    specs = native_shapes.titan(qk_norm=True, today=today, tied=True)
    assert sorted(asked(specs)) == ["max_position_embeddings", "rms_norm_eps", "rope_parameters"]
    config = hf_config("x", "torchtitan", Declared(), specs, ANSWERS).config
    assert (config["architectures"], config["num_attention_heads"]) == (["Qwen3ForCausalLM"], 6)
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize("today", [True, False])
def test_torchtitans_qwen3_moe_leaves_the_routing_open(today: bool) -> None:
    specs = native_shapes.titan(qk_norm=True, experts=True, today=today)
    assert {"num_experts_per_tok", "norm_topk_prob"} < set(asked(specs))
    given = ANSWERS | {"num_experts_per_tok": 2, "norm_topk_prob": True}
    config = hf_config("x", "torchtitan", Declared(), specs, given).config
    assert (config["num_experts"], config["moe_intermediate_size"]) == (5, MOE_FFN)
    made = native_shapes.built(config)
    assert made["model.layers.0.mlp.experts.down_proj"].shape == (5, HIDDEN, MOE_FFN)


def test_torchtitans_deepseek_needs_its_heads_and_its_routing() -> None:
    specs = native_shapes.titan_latent()
    routing = {"num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1}
    assert sorted(asked(specs)) == sorted([*ANSWERS, *routing, "num_attention_heads"])
    config = hf_config("x", "torchtitan", Declared(), specs, ANSWERS | routing | {"num_attention_heads": 6}).config
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "n_shared_experts")
    assert [config[name] for name in widths] == [12, 8, 14, 28, 20, 2]
    assert config["first_k_dense_replace"] == 1
    made = native_shapes.built(config)
    assert made["model.layers.1.self_attn.kv_b_proj.weight"].shape == specs["layers.1.attention.wkv_b.weight"].shape
    assert made["model.layers.0.mlp.gate_proj.weight"].shape == (FFN, HIDDEN)


def test_heads_that_do_not_divide_are_a_contradiction() -> None:
    with pytest.raises(
        SourceError, match=r"no whole head_dim gives heads \* head_dim = 96 .* config=: num_attention_heads = 7"
    ):
        hf_config("x", "torchtitan", Declared(), native_shapes.titan(), ANSWERS | {"num_attention_heads": 7})
