from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bridge.core.errors import PlanError, TableError
from bridge.core.mappings import mappings, read_table
from bridge.core.values import TensorSpec
from bridge.sources.live_models.meta_device import build_weightless
from bridge.sources.opening import open_source
from bridge.tables.architectures.arch import load_arch, parse_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.architectures.structure import canonical_names, structure
from tests.models import decoder_families
from tests.tables.checkpoints import BERT, GPT2, LLAMA, MIXTRAL, QWEN3_MOE, add, headers
from tests.tables.foreign import DEEPSEEK
from tests.tables.tiny import tiny
from tests.work import counted

LAYER = "model.layers.{}.self_attn.{}_proj.weight"


def _refused(config: dict[str, Any], specs: dict[str, TensorSpec]) -> str:
    with pytest.raises(PlanError) as caught:
        structure(config, specs)
    return str(caught.value)


# sites


def test_sites_come_in_model_order_whatever_the_order_of_the_shards() -> None:
    config = LLAMA | {"num_hidden_layers": 12}
    specs = headers(config)
    found = structure(config, dict(sorted(specs.items())))
    assert found == structure(config, dict(sorted(specs.items(), reverse=True)))
    assert [site.layer for site in found.sites] == [layer for layer in range(12) for _ in range(7)] + [None]
    assert [s.module.rpartition(".")[2] for s in found.sites[:7]] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    assert found.attention == tuple(f"model.layers.{layer}.self_attn" for layer in range(12))


def test_heads_and_routers_are_kept() -> None:
    sites = structure(MIXTRAL, headers(MIXTRAL)).sites
    kept = {site.module: site.keep for site in sites if site.keep}
    assert kept == {f"model.layers.{n}.block_sparse_moe.gate": "router" for n in range(3)} | {"lm_head": "output head"}


def test_gate_and_up_of_one_expert_share() -> None:
    sites = structure(MIXTRAL, headers(MIXTRAL)).sites
    groups: dict[str, list[str]] = {}
    for site in sites:
        groups.setdefault(site.shares, []).append(site.module)
    assert len(groups.pop("")) == 3 * (4 + 1 + 5) + 1
    assert len(groups) == 3 * 5
    experts = "model.layers.2.block_sparse_moe.experts.4"
    assert groups["2.4"] == [f"{experts}.w1", f"{experts}.w3"]


def test_dense_layers_share_nothing_and_hold_no_experts() -> None:
    found = structure(QWEN3_MOE, headers(QWEN3_MOE))
    dense = [site for site in found.sites if site.layer == 1]
    assert len(dense) == 7
    assert {site.shares for site in dense} == {""}
    assert {site.expert for site in found.sites if site.layer == 2} == {None, 0, 1, 2, 3, 4}


def test_conv1d_lies_in_out() -> None:
    found = structure(GPT2, headers(GPT2))
    assert {site.layout for site in found.sites if site.layer is not None} == {"in_out"}
    assert found.roles["transformer.h.0.attn.c_attn.weight"] == ("attn.q.weight", "attn.k.weight", "attn.v.weight")
    assert {s.layout for s in structure(LLAMA, headers(LLAMA)).sites} == {"out_in"}


# ties


def test_a_tied_head_is_a_site_of_the_embedding() -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    specs = headers(config)
    assert "lm_head.weight" not in specs
    found = structure(config, specs)
    embedding = "model.embed_tokens.weight"
    assert found.tied == {"lm_head.weight": embedding}
    assert found.roles[embedding] == ("embed.tokens.weight", "head.weight")
    head = found.sites[-1]
    assert (head.module, head.weight, head.keep) == ("lm_head", embedding, f"output head, tied to {embedding}")


def test_a_tied_head_that_is_stored_all_the_same_is_tied() -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    specs = headers(config)
    add(specs, "lm_head.weight", 97, 48)
    found = structure(config, specs)
    assert found.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in found.roles


