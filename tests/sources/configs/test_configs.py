"""Configurations of Megatron checkpoints become config.json of the same model: held against transformers' classes."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
import yaml

from bridge.core.errors import SourceError
from bridge.core.values import TensorSpec
from bridge.sources.configs.derive import hf_config
from bridge.sources.configs.writers import declared_by_megatron
from bridge.sources.configs.yaml_data import read_yaml
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.structure import structure
from tests.models.megatron_configs import megatron_lm, nemo1, nemo2
from tests.models.megatron_families import FAMILIES, VOCAB, Family
from tests.oracles import megatron_bridge_process, megatron_oracle
from tests.sources.weights import native_shapes
from tests.sources.weights.native_shapes import FFN, HIDDEN, LAYERS, MOE_FFN, ROWS

# Native tensor -> the parameters of one layer in transformers that it holds, under each other.
HOLDS = {
    "self_attention.linear_qkv.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2.weight": ("mlp.down_proj",),
    "mlp.router.weight": ("mlp.gate",),
}


def native(family: Family, **options: Any) -> dict[str, TensorSpec]:
    config = family.config
    return native_shapes.megatron(
        gates=1 + config["gated_linear_unit"],
        kv_heads=config["num_query_groups"],
        head_dim=config["kv_channels"],
        tied=family.tied,
        qkv_bias=config["add_qkv_bias"],
        bias=config["add_bias_linear"],
        layer_norm=config["normalization"] == "LayerNorm",
        qk_norm=config["qk_layernorm"],
        positions=family.positions if family.model["position_embedding_type"] == "learned_absolute" else 0,
        experts=bool(family.experts),
        **options,
    )


def expected(family: Family) -> dict[str, Any]:
    """What transformers is told of the same model; fields that its classes do not have left out."""
    unknown = {"torch_dtype", "hidden_activation", "partial_rotary_factor"}
    unknown |= {"rms_norm_eps"} if "norm_eps" in family.hf else set()
    return {name: value for name, value in family.hf.items() if name not in unknown}


@pytest.mark.slow
def test_megatron_bridges_own_dump_tells_everything() -> None:
    found = megatron_oracle.in_bridge().map(megatron_bridge_process.run_config, FAMILIES, repeat(1), repeat(1))
    dumps = dict(zip(FAMILIES, found, strict=True))
    for name, text in dumps.items():
        told = declared_by_megatron("run_config.yaml", read_yaml(text, "run_config.yaml"))
        config = hf_config(name, "megatron", told, native(FAMILIES[name])).config
        assert expected(FAMILIES[name]).items() <= config.items(), name


def as_dumped(raw: dict[str, Any], name: str) -> Any:
    return read_yaml(yaml.safe_dump(raw), name)


@pytest.mark.parametrize("name", FAMILIES)
def test_nemo2_tells_everything(name: str) -> None:
    told = declared_by_megatron("context/model.yaml", as_dumped(nemo2(FAMILIES[name]), "context/model.yaml"))
    config = hf_config(name, "megatron", told, native(FAMILIES[name])).config
    assert expected(FAMILIES[name]).items() <= config.items()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["model_config.yaml", "common.pt: args"])
def test_nemo1_and_megatron_lm_tell_everything_but_the_vocabulary(name: str, kind: str) -> None:
    family = FAMILIES[name]
    if kind == "common.pt: args":
        if name == "gemma":
            pytest.skip("no argument of Megatron-LM gates with GELU")
        raw = dict(vars(megatron_lm(family, 1, 1)))
    else:
        raw = as_dumped({"bias_activation_fusion": False, "scale_factor": 4.0} | nemo1(family, 1, 1), kind)
    told = declared_by_megatron(kind, raw)
    with pytest.raises(SourceError, match=r'config=\{"vocab_size": ...\}(.|\n)*the tensors have 144 rows'):
        hf_config(name, "megatron", told, native(family))
    config = hf_config(name, "megatron", told, native(family), {"vocab_size": VOCAB}).config
    wanted = expected(family)
    if name == "mistral":  # without a window it computes what Llama does
        wanted |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        del wanted["sliding_window"]
    assert wanted.items() <= config.items()


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_builds_the_model_that_the_tensors_fit(name: str) -> None:
    family = FAMILIES[name]
    told = declared_by_megatron("context/model.yaml", nemo2(family))
    specs = native(family)
    config = hf_config(name, "megatron", told, specs).config
    made = native_shapes.built(config)
    layer = {k.split(".", 3)[3].removesuffix(".weight"): s.shape for k, s in made.items() if ".layers.1." in k}
    for tensor, parts in HOLDS.items():
        spec = specs.get(f"decoder.layers.{tensor}")
        if spec is not None and set(parts) <= layer.keys():
            assert spec.shape[1] == sum(layer[part][0] for part in parts), tensor
            assert spec.shape[2:] == layer[parts[0]][1:], tensor
    if name == "gpt":
        assert made["transformer.h.2.attn.c_attn.weight"].shape == (HIDDEN, 3 * HIDDEN)
        assert made["transformer.wpe.weight"].shape == specs["embedding.position_embeddings.weight"].shape
    else:
        assert layer.keys() >= {"self_attn.q_proj", "self_attn.o_proj"}
        assert made["model.embed_tokens.weight"].shape == (VOCAB, HIDDEN)
        assert f"model.layers.{LAYERS - 1}.self_attn.q_proj.weight" in made
        assert f"model.layers.{LAYERS}.self_attn.q_proj.weight" not in made
    assert ("lm_head.weight" in made) is not family.tied
    assert any(k.endswith("q_proj.bias") for k in made) == (family.config["add_qkv_bias"] and name != "gpt")
    if family.experts:
        assert (
            layer["mlp.experts.gate_up_proj"] == specs["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape[1:]
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_that_the_table_reads_is_written(name: str) -> None:
    told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES[name]))
    config = hf_config(name, "megatron", told, native(FAMILIES[name])).config
    table = load_arch(config["architectures"][0])
    assert table is not None
    assert {f for f in table.config if f not in config} <= {
        "id2label",
        "num_labels",
        "num_local_experts",
        "attention_bias",
        "scale_attn_by_inverse_layer_idx",  # its class has the default
    }
    dims = table.names(config)
    assert (dims["hidden"], dims["layers"], dims["heads"], dims["vocab"]) == (HIDDEN, LAYERS, 6, VOCAB)
    assert dims.get("ffn", FFN) == FFN and dims.get("moe_ffn", MOE_FFN) == MOE_FFN


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.experts])
def test_the_table_covers_the_model_exactly(name: str) -> None:
    told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES[name]))
    config = hf_config(name, "megatron", told, native(FAMILIES[name])).config
    found = structure(config, native_shapes.built(config))
    assert len(found.attention) == LAYERS
    assert bool(found.tied) is FAMILIES[name].tied


@pytest.mark.parametrize("options", [{"stacked": False}, {"stacked": False, "grouped": False}, {"prefix": "module."}])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe"])
def test_layers_and_experts_count_however_they_are_stored(name: str, options: dict[str, Any]) -> None:
    told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES[name]))
    stacked = hf_config(name, "megatron", told, native(FAMILIES[name])).config
    assert hf_config(name, "megatron", told, native(FAMILIES[name], **options)).config == stacked


def test_the_dtype_is_the_one_that_is_stored() -> None:
    told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES["llama"]))  # says float32
    assert hf_config("x", "megatron", told, native(FAMILIES["llama"])).config["dtype"] == "bfloat16"


def test_no_token_of_another_tokenizer_is_taken_over() -> None:
    told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES["llama"]))
    config = hf_config("x", "megatron", told, native(FAMILIES["llama"])).config
    assert all(config[name] is None for name in ("bos_token_id", "eos_token_id", "pad_token_id"))


def test_norms_tell_whether_they_are_centered() -> None:
    for name, centered in (("gemma", True), ("nemotron", True), ("llama", False)):
        told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES[name]))
        assert hf_config("x", "megatron", told, native(FAMILIES[name])).terms["centered"].value is centered
    told = declared_by_megatron("model_config.yaml", nemo1(FAMILIES["gemma"], 1, 1))  # adds the one when it imports
    derived = hf_config("x", "megatron", told, native(FAMILIES["gemma"]), {"vocab_size": VOCAB})
    assert derived.terms["centered"].value is False


def config_of(change: dict[str, Any], *, base: str = "llama", given: Any = None, **shapes: Any) -> dict[str, Any]:
    """The config.json of NeMo 2's configuration with fields changed, and of tensors that fit it."""
    raw = nemo2(FAMILIES[base])
    raw["config"] |= change
    told = declared_by_megatron("context/model.yaml", as_dumped(raw, "context/model.yaml"))
    return hf_config("x", "megatron", told, native_shapes.megatron(**shapes), given).config


