"""Draft layers travel to target `hf`; elsewhere, or dropped, nothing promises them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import PlanError, UsageError
from bridge.planning.drafts import drafts_among, lacking, without_promise
from bridge.targets.hf.lint import lint

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
DEEPSEEK: dict[str, Any] = SIZES | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 16,
    "n_routed_experts": 3, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}  # fmt: skip
QWEN: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
MOE = {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2
}  # fmt: skip
# Modules of a draft layer beside those of a decoder layer, as the hub's checkpoints name them.
JOINING = {
    "deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"),
    "qwen": ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
}
SHAPES = {"eh_proj": (32, 64), "fc": (32, 64), "shared_head.head": (64, 32), "embed_tokens": (64, 32)}


def saved(at: Path, kind: str, config: Any, key: str) -> Tensors:
    """Save a model with one draft layer, a copy of its last layer; return the draft layer's tensors."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(at)
    tensors = load_file(at / "model.safetensors")
    last = config.num_hidden_layers - 1
    begin = f"model.layers.{last + 1}." if kind == "deepseek" else "mtp.layers.0."
    copied = {name: tensor.clone() for name, tensor in tensors.items() if f"layers.{last}." in name}
    drafts = {name.replace(f"model.layers.{last}.", begin): tensor for name, tensor in copied.items()}
    outside = begin if kind == "deepseek" else "mtp."
    drafts |= {f"{outside}{n}.weight": torch.randn(SHAPES.get(n, (32,))).bfloat16() for n in JOINING[kind]}
    write(at, tensors | drafts, json.loads((at / "config.json").read_text()) | {key: 1})
    return drafts


def write(at: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    at.mkdir(exist_ok=True)
    save_file(tensors, at / "model.safetensors", {"format": "pt"})
    (at / "config.json").write_text(json.dumps(config))


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())  # type: ignore[no-any-return]


def is_kept(output: Path, drafts: Tensors) -> bool:
    """Whether all tensors are there with the same bytes."""
    written = load_file(output / "model.safetensors")
    return all(
        written[name].dtype == tensor.dtype and torch.equal(written[name], tensor) for name, tensor in drafts.items()
    )


FAMILIES = {
    "deepseek_v3": lambda at: saved(at, "deepseek", transformers.DeepseekV3Config(**DEEPSEEK), KEY),
    "qwen3_next": lambda at: saved(at, "qwen", transformers.Qwen3NextConfig(**QWEN, **MOE), KEY),
    "qwen3_5": lambda at: saved(at, "qwen", transformers.Qwen3_5TextConfig(**QWEN), "mtp_num_hidden_layers"),
}
KEY = "num_nextn_predict_layers"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelled", ["modelopt", "compressed-tensors"])
def test_draft_layers_are_copied_and_listed_as_unquantized(family: str, spelled: str, tmp_path: Path) -> None:
    drafts = FAMILIES[family](tmp_path / "model")
    report = bridge.convert(
        tmp_path / "model", "hf", "fp8_pc_pt", tmp_path / "out", format=spelled, dtype="bf16", progress=False
    )
    assert report.passed and not lint(tmp_path / "out")
    assert is_kept(tmp_path / "out", {name: tensor.to(torch.bfloat16) for name, tensor in drafts.items()})
    config = config_of(tmp_path / "out")
    assert 1 in (config.get(KEY), config.get("mtp_num_hidden_layers"))
    ignored = config["quantization_config"]["ignore"]
    if spelled == "compressed-tensors":
        from compressed_tensors.utils.match import match_name

        matrices = {n.removesuffix(".weight") for n, t in drafts.items() if t.ndim == 2 and "embed_tokens" not in n}
        assert all(any(match_name(module, entry) for entry in ignored) for module in matrices)
    else:
        assert ("model.layers.2*" if family == "deepseek_v3" else "mtp*") in ignored


