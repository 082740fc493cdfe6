"""What a config says, held to transformers: fields of its classes, their defaults, what reads them, rotary entries."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import transformers
from transformers.activations import ACT2CLS, ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding

from bridge.core.mappings import own_files, read_table
from bridge.sources.configs.rope import rope_of
from bridge.tables.architectures import meaning
from bridge.tables.architectures.arch import ArchTable, load_arch
from bridge.tables.architectures.meaning import (
    PARTIAL,
    SPELLED,
    as_read,
    impossible,
    listed,
    not_followed,
    not_known,
    not_read,
    shared,
)
from bridge.tables.architectures.pruning import parse_pruning

TABLES = {path.stem: path for path in own_files("arch")}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
}
ENTRIES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}}),
    ("LlamaForCausalLM", {"rope_theta": 5e5, "rope_scaling": None}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, PARTIAL: 0.5}}),
    ("NemotronForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, PARTIAL: 0.25}}),
    ("NemotronForCausalLM", {PARTIAL: 0.25, "rope_theta": 5e5}),
    ("Gemma3ForCausalLM", {"rope_parameters": GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("Gemma3ForCausalLM", {"rope_theta": 5e5, "rope_local_base_freq": 2e4}),
    ("Gemma3ForCausalLM", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}}),
    ("Gemma3ForCausalLM", {"rope_parameters": GEMMA | {"full_attention": GEMMA["full_attention"] | {PARTIAL: 0.5}}}),
]


def table(architecture: str) -> ArchTable:
    found = load_arch(architecture)
    assert found
    return found


def config_class(architecture: str) -> Any:
    return getattr(transformers, architecture).config_class


@pytest.mark.parametrize("name", list(TABLES))
def test_every_field_of_a_config_class_is_known_with_its_default(name: str) -> None:
    architecture = read_table(TABLES[name]).words("architectures")[0]
    rows, cls = table(architecture), config_class(architecture)
    fields = {field.name for field in dataclasses.fields(cls)}
    known = {*rows.config, *rows.computes, *listed("without_effect"), *listed("elsewhere")}
    assert fields - known == set()
    default = cls().to_dict()
    numbers = {field: value for field, value in default.items() if not isinstance(value, list | dict)}
    assert {f: rows.computes[f] for f in rows.computes.keys() & numbers} == {
        f: numbers[f] for f in rows.computes.keys() & numbers
    }


@pytest.mark.parametrize("name", list(TABLES))
def test_a_default_config_asks_for_nothing(name: str) -> None:
    listed = read_table(TABLES[name]).words("architectures")
    for architecture in (name for name in listed if hasattr(transformers, name)):  # MiMo's class is no part of it
        rows = table(architecture)
        config = {f: v for f, v in config_class(architecture)().to_dict().items() if not isinstance(v, list)}
        assert list(not_followed(rows, architecture, as_read(config, rows), ())) == []


@pytest.mark.parametrize(("architecture", "entries"), ENTRIES)
def test_rotary_entries_are_merged_as_transformers_merges_them(architecture: str, entries: dict[str, Any]) -> None:
    theirs = config_class(architecture)(**entries).rope_parameters
    theirs = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": theirs} if "rope_theta" in theirs else theirs
    partial = table(architecture).computes.get(PARTIAL)
    rope = rope_of(as_read(entries, table(architecture)), share=float(str(partial or 1)))
    full = theirs["full_attention"]
    assert (rope.theta, rope.kind, rope.local) == (
        full["rope_theta"], full["rope_type"], theirs["sliding_attention"]["rope_theta"],
    )  # fmt: skip
    assert rope.scaling.get("factor") == full.get("factor")
    assert rope.share == (full.get(PARTIAL, 1.0) if partial else 1.0)


def test_a_key_that_no_code_reads_passes_and_one_that_is_read_does_not() -> None:
    rows = table("LlamaForCausalLM")
    said = not_followed(
        rows, "LlamaForCausalLM", {"unsloth_version": "1", "training": {}, "attention_dropout": 0.5}, ()
    )
    assert list(said) == []
    (text,) = not_followed(rows, "LlamaForCausalLM", {"is_causal": False}, ())
    assert text.startswith(
        "is_causal is false (whether a token sees only those before it); the output cannot say so and means true; "
    )
    unlisted = dataclasses.replace(rows, config={}, computes={})
    (text,) = not_followed(unlisted, "LlamaForCausalLM", {"mlp_bias": True}, ())
    assert (
        "which transformers' modeling_llama.py reads; [computes] of mappings/arch/llama.toml does not list it" in text
    )
    assert list(not_followed(rows, "LlamaForCausalLM", {"is_causal": False}, ("is_causal",))) == []


def test_without_transformers_entries_that_no_table_knows_are_named_in_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, config = table("LlamaForCausalLM"), {"rms_norm_eps": 1e-5, "use_cache": True, "summary_last_dropout": 1}
    assert not not_known(rows, "LlamaForCausalLM", config)
    monkeypatch.setattr(meaning, "_code", lambda architecture: ())
    text = not_known(rows, "LlamaForCausalLM", config)
    assert "is not installed (transformers)" in text
    assert text.endswith("reads summary_last_dropout of config.json; taken to change nothing")
    assert not not_known(rows, "LlamaForCausalLM", {"rms_norm_eps": 1e-5})


def test_what_other_models_of_the_same_file_read_is_not_read_by_this_one() -> None:
    """GPT-2's summary is of the model with two heads, the width of Qwen 3.5's tower of images of another part."""
    assert not [*not_followed(table("GPT2LMHeadModel"), "GPT2LMHeadModel", {"summary_last_dropout": 1}, ())]
    of_experts = "Qwen3_5MoeForCausalLM"
    assert not [*not_followed(table(of_experts), of_experts, {"intermediate_size": 80}, ())]


# What code of text models reads beside the entries of tables: other names of them, names of parts, methods.
NAMED_ELSEWHERE = {
    "cu_seq_lens_q", "embedding_size", "get", "get_text_config", "hidden_size", "intermediate_size",
    "kv_sharing_modes", "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers",
    "num_local_experts", "position_ids", "return_shared_kv_states", "shared_kv_states", "text_config",
    # of images and sound, in the file of the configs: Gemma 3 and 4, Llama 4, MiniMax M3
    "attention_chunk_size", "attention_context_left", "attention_context_right", "attention_invalid_logits_value",
    "attention_logit_cap", "pooling_kernel_size", "position_embedding_size", "standardize", "use_clipped_linears",
    "image_size", "mm_tokens_per_image", "num_channels", "patch_size", "pixel_shuffle_ratio", "projector_dropout",
    "projector_input_dim", "projector_output_dim", "spatial_merge_size", "vision_config",
}  # fmt: skip


@pytest.mark.parametrize("name", list(TABLES))
def test_no_code_of_transformers_reads_an_entry_that_its_table_does_not_know(name: str) -> None:
    """So an unknown entry changes nothing, also where transformers is not installed; a newer one turns this red."""
    architecture = read_table(TABLES[name]).data["architectures"][0]
    rows = table(architecture)
    known = {*rows.computes, *rows.config, *listed("without_effect"), *listed("elsewhere")}
    reads = re.compile(r"""config\.([a-z]\w*)\b|config, ["']([a-z]\w*)["']|kwargs\.(?:get|pop)\(["'](\w+)["']""")
    for _, text in meaning._code(architecture):
        assert {"".join(names) for names in reads.findall(text)} - known <= NAMED_ELSEWHERE


