"""Section [foreign] of architectures' tables: held to transformers' classes; what is wrong in one names its line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import transformers

from bridge.core.errors import SourceError, TableError
from bridge.core.mappings import mappings, parse_table, table_files
from bridge.sources.configs.derive import hf_config
from bridge.sources.configs.facts import Fact
from bridge.sources.configs.families import (
    Family,
    check_families,
    check_family,
    choose,
    deviations,
    families,
    family_of,
    parse_family,
)
from bridge.sources.configs.writers import declared_by_megatron
from bridge.tables.architectures.arch import load_arch, parse_arch
from bridge.tables.architectures.roles import load_roles
from tests.models.megatron_configs import nemo2
from tests.models.megatron_families import FAMILIES
from tests.sources.weights import native_shapes

MODULE = "bridge.sources.configs.families"
KNOWN = {family.architecture: family for family in families()}
LLAMA = (mappings() / "arch/llama.toml").read_text()


@pytest.mark.parametrize("name", KNOWN)
def test_transformers_reads_every_field_and_has_the_same_defaults(name: str) -> None:
    family, cls = KNOWN[name], getattr(transformers, name)
    config = cls.config_class()
    assert config.model_type == family.model_type
    fields = {*vars(config), *config.attribute_map}
    if '"head_dim"' in inspect.getsource(inspect.getmodule(cls)):  # some have it only where a config.json has
        fields.add("head_dim")
    assert {*family.config, *family.always} <= fields
    for field, value in family.always.items():
        assert getattr(config, field) == value, field
    theta = getattr(config, "default_theta", None) if family.theta else None
    assert family.theta == ([theta["local"], theta["global"]] if isinstance(theta, dict) else theta)


def test_a_field_that_is_always_the_same_is_read_as_such() -> None:
    table = load_arch("DeepseekV3ForCausalLM")
    assert table is not None
    said = deviations({"rope_interleave": False, "norm_topk_prob": None}, table, "DeepseekV3ForCausalLM")
    assert said == ["config.json has rope_interleave = False, of such a checkpoint it would be read as True"]
    sparse = load_arch("Qwen3MoeForCausalLM")  # which layers have experts shows in the tensors
    assert sparse is not None
    assert deviations({"decoder_sparse_step": 2}, sparse, "Qwen3MoeForCausalLM") == []


# Classes of NeMo 2 and Megatron-Bridge 0.3.1 -> what they are here; None: none of the families.
CLASSES = {
    "Llama2Config7B": "LlamaForCausalLM", "Llama31ModelProvider405B": "LlamaForCausalLM",
    "CodeLlamaConfig34B": "LlamaForCausalLM", "Llama32Config1B": "LlamaForCausalLM",
    "Llama31NemotronNano8BProvider": "LlamaForCausalLM", "Llama31Nemotron70BConfig": "LlamaForCausalLM",
    "Llama32EmbeddingConfig1B": None, "Llama32Reranker1BConfig": None, "LlamaBidirectionalConfig": None,
    "Llama4ModelProvider": None, "LlamaNemotronHeterogeneousProvider": None, "MistralConfig7B": "MistralForCausalLM",
    "MistralNeMoConfig12B": "MistralForCausalLM", "MistralSmall3ModelProvider24B": None,
    "MixtralConfig8x7B": "MixtralForCausalLM", "Qwen25Config1P5B": "Qwen2ForCausalLM",
    "Qwen2ModelProvider500M": "Qwen2ForCausalLM", "Qwen25VLModelProvider": None,
    "Qwen3MoEModelProvider235B_A22B": "Qwen3MoeForCausalLM", "Qwen3NextModelProvider80B_A3B": None,
    "CodeGemmaConfig2B": "GemmaForCausalLM", "Gemma2Config27B": "Gemma2ForCausalLM",
    "Gemma3ModelProvider1B": "Gemma3ForCausalLM", "Gemma3VLModelProvider": None,
    "Nemotron4Config340B": "NemotronForCausalLM", "NemotronHModel47BProvider": None,
    "NemotronNanoModelProvider9Bv2": None, "Nemotron3NanoProvider": None, "Starcoder2Config7B": "Starcoder2ForCausalLM",
    "StarcoderConfig15B": None, "DeepSeekV3ModelProvider": "DeepseekV3ForCausalLM", "DeepSeekV2Config": None,
    "GLM45ModelProvider355B": "Glm4MoeForCausalLM", "GLM45AirModelProvider106B": "Glm4MoeForCausalLM",
    "Phi3ConfigMini": None,
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_its_own_architecture_and_no_cousins(name: str) -> None:
    found = choose({"class": Fact(name, "model.yaml: config._target_")})
    if CLASSES[name] is None:
        assert isinstance(found, str) and f"_target_ = '{name}' is not of a known family" in found
    else:
        assert isinstance(found, Family) and found.architecture == CLASSES[name]


def test_one_class_of_two_architectures_is_told_by_its_terms() -> None:
    for name, options in (("qwen3", {}), ("qwen3-moe", {"experts": True})):
        raw = nemo2(FAMILIES[name])
        raw["config"]["_target_"] = "nemo.collections.llm.gpt.model.qwen3.Qwen3Config30B_A3B"
        told = declared_by_megatron("context/model.yaml", raw)
        specs = native_shapes.megatron(qk_norm=True, tied=FAMILIES[name].tied, **options)
        assert hf_config("x", "megatron", told, specs).config["architectures"] == FAMILIES[name].hf["architectures"]


def arch(name: str, text: str) -> Any:
    return parse_arch(parse_table(text, f"{name}.toml"), load_roles())


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ('model_type   = "llama"', 'model_typ = "llama"', "unknown key `model_typ`"),
        ('model_type   = "llama"', "", "no `model_type`"),
        ('architecture = "LlamaForCausalLM"', 'architecture = "LamaForCausalLM"', "is one of those listed above"),
        ('"layers"\nnum_attention', '"layer"\nnum_attention', "term `layer` is unknown"),
        ('"mlp_bias or False"', '"open(mlp_bias)"', "is not allowed here"),
        ("qkv_bias == o_bias", "qkv_bias == out_bias", "term `out_bias` is unknown"),
        ("layer_norm = false", "layernorm = false", "must say layer_norm"),
        ("gates      = 2", "gates = 2\ngate = 2", "term `gate` is unknown"),
        ('takes = ["scaling"]', 'takes = ["scalings"]', "term `scalings` is unknown"),
        ("theta = 10000.0", "", "`theta` is a number"),
        ("theta = 10000.0", "theta = [10000.0]", "`theta` is a number"),
        ("theta = 10000.0", "theta = 10000.0\nbase = 1.0", "unknown key `base`"),
        ("post_norms or", "post_norm or", "term `post_norm` is unknown"),
        ('num_hidden_layers       = "layers"\n', "", "`num_hidden_layers` is not given; `layers` is made of it"),
    ],
)
def test_a_mistake_names_its_line(was: str, now: str, says: str) -> None:
    assert LLAMA.count(was) == 1, was
    text = LLAMA.replace(was, now)
    problems = check_family(arch("llama", text))
    assert len(problems) == 1 and says in problems[0]
    at = problems[0].split(":")[1]
    line = problems[0].splitlines()[1].removeprefix("  row    ")
    assert problems[0].startswith("llama.toml:")
    assert line.startswith("[foreign") or text.splitlines()[int(at) - 1].strip() == line


def test_every_section_that_ships_is_well() -> None:
    assert check_families() == []


def test_two_families_of_one_class_must_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {path: path.read_text() for path in table_files("arch")}
    mistral = mappings() / "arch/mistral.toml"
    lines = texts[mistral].replace('["Mistral", "MistralNeMo"]', '["Llama"]').splitlines()
    texts[mistral] = "\n".join(line for line in lines if not line.startswith("tell"))
    monkeypatch.setattr(f"{MODULE}.read_table", lambda path: parse_table(texts[path], path.name))
    (problem,) = check_families()
    assert problem.startswith("mistral.toml:") and "Llama is LlamaForCausalLM, too: `tell` must" in problem


def test_terms_that_two_tables_claim_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    other = parse_family(parse_table(LLAMA.replace("LlamaForCausalLM", "CousinForCausalLM"), "cousin.toml"))
    monkeypatch.setattr(f"{MODULE}.families", lambda: [*KNOWN.values(), other])
    change = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider"}
    raw = nemo2(FAMILIES["llama"])
    raw["config"] |= change
    with pytest.raises(SourceError, match="LlamaForCausalLM and CousinForCausalLM both fit; give config="):
        hf_config("x", "megatron", declared_by_megatron("context/model.yaml", raw), native_shapes.megatron())


def test_an_architecture_without_a_section_is_none_of_them() -> None:
    for name in ("BertModel", "LlamaForSequenceClassification", "NoSuchModel"):
        assert f"architecture '{name}' has no [foreign] table" in str(family_of(name))
    with pytest.raises(TableError, match="is a section"):
        parse_family(parse_table('architectures = ["A"]\nforeign = 1\n', "a.toml"))


def test_terms_that_nobody_says_do_not_tell() -> None:
    assert "neither configuration nor tensors tell layer_norm, gates, activation" in str(choose({}))
