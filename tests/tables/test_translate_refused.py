"""What a dialect refuses to spell, and in which words: all problems of a checkpoint at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from bridge.core.errors import PlanError, SourceError
from bridge.core.text import natural
from bridge.core.values import TensorSpec
from bridge.tables.dialects.dialect import load_dialect
from bridge.tables.dialects.translate import row_pattern, translate, translator
from tests.tables.checkpoints import LLAMA
from tests.tables.foreign import CONFIGS, megatron, meta
from tests.tables.test_translate import hugging_face, specs_of, stacked


def _refused(case: str, native: Iterable[TensorSpec], dialect: str = "megatron") -> str:
    with pytest.raises(SourceError) as caught:
        translate(load_dialect(dialect), CONFIGS[case], {"vocab_multiple": 16, "centered": 0}, native, "here")
    return str(caught.value)


def _native(case: str = "llama") -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs_of(megatron(case, hugging_face(CONFIGS[case])))}


def _add(specs: dict[str, TensorSpec], name: str, *shape: int) -> None:
    specs[name] = TensorSpec(name, shape, "float32")


def test_unknown_tensors_are_told_folded() -> None:
    specs = _native()
    for layer in range(3):
        _add(specs, f"decoder.layers.{layer}.self_attention.adapter.weight", 4, 4)
    assert _refused("llama", specs.values()) == (
        "here is not a LlamaForCausalLM of this config: 1 problem\n"
        "  decoder.layers.{0..2}.self_attention.adapter.weight: mappings/dialects/megatron.toml has no row for it; add "
        "one, or a line under [ignore] that says why it is not a weight of the model"
    )


def test_missing_tensors_are_told_with_what_they_would_make() -> None:
    specs = _native()
    for layer in range(3):
        del specs[f"decoder.layers.{layer}.mlp.linear_fc1.weight"]
    del specs["decoder.final_layernorm.weight"]
    assert _refused("llama", specs.values()) == (
        "here is not a LlamaForCausalLM of this config: 2 problems\n"
        "  decoder.layers.{0..2}.mlp.linear_fc1.weight: is missing; model.layers.{0..2}.mlp.gate_proj.weight, "
        "model.layers.{0..2}.mlp.up_proj.weight needs it\n"
        "  decoder.final_layernorm.weight: is missing; model.norm.weight needs it"
    )


def test_all_shapes_that_contradict_the_config_are_told_at_once() -> None:
    specs = _native()
    for layer in range(3):
        _add(specs, f"decoder.layers.{layer}.self_attention.linear_qkv.weight", 90, 48)
    _add(specs, "decoder.layers.1.mlp.linear_fc2.weight", 48, 88)
    _add(specs, "embedding.word_embeddings.weight", 80, 48)
    assert _refused("llama", specs.values()) == (
        "here is not a LlamaForCausalLM of this config: 3 problems\n"
        "  embedding.word_embeddings.weight: has shape (80, 48), the config gives (160, 48): "
        "column(pad(embed.tokens.weight, multiple=vocab_multiple)) of embed.tokens.weight (97, 48)\n"
        "  decoder.layers.{0..2}.self_attention.linear_qkv.weight: has shape (90, 48), the config gives (100, 48): "
        "column(interleave(attn.q.weight, attn.k.weight, attn.v.weight, groups=kv_heads)) of attn.q.weight (60, 48), "
        "attn.k.weight (20, 48), attn.v.weight (20, 48)\n"
        "  decoder.layers.1.mlp.linear_fc2.weight: has shape (48, 88), the config gives (48, 80): "
        "row(mlp.down.weight) of mlp.down.weight (48, 80)"
    )


def test_stacked_layers_of_another_number_are_told_once() -> None:
    specs = {spec.name: spec for spec in specs_of(stacked(megatron("llama", hugging_face(LLAMA))))}
    _add(specs, "decoder.layers.mlp.linear_fc2.weight", 4, 48, 80)
    assert _refused("llama", specs.values()) == (
        "here is not a LlamaForCausalLM of this config: 1 problem\n"
        "  decoder.layers.mlp.linear_fc2.weight: has shape (4, 48, 80), the first axis of which should count 3 layers"
    )


def test_what_is_held_twice_is_told() -> None:
    specs = _native()
    _add(specs, "decoder.layers.1.input_layernorm.weight", 48)
    assert _refused("llama", specs.values()) == (
        "here is not a LlamaForCausalLM of this config: 1 problem\n"
        "  decoder.layers.1.input_layernorm.weight: contains attn.norm.weight, which is also in "
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    )
    specs = _native()
    _add(specs, "module.decoder.final_layernorm.weight", 48)
    assert _refused("llama", specs.values()) == (
        "here is not a LlamaForCausalLM of this config: 1 problem\n"
        "  module.decoder.final_layernorm.weight: is decoder.final_layernorm.weight, which is also in "
        "decoder.final_layernorm.weight"
    )


def test_what_the_config_denies_is_told() -> None:
    specs = _native("llama-biases")
    message = _refused("llama", specs.values())
    layer = "decoder.layers.{0..2}."
    names = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    assert message.splitlines()[1:] == [
        f"  {', '.join(f'{layer}{name}.bias' for name in names)}: a LlamaForCausalLM of this config does not have it"
    ]
    specs = _native()
    _add(specs, "decoder.layers.3.mlp.linear_fc2.weight", 48, 80)
    assert "decoder.layers.3.mlp.linear_fc2.weight: a LlamaForCausalLM of this config does not" in _refused(
        "llama", specs.values()
    )
    specs = _native("mixtral")
    _add(specs, "decoder.layers.1.mlp.experts.linear_fc2.weight7", 48, 80)
    assert "decoder.layers.1.mlp.experts.linear_fc2.weight7: a MixtralForCausalLM of this config" in _refused(
        "mixtral", specs.values()
    )


def test_a_stack_that_lacks_experts_is_told() -> None:
    specs = _native("gpt_oss")
    fc2 = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
    del specs[fc2], specs["decoder.layers.0.self_attention.core_attention.softmax_offset"]
    for e in (0, 1, 3, 4):
        _add(specs, f"decoder.layers.1.mlp.experts.linear_fc2.weight{e}", 48, 28)
    assert _refused("gpt_oss", specs.values()).splitlines()[1:] == [
        "  decoder.layers.0.self_attention.core_attention.softmax_offset: is missing; model.layers.0.self_attn.sinks "
        "needs it",
        f"  {fc2}: is missing; model.layers.1.mlp.experts.down_proj needs it",
    ]


def test_parts_of_several_dtypes_are_told() -> None:
    config = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
    dialect = replace(load_dialect("meta"), architectures={"Phi3ForCausalLM": "llama"})
    native = {spec.name: spec for spec in specs_of(meta(hugging_face(LLAMA)))}
    assert "model.layers.2.self_attn.qkv_proj.weight" in translate(dialect, config, {}, native.values(), "here")[0]
    for layer in range(2):
        name = f"layers.{layer}.attention.wk.weight"
        native[name] = TensorSpec(name, native[name].shape, "bfloat16")
    with pytest.raises(SourceError) as caught:
        translate(dialect, config, {}, native.values(), "here")
    assert str(caught.value).splitlines()[1:] == [
        "  model.layers.{0..1}.self_attn.qkv_proj.weight: its parts are bfloat16 and float32; save them in one dtype"
    ]


def test_an_architecture_without_a_layout_is_named() -> None:
    with pytest.raises(PlanError, match=r"meta.toml has no layout for Qwen3ForCausalLM; known: LlamaForCausalLM"):
        translator(load_dialect("meta"), CONFIGS["qwen3"], {})


def test_a_number_of_thousands_of_digits_is_a_name_like_any_other() -> None:
    """Python refuses to make an integer of it."""
    name = f"decoder.layers.{'9' * 5000}.mlp.linear_fc1.weight"
    pattern = row_pattern("decoder.layers.{l}.mlp.linear_fc1.weight")
    assert not pattern.fullmatch(name)
    assert pattern.fullmatch("decoder.layers.123456789.mlp.linear_fc1.weight")
    assert sorted([name, "decoder.layers.2.a"], key=natural) == ["decoder.layers.2.a", name]
