"""Draft layers travel to target `hf`; elsewhere, or dropped, nothing promises them."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import PlanError, SchemeError, UsageError
from bridge.core.values import Site, Structure, TensorSpec
from bridge.planning.drafts import _with_sites, asked_as, drafts_among, lacking, without_promise
from bridge.reporting.report import report_lines
from bridge.targets.hf.lint import lint
from tests.models.draft_families import DEEPSEEK, FAMILIES, KEY, QWEN, Tensors, write


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())  # type: ignore[no-any-return]


def is_kept(output: Path, drafts: Tensors) -> bool:
    """Whether all tensors are there with the same bytes."""
    written = load_file(output / "model.safetensors")
    return all(
        written[name].dtype == tensor.dtype and torch.equal(written[name], tensor) for name, tensor in drafts.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelled", ["modelopt", "compressed-tensors"])
def test_draft_layers_are_copied_and_listed_as_unquantized(family: str, spelled: str, tmp_path: Path) -> None:
    drafts = FAMILIES[family](tmp_path / "model")
    options: dict[str, Any] = {"format": spelled, "dtype": "bf16", "progress": False}
    report = bridge.convert(tmp_path / "model", "hf", "fp8_pc_pt", tmp_path / "out", **options)
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
        matrices = [n.removesuffix(".weight") for n, t in drafts.items() if t.ndim == 2]
        assert all(any(fnmatch(module, entry) for entry in ignored) for module in matrices)


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
    assert bridge.plan(tmp_path / "model", "trt", "fp8", drafts="drop").notes == notes


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
    tensors |= {
        f"model.layers.2.{norm}.weight": torch.ones(32).bfloat16() for norm in ("enorm", "hnorm", "shared_head.norm")
    }
    write(tmp_path / "two", tensors, settings | {"num_hidden_layers": 2, KEY: 1})
    bridge.convert(tmp_path / "two", "hf", out=tmp_path / "out", **options)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[n].view(torch.uint8), t.view(torch.uint8)) for n, t in tensors.items() if t.ndim)
    assert "model.layers.2.eh_proj" in config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]


def test_codes_of_a_draft_layer_are_dequantized_for_another_scheme(tmp_path: Path) -> None:
    FAMILIES["qwen3_5"](tmp_path / "model")
    options: dict[str, Any] = {"format": "deepseek", "drafts": "quantize", "progress": False, "verify": False}
    bridge.convert(tmp_path / "model", "hf", "fp8_block", tmp_path / "codes", dtype="bf16", **options)
    config = config_of(tmp_path / "codes")
    config["quantization_config"].pop("written_by")
    (tmp_path / "codes" / "config.json").write_text(json.dumps(config))
    report = bridge.convert(tmp_path / "codes", "hf", "int8_wo", tmp_path / "out", progress=False)
    assert report.passed
    codes, written = load_file(tmp_path / "codes/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    name = "mtp.layers.0.mlp.up_proj.weight"
    values = codes[name].float() * codes[f"{name}_scale_inv"]  # 48 x 32: one tile
    assert torch.equal(written[name], values.to(torch.bfloat16))
    assert "mtp*" in config_of(tmp_path / "out")["quantization_config"]["ignore"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelled", ["modelopt", "compressed-tensors"])
def test_quantized_draft_layers_have_torchs_codes_and_are_not_listed(family: str, spelled: str, tmp_path: Path) -> None:
    drafts = FAMILIES[family](tmp_path / "model")
    options: dict[str, Any] = {"format": spelled, "drafts": "quantize", "progress": False}
    report = bridge.convert(tmp_path / "model", "hf", "fp8_pc_pt", tmp_path / "out", **options)
    assert report.passed and not lint(tmp_path / "out")
    written, ignored = load_file(tmp_path / "out" / "model.safetensors"), config_of(tmp_path / "out")
    ignored = ignored["quantization_config"]["ignore"]
    quantized = {n.removesuffix(".weight"): t for n, t in drafts.items() if n.endswith("_proj.weight") and t.ndim == 2}
    joining = {m: quantized.pop(m) for m in [*quantized] if m.endswith(("eh_proj", "input_proj"))}
    assert len(quantized) >= 4  # q, k, v, o
    for module, weight in quantized.items():
        scale = weight.abs().amax(1) / 448
        codes = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        torch.testing.assert_close(written[f"{module}.weight_scale"].flatten(), scale, rtol=1e-6, atol=0)
        assert torch.equal(written[f"{module}.weight"].view(torch.uint8), codes.view(torch.uint8))
        assert not any(fnmatch(module, entry) for entry in ignored)
    for module in joining:
        assert torch.equal(written[f"{module}.weight"], drafts[f"{module}.weight"])
        assert any(fnmatch(module, entry) for entry in ignored)


def test_quantized_draft_layers_have_no_names_in_transformers() -> None:
    """Its classes leave them out; a main layer's name for one would make the main layer unquantized there."""
    main = Site("layers.1.attn.wq_a", "layers.1.attn.wq_a.weight", "out_in", live=("model.layers.1.self_attn.q_a",))
    drafts = {"mtp.0.attn.wq_a.weight": (0, "attn.wq_a.weight")}
    specs = {name: TensorSpec(name, (4, 8), "bfloat16") for name in (main.weight, *drafts)}
    made = _with_sites(Structure("any", (main,), ignored=dict.fromkeys(drafts, "")), specs, {}, drafts, True)
    assert [(site.module, site.live) for site in made.sites] == [(main.module, main.live), ("mtp.0.attn.wq_a", ())]


