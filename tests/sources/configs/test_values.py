"""Values of a foreign configuration that are of the wrong kind or without bounds, and the one that is never assumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from bridge.core.errors import SourceError
from bridge.core.values import TensorSpec
from bridge.sources.configs.derive import Declared, hf_config
from bridge.sources.configs.facts import Fact
from bridge.sources.configs.meta import declared_by_meta
from bridge.sources.configs.writers import declared_by_megatron
from tests.models.megatron_configs import megatron_lm, nemo1, nemo2
from tests.models.megatron_families import FAMILIES
from tests.sources.configs.test_configs import native
from tests.sources.weights import native_shapes
from tests.work import counted

TRUTHS = (
    "gated_linear_unit", "layernorm_zero_centered_gamma", "share_embeddings_and_output_weights", "qk_layernorm",
    "rotary_interleaved", "apply_embedding_scaling", "multi_latent_attention", "moe_router_enable_expert_bias",
    "moe_router_pre_softmax", "add_bias_linear", "add_qkv_bias", "bias_activation_fusion", "rope_scaling",
)  # fmt: skip
COUNTS = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "vocab_size", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "seq_length", "moe_layer_freq",
    "moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size", "window_size",
    "max_position_embeddings", "q_lora_rank", "old_context_len",
)  # fmt: skip
NUMBERS = (
    "layernorm_epsilon", "rotary_base", "rotary_percent", "softmax_scale", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "moe_router_topk_scaling_factor", "rope_scaling_factor",
    "seq_len_interpolation_factor", "scale_factor", "low_freq_factor", "high_freq_factor", "beta_fast",
    "rotary_scaling_factor", "yarn_rotary_scaling_factor", "yarn_beta_slow",
)  # fmt: skip
NO_COUNTS = ("8", 0, -1, 1.5, float("nan"), True, [8, 8, 8], {"a": 1}, 10**12, 10**400)
NO_NUMBERS = ("1e-5", "", 0, -1, float("nan"), float("inf"), 1e-300, 10**400, True, [], {"a": 1})


def refusal(field: str, value: Any, base: str = "mixtral") -> str:
    raw = nemo2(FAMILIES[base])
    raw["config"][field] = value
    with pytest.raises(SourceError) as caught:
        hf_config("x", "megatron", declared_by_megatron("context/model.yaml", raw), native(FAMILIES[base]))
    return str(caught.value)


@pytest.mark.parametrize("value", ["false", "", 0, 1, 1.0, [], {"a": True}])
@pytest.mark.parametrize("field", TRUTHS)
def test_a_word_or_a_number_is_no_truth(field: str, value: Any) -> None:
    assert f"config.{field} = {value!r}: must be true or false" in refusal(field, value)


@pytest.mark.parametrize("value", NO_COUNTS)
@pytest.mark.parametrize("field", COUNTS)
def test_a_count_is_whole_above_zero_and_bounded(field: str, value: Any) -> None:
    text = refusal(field, value)
    assert f"context/model.yaml: config.{field} = " in text and ": must be a whole number" in text


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_is_finite_and_above_zero(field: str, value: Any) -> None:
    text = refusal(field, value)
    assert f"context/model.yaml: config.{field} = " in text and ": must be a number above zero" in text


@pytest.mark.parametrize(
    "field", ["normalization", "position_embedding_type", "rope_type", "moe_router_score_function"]
)
def test_a_word_is_a_word(field: str) -> None:
    assert f"config.{field} = 3: must be a word" in refusal(field, 3)


@pytest.mark.parametrize(("value", "shown"), [(10**400, "a whole number of 1329 bits"), ([10**5000], "a list of 1")])
def test_what_python_refuses_to_write_out_is_told_in_words(value: Any, shown: str) -> None:
    assert f"config.rotary_base = {shown}: must be" in refusal("rotary_base", value)


def test_layers_that_are_routed_are_as_many_as_there_are() -> None:
    text = refusal("moe_layer_freq", [1, 0])
    assert "config.moe_layer_freq lists 2 layers, but context/model.yaml: config.num_layers = 3" in text
    assert "or a list of 0 and 1, at most 10000" in refusal("moe_layer_freq", [1] * 10_001)


@pytest.mark.parametrize(
    "flag",
    ["swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion", "untie_embeddings_and_output_weights",
     "apply_layernorm_1p", "use_rope_scaling", "group_query_attention", "use_rotary_position_embeddings"],
)  # fmt: skip
def test_flags_of_megatron_lm_are_truths(flag: str) -> None:
    told = declared_by_megatron("common.pt: args", dict(vars(megatron_lm(FAMILIES["gpt"], 1, 1))) | {flag: "False"})
    assert any(f"{flag} = 'False': must be true or false" in problem for problem in told.problems)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be a whole number above zero, at most 10"),
        ({"vocab_size": float("nan")}, "vocab_size = nan: must be a whole number above zero"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': must be true or false"),
        ({"hidden_act": 3}, "hidden_act = 3: must be a word"),
        ({"rope_theta": "5"}, "rope_theta = '5': must be a number above zero"),
        ({"rope_theta": float("inf")}, "rope_theta = inf: must be a number above zero"),
        ({"partial_rotary_factor": []}, "partial_rotary_factor = []: must be a number above zero"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "must be a mapping with a rope_type and finite"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "must be a mapping with a rope_type and finite"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters = {'rope_theta': nan}: must be a mapping"),
        ({"rope_parameters": {"full_attention": {"factor": "x"}}}, "rope_parameters = {'factor': 'x'}: must be a"),
        ({"rope_parameters": None}, "rope_parameters = None: must be a mapping of finite numbers"),
    ],
)  # fmt: skip
def test_the_callers_entries_are_of_their_kind_too(given: dict[str, Any], why: str) -> None:
    told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES["llama"]))
    with pytest.raises(SourceError) as caught:
        hf_config("x", "megatron", told, native_shapes.megatron(), given)
    assert "config=: " in str(caught.value) and why in str(caught.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dim": 10**400}, "dim = a whole number of 1329 bits: must be a whole number"),
        ({"dim": "60"}, "dim = '60': must be a whole number"),
        ({"n_layers": 10**9}, "n_layers = 1000000000: must be a whole number above zero, at most 10000"),
        ({"multiple_of": 0}, "multiple_of = 0: must be a whole number"),
        ({"ffn_dim_multiplier": float("nan")}, "ffn_dim_multiplier = nan: must be a number above zero"),
        ({"use_scaled_rope": "false"}, "use_scaled_rope = 'false': must be true or false"),
        ({"use_biases": "false"}, "use_biases = 'false': must be true or false"),
        ({"rope_scaling_factor": "8"}, "rope_scaling_factor = '8': must be a number above zero"),
        ({"norm_eps": float("inf")}, "norm_eps = inf: must be a number above zero"),
        ({"n_heads": [6]}, "n_heads = [6]: must be a whole number"),
    ],
)
def test_params_of_meta_are_of_their_kind(change: dict[str, Any], why: str) -> None:
    params = {"dim": 60, "n_layers": 3, "n_heads": 6, "head_dim": 16, "multiple_of": 11, "norm_eps": 1e-5} | change
    with pytest.raises(SourceError) as caught:
        hf_config("x", "meta", declared_by_meta(params), native_shapes.titan(today=False))
    assert f"params.json: {why}" in str(caught.value)


def test_json_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(SourceError, match=r"config.json \(--config\): cannot be read as JSON: nested too deeply"):
        hf_config("x", "megatron", Declared(), native_shapes.megatron(), tmp_path)


def refused_at_once(says: str, *facts: Any) -> None:
    """The config is refused, in work that does not grow with the number that it claims."""

    def refused() -> None:
        with pytest.raises(SourceError, match=says):
            hf_config("x", "megatron", *facts)

    _, calls = counted(refused)
    assert calls < 1_000_000


@pytest.mark.parametrize("layer", ["1000000000", "9" * 5000])
def test_a_layer_of_a_wild_number_is_no_layer(layer: str) -> None:
    specs = native_shapes.megatron(stacked=False)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    wild = name.replace("1", layer, 1)
    told = declared_by_megatron("context/model.yaml", nemo2(FAMILIES["llama"]))
    specs |= {wild: TensorSpec(wild, specs[name].shape, "bfloat16")}
    refused_at_once("must be a whole number above zero, at most 10000", told, specs)


@pytest.mark.parametrize("count", [0, 10**9, 10**13])
def test_a_wild_number_of_stacked_layers_is_refused_before_they_are_counted(count: int) -> None:
    stacked = {
        name: TensorSpec(name, (count, *spec.shape[1:]) if ".layers." in name else spec.shape, spec.dtype)
        for name, spec in native_shapes.megatron().items()
    }
    says = f"= {count}: must be a whole number above zero, at most 10000"
    refused_at_once(says, Declared(), stacked, {"architectures": ["Gemma2ForCausalLM"]})


ASKED = r'config=\{.*"layernorm_zero_centered_gamma": ...(.|\n)*whether norms are stored less one'
WRITERS_DIFFER = ("GemmaForCausalLM", "NemotronForCausalLM", "Starcoder2ForCausalLM", "GPT2LMHeadModel")
NEVER = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM")


def asked(architecture: str, told: Declared, **given: Any) -> str:
    specs = {"somewhere.weight": TensorSpec("somewhere.weight", (3, 4), "bfloat16")}
    with pytest.raises(SourceError) as caught:
        hf_config("x", "megatron", told, specs, {"architectures": [architecture]} | given)
    return str(caught.value)


@pytest.mark.parametrize("architecture", [*WRITERS_DIFFER, *NEVER])
def test_norms_less_one_are_asked_for_where_writers_differ(architecture: str) -> None:
    question = '"layernorm_zero_centered_gamma": ...'
    assert (question in asked(architecture, Declared())) is (architecture in WRITERS_DIFFER)
    assert question not in asked(architecture, Declared({"centered": Fact(True, "the file")}))
    assert question not in asked(architecture, Declared(), layernorm_zero_centered_gamma=False)
    assert "layernorm_zero_centered_gamma = 'no': must be true or false" in asked(
        architecture, Declared(), layernorm_zero_centered_gamma="no"
    )


def test_the_answer_is_no_field_of_config_json() -> None:
    raw = nemo2(FAMILIES["nemotron"])
    del raw["config"]["layernorm_zero_centered_gamma"]
    told, specs = declared_by_megatron("context/model.yaml", raw), native(FAMILIES["nemotron"])
    with pytest.raises(SourceError, match=ASKED):
        hf_config("x", "megatron", told, specs)
    for answer in (True, False):
        derived = hf_config("x", "megatron", told, specs, {"layernorm_zero_centered_gamma": answer})
        assert derived.terms["centered"] == Fact(answer, "config=: layernorm_zero_centered_gamma")
        assert "layernorm_zero_centered_gamma" not in derived.config


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_transformers_turns_the_part_of_a_head_that_megatron_turns(share: float) -> None:
    raw = nemo2(FAMILIES["nemotron"])
    raw["config"]["rotary_percent"] = share
    told, specs = declared_by_megatron("context/model.yaml", raw), native(FAMILIES["nemotron"])
    config = hf_config("x", "megatron", told, specs, {"layernorm_zero_centered_gamma": True}).config
    theirs = transformers.NemotronConfig(**config)
    assert theirs.rope_parameters["partial_rotary_factor"] == share


@pytest.mark.parametrize(
    ("change", "centered"),
    [
        ({}, False),
        ({"normalization": "layernorm1p"}, True),
        ({"layernorm_zero_centered_gamma": True}, True),
        ({"mcore_customization_config": {"layernorm_zero_centered_gamma": True}}, True),
        ({"normalization": "layernorm1p", "mcore_customization_config": {"normalization": "RMSNorm"}}, True),
    ],
)
def test_nemo_1_always_says_it(change: dict[str, Any], centered: bool) -> None:
    """As its `build_transformer_config` reads it, whose last word is the customization."""
    told = declared_by_megatron("model_config.yaml", nemo1(FAMILIES["gpt"], 1, 1) | change)
    assert told.terms["centered"].value is centered
    changed = change.get("mcore_customization_config", {})
    assert told.terms["layer_norm"].value is ("normalization" not in changed)


def test_megatron_lm_says_it_by_its_parsers_default() -> None:
    raw = dict(vars(megatron_lm(FAMILIES["gpt"], 1, 1)))
    del raw["apply_layernorm_1p"]
    said = declared_by_megatron("common.pt: args", raw).terms["centered"]
    assert (said.value, said.where) == (False, "common.pt: args has no apply_layernorm_1p: the default")


def test_embeddings_of_nemo_1_are_scaled_only_where_it_says_so() -> None:
    raw = nemo1(FAMILIES["gemma"], 1, 1)
    del raw["apply_embedding_scaling"]
    told, specs = declared_by_megatron("model_config.yaml", raw), native(FAMILIES["gemma"])
    given = {"vocab_size": 131, "architectures": ["GemmaForCausalLM"]}
    with pytest.raises(SourceError, match=r"has embed_scaled = True, but .* has no apply_embedding_scaling: NeMo"):
        hf_config("x", "megatron", told, specs, given)
