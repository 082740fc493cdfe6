"""transformers loads outputs of models whose modules have other names than the tensors of their checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

import bridge  # noqa: E402
from bridge.planning.contract_files import load_runtime  # noqa: E402
from bridge.planning.contracts import verdict  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.targets.hf.compressed_tensors import ignored  # noqa: E402

TEXT = {
    "vocab_size": 97, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256,
}  # fmt: skip
SIGHT = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
SIGLIP = SIGHT | {"model_type": "siglip_vision_model"}
IMAGE = {"image_token_index": 90}
PLACES = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
    "image_start_token_id": 94, "image_end_token_id": 95, "video_start_token_id": 94, "video_end_token_id": 95,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 10000.0}
SPARSE = TEXT | {
    "intermediate_size": 80, "dense_intermediate_size": 160, "shared_intermediate_size": 80, "rotary_dim": 12,
    "num_local_experts": 5, "num_experts_per_tok": 3, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8,
    "index_topk_blocks": 4,
}  # fmt: skip
LINEAR = {
    "vocab_size": 97, "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 5, "num_key_value_heads": 5, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "n_routed_experts": 5, "kv_lora_rank": 64, "q_lora_rank": 48, "v_head_dim": 32, "qk_nope_head_dim": 32,
    "index_topk": 16, "index_head_dim": 32, "index_n_heads": 3, "linear_head_dim": 16, "linear_num_heads": 4,
    "pad_token_id": 0, "index_kpool": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}  # fmt: skip
# class -> its config's fields
CLASSES: dict[str, dict[str, Any]] = {
    "DeepseekV4ForCausalLM": {
        "vocab_size": 97, "hidden_size": 160, "moe_intermediate_size": 96, "num_attention_heads": 4, "head_dim": 64,
        "num_key_value_heads": 1, "num_hidden_layers": 4, "n_routed_experts": 7, "n_shared_experts": 1,
        "num_experts_per_tok": 3, "max_position_embeddings": 256, "q_lora_rank": 96, "o_groups": 2, "o_lora_rank": 32,
        "index_topk": 16, "index_head_dim": 32, "index_n_heads": 3, "sliding_window": 16, "partial_rotary_factor": 0.25,
    },
    "LlavaForConditionalGeneration": {
        "text_config": TEXT, "vision_config": SIGHT | {"model_type": "clip_vision_model"}, **IMAGE,
    },
    "Qwen2VLForConditionalGeneration": {
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"} | {"rope_parameters": ROPE},
        "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 96, "num_heads": 2, "patch_size": 14},
        **{name: at for name, at in PLACES.items() if name.startswith(("image_token", "video_token", "vision"))},
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": TEXT | {"sliding_window": 16}, "vision_config": SIGLIP, "mm_tokens_per_image": 4, **IMAGE,
        "boi_token_index": 91, "eoi_token_index": 92,
    },
    "PaliGemmaForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "gemma"}, "vision_config": SIGLIP, "projection_dim": 96, **IMAGE,
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral"}, "vision_config": SIGHT | {"model_type": "pixtral"}, **IMAGE,
    },
    "MiniMaxM3SparseForConditionalGeneration": {
        "text_config": SPARSE, "projector_hidden_size": 96, "image_token_index": 90, "video_token_index": 91,
        "vision_config": SIGHT,
    },
    "MistralLarge4ForConditionalGeneration": {  # transformers permutes rows of its vision tower while it loads
        "text_config": {
            "vocab_size": 97, "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 80,
            "num_attention_heads": 5, "num_key_value_heads": 5, "n_shared_experts": 1, "num_experts_per_tok": 3,
            "max_position_embeddings": 256, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 32,
            "qk_nope_head_dim": 48, "index_topk": 16, "index_head_dim": 32, "index_n_heads": 3, "n_routed_experts": 5,
            "num_hidden_layers": 3, "head_dim": 16, "model_type": "mistral_large4_text",
        },
        "vision_config": SIGHT | {"model_type": "pixtral", "image_size": 32, "patch_size": 8, "num_hidden_layers": 1},
    },
    "Glm5NextForConditionalGeneration": {
        "text_config": LINEAR, **{name: at for name, at in PLACES.items() if not name.startswith("vision")},
        "vision_config": {
            "depth": 1, "hidden_size": 64, "num_heads": 2, "image_size": 28, "out_hidden_size": 96,
            "intermediate_size": 80, "projection_intermediate_size": 80,
        },
    },
}  # fmt: skip
IDS = torch.randint(5, 80, (2, 33), generator=torch.Generator().manual_seed(3))
# Classes whose model has modules together that are apart in the checkpoint, some of them unquantized.
JOINING = ("MiniMaxM3SparseForConditionalGeneration", "Glm5NextForConditionalGeneration")


def saved(name: str, directory: Path) -> Path:
    """A checkpoint of the class, as `save_pretrained` writes it, under the names of the hub."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    cls(cls.config_class(**CLASSES[name])).bfloat16().save_pretrained(directory)
    return directory


def why_not(source: Path, quant: str, form: str = "compressed-tensors") -> str:
    return verdict(load_runtime("transformers"), bridge.plan(source, "hf", quant, format=form)).why_not


