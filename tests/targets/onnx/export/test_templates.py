"""Graphs of templates against exports of the same configs, and configs that must not take one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bridge.core.mappings import mappings
from bridge.targets.onnx.export.float_graph import Graph, plain_bytes
from bridge.targets.onnx.export.request import GraphRequest
from bridge.targets.onnx.export.templates.find import ENDING, FOLDER, ROUNDED, find_template, member_name, read_family
from bridge.targets.onnx.export.templates.sizes import read_sizes
from bridge.targets.onnx.families.templates import FAMILIES, FORMS, family_of
from tests.models.graphs import export_once

# Sizes that are equal are one constant in an export: 2 keys and 2 queries a key, 8 heads and half of a head's width.
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 101,
    "num_hidden_layers": 3, "max_position_embeddings": 512,
}  # fmt: skip
ALIKE = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16, "num_attention_heads": 8}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {**SMALL, "head_dim": 32}
WIDE = {
    **GEMMA,
    "hidden_size": 60,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
}
# Entries, dtype and opset: every variant of every family once, every form twice.
CASES: list[tuple[str, dict[str, Any], str, int]] = [
    ("llama", SMALL, "float32", 21),
    ("llama", {**SMALL, **ALIKE, "num_key_value_heads": 4, "rope_theta": 5e5, "rope_scaling": LLAMA3}, "float16", 21),
    ("llama", {**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True}, "bfloat16", 21),
    ("llama", {**SMALL, "num_key_value_heads": None, "rope_scaling": {"type": "linear", "factor": 4}}, "float32", 23),
    ("qwen2", {**SMALL, "num_hidden_layers": 2, "rope_theta": 1e6, "use_sliding_window": False}, "float16", 21),
    ("qwen2", {**SMALL, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 3}, "float32", 21),
    ("llama", {**SMALL, "partial_rotary_factor": 0.5, "logit_scale": 0.5}, "float32", 21),  # which its class ignores
    ("qwen2", {**SMALL, "head_dim": 12}, "float32", 21),
    ("qwen3", {**SMALL, **ALIKE, "tie_word_embeddings": True}, "bfloat16", 21),
    ("qwen3", {**SMALL, "num_key_value_heads": 4, "head_dim": 6}, "float32", 21),
    ("mistral", {**SMALL, "sliding_window": None, "head_dim": 12}, "float32", 21),
    ("mistral", {**SMALL, "sliding_window": 16}, "float16", 21),
    ("mistral", {**SMALL, "num_key_value_heads": 4, "sliding_window": None}, "float16", 21),
    ("mistral", {**SMALL, "num_key_value_heads": 4, "sliding_window": 3}, "bfloat16", 21),
    ("gemma", {**GEMMA, "num_key_value_heads": 1, "hidden_act": "gelu", "hidden_activation": None}, "float32", 21),
    ("gemma", {**GEMMA, "num_key_value_heads": 4, "tie_word_embeddings": False}, "bfloat16", 21),
    ("gemma2", {**WIDE, "num_hidden_layers": 7, "hidden_act": "gelu_pytorch_tanh"}, "float32", 21),
    ("gemma2", {**WIDE, "num_hidden_layers": 5}, "bfloat16", 21),
    ("gemma3_text", {**WIDE, "num_hidden_layers": 14, "sliding_window_pattern": 6}, "float32", 21),
    (
        "gemma3_text",
        {**WIDE, "num_hidden_layers": 12, "num_key_value_heads": 1, "rope_theta": 1e5, "rope_local_base_freq": 1e3,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "float16",
        21,
    ),
    (
        "gemma3_text",
        {**WIDE, "num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
         "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e3, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e5, "rope_type": "linear", "factor": 4.0}}},
        "float32",
        23,
    ),
]  # fmt: skip


def config_of(family: str, entries: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": family, "architectures": [FAMILIES[family].architecture], **entries}


def request_of(config: dict[str, Any], dtype: str = "float32", opset: int = 21, **changes: Any) -> GraphRequest:
    """A request for a checkpoint that has all tensors of a model of up to 20 layers."""
    matrices = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = [f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
    parts = [*matrices, *norms, "self_attn.q_norm", "self_attn.k_norm"]
    names = [f"model.layers.{i}.{part}.weight" for i in range(20) for part in parts]
    names += [f"model.layers.{i}.self_attn.{name}_proj.bias" for i in range(20) for name in "qkv"]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    given = {"task": "causal-lm", "cache": True, "stamp": True, "tensors": tuple(names), "tied": {}} | changes
    return GraphRequest(config, dtype=dtype, opset=opset, **given)


def filled(request: GraphRequest) -> Graph:
    template = find_template(request)
    assert template is not None
    graph, names = template.graph(request)
    assert names == {name: name for name in graph.weights}
    return graph


def frequencies(graph: Graph) -> dict[str, np.ndarray]:
    values = graph.model.graph.initializers
    return {name: values[name].const_value.numpy() for name in values if name.endswith("inv_freq")}


FIRST = [next(case for case in CASES if case[0] == family) for family in FAMILIES]  # an export takes seconds
MORE = [pytest.param(*case, marks=pytest.mark.product) for case in CASES if case not in FIRST]


@pytest.mark.parametrize(("family", "entries", "dtype", "opset"), [*FIRST, *MORE], ids=lambda value: str(value)[:12])
@pytest.mark.slow
def test_a_template_gives_the_bytes_of_an_export(family: str, entries: dict[str, Any], dtype: str, opset: int) -> None:
    config = config_of(family, entries)
    request = request_of(config, dtype, opset)
    mine, theirs = filled(request), export_once(config, task="causal-lm", dtype=dtype, opset=opset)
    settled, expected = frequencies(mine), frequencies(theirs)
    assert settled.keys() == expected.keys() != set()
    for name in expected:
        np.testing.assert_allclose(settled[name], expected[name], rtol=ROUNDED)
    template = find_template(request)
    assert template
    template.settle(theirs)
    assert plain_bytes(mine, {}) == plain_bytes(theirs, {})


# What a template does not follow: another graph, or a mistake that whoever builds the model tells.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True}),
    "biases of the MLP": ("llama", {"mlp_bias": True}),
    "another activation": ("llama", {"hidden_act": "gelu"}),
    "frequencies of another kind": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "an entry of frequencies": ("llama", {"rope_parameters": {"rope_theta": 1e4, "attention_factor": 2.0}}),
    "a decoder that sees later tokens": ("llama", {"is_causal": False}),
    "one layer": ("llama", {"num_hidden_layers": 1}),
    "one head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "one key for all": ("llama", {"num_key_value_heads": 1}),
    "an odd head": ("llama", {"head_dim": 15}),
    "no whole number": ("llama", {"hidden_size": "wide"}),
    "keys that divide no heads": ("llama", {"num_key_value_heads": 3}),
    "a number in quotes": ("llama", {"vocab_size": "101"}),
    "negative": ("llama", {"intermediate_size": -96}),
    "a window in some layers": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "layers of two kinds": ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "another cap": ("gemma2", {"attn_logit_softcapping": 30.0}),
    "attention to both sides": ("gemma3_text", {"use_bidirectional_attention": True}),
    "layers in another order": ("gemma3_text", {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}),
    "two forms of frequencies": (
        "llama", {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ),
    "frequencies of kinds that it has not": ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}),
    "scaling without a factor": ("llama", {"rope_scaling": {"type": "linear"}}),
    "a factor in quotes": ("llama", {"rope_scaling": {"type": "linear", "factor": "4"}}),
    "factors in the wrong order": ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}),
    "a length that is no whole number": (
        "llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64.9}},
    ),
    "theta of 0": ("llama", {"rope_theta": 0}),
    "no theta": ("llama", {"rope_theta": None}),
    "no head width": ("qwen3", {"head_dim": None}),
    "a word for false": ("llama", {"tie_word_embeddings": "false"}),
    "a whole number for epsilon": ("llama", {"rms_norm_eps": 1}),
    "epsilon of 0, which an export leaves out": ("llama", {"rms_norm_eps": 0.0}),
    "as many last tokens as layers": ("llama", {"eos_token_id": [1, 2, 3]}),
    "a padding token beyond the vocabulary": ("llama", {"pad_token_id": 101}),
    "several padding tokens": ("llama", {"pad_token_id": [1, 2]}),
    "a token in quotes": ("llama", {"eos_token_id": "2"}),
    "a cap of 0": ("gemma3_text", {"final_logit_softcapping": 0.0}),
    "a scale of 1, which an export leaves out": ("gemma2", {"query_pre_attn_scalar": 1}),
    "one theta for both kinds of layers": ("gemma3_text", {"rope_theta": 1e4, "rope_local_base_freq": 1e4}),
    "frequencies of no kind": ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "the old word for a kind of scaling": ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}),
    "scaling by kind": (
        "gemma3_text", {"rope_scaling": {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {}}},
    ),
    "scaled windows": (
        "gemma3_text",
        {"num_hidden_layers": 12, "rope_parameters": {
            "full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}},
    ),
    "another family": ("phi3", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_template_does_not_follow_is_exported(name: str) -> None:
    family, entries = REFUSED[name]
    given = {"llama": SMALL, "qwen2": SMALL, "qwen3": SMALL, "phi3": SMALL}.get(
        family, {**WIDE, "num_hidden_layers": 12}
    )
    architecture = FAMILIES[family].architecture if family in FAMILIES else "Phi3ForCausalLM"
    config = {"model_type": family, "architectures": [architecture], **given, **entries}
    assert find_template(request_of(config)) is None
    base = {key: value for key, value in config.items() if key not in entries or key in given}
    if family in FAMILIES:  # what is refused is the entry
        assert find_template(request_of(base | {key: given[key] for key in entries if key in given})) is not None


OTHER_REQUESTS = {
    "cache": False, "stamp": False, "part": "decoder", "pooling": "mean", "task": "feature-extraction", "stacked": True,
    "dtype": "float64", "opset": 22,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_REQUESTS)
def test_other_graphs_of_a_family_are_exported(name: str) -> None:
    config = config_of("llama", SMALL)
    assert find_template(request_of(config)) is not None
    assert find_template(request_of(config, **{name: OTHER_REQUESTS[name]})) is None


def test_another_class_of_the_family_is_exported() -> None:
    config = config_of("llama", SMALL) | {"architectures": ["LlamaForSequenceClassification"]}
    assert find_template(request_of(config)) is None


FROM_OTHERS = {
    "_attn_implementation_autoset": True, "do_sample": True, "gradient_checkpointing": False, "logit_scale": 0.5,
    "mlp_bias": False, "partial_rotary_factor": 0.5, "rope_interleaved": False, "sliding_window": None,
    "temperature": 0.6, "unsloth_fixed": True, "use_mrope": False,
}  # fmt: skip


def test_entries_that_programs_leave_in_configs_change_nothing() -> None:
    assert find_template(request_of(config_of("llama", SMALL | FROM_OTHERS))) is not None


KINDS = {"sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}


@pytest.mark.parametrize("full", [{"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}])
def test_frequencies_of_each_kind_of_layer_are_followed(full: dict[str, Any]) -> None:
    entries = {**WIDE, "num_hidden_layers": 12, "rope_parameters": KINDS | {"full_attention": full}}
    template = find_template(request_of(config_of("gemma3_text", entries)))
    assert template is not None
    assert (template.sizes.rope.theta, template.sizes.rope.local) == (1e6, 1e4)
    assert template.sizes.rope.kind == full.get("rope_type", "default")


def test_the_sizes_of_a_sentinel_differ() -> None:
    for family in map(family_of, FAMILIES):
        for variant, config in family.sentinels.items():
            sizes = {number for number in read_sizes(config, family).integers if number > 1}
            kinds, _, window = variant.partition("-")
            assert len(sizes) == {"gqa": 10, "mha": 7, "mqa": 7}[kinds] + bool(
                window
            )  # by their meaning, others are one
            assert min(sizes) > 5  # as graphs count


def test_a_checkpoint_without_a_weight_is_exported() -> None:
    request = request_of(config_of("llama", SMALL), tensors=("lm_head.weight",))
    template = find_template(request)
    assert template is not None and template.graph(request)[1] == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_archive_has_the_defaults_of_transformers_and_every_graph(family: str) -> None:
    expected = family_of(family)
    held, members = read_family(mappings() / FOLDER / f"{family}{ENDING}")
    assert held == replace(expected, made_with=held.made_with)  # newer versions may give the same graphs
    assert held.made_with.keys() == expected.made_with.keys() and all(held.made_with.values())
    assert members == [member_name(variant, *form) for variant in expected.sentinels for form in FORMS]