@pytest.mark.parametrize("part", ["eh_proj", "enorm", ".mlp.experts."])
def test_a_draft_layer_without_one_of_its_parts_is_refused(part: str, tmp_path: Path) -> None:
    FAMILIES["deepseek_v3"](tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not (".layers.2." in name and part in name)}
    save_file(kept, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(PlanError, match=re.escape(part.strip(".")) + r".* of draft layer 2"):
        bridge.plan(tmp_path / "model", "hf", "int8_wo")


def test_a_changed_draft_tensor_is_found(tmp_path: Path) -> None:
    FAMILIES["qwen3_5"](tmp_path / "model")
    bridge.convert(tmp_path / "model", "hf", "int8_wo", tmp_path / "out", progress=False, verify=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    written["mtp.fc.weight"][3, 5] += 1
    save_file(written, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    report = bridge.verify(tmp_path / "out", against=tmp_path / "model")
    assert not report.passed
    assert "mtp.fc.weight" in str(report)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_dropped_draft_layers_are_not_promised(family: str, tmp_path: Path) -> None:
    drafts = FAMILIES[family](tmp_path / "model")
    report = bridge.convert(
        tmp_path / "model", "hf", "fp8_pc_pt", tmp_path / "out", drafts="drop", progress=False, verify=False
    )
    assert not drafts.keys() & load_file(tmp_path / "out" / "model.safetensors").keys()
    config = config_of(tmp_path / "out")
    assert {config.get(KEY), config.get("mtp_num_hidden_layers")} == {0, None}
    assert any(f"1 draft layer, {len(drafts)} tensors, is left out" in note for note in report.notes)


def test_other_targets_say_that_draft_layers_are_left_out(tmp_path: Path) -> None:
    drafts = FAMILIES["deepseek_v3"](tmp_path / "model")
    notes = bridge.plan(tmp_path / "model", "trt", "fp8").notes
    assert f"1 draft layer, {len(drafts)} tensors, is left out: target trt has no place for it" in notes
    with pytest.raises(UsageError, match="target trt has no option 'drafts'"):
        bridge.plan(tmp_path / "model", "trt", "fp8", drafts="keep")


def test_half_a_set_of_draft_tensors_is_refused(tmp_path: Path) -> None:
    FAMILIES["deepseek_v3"](tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.layers.2.self_attn.o_proj.weight"]
    write(tmp_path / "model", tensors, config_of(tmp_path / "model"))
    with pytest.raises(PlanError, match=r"self_attn\.o_proj of draft layer 2(.|\n)*drafts='drop'"):
        bridge.plan(tmp_path / "model", "hf", "fp8_pc_pt")
    assert any("self_attn.o_proj of draft layer 2" in finding for finding in lint(tmp_path / "model"))
    bridge.plan(tmp_path / "model", "hf", "fp8_pc_pt", drafts="drop")


def test_a_promise_without_tensors_is_not_carried(tmp_path: Path) -> None:
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK))
    model.save_pretrained(tmp_path / "model")
    assert config_of(tmp_path / "model")[KEY] == 1  # the class's default
    assert any("1 draft layer" in finding for finding in lint(tmp_path / "model"))
    bridge.convert(tmp_path / "model", "hf", out=tmp_path / "out", progress=False, verify=False)
    assert config_of(tmp_path / "out")[KEY] == 0
    assert not lint(tmp_path / "out")


def test_codes_of_a_draft_layer_are_copied_with_their_scales(tmp_path: Path) -> None:
    """DeepSeek's own files: the draft layer is quantized as the others."""
    config = transformers.DeepseekV3Config(**DEEPSEEK | {"num_hidden_layers": 3})
    transformers.DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "three")
    options: dict[str, Any] = {"format": "deepseek", "progress": False, "verify": False}
    bridge.convert(tmp_path / "three", "hf", "fp8_block", tmp_path / "codes", **options)
    tensors, settings = load_file(tmp_path / "codes" / "model.safetensors"), config_of(tmp_path / "codes")
    settings["quantization_config"].pop("written_by")  # not DeepSeek's
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(32, 64).bfloat16()
    tensors |= {f"model.layers.2.{norm}.weight": torch.ones(32).bfloat16() for norm in ("enorm", "hnorm")}
    write(tmp_path / "two", tensors, settings | {"num_hidden_layers": 2, KEY: 1})
    bridge.convert(tmp_path / "two", "hf", out=tmp_path / "out", **options)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[n].view(torch.uint8), t.view(torch.uint8)) for n, t in tensors.items() if t.ndim)
    assert "model.layers.2.eh_proj" in config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]


def test_choices_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    FAMILIES["qwen3_5"](tmp_path / "model")
    for choice, message in (("quantize", "not built yet"), ("some", "use keep or drop")):
        with pytest.raises(UsageError, match=message):
            bridge.plan(tmp_path / "model", "hf", "int8_wo", drafts=choice)


def test_names_of_draft_layers_are_known() -> None:
    config = {"text_config": {"num_hidden_layers": 4, "mtp_num_hidden_layers": 2}}
    names = [
        "model.language_model.layers.3.mlp.up_proj.weight", "model.language_model.layers.4.eh_proj.weight",
        "mtp.layers.1.mlp.up_proj.weight", "mtp.fc.weight", "model.mtp_block.0.mlp.up_proj.weight",
        "model.visual.layers.9.mlp.up_proj.weight",
    ]  # fmt: skip
    assert drafts_among(names, config) == {
        names[1]: (4, "eh_proj.weight"), names[2]: (1, "mlp.up_proj.weight"), names[3]: (-1, "fc.weight"),
        names[4]: (0, "mlp.up_proj.weight"),
    }  # fmt: skip
    assert lacking(config, ["mtp.layers.0.norm.weight"]) == ["2 draft layers, and tensors of 1 are there"]
    assert without_promise(config, names) == config
    assert without_promise(config, ["lm_head.weight"])["text_config"]["mtp_num_hidden_layers"] == 0