def test_a_tie_stored_under_the_other_name_is_found() -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    specs = headers(config)
    del specs["model.embed_tokens.weight"]
    add(specs, "lm_head.weight", 97, 48)
    found = structure(config, specs)
    assert found.tied == {"model.embed_tokens.weight": "lm_head.weight"}
    assert set(found.roles["lm_head.weight"]) == {"head.weight", "embed.tokens.weight"}
    assert found.sites[-1].weight == "lm_head.weight"


def test_a_tied_copy_of_another_shape_is_refused() -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    specs = headers(config)
    add(specs, "lm_head.weight", 98, 48)
    assert "lm_head.weight has (98, 48), the config gives (97, 48)" in _refused(config, specs)


def test_a_missing_untied_head_points_to_the_tie() -> None:
    specs = headers(LLAMA)
    del specs["lm_head.weight"]
    message = _refused(LLAMA, specs)
    assert "missing  lm_head.weight (97, 48)" in message
    assert "tie_word_embeddings = False; if true, model.embed_tokens.weight is used" in message


def test_both_tensors_of_berts_head_are_tied() -> None:
    specs = headers(BERT)
    add(specs, "cls.predictions.decoder.weight", 97, 60)
    add(specs, "cls.predictions.decoder.bias", 97)
    assert structure(BERT, specs).tied == {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


# spellings of the hub


def test_names_without_the_prefix_of_the_base_model_are_found() -> None:
    specs = {n.removeprefix("transformer."): s for n, s in headers(GPT2).items()}
    specs = {n: TensorSpec(n, s.shape, s.dtype) for n, s in specs.items()}
    add(specs, "h.0.attn.bias", 1, 1, 72, 72)
    found = structure(GPT2, specs)
    assert found.tied == {"lm_head.weight": "wte.weight"}
    assert found.sites[0].module == "h.0.attn.c_attn"
    assert found.ignored == {"h.0.attn.bias": "the causal mask, a buffer that older versions of transformers saved"}
    names = canonical_names(GPT2, specs)
    assert names["h.0.ln_1.weight"] == "transformer.h.0.ln_1.weight"
    assert len(names) == len(specs)


def test_names_with_another_prefix_of_the_table_are_found() -> None:
    config = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "tie_word_embeddings": True}
    plain = headers(config)
    names = {name: name.replace("model.", "model.language_model.", 1) for name in plain}
    found = structure(config, {new: TensorSpec(new, plain[old].shape, "bfloat16") for old, new in names.items()})
    assert found.order == tuple(names.get(name, name) for name in structure(config, plain).order)
    assert found.tied == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    assert found.attention == ("model.language_model.layers.3.self_attn",)


def test_experts_of_a_layer_may_be_one_tensor_where_a_table_says_so() -> None:
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 4, "num_experts": 3}
    plain = headers(config)
    specs = {name: spec for name, spec in plain.items() if ".experts." not in name}
    for layer in range(4):
        add(specs, f"model.layers.{layer}.mlp.experts.gate_up_proj", 3, 1024, 2048)
        add(specs, f"model.layers.{layer}.mlp.experts.down_proj", 3, 2048, 512)
    found, each = structure(config, specs), structure(config, plain)
    assert [site for site in found.sites if not site.stacked] == [site for site in each.sites if site.expert is None]
    assert [(site.module, site.roles) for site in found.sites if site.stacked and site.layer == 2] == [
        ("model.layers.2.mlp.experts.gate_up_proj", ("moe.gate.weight", "moe.up.weight")),
        ("model.layers.2.mlp.experts.down_proj", ("moe.down.weight",)),
    ]
    assert found.joined == {f"model.layers.{layer}.mlp.experts.gate_up_proj": "halves" for layer in range(4)}
    del specs["model.layers.1.mlp.experts.down_proj"]
    assert "missing  model.layers.1.mlp.experts.down_proj (3, 2048, 512)" in _refused(config, specs)