def loaded(name: str, source: Path, quant: Any, out: Path) -> tuple[Any, Any]:
    """Logits of an output in transformers, and of its weights as we read them; all of its tensors are there."""
    bridge.convert(source, target="hf", quant=quant, out=out, format="compressed-tensors", verify=False)
    model, info = getattr(transformers, name).from_pretrained(out, dtype="auto", output_loading_info=True)
    assert (info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"]) == (set(), set(), set())
    with torch.no_grad():
        return model(input_ids=IDS).logits.float(), open_source(out).load_model()(input_ids=IDS).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLASSES if name != JOINING[1]])  # it takes 15 seconds to run
def test_fp8_loads_whole(tmp_path: Path, name: str) -> None:
    """Inputs are rounded to FP8 there, and experts that are chosen otherwise differ by more than weights."""
    source = saved(name, tmp_path / "source")
    assert not why_not(source, "fp8_pc_pt")
    theirs, ours = loaded(name, source, "fp8_pc_pt", tmp_path / "out")
    assert 0 < (theirs - ours).norm() / ours.norm() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_packed_weights_load_whole_or_are_refused(tmp_path: Path, name: str) -> None:
    source = saved(name, tmp_path / "source")
    if name in JOINING:
        with pytest.raises((RuntimeError, AttributeError)):
            loaded(name, source, "int8_wo", tmp_path / "out")
        assert "shares a module with" in why_not(source, "int8_wo")
        return
    assert not why_not(source, "int8_wo")
    theirs, ours = loaded(name, source, "int8_wo", tmp_path / "out")
    assert torch.equal(theirs, ours)


def test_servers_read_the_names_of_the_file_and_transformers_its_own(tmp_path: Path) -> None:
    source = saved("LlavaForConditionalGeneration", tmp_path)
    names = ignored(bridge.plan(source, "hf", "fp8_pc_pt", format="compressed-tensors"))
    head, eye = "language_model.lm_head", "encoder.layers.1.self_attn.k_proj"
    assert {head, "lm_head", f"vision_tower.{eye}", f"model.vision_tower.{eye}"} <= set(names)
    other = bridge.plan(source, "hf", "fp8_pc_pt")  # ModelOpt's lists have the names of the file alone
    assert "model.vision_tower" not in str(bridge.targets.hf._config_files(other, {}))


MIXED = """
base = "{base}"
[[rule]]
{where}
quant = "{quant}"
"""
EXPERTS, ATTENTION, ROUTER = 'roles = ["moe.*"]', 'roles = ["attn.*"]', 'roles = ["moe.router.weight"]'
FIRST = 'roles = ["moe.gate.weight", "moe.up.weight", "moe.down.weight"]\nlayers = [0]'


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    config = transformers.MixtralConfig(**TEXT | {"hidden_size": 128, "intermediate_size": 256}, num_local_experts=3)
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "where", "quant"),
    [("int8_wo", ATTENTION, "fp8_pc_pt"), ("int4_wo", ATTENTION, "int8_wo"), ("fp8_pc_pt", EXPERTS, "none")],
)
def test_experts_may_have_another_format_than_other_modules(
    tmp_path: Path, mixture: Path, base: str, where: str, quant: str
) -> None:
    """transformers takes the format of experts from the first group of config.json."""
    (recipe := tmp_path / "mixed.toml").write_text(MIXED.format(base=base, where=where, quant=quant))
    assert not why_not(mixture, str(recipe))
    theirs, ours = loaded("MixtralForCausalLM", mixture, recipe, tmp_path / "out")
    assert (theirs - ours).norm() / ours.norm() < (0.08 if "fp8" in base + quant else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "where", "quant", "why"),
    [
        ("int8_wo", EXPERTS, "none", "shares a module with quantized matrices there"),
        ("mxfp4_wo", EXPERTS, "none", "shares a module with quantized matrices there"),
        ("int8_wo", FIRST, "int4_wo", "has another format than other experts"),
        ("int8_wo", ROUTER, "int8_wo", "is a router"),
    ],
)
def test_experts_that_it_does_not_read_are_refused(
    tmp_path: Path, mixture: Path, base: str, where: str, quant: str, why: str
) -> None:
    (recipe := tmp_path / "mixed.toml").write_text(MIXED.format(base=base, where=where, quant=quant))
    assert why in why_not(mixture, str(recipe))
    with pytest.raises((RuntimeError, AttributeError, AssertionError)):  # at load, or by other numbers
        assert torch.equal(*loaded("MixtralForCausalLM", mixture, recipe, tmp_path / "out"))


def test_tiles_that_do_not_fill_a_matrix_are_refused(tmp_path: Path) -> None:
    """transformers 5.23 computes the size of a tile from the number of scales: 160 rows are two tiles of 80 there."""
    source = saved("LlavaForConditionalGeneration", tmp_path)
    assert "out = 160 is not a multiple of 128" in why_not(source, "fp8_block", "deepseek")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales = torch.ones(160, 128).to(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0]])
    rows = Fp8Dequantize(None)._dequantize_one(codes, scales)[:, 0]
    assert rows.eq(1).sum() == 80