GEMMA = {
    "activation_func": {"_target_": "megatron.core.activations.fast_gelu", "_call_": False},
    "layernorm_zero_centered_gamma": True,
    "share_embeddings_and_output_weights": True,
}


def test_gemma2_has_its_caps_its_window_and_its_alternating_layers() -> None:
    own = GEMMA | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    own |= {"_target_": "nemo.collections.llm.gpt.model.gemma2.Gemma2Config2B", "window_size": [22, 0]}
    config = config_of(own, tied=True, post_norms=True)
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (23, 24)
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert (config["hidden_activation"], config["tie_word_embeddings"]) == ("gelu_pytorch_tanh", True)
    assert native_shapes.built(config)["model.layers.0.self_attn.k_proj.weight"].shape == (32, HIDDEN)


def test_gemma3_has_two_rotary_bases_and_a_pattern_of_layers() -> None:
    own = GEMMA | {"rotary_base": [10000, 1000000], "window_size": 17, "interleaved_attn_pattern": [2, 1]}
    own |= {"softmax_scale": 1 / 28**0.5, "rope_scaling_factor": 8.0, "rope_scaling": False, "qk_layernorm": True}
    own |= {"_target_": "nemo.collections.llm.gpt.model.gemma3.Gemma3Config4B"}
    config = config_of(own, tied=True, post_norms=True, qk_norm=True)
    assert config["rope_parameters"] == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    }
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (17, 28)
    assert native_shapes.built(config)["model.layers.0.self_attn.q_norm.weight"].shape == (16,)