def test_matrices_of_a_draft_layer_that_are_held_as_one_share_a_scale(tmp_path: Path) -> None:
    FAMILIES["qwen3_5"](tmp_path / "model")
    options: dict[str, Any] = {"drafts": "quantize", "progress": False}
    bridge.convert(tmp_path / "model", "hf", "nvfp4_wo", tmp_path / "out", **options)
    written, model = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "model/model.safetensors")
    for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        modules = [f"mtp.layers.0.{block}.{name}_proj" for name in names]
        largest = max(model[f"{module}.weight"].abs().max() for module in modules)
        for module in modules:
            assert written[f"{module}.weight_scale_2"] == largest / (6 * 448)


def test_inputs_of_draft_layers_cannot_be_measured(tmp_path: Path) -> None:
    FAMILIES["qwen3_5"](tmp_path / "model")
    with pytest.raises(SchemeError, match=r"mtp\.layers\.0\.mlp(.|\n)*cannot be measured; use (.|\n)*drafts='keep'"):
        bridge.plan(tmp_path / "model", "hf", "fp8", drafts="quantize")


def test_rules_see_draft_layers_by_their_roles(tmp_path: Path) -> None:
    FAMILIES["glm4_moe"](tmp_path / "model")
    recipe = tmp_path / "own.toml"
    rules = [("draft.*", "fp8_pc_pt"), ("draft.moe.*", "none")]
    text = [f'[[rule]]\nroles = ["{role}"]\nquant = "{quant}"\noverride = true\n' for role, quant in rules]
    recipe.write_text('base = "fp8"\n' + "".join(text))
    plan = bridge.plan(tmp_path / "model", "hf", recipe, drafts="quantize")
    formats = {step.site.module: step.format for step in plan.steps if step.site}
    attention, main = formats["model.layers.2.self_attn.q_proj"], formats["model.layers.1.self_attn.q_proj"]
    assert attention and attention.input and attention.input.dynamic
    assert main and main.input and not main.input.dynamic
    assert formats["model.layers.2.mlp.shared_experts.up_proj"] is None
    assert formats["model.layers.2.mlp.gate"] is None  # the router, which no rule reaches
    assert formats["model.layers.1.mlp.shared_experts.up_proj"] is not None
    with pytest.raises(SchemeError, match=r"no draft layer is quantized here(.|\n)*drafts='quantize'"):
        bridge.plan(tmp_path / "model", "hf", recipe)
    recipe.write_text('base = "fp8_pc_pt"\n[[rule]]\nroles = ["draft.atn.*"]\nquant = "int8_wo"\n')
    with pytest.raises(SchemeError, match=r"matches no module(.|\n)*nearest: draft\.attn"):
        bridge.plan(tmp_path / "model", "hf", recipe, drafts="quantize")