def test_a_bare_model_saved_with_the_prefix_is_found() -> None:
    config = BERT | {"architectures": ["BertModel"]}
    specs = headers(config)
    assert canonical_names(config, specs)["bert.pooler.dense.bias"] == "pooler.dense.bias"
    assert structure(config, specs).sites[0].module == "bert.encoder.layer.0.attention.self.query"


def test_tensorflow_names_of_norms_are_found() -> None:
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    specs: dict[str, TensorSpec] = {}
    for name, spec in headers(BERT).items():
        for new, legacy in old.items():
            name = name.replace(new, legacy)
        add(specs, name, *spec.shape)
    found = structure(BERT, specs)
    assert found.roles["bert.embeddings.LayerNorm.gamma"] == ("embed.norm.weight",)
    assert canonical_names(BERT, specs)["cls.predictions.transform.LayerNorm.beta"].endswith(".LayerNorm.bias")
    add(specs, "bert.embeddings.LayerNorm.weight", 60)
    assert "unknown  bert.embeddings.LayerNorm.gamma" in _refused(BERT, specs)


def test_names_of_today_need_no_translation() -> None:
    for config in (LLAMA, GPT2, BERT, QWEN3_MOE):
        assert canonical_names(config, headers(config)) == {}


def test_what_pre_training_left_is_ignored_with_its_reason() -> None:
    specs = headers(BERT)
    for name, *shape in (("bert.pooler.dense.weight", 60, 60), ("cls.seq_relationship.bias", 2)):
        add(specs, str(name), *map(int, shape))
    add(specs, "bert.embeddings.position_ids", 1, 72)
    assert structure(BERT, specs).ignored.keys() == {
        "bert.pooler.dense.weight", "cls.seq_relationship.bias", "bert.embeddings.position_ids"
    }  # fmt: skip


HYBRID: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "mamba_num_heads": 8, "mamba_head_dim": 15,
    "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 5, "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 36, "num_hidden_layers": 5,
}  # fmt: skip
KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


@pytest.mark.parametrize("latent", [None, 24])
def test_the_kinds_of_layers_are_words_or_letters(latent: int | None) -> None:
    words = [KINDS[letter] for letter in "ME*-M"]
    old = ["mamba" if word == "linear_attention" else "attention" if "full" in word else word for word in words]
    config = HYBRID | {"moe_latent_size": latent}
    found = [
        structure(config | kinds, headers(config | kinds))
        for kinds in ({"hybrid_override_pattern": "ME*-M"}, {"layers_block_type": words}, {"layer_types": old})
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].states and not structure(LLAMA, headers(LLAMA)).states
    assert found[0].attention == ("backbone.layers.2.mixer",)