SPEAK_OF_LAYERS = {
    "layer_types", "mlp_layer_types", "max_window_layers", "no_rope_layers", "moe_layers",
    "interleave_moe_layer_step", "decoder_sparse_step", "first_k_dense_replace", "mlp_only_layers", "attn_type_list",
    "scale_attn_by_inverse_layer_idx", "sliding_window_pattern",
}  # fmt: skip


@pytest.mark.parametrize("name", list(TABLES))
def test_every_field_that_speaks_of_layers_has_a_rule_for_models_with_fewer(name: str) -> None:
    rows = table(read_table(TABLES[name]).words("architectures")[0])
    own = {field for field in {*rows.computes, *rows.config} if field in SPEAK_OF_LAYERS}
    assert own - parse_pruning(rows).names == set()


def test_a_field_of_other_classes_is_not_read() -> None:
    given = {"sliding_window": 8, "hidden_act": "silu"}
    assert as_read(given, table("LlamaForCausalLM")) == {"hidden_act": "silu"}
    assert as_read(given, table("MistralForCausalLM")) == given


@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "Starcoder2ForCausalLM", "LlamaForCausalLM"])
def test_an_activation_is_what_its_class_takes_it_for(architecture: str) -> None:
    theirs = config_class(architecture)(hidden_act="gelu").hidden_act
    assert as_read({"hidden_act": "gelu"}, table(architecture))["hidden_act"] == theirs