@pytest.mark.parametrize(
    ("module", "asked"),
    [
        # the prefixes with which vLLM 0.33 and SGLang 0.5.23 build these modules (read in their sources)
        ("model.layers.2.self_attn.q_a_proj", ["model.decoder.self_attn.q_a_proj"]),
        ("model.layers.2.self_attn.q_a_proj", ["model.layers.2.self_attn.fused_qkv_a_proj"]),
        ("model.layers.2.shared_head.head", ["model.layers.2.head", "model.shared_head.head"]),
        ("model.layers.2.mlp.experts.1.up_proj", ["model.decoder.mlp.experts.1.up_proj"]),
        ("model.mtp_layers.0.mlp.up_proj", ["model.layers.2.mlp.up_proj", "model.layers.2.mlp.gate_up_proj"]),
        ("model.mtp_block.0.mlp.up_proj", ["model.layers.2.mlp.gate_up_proj", "model.mtp_block.mlp.gate_up_proj"]),
        ("mtp.layers.0.mlp.up_proj", ["mtp.layers.0.mlp.gate_up_proj"]),
    ],
)  # fmt: skip
def test_lists_have_the_names_that_programs_ask_for(module: str, asked: list[str]) -> None:
    assert {*asked} <= {*asked_as(module, 2 if ".2." in module else 0, layers=2)}


def test_choices_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    FAMILIES["qwen3_5"](tmp_path / "model")
    for choice, quant, message in (("quantise", "int8_wo", "nearest: quantize"), ("quantize", None, "a scheme")):
        with pytest.raises(UsageError, match=message):
            bridge.plan(tmp_path / "model", "hf", quant, drafts=choice)
    transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**QWEN)).save_pretrained(tmp_path / "none")
    with pytest.raises(PlanError, match="no draft layers to quantize"):
        bridge.plan(tmp_path / "none", "hf", "int8_wo", drafts="quantize")


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
    assert lacking(config, ["mtp.layers.0.norm.weight"]) == ["of 2 draft layers tensors of 1 are there"]
    dense = [f"model.layers.{n}.self_attn.o_proj.weight" for n in (0, 1)]
    dense += ["model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]  # Step 3.5
    dense += [f"model.layers.1.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")]
    of_experts = {"num_hidden_layers": 1, "num_mtp_modules": 1}
    assert lacking(of_experts, dense) == []
    assert lacking(of_experts, dense[:3] + dense[4:]) == ["mlp.experts.0.up_proj of draft layer 1"]
    assert without_promise(config, names) == config
    assert without_promise(config, ["lm_head.weight"])["text_config"]["mtp_num_hidden_layers"] == 0


def test_the_short_report_says_what_becomes_of_draft_layers(tmp_path: Path) -> None:
    FAMILIES["glm4_moe"](tmp_path / "model")
    tensors, config = load_file(tmp_path / "model" / "model.safetensors"), config_of(tmp_path / "model")
    write(tmp_path / "none", tensors, config | {KEY: 0})
    words = {"model": "copied as stored", "none": "left out: config.json promises none"}
    for name, text in words.items():
        options: dict[str, Any] = {"drafts": "keep", "progress": False, "verify": False}
        report = bridge.convert(tmp_path / name, "hf", "int8_wo", tmp_path / f"{name}-out", **options)
        assert any(str(line).startswith("drafts") and text in str(line) for line in report_lines(report))


def test_gguf_refuses_draft_layers_that_llama_cpp_has_no_names_for(tmp_path: Path) -> None:
    FAMILIES["deepseek_v3"](tmp_path / "model")
    with pytest.raises(PlanError, match=r"deepseek2 has no place for draft layers; use drafts='drop'"):
        bridge.plan(tmp_path / "model", "gguf", drafts="keep")
    for options, said in (({}, "target gguf has no place for it"), ({"drafts": "drop"}, "--drafts drop")):
        plan = bridge.plan(tmp_path / "model", "gguf", **options)
        assert any(said in note for note in plan.notes)
        assert not any("nextn" in output.spec.name for output in plan.outputs)
    with pytest.raises(UsageError, match=r"drafts 'kep' is unknown; .*nearest: keep"):
        bridge.plan(tmp_path / "model", "gguf", drafts="kep")


