"""Full-size configs against transformers' own names: models on the meta device, spelled as they are saved."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from bridge.core.mappings import read_table, table_files
from bridge.core.values import TensorSpec
from bridge.tables.architectures.arch import parse_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.architectures.structure import canonical_names, structure
from bridge.tables.dialects.dialect import load_dialect
from bridge.tables.dialects.layout import role_shapes
from bridge.tables.dialects.translate import translate, translator
from bridge.tables.expressions.shapes import row_shape
from tests.tables.checkpoints import headers, saved_headers, tiny_fields
from tests.work import counted

_QWEN3_235B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 1536,
    "num_experts": 128,
}  # fmt: skip
_LLAMA_405B = {
    "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8,
}  # fmt: skip

_DEEPSEEK: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"]}  # the defaults are DeepSeek-V3's
_KIMI_K2: dict[str, Any] = _DEEPSEEK | {
    "vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_DEEPSEEK_V2 = {  # of the hub's DeepSeek-V2, whose config names no default of transformers
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60,
    "num_attention_heads": 128, "n_routed_experts": 160, "first_k_dense_replace": 1,
}  # fmt: skip
_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
_QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "num_experts": 128,
}  # fmt: skip

# Extents of published configs; what they leave out is the default of transformers' config class.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-70b": (
        "LlamaForCausalLM",
        {
            "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8,
        },
    ),
    "llama-3-405b": ("LlamaForCausalLM", _LLAMA_405B),
    "mistral-nemo-12b": (
        "MistralForCausalLM",
        {
            "vocab_size": 131072, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128,
        },
    ),
    "qwen2-0.5b": (
        "Qwen2ForCausalLM",
        {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
    ),
    "gemma2-27b": (
        "Gemma2ForCausalLM",
        {
            "hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128,
        },
    ),
    "gemma3-1b": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
            "num_attention_heads": 4, "num_key_value_heads": 1,
        },
    ),
    "gemma4-dense": ("Gemma4ForCausalLM", {"num_kv_shared_layers": 12, "use_double_wide_mlp": True}),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        {
            "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        },
    ),
    "gemma-7b": ("GemmaForCausalLM", {}),
    "starcoder2-15b": (
        "Starcoder2ForCausalLM",
        {
            "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 40, "num_attention_heads": 48,
            "num_key_value_heads": 4,
        },
    ),
    "nemotron-4-340b": (
        "NemotronForCausalLM",
        {
            "hidden_size": 18432, "intermediate_size": 73728, "num_hidden_layers": 96, "num_attention_heads": 96,
            "num_key_value_heads": 8,
        },
    ),
    "phi3-medium": (
        "Phi3ForCausalLM",
        {
            "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 10,
        },
    ),
    "gpt2-xl": ("GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "mixtral-8x7b": ("MixtralForCausalLM", {}),
    "qwen3-moe-235b": ("Qwen3MoeForCausalLM", _QWEN3_235B),
    "deepseek-v2": ("DeepseekV2ForCausalLM", _DEEPSEEK_V2),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {}),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", {}),
    "deepseek-v4-flash": ("DeepseekV4ForCausalLM", {}),
    "glm-5": ("GlmMoeDsaForCausalLM", {}),
    "mistral-small-4": ("Mistral4ForCausalLM", {}),
    "minimax-m3": (
        "MiniMaxM3VLForCausalLM",
        {
            "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
            "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
        },
    ),
    "nemotron-3-nano-30b-a3b": (
        "NemotronHForCausalLM",
        {
            "hidden_size": 2688, "num_key_value_heads": 2, "mamba_num_heads": 64, "n_routed_experts": 128,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        },
    ),
    "granite-3.0-3b-a800m": (
        "GraniteMoeForCausalLM",
        {
            "vocab_size": 49155, "hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 24,
            "num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8, "tie_word_embeddings": True,
        },
    ),
    "llama-4-maverick": ("Llama4ForCausalLM", {"num_local_experts": 128, "interleave_moe_layer_step": 2}),
    "ernie-4.5-0.3b": ("Ernie4_5ForCausalLM", {}),
    "ernie-4.5-21b-a3b": ("Ernie4_5_MoeForCausalLM", {}),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeForCausalLM", {}),
    "bert-large": (
        "BertForMaskedLM",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
}  # fmt: skip


# These make some 40,000 meta tensors in ten seconds and more.
_LARGE = (
    "qwen3-moe-235b",
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-v3.2",
    "deepseek-v4-flash",
    "glm-5",
    "qwen3.5-35b-a3b",
)
_PARAMS = [pytest.param(size, marks=[pytest.mark.slow] if size in _LARGE else []) for size in SIZES]


@pytest.mark.parametrize("size", _PARAMS)
def test_tables_cover_full_size_models_exactly(size: str) -> None:
    config, specs = saved_headers(*SIZES[size])
    found = structure(config, specs)
    assert found.roles.keys() == specs.keys()
    assert found.ignored == {}
    assert canonical_names(config, specs) == {}


@pytest.mark.slow
def test_qwen3_moe_235b_has_one_module_for_each_projection_of_each_expert() -> None:
    config = _QWEN3_235B | {"architectures": ["Qwen3MoeForCausalLM"]}
    specs = headers(config)
    assert len(specs) == 94 * (2 + 4 + 2 + 1 + 128 * 3) + 3
    assert len(structure(config, specs).sites) == 94 * (4 + 1 + 128 * 3) + 1


@pytest.mark.slow
def test_kimi_k2_has_sixty_layers_of_384_experts_which_llama_cpp_has_in_stacks() -> None:
    specs = headers(_KIMI_K2)
    assert len(specs) == 61 * 9 + 3 + 60 * (2 + 3 + 384 * 3) + 3
    assert len(structure(_KIMI_K2, specs).sites) == 61 * 5 + 3 + 60 * (1 + 3 + 384 * 3) + 1
    stacked = {spec.name: spec.shape for spec in foreign_headers("gguf", _KIMI_K2, {})}
    assert len(stacked) == 61 * 10 + 3 + 60 * (2 + 3 + 3) + 3
    assert stacked["blk.60.ffn_down_exps.weight"] == (384, 7168, 2048)
    assert (stacked["blk.0.attn_k_b.weight"], stacked["blk.0.attn_v_b.weight"]) == ((64, 512, 128), (64, 128, 512))


ARCHITECTURES = [n for path in table_files("arch") for n in parse_arch(read_table(path), load_roles()).architectures]


@pytest.mark.parametrize("architecture", (name for name in ARCHITECTURES if hasattr(transformers, name)))
def test_every_architecture_covers_what_transformers_saves(architecture: str) -> None:
    config, specs = saved_headers(architecture, tiny_fields(architecture))
    assert structure(config, specs).roles.keys() == specs.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        _LLAMA_405B | {"architectures": ["LlamaForCausalLM"]},
        pytest.param(_QWEN3_235B | {"architectures": ["Qwen3MoeForCausalLM"]}, marks=pytest.mark.product),
        _DEEPSEEK,
    ],
)
def test_structure_takes_the_same_work_a_tensor_at_any_size(config: dict[str, Any]) -> None:
    """Calls are counted, no seconds: 70 a tensor for 1,137 tensors, 55 for 36,945 and for 45,395."""
    specs = headers(config)
    _, calls = counted(structure, config, specs)
    assert calls < 100 * len(specs)


def foreign_headers(dialect: str, config: dict[str, Any], dims: dict[str, int]) -> list[TensorSpec]:
    """Every tensor that a dialect writes for a config."""
    made = translator(load_dialect(dialect), config, dims)
    specs = []
    for layer, held in made.roles_by_layer.items():
        for stage in ("first", "last") if layer is None else ("layer",):
            for row in made.dialect.rows_of(stage, held, made.dialect.architectures[made.architecture]):
                shapes = role_shapes(made.table.roles.roles, row.roles, made.names)
                name = row.name.replace("{l}", str(layer))
                specs.append(TensorSpec(name, row_shape(row.expr, shapes, made.names, row.place), "bfloat16"))
    return specs


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["megatron", "torchtitan"])
@pytest.mark.parametrize("config", [_LLAMA_8B, _QWEN3_30B, pytest.param(_DEEPSEEK, marks=pytest.mark.product)])
def test_foreign_checkpoints_take_the_same_work_a_tensor_at_any_size(dialect: str, config: dict[str, Any]) -> None:
    dims = {"vocab_multiple": 128, "centered": 0}
    specs = foreign_headers(dialect, config, dims)
    (found, _), calls = counted(translate, load_dialect(dialect), config, dims, specs, "here")
    assert calls < 800 * len(found)
    assert {name: tensor.spec for name, tensor in found.items()} == headers(config)