def test_words_for_activations_and_rotary_types_are_those_of_transformers() -> None:
    words = shared().section("words")
    assert set(words["activations"]) == set(ACT2CLS)
    assert set(words["rope_types"]) == {*ROPE_INIT_FUNCTIONS, "default", "mrope", "su"}


@pytest.mark.parametrize("name", list(SPELLED))
def test_two_names_of_an_activation_are_one_function(name: str) -> None:
    values = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    assert (ACT2FN[name](values) - ACT2FN[SPELLED[name]](values)).abs().max() < 1e-11


def test_a_linear_scaling_by_one_is_none() -> None:
    entries = {"rope_scaling": {"type": "linear", "factor": 1.0}, "rope_theta": 5e5}
    ours = rope_of(as_read(entries, table("LlamaForCausalLM")))
    assert (ours.kind, ours.theta) == ("default", 5e5)
    theirs = config_class("LlamaForCausalLM")(**entries)
    scaled, _ = ROPE_INIT_FUNCTIONS["linear"](theirs, "cpu")
    plain = LlamaRotaryEmbedding(config_class("LlamaForCausalLM")(rope_theta=5e5)).inv_freq
    assert torch.equal(scaled, plain)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"rms_norm_eps": "banana"}, "rms_norm_eps is 'banana'; it should be a number, as 1e-06 is"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; it should be true or false, as false is"),
        ({"rms_norm_eps": [1e-5]}, "rms_norm_eps is .*; it should be a number, as 1e-06 is"),
        ({"hidden_act": 3}, "hidden_act is 3; it should be a word, as 'silu' is"),
        ({"hidden_act": "gulu"}, "nearest: gelu"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "rope_scaling has the factor '2'; it should be a number",
        ),
        ({"rope_scaling": {"type": "liner"}}, "rope_scaling has the rope_type 'liner'; known: .*; nearest: linear"),
    ],
)
def test_a_value_that_its_class_does_not_take_is_told(entries: dict[str, Any], says: str) -> None:
    (text,) = impossible(table("LlamaForCausalLM"), entries, "LlamaForCausalLM")
    assert re.search(says, text)
    with pytest.raises(Exception, match=r"(?i)validation|hidden_act|gulu|liner|'str'"):
        LlamaModel(config_class("LlamaForCausalLM")(**entries, num_hidden_layers=1))


def test_numbers_of_every_kind_of_rotary_positions_are_looked_at() -> None:
    entry = {"main": {"rope_type": "default", "rope_theta": "ten"}, "compress": {"rope_type": "yarn", "factor": "2"}}
    told = [*impossible(table("DeepseekV4ForCausalLM"), {"rope_parameters": entry}, "DeepseekV4ForCausalLM")]
    assert [text.partition(";")[0] for text in told] == [
        "rope_parameters has the rope_theta 'ten'", "rope_parameters has the factor '2'",
    ]  # fmt: skip


def test_an_epsilon_below_zero_is_told() -> None:
    (text,) = impossible(table("LlamaForCausalLM"), {"rms_norm_eps": -1}, "LlamaForCausalLM")
    assert text == "rms_norm_eps is -1; it should be 0 or above"


def test_a_given_entry_that_no_code_reads_is_told_with_a_name_that_is_near() -> None:
    of, stated = "LlamaForCausalLM", {"written_by_us": 1}
    read = {
        "rope_theta": 1,
        "eos_token_id": 2,
        "name_or_path": "x",
        "num_labels": 3,
        "written_by_us": 2,
        "use_cache": 0,
    }
    assert not [*not_read(read, stated, of)]
    (text,) = not_read({"hiden_act": "silu"}, stated, of)
    assert text == "hiden_act is no field of LlamaForCausalLM's config, and no code reads it; nearest: hidden_act"
    (text,) = not_read({"attention_scale": 2}, stated, of)
    assert text.endswith("no code reads it")
    assert not [*not_read({"hiden_act": "silu"}, {}, "OfRemoteCode")]


def test_every_field_that_computes_has_a_meaning_and_no_other() -> None:
    first = [read_table(path).words("architectures")[0] for path in TABLES.values()]
    assert set(shared().section("meaning")) == {
        field for architecture in first for field in table(architecture).computes
    }