def test_a_program_that_reads_no_kept_draft_layer_is_given_the_remedy(tmp_path: Path) -> None:
    FAMILIES["glm4_moe"](tmp_path / "model")
    given: dict[str, Any] = {"quant": "fp8_pc_pt", "runtime": "sglang", "dtype": "bf16"}
    with pytest.raises(SchemeError, match=r"model\.layers\.2\.self_attn\.q_proj.*use drafts='quantize'"):
        bridge.plan(tmp_path / "model", "hf", **given)
    for choice in ("quantize", "drop"):
        assert bridge.plan(tmp_path / "model", "hf", drafts=choice, **given).program == "sglang"


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"mimo_v2_flash"}))
def test_no_tensor_of_a_draft_layer_may_lack(family: str, tmp_path: Path) -> None:
    """vLLM's draft models make a parameter of each; but the embedding and head of their own, which are the model's."""
    drafts = FAMILIES[family](tmp_path)
    names, config = [*load_file(tmp_path / "model.safetensors")], config_of(tmp_path)
    assert lacking(config, names) == []
    accepted = {name for name in drafts if not lacking(config, [other for other in names if other != name])}
    assert not {n for n in accepted if "embed_tokens" not in n and "shared_head.head" not in n}
    begin = min((name.rpartition(".layers.")[0] for name in drafts if ".layers." in name), key=len, default="none")
    layer = [name for name in names if not name.startswith(f"{begin}.layers.0.") or name not in drafts]
    assert begin in ("model", "none") or lacking(config, layer)


def test_half_a_draft_layer_that_no_config_promises_is_refused(tmp_path: Path) -> None:
    """Qwen3-Next's config has no such number."""
    drafts = FAMILIES["qwen3_next"](tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), config_of(tmp_path)
    del config[KEY], tensors["mtp.layers.0.mlp.experts.1.down_proj.weight"]
    write(tmp_path, tensors, config)
    with pytest.raises(PlanError, match=r"mlp\.experts\.1\.down_proj of draft layer 0(.|\n)*drafts='drop'"):
        bridge.plan(tmp_path, "hf", "fp8_pc_pt")
    assert any("mlp.experts.1.down_proj of draft layer 0" in finding for finding in lint(tmp_path))
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if name not in drafts}, config)
    assert bridge.plan(tmp_path, "hf", "fp8_pc_pt").notes == () and not lint(tmp_path)


def test_experts_of_a_draft_layer_may_be_stacked_where_the_models_are_not() -> None:
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 1, "mtp_num_hidden_layers": 1}
    joining = [f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")]
    stacked = [f"mlp.experts.{word}" for word in ("gate_up_proj", "down_proj")]
    single = [f"mlp.experts.{n}.{word}_proj.weight" for n in (0, 1) for word in ("gate", "up", "down")]
    for main, drafted, part in ((single, stacked, "experts.down_proj"), (stacked, single, "experts.0.up_proj")):
        names = [*joining, *(f"model.layers.0.{n}" for n in main), *(f"mtp.layers.0.{n}" for n in drafted)]
        assert lacking(config, names) == []
        lost = [n for n in names if not (n.startswith("mtp.") and part in n)]
        assert lacking(config, lost) == [f"mlp.{part} of draft layer 0"]


def test_layers_after_the_last_that_no_config_counts_are_left_out(tmp_path: Path) -> None:
    FAMILIES["glm4_moe"](tmp_path / "model")
    tensors, config = load_file(tmp_path / "model" / "model.safetensors"), config_of(tmp_path / "model")
    more = {name.replace("layers.2.", "layers.3."): t.clone() for name, t in tensors.items() if "layers.2." in name}
    write(tmp_path / "two", tensors | more, config)
    plan = bridge.plan(tmp_path / "two", "hf", "int8_wo", drafts="quantize")
    assert not [output for output in plan.outputs if "layers.3." in output.spec.name]
    assert f"1 draft layer, {len(more)} tensors, is left out: config.json promises 1" in str(plan.notes)
    write(tmp_path / "none", tensors, config | {KEY: 0})
    with pytest.raises(PlanError, match=r"promises none(.|\n)*set num_nextn_predict_layers"):
        bridge.plan(tmp_path / "none", "hf", "int8_wo", drafts="quantize")


def test_the_config_beside_a_gguf_file_promises_what_the_file_has(tmp_path: Path) -> None:
    FAMILIES["glm4_moe"](tmp_path / "model")
    for choice, count in (("keep", 1), ("drop", 0)):
        options: dict[str, Any] = {"drafts": choice, "progress": False, "verify": False}
        bridge.convert(tmp_path / "model", "gguf", out=tmp_path / choice, **options)
        assert config_of(tmp_path / choice)[KEY] == count
