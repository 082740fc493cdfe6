"""What a foreign configuration must not get away with: contradictions, gaps, and what no class here does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from bridge.core.errors import SourceError
from bridge.sources.configs.derive import hf_config
from bridge.sources.configs.writers import declared_by_megatron
from tests.models.megatron_configs import nemo2
from tests.models.megatron_families import FAMILIES
from tests.sources.weights import native_shapes
from tests.sources.weights.native_shapes import ROWS


def told(change: dict[str, Any] | None = None, base: str = "llama", without: tuple[str, ...] = ()) -> Any:
    raw = nemo2(FAMILIES[base])
    raw["config"] = {name: value for name, value in (raw["config"] | (change or {})).items() if name not in without}
    return declared_by_megatron("context/model.yaml", raw)


def refusal(
    change: dict[str, Any] | None = None, given: Any = None, without: tuple[str, ...] = (), **shapes: Any
) -> str:
    with pytest.raises(SourceError) as error:
        hf_config("the/checkpoint", "megatron", told(change, without=without), native_shapes.megatron(**shapes), given)
    return str(error.value)


def test_every_contradiction_stands_in_one_error_with_both_numbers() -> None:
    wrong = {"num_layers": 4, "hidden_size": 61, "ffn_hidden_size": 89, "num_attention_heads": 8, "vocab_size": 150}
    wrong |= {"gated_linear_unit": False, "share_embeddings_and_output_weights": True, "normalization": "LayerNorm"}
    text = refusal(
        wrong | {"qk_layernorm": True, "add_bias_linear": True, "position_embedding_type": "learned_absolute"}
    )
    said = "context/model.yaml: config."
    for line in (
        f"{said}num_layers = 4, but the tensors have 3: decoder.layers.",
        f"{said}hidden_size = 61, but the tensors have 60: embedding.word_embeddings.weight (144, 60)",
        f"{said}ffn_hidden_size = 89, but the tensors have 88: decoder.layers.mlp.linear_fc2.weight (3, 60, 88)",
        f"heads * head_dim = 128 ({said}kv_channels = 16, {said}num_attention_heads = 8), but the tensors have 96",
        "(heads + 2 * kv_heads) * head_dim = 192",
        f"{said}vocab_size = 150, but the tensors have 144 rows",
        f"{said}gated_linear_unit = False, but the tensors have 2 matrices in the MLP's first layer",
        f"{said}share_embeddings_and_output_weights = True, but the tensors have False: output_layer.weight",
        f"{said}normalization (LayerNorm) = True, but the tensors have False: no tensor ends in final_layernorm.bias",
        f"{said}qk_layernorm = True, but the tensors have False: no tensor ends in .q_layernorm.weight",
        f"{said}add_bias_linear = True, but the tensors have False: no tensor ends in linear_proj.bias",
        f"{said}position_embedding_type ('learned_absolute') = True, but the tensors have False",
    ):
        assert line in text
    assert text.startswith("the/checkpoint: the model's configuration, ")


@pytest.mark.parametrize(
    ("field", "value", "told_by"),
    [
        ("num_attention_heads", 12, "heads * head_dim = 192"),
        ("num_query_groups", 3, "(heads + 2 * kv_heads) * head_dim = 192"),
        ("kv_channels", 12, "heads * head_dim = 72"),
        ("num_query_groups", 6, "(heads + 2 * kv_heads) * head_dim = 288"),
    ],
)
def test_heads_are_checked_by_the_widths_they_make(field: str, value: int, told_by: str) -> None:
    text = refusal({field: value})
    assert told_by in text and f"config.{field} = {value}" in text


def test_heads_that_divide_nothing_are_a_contradiction() -> None:
    text = refusal({"num_attention_heads": 7}, without=("kv_channels", "num_query_groups"))
    assert "no whole head_dim gives heads * head_dim = 96" in text and "num_attention_heads = 7" in text


def test_what_nobody_says_is_asked_for_by_name_at_once() -> None:
    text = refusal(without=("layernorm_epsilon", "rotary_base", "activation_func", "seq_length", "vocab_size"))
    names = ("vocab_size", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    listed = ", ".join(f'"{name}": ...' for name in names)
    assert f"give config={{{listed}}}" in text
    for line in (
        "vocab_size: tokens with an embedding; the tensors have 144 rows",
        "rms_norm_eps: epsilon of the norms",
    ):
        assert line in text
    assert "rope_parameters: base and scaling of the rotary embedding: {'rope_type': 'default'" in text


def test_of_heads_only_their_number_is_asked_for() -> None:
    text = refusal(without=("num_attention_heads", "num_query_groups", "kv_channels"))
    assert 'config={"num_attention_heads": ...}' in text and "head_dim" not in text
    answered = hf_config(
        "x", "megatron", told(without=("num_attention_heads", "num_query_groups", "kv_channels")),
        native_shapes.megatron(), {"num_attention_heads": 6},
    )  # fmt: skip
    assert (answered.config["head_dim"], answered.config["num_key_value_heads"]) == (16, 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rotary_interleaved": True}, "LlamaForCausalLM cannot express interleaved"),
        ({"rotary_percent": 0.5}, "LlamaForCausalLM cannot express partial"),
        ({"window_size": [127, 0]}, "LlamaForCausalLM cannot express window"),
        ({"softmax_scale": 0.5}, "LlamaForCausalLM cannot express softmax_scale"),
        ({"glu_linear_offset": 1.0}, "LlamaForCausalLM cannot express up_offset"),
        ({"activation_func_clamp_value": 7.0}, "LlamaForCausalLM cannot express clamp"),
        ({"softmax_type": "off-by-one"}, "softmax_type = 'off-by-one': known are vanilla, learnable"),
        ({"softmax_type": "learnable"}, "softmax_type (learnable) = True, but the tensors have False"),
        ({"window_attn_skip_freq": 2, "window_size": [127, 0]}, "LlamaForCausalLM cannot express pattern"),
        (
            {"window_attn_skip_freq": [1, 1, 0], "window_size": [127, 0]},
            "cannot express pattern: context/model.yaml: config.window_attn_skip_freq ([1, 1, 0]) = (2, 1)",
        ),
        (
            {"window_attn_skip_freq": [0, 1, 1], "window_size": [127, 0]},
            "supported is a window in all layers but every n-th",
        ),
        ({"attention_output_gate": True}, "no supported architecture has that"),
        ({"apply_residual_connection_post_layernorm": True}, "no supported architecture has that"),
        ({"no_rope_freq": [0, 1, 1]}, "no supported architecture has that"),
        ({"heterogeneous_block_specs": True}, "no supported architecture has that"),
        *(
            ({field: value}, f"{field} = {value!r}: no supported architecture has that")
            for field, value in (
                ("qk_l2_norm", True),
                ("nope_layer_interval", 4),
                ("linear_attention_freq", 4),
                ("experimental_attention_variant", "dsa"),
                ("mrope_section", [16, 24]),
                ("is_hybrid_model", True),
                ("moe_shared_expert_gate", True),
                ("moe_apply_probs_on_input", True),
                ("moe_latent_size", 64),
                ("drop_layers", [1]),
                ("mcore_gpt", False),
                ("transformer_block_type", "post_ln"),
                ("headscale", True),
                ("normalize_attention_scores", False),
                ("attention_type", "linear"),
                ("moe_mlp_glu_interleave_size", 32),
                ("moe_expert_capacity_factor", 1.25),
                ("moe_router_load_balancing_type", "sinkhorn"),
                ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
                ("use_mup", True),
            )
        ),
        (
            {"residual_scale": 0.3},
            "residual_scale = 0.3: not known here, so that it may change what the model computes",
        ),
        ({"moe_new_thing": "x"}, 'if this model does without it, give config={"moe_new_thing": None}'),
        ({"position_embedding_type": "mrope"}, "supported are rope, yarn and learned_absolute"),
        ({"normalization": "DyT"}, "known norms are RMSNorm, LayerNorm"),
        ({"num_moe_experts": 5}, "LlamaForCausalLM cannot express experts"),
        ({"num_layers": "three"}, "num_layers = 'three': must be a whole number above zero"),
        ({"layernorm_epsilon": "small"}, "must be a number above zero"),
        ({"rotary_base": {"_target_": "os.system"}}, "rotary_base = os.system: must be a number above zero"),
    ],
)
def test_what_changes_the_answer_is_refused(change: dict[str, Any], why: str) -> None:
    text = refusal(change)
    assert why in text and next(iter(change)) in text


@pytest.mark.parametrize(
    ("shapes", "terms"),
    [
        ({"bias": True}, ("qkv_bias", "o_bias", "mlp_bias")),
        ({"qk_norm": True, "post_norms": True}, ("qk_norm", "post_norms")),
        ({"positions": 112}, ("learned",)),
        ({"experts": True}, ("experts",)),
    ],
)
def test_what_the_tensors_have_and_the_class_has_not_is_refused(shapes: dict[str, Any], terms: tuple[str, ...]) -> None:
    text = refusal({"_target_": "nemo.collections.llm.gpt.model.mistral.MistralConfig7B"}, **shapes)
    for term in terms:
        assert f"MistralForCausalLM cannot express {term}: " in text


def test_experts_that_are_not_routed_as_mixtrals_are_refused() -> None:
    change = {"moe_shared_expert_intermediate_size": 40, "moe_router_topk_scaling_factor": 2.0}
    change |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_score_function": "sigmoid"}
    change |= {"moe_router_enable_expert_bias": True, "moe_layer_freq": [1, 0, 1], "multi_latent_attention": True}
    with pytest.raises(SourceError) as error:
        hf_config("x", "megatron", told(change, "mixtral"), native_shapes.megatron(experts=True))
    for term in ("shared_ffn", "routed_scale", "router_groups", "top_groups", "score", "dense"):
        assert f"MixtralForCausalLM cannot express {term}: " in str(error.value)
    for field in ("moe_router_enable_expert_bias", "multi_latent_attention"):
        assert f"config.{field} = True, but the tensors have False" in str(error.value)


def test_a_bias_of_the_router_is_refused_where_there_is_none() -> None:
    specs = native_shapes.megatron(experts=True)
    name = "decoder.layers.mlp.router.expert_bias"
    specs[name] = type(specs["output_layer.weight"])(name, (3, 5), "bfloat16")
    with pytest.raises(SourceError, match=f"MixtralForCausalLM cannot express expert_bias: {name} = True"):
        hf_config("x", "megatron", told(base="mixtral"), specs)


def test_caps_and_scaled_embeddings_are_no_llamas() -> None:
    change = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 24}
    change |= {"apply_embedding_scaling": True, "interleaved_attn_pattern": [5, 1]}
    text = refusal(change)
    for term in ("attn_softcap", "logit_softcap", "query_scale", "embed_scaled", "pattern"):
        assert f"LlamaForCausalLM cannot express {term}: " in text
    scaled = {"rope_scaling": True, "_target_": "nemo.collections.llm.gpt.model.gemma.GemmaConfig2B"}
    assert "GemmaForCausalLM cannot express scaling: " in refusal(scaled)


def test_a_softmax_scale_that_is_the_usual_one_is_none() -> None:
    assert hf_config("x", "megatron", told({"softmax_scale": 0.25}), native_shapes.megatron()).config["head_dim"] == 16


GEMMA3 = {
    "_target_": "nemo.collections.llm.gpt.model.gemma3.Gemma3Config4B", "layernorm_zero_centered_gamma": True,
    "activation_func": {"_target_": "megatron.core.activations.fast_gelu", "_call_": False}, "qk_layernorm": True,
    "share_embeddings_and_output_weights": True, "rotary_base": [10000, 1000000], "rope_scaling_factor": 1.0,
    "window_size": 17, "interleaved_attn_pattern": [2, 1], "softmax_scale": 24**-0.5,
}  # fmt: skip


def test_gemma3s_softmax_scale_and_what_its_queries_are_divided_by_are_one_number() -> None:
    def derived(change: dict[str, Any], given: Any = None) -> Any:
        shapes = native_shapes.megatron(tied=True, post_norms=True, qk_norm=True)
        return hf_config("x", "megatron", told(GEMMA3 | change), shapes, given).config["query_pre_attn_scalar"]

    layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    assert derived({}) == derived({}, layers) == derived({"query_pre_attn_scalar": 24}) == 24
    with pytest.raises(SourceError, match=r"query_pre_attn_scalar = 20.*but .*softmax_scale.* 1 / sqrt\(24\)"):
        derived({"query_pre_attn_scalar": 20})
    assert derived({}, layers | {"query_pre_attn_scalar": 20}) == 20  # what the caller gives wins


def test_mixtral_cannot_have_weights_that_do_not_sum_to_one() -> None:
    with pytest.raises(SourceError, match=r"MixtralForCausalLM has renormalize = True, but .*moe_router_pre_softmax"):
        hf_config(
            "x", "megatron", told({"moe_router_pre_softmax": True}, "mixtral"), native_shapes.megatron(experts=True)
        )


def test_one_bias_of_two_is_no_llama() -> None:
    text = refusal({"add_qkv_bias": True}, qkv_bias=True)
    assert "LlamaForCausalLM wants qkv_bias == o_bias, since attention_bias stands for both" in text


@pytest.mark.parametrize("name", ["llama4_utils.Llama4Config", "hyena.HyenaNV7bConfig", "starcoder.StarcoderConfig15B"])
def test_an_unknown_class_is_not_taken_for_its_cousin(name: str) -> None:
    text = refusal({"_target_": f"nemo.collections.llm.gpt.model.{name}"})
    assert name.split(".")[1] in text and 'give config={"architectures": ["LlamaForCausalLM"]}' in text
    given = {"architectures": ["LlamaForCausalLM"]}
    change = {"_target_": f"nemo.collections.llm.gpt.model.{name}"}
    assert hf_config("x", "megatron", told(change), native_shapes.megatron(), given).config["model_type"] == "llama"


def test_gelu_and_rmsnorm_alone_are_no_gemma() -> None:
    change = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", "activation_func": "gelu"}
    text = refusal(change)
    assert "no family has gates = 2, activation = 'gelu', unless embed_scaled (GemmaForCausalLM): unknown" in text


def test_layers_that_differ_are_named() -> None:
    specs = native_shapes.megatron(stacked=False)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    specs[name] = type(specs[name])(name, (60, 44), "bfloat16")
    with pytest.raises(
        SourceError, match=r"layers differ in shape.*layers.0.mlp.linear_fc2.*layers.1.mlp.linear_fc2.weight \(60, 44\)"
    ):
        hf_config("x", "megatron", told(), specs)


def test_a_section_that_is_missing_says_what_is_there() -> None:
    with pytest.raises(SourceError, match=r"run_config.yaml: has no section `model`.*it has config"):
        declared_by_megatron("run_config.yaml", nemo2(FAMILIES["llama"]) and {"config": 1})
    with pytest.raises(SourceError, match="not a mapping"):
        declared_by_megatron("context/model.yaml", ["a"])
    with pytest.raises(SourceError, match=r"known: .*run_config.yaml"):
        declared_by_megatron("run_confg.yaml", {})


def test_the_callers_entries_win() -> None:
    given = {"vocab_size": ROWS, "rms_norm_eps": 3e-6, "bos_token_id": 7, "max_position_embeddings": 999}
    config = hf_config("x", "megatron", told(), native_shapes.megatron(), given).config
    assert given.items() <= config.items()


def test_the_callers_entries_are_checked_by_the_tensors_too() -> None:
    text = refusal(given={"hidden_size": 62, "vocab_size": 145})
    assert "config=: hidden_size = 62, but the tensors have 60" in text
    assert "config=: vocab_size = 145, but the tensors have 144 rows" in text


def test_the_callers_entry_settles_what_the_configuration_has_wrong() -> None:
    config = hf_config(
        "x", "megatron", told({"num_layers": 4}), native_shapes.megatron(), {"num_hidden_layers": 3}
    ).config
    assert config["num_hidden_layers"] == 3


@pytest.mark.parametrize(
    ("given", "rope"),
    [
        ({"rope_theta": 9.0}, {"rope_type": "llama3", "rope_theta": 9.0, "factor": 4.0}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 5000.0}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, {"rope_type": "default", "rope_theta": 3.0}),
    ],
)
def test_rotary_entries_of_any_age_replace_what_they_mean(given: dict[str, Any], rope: dict[str, Any]) -> None:
    raw = {"rope_scaling": True, "rope_scaling_factor": 4.0}
    config = hf_config("x", "megatron", told(raw), native_shapes.megatron(), given).config
    assert rope.items() <= config["rope_parameters"].items()
    assert ("factor" in rope) == ("factor" in config["rope_parameters"])
    assert not {"rope_theta", "rope_scaling"} & config.keys()


def test_entries_under_older_and_newer_names_are_the_same_entries() -> None:
    config = hf_config("x", "megatron", told(), native_shapes.megatron(), {"torch_dtype": "float16"}).config
    assert config["dtype"] == "float16" and "torch_dtype" not in config
    specs = native_shapes.megatron(experts=True, qk_norm=True)
    config = hf_config("x", "megatron", told(None, "qwen3-moe"), specs, {"num_local_experts": 5}).config
    assert config["num_experts"] == 5 and "num_local_experts" not in config
    with pytest.raises(SourceError, match="config=: num_experts = 6, but the tensors have 5"):
        hf_config("x", "megatron", told(None, "qwen3-moe"), specs, {"num_local_experts": 6})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rms_norm_epss": 1e-5}, "config= (--config): rms_norm_epss is no field of LlamaForCausalLM's config"),
        ({"hidden_act": "sillu"}, "nearest: silu"),
    ],
)
def test_given_entries_that_no_class_reads_or_takes_are_refused(given: dict[str, Any], message: str) -> None:
    assert message in refusal(given=given)


def test_a_directory_a_file_and_an_object_serve_as_config(tmp_path: Path) -> None:
    plain = hf_config("x", "megatron", told(), native_shapes.megatron()).config
    object_ = transformers.LlamaConfig(**{name: value for name, value in plain.items() if name != "model_type"})
    object_.save_pretrained(tmp_path)
    for given in (tmp_path, tmp_path / "config.json", str(tmp_path), object_):
        config = hf_config(
            "x", "megatron", declared_by_megatron("context/model.yaml", {"config": {}}), native_shapes.megatron(), given
        )
        assert {k: v for k, v in plain.items() if k != "dtype"}.items() <= config.config.items()
    with pytest.raises(SourceError, match="cannot be read as JSON"):
        hf_config("x", "megatron", told(), native_shapes.megatron(), tmp_path / "nothing.json")