def test_draft_layers_of_any_kind_are_ignored_with_their_reason() -> None:
    config = HYBRID | {"hybrid_override_pattern": "M-M*E", "moe_latent_size": 24, "mlp_bias": True}
    specs = headers(config)
    drafts = [
        f"mtp.{name.removeprefix('backbone.')}"
        for name in specs
        if name.startswith(("backbone.layers.3", "backbone.layers.4"))
    ]
    drafts += [f"mtp.layers.3.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "final_layernorm")]
    for name in drafts:
        add(specs, name, *specs.get(name.replace("mtp.", "backbone."), specs["backbone.norm_f.weight"]).shape)
    found = structure(config, specs)
    assert found.ignored.keys() == set(drafts)
    assert set(found.ignored.values()) == {"of a layer that drafts tokens ahead; the model of transformers has none"}


WIDTHS: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 7, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "attention_k_eq_v": True, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 91,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip


def test_layers_have_widths_of_their_own_by_the_hubs_fields_and_by_those_that_are_saved() -> None:
    hub = WIDTHS | {"global_head_dim": 14, "num_global_key_value_heads": 3}
    saved = WIDTHS | {"per_layer_config": {f"0{layer}": {"head_dim": 14, "num_key_value_heads": 3} for layer in (5, 6)}}
    specs = headers(hub)
    assert specs == headers(saved | {"global_head_dim": 512})
    assert [specs[LAYER.format(layer, "k")].shape for layer in (4,)] == [(20, 48)]
    assert [specs[LAYER.format(layer, "q")].shape for layer in (4, 5, 6)] == [(60, 48), (84, 48), (84, 48)]
    assert [specs[f"model.layers.{layer}.mlp.down_proj.weight"].shape for layer in (4, 5)] == [(48, 80), (48, 160)]
    assert LAYER.format(5, "k") not in specs and LAYER.format(4, "v") in specs
    assert structure(hub, specs) == structure(saved, specs)
    wrong = specs | {LAYER.format(6, "q"): TensorSpec(LAYER.format(6, "q"), (60, 48), "bfloat16")}
    message = _refused(hub, wrong)
    assert "model.layers.6.self_attn.q_proj.weight has (60, 48), the config gives (84, 48)" in message
    assert "with head_dim = 14, heads = 6" in message


def test_keys_that_a_layer_does_not_use_are_ignored_with_their_reason() -> None:
    specs = headers(WIDTHS)
    unused = [LAYER.format(5, "k"), LAYER.format(6, "v"), "model.layers.6.self_attn.k_norm.weight"]
    for name in unused:
        add(specs, name, 20, 48)
    assert structure(WIDTHS, specs).ignored.keys() == set(unused)
    add(specs, "model.layers.7.self_attn.k_norm.weight", 10)
    assert "unknown  model.layers.4.self_attn.sinks" in _refused(
        WIDTHS,
        specs | {"model.layers.4.self_attn.sinks": TensorSpec("model.layers.4.self_attn.sinks", (6,), "bfloat16")},
    )


def test_an_old_config_gets_the_defaults_of_transformers() -> None:
    config = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 1}
    assert headers(config)[LAYER.format(0, "k")].shape == (1024, 4096)  # 8 key heads, not 32


def test_layers_that_draft_tokens_ahead_are_ignored_with_their_reason() -> None:
    specs = headers(DEEPSEEK)
    drafts = [n.replace("layers.2.", "layers.3.") for n in specs if ".layers.2." in n]
    drafts += [f"model.layers.3.{name}.weight" for name in ("embed_tokens", "enorm", "eh_proj", "shared_head.head")]
    for name in drafts:
        add(specs, name, *specs.get(name.replace("layers.3.", "layers.2."), specs["model.norm.weight"]).shape)
    found = structure(DEEPSEEK, specs)
    assert found.ignored.keys() == set(drafts)
    assert set(found.ignored.values()) == {"of a layer that drafts tokens ahead; the model of transformers has none"}
    add(specs, "model.layers.1.enorm.weight", 48)
    assert "unknown  model.layers.1.enorm.weight" in _refused(DEEPSEEK, specs)


def test_attention_from_a_latent_has_a_cache_and_one_input() -> None:
    for rank, name in ((26, "q_a_proj"), (None, "q_proj")):
        config = DEEPSEEK | {"q_lora_rank": rank}
        found = structure(config, headers(config))
        assert found.attention == tuple(f"model.layers.{layer}.self_attn" for layer in range(3))
        layer = "model.layers.0"
        assert found.groups[0].modules == tuple(f"{layer}.self_attn.{x}" for x in (name, "kv_a_proj_with_mqa"))
        assert (found.groups[0].norm, found.groups[0].alone) == (f"{layer}.input_layernorm", True)
        shared = [group for group in found.groups if "shared_experts" in group.modules[0]]
        assert [group.alone for group in shared] == [False, False]  # experts and the router read it, too


# bad input