def test_starcoder2_is_told_from_gpt_by_its_positions() -> None:
    own = {"normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True, "add_qkv_bias": True}
    own |= {"activation_func": {"_target_": "torch._C._nn.gelu", "_call_": False}, "bias_activation_fusion": True}
    own |= {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider"}
    config = config_of(own, gates=1, bias=True, layer_norm=True)
    assert config["architectures"] == ["Starcoder2ForCausalLM"]
    assert (config["use_bias"], config["norm_epsilon"]) == (True, 1e-5)
    assert (config["head_dim"], config["tie_word_embeddings"]) == (16, False)
    assert config["hidden_act"] == "gelu_pytorch_tanh"  # what the fused kernel computes, whatever it is called
    assert native_shapes.built(config)["model.layers.0.mlp.c_fc.bias"].shape == (FFN,)


def test_mistrals_window_counts_the_token_itself() -> None:
    assert config_of({"window_size": [4095, 0]}, base="mistral")["sliding_window"] == 4096


def test_dense_layers_among_experts_are_named() -> None:
    shapes = native_shapes.megatron(experts=True, stacked=False, qk_norm=True)
    for name, shape in (("linear_fc1", (2 * FFN, HIDDEN)), ("linear_fc2", (HIDDEN, FFN))):
        shapes[f"decoder.layers.1.mlp.{name}.weight"] = TensorSpec("", shape, "bfloat16")
    shapes = {
        name: spec
        for name, spec in shapes.items()
        if "layers.1.mlp.router" not in name and "layers.1.mlp.experts" not in name
    }
    raw = nemo2(FAMILIES["qwen3-moe"])
    raw["config"]["moe_layer_freq"] = [1, 0, 1]
    config = hf_config("x", "megatron", declared_by_megatron("context/model.yaml", raw), shapes).config
    assert config["mlp_only_layers"] == [1]
    assert native_shapes.built(config)["model.layers.1.mlp.gate_proj.weight"].shape == (FFN, HIDDEN)
    raw["config"]["moe_layer_freq"] = 2  # layers 0 and 2
    assert hf_config("x", "megatron", declared_by_megatron("context/model.yaml", raw), shapes).config == config


def test_deepseek_v3_of_megatron() -> None:
    config = config_of_latent()
    made = native_shapes.built(config)
    attention = "model.layers.2.self_attn."
    assert made[f"{attention}q_b_proj.weight"].shape == (6 * 20, 28)
    assert made[f"{attention}kv_a_proj_with_mqa.weight"].shape == (28, HIDDEN)
    assert made[f"{attention}kv_b_proj.weight"].shape == (6 * 26, 20)
    assert made["model.layers.0.mlp.gate_proj.weight"].shape == (FFN, HIDDEN)
    assert made["model.layers.1.mlp.shared_experts.up_proj.weight"].shape == (2 * MOE_FFN, HIDDEN)
    assert config["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    assert (config["n_group"], config["topk_group"], config["routed_scaling_factor"]) == (1, 1, 2.5)
    assert config["tie_word_embeddings"] is False


def config_of_latent(given: Any = None, specs: dict[str, TensorSpec] | None = None, **change: Any) -> dict[str, Any]:
    raw = nemo2(FAMILIES["mixtral"])
    raw["config"] |= {
        "_target_": "megatron.bridge.models.mla_provider.MLAModelProvider", "multi_latent_attention": True,
        "q_lora_rank": 28, "kv_lora_rank": 20, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 14,
        "qk_layernorm": True, "moe_layer_freq": [0, 1, 1], "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 2 * MOE_FFN, "rotary_scaling_factor": 40, "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_type": "yarn",
        "qk_clip": False,
    } | change  # fmt: skip
    told = declared_by_megatron("context/model.yaml", as_dumped(raw, "context/model.yaml"))
    return hf_config("x", "megatron", told, specs or native_shapes.megatron_latent(), given).config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("multi_latent_attention", False), ("q_lora_rank", 29), ("kv_lora_rank", 21), ("qk_head_dim", 13),
        ("qk_pos_emb_head_dim", 9), ("v_head_dim", 15), ("moe_shared_expert_intermediate_size", 73),
        ("moe_router_score_function", "softmax"), ("moe_router_enable_expert_bias", False), ("moe_ffn_hidden_size", 37),
        ("moe_layer_freq", [0, 0, 1]),
    ],
)  # fmt: skip
def test_what_deepseeks_configuration_says_is_checked(field: str, value: Any) -> None:
    with pytest.raises(SourceError, match=f"config.{field}"):
        config_of_latent(**{field: value})


def test_yarn_without_its_factor_is_asked_for() -> None:
    with pytest.raises(SourceError, match="rope_parameters: scaling of the rotary embedding"):
        config_of_latent(rotary_scaling_factor=None)


def test_shared_experts_that_are_no_whole_number_of_them_are_named_by_both_fields() -> None:
    specs = {
        name: replace(spec, shape=tuple({144: 146, 72: 73}.get(n, n) if "shared" in name else n for n in spec.shape))
        for name, spec in native_shapes.megatron_latent().items()
    }
    fields = "moe_shared_expert_intermediate_size // moe_ffn_hidden_size"
    with pytest.raises(SourceError, match=f"since n_shared_experts is {fields}; but .* = 36, .* = 73"):
        config_of_latent(specs=specs, moe_shared_expert_intermediate_size=73)


def test_groups_of_experts_are_carried_over() -> None:
    config = config_of_latent(moe_router_num_groups=4, moe_router_group_topk=2)
    assert (config["n_group"], config["topk_group"]) == (4, 2)


def test_only_the_first_layers_may_be_dense() -> None:
    specs = native_shapes.megatron_latent()
    turned = {name.replace("layers.0.", "layers.9.").replace("layers.1.", "layers.0."): s for name, s in specs.items()}
    turned = {name.replace("layers.9.", "layers.1."): spec for name, spec in turned.items()}
    given = {"num_attention_heads": 6, "architectures": ["DeepseekV3ForCausalLM"]}
    with pytest.raises(SourceError, match="since only the first layers may be dense; but layers that have no router"):
        hf_config("x", "megatron", declared_by_megatron("context/model.yaml", {"config": {}}), turned, given)


def test_shapes_alone_leave_only_what_they_cannot_tell() -> None:
    given = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": ROWS, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": 77, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    }  # fmt: skip
    told = declared_by_megatron("context/model.yaml", {"config": {}})
    config = hf_config("x", "megatron", told, native_shapes.megatron(qk_norm=True, tied=True), given).config
    dims = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    assert [config[name] for name in dims] == [3, 60, 88, 6, 2, 16]
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == given["rope_parameters"]