def test_all_problems_are_told_at_once_with_layers_folded() -> None:
    specs = headers(LLAMA)
    for layer in range(3):
        del specs[f"model.layers.{layer}.mlp.up_proj.weight"]
        add(specs, f"model.layers.{layer}.self_attn.sinks", 20)
    add(specs, LAYER.format(1, "k"), 60, 48)
    lines = _refused(LLAMA, specs).splitlines()
    assert lines[0] == "LlamaForCausalLM does not fit mappings/arch/llama.toml: 3 problems"
    assert "  missing  model.layers.{0..2}.mlp.up_proj.weight (80, 48)" in lines
    assert "  shape    model.layers.1.self_attn.k_proj.weight has (60, 48), the config gives (20, 48)" in lines
    symbols = "attn.k.weight (kv_heads * head_dim, hidden) with head_dim = 10, hidden = 48, kv_heads = 2"
    assert symbols in lines[5]
    assert "  unknown  model.layers.{0..2}.self_attn.sinks (20,)" in lines
    assert '"model.layers.{l}.self_attn.sinks" = ' in lines[-2]
    assert "mappings/arch/llama.toml" in lines[-2]


def test_an_expert_that_is_missing_is_named() -> None:
    specs = headers(MIXTRAL)
    del specs["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    assert "missing  model.layers.1.block_sparse_moe.experts.3.w2.weight (48, 80)" in _refused(MIXTRAL, specs)


def test_experts_are_folded_inside_layers() -> None:
    specs = {name: spec for name, spec in headers(MIXTRAL).items() if ".w2." not in name}
    assert "missing  model.layers.{0..2}.block_sparse_moe.experts.{0..4}.w2.weight" in _refused(MIXTRAL, specs)


def test_a_layer_too_many_is_told_from_an_unknown_tensor() -> None:
    specs = headers(LLAMA | {"num_hidden_layers": 4})
    message = _refused(LLAMA, specs)
    assert "unknown  model.layers.3.mlp.up_proj.weight (80, 48)" in message
    assert "the config gives {l} < 3: another model's config, or extra layers?" in message


def test_biases_that_the_config_denies_are_told() -> None:
    specs = headers(LLAMA | {"attention_bias": True})
    message = _refused(LLAMA, specs)
    assert "unknown  model.layers.{0..2}.self_attn.q_proj.bias (60,)" in message
    assert "that row requires attention_bias; the config gives attention_bias = False" in message


def test_biases_that_the_config_promises_are_missed() -> None:
    message = _refused(LLAMA | {"attention_bias": True}, headers(LLAMA))
    assert "self_attn.o_proj.bias (48,), because attention_bias (attention_bias = True)" in message


def test_a_row_of_another_architecture_is_named() -> None:
    config = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
    specs = headers(config)
    add(specs, "lm_head.weight", 97, 48)
    assert "that row is for LlamaForCausalLM" in _refused(config, specs)


def test_numbers_with_leading_zeros_are_no_layers() -> None:
    specs = headers(LLAMA)
    spec = specs.pop("model.norm.weight")
    add(specs, "model.layers.00.input_layernorm.weight", *spec.shape)
    assert "unknown  model.layers.00.input_layernorm.weight" in _refused(LLAMA, specs)


def test_an_unknown_architecture_has_no_table() -> None:
    assert load_arch("LlamaForCausalLM2") is None
    assert "no file of mappings/arch lists the architecture 'NobodysModel'" in _refused(
        {"architectures": ["NobodysModel"]}, {}
    )


@pytest.mark.parametrize("architectures", [None, [], [3], "LlamaForCausalLM"])
def test_a_config_without_an_architecture_is_refused(architectures: object) -> None:
    assert '"architectures": ["LlamaForCausalLM"]' in _refused({"architectures": architectures}, {})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_attention_heads", 0, "divides by zero"),
        ("hidden_size", None, "`hidden_size` must be a whole number, it is None"),
        ("num_hidden_layers", "3", "must be a whole number, it is '3'"),
    ],
)
def test_a_config_of_the_wrong_type_names_the_dim_and_the_line(field: str, value: object, says: str) -> None:
    message = _refused(LLAMA | {"head_dim": None, field: value}, headers(LLAMA))
    assert says in message
    assert "mappings/arch/llama.toml:" in message


@pytest.mark.parametrize("base", [LLAMA, QWEN3_MOE])
def test_a_config_that_claims_a_billion_layers_is_refused_at_once(base: dict[str, Any]) -> None:
    message, calls = counted(_refused, base | {"num_hidden_layers": 10**9}, headers(base))
    assert message.startswith("the config claims 1000000000 layers (mappings/arch/")
    assert calls < 100_000


@pytest.mark.slow
def test_many_missing_layers_are_one_line() -> None:
    message = _refused(LLAMA | {"num_hidden_layers": 900_000}, headers(LLAMA))
    assert "missing  model.layers.{3..10002}.mlp.up_proj.weight" in message


def test_structure_loads_no_framework() -> None:
    imports = "import sys, bridge.tables.architectures.structure"
    code = f"{imports}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def _on_the_hub(name: str) -> str:
    """The name of a tensor of DeepSeek-V4 in its own program (inference/model.py of the release)."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens.", "embed.")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def test_deepseek_v4_is_read_by_its_names_on_the_hub_as_by_transformers(tmp_path: Path) -> None:
    model = decoder_families.build("DeepseekV4ForCausalLM", torch.float32, num_hash_layers=1)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    stored = {_on_the_hub(name): tensor for name, tensor in saved.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, how = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(how.values())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    specs = [{n: TensorSpec(n, tuple(t.shape), "float32") for n, t in part.items()} for part in (saved, stored)]
    ours, theirs = (structure(config, part) for part in specs)
    assert {_on_the_hub(name): roles for name, roles in ours.roles.items()} == theirs.roles
    assert theirs.embeddings == ("embed",)
    names = {"layer_types": "compress_ratios", "mlp_layer_types": "num_hash_layers"}
    older = {name: value for name, value in config.items() if name not in names}
    older |= {"compress_ratios": [4, 128], "num_hash_layers": 1}  # the hub's
    assert structure(older, specs[1]).roles == theirs.roles
    drafts = {f"mtp.0.{name}": (3, 4) for name in ("e_proj.weight", "attn.kv_norm.weight", "ffn.experts.2.w1.weight")}
    more = {name: TensorSpec(name, shape, "float32") for name, shape in drafts.items()}
    assert set(structure(config, specs[1] | more).ignored) == set(drafts)


# names in the model of transformers


@pytest.mark.parametrize("case", ["deepseek_v4", "llama-bare", "mixtral", "minimax_m3", "qwen3_5"])
def test_every_linear_of_the_model_has_a_site(tmp_path: Path, case: str) -> None:
    """transformers asks with these names what is quantized; each is that of its own model."""
    made = tiny(case, tmp_path)
    sites = structure(made.config, made.specs).sites
    model, _ = build_weightless(open_source(tmp_path))
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear <= {name for site in sites for name in site.live or (site.module,)}
    assert any(site.live for site in sites) == (case == "deepseek_v4")


def test_names_of_the_hub_have_those_of_the_model() -> None:
    config = BERT | {"architectures": ["BertForMaskedLM"]}
    named = [(name.removeprefix("bert."), spec) for name, spec in headers(config).items()]
    sites = structure(config, {name: replace(spec, name=name) for name, spec in named}).sites
    query = "encoder.layer.0.attention.self.query"
    assert {site.module: site.live for site in sites}[query] == (f"bert.{query}",)


def test_a_name_of_a_module_that_no_row_has_is_refused() -> None:
    file = read_table(mappings() / "arch" / "deepseek_v4.toml")
    data = file.data | {"live": {"model.layers.{l}.attn.wq": "model.layers.{l}.self_attn.q_proj"}}
    with pytest.raises(TableError, match=r"no row has the weight of `model\.layers\.\{l\}\.attn\.wq`"):
        parse_arch(replace(file, data=data), load_roles())
