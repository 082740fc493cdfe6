"""Experts that one tensor of the source holds, written as modules of each: target `hf`, every format of files.

`apart` cuts the stacks a second time, in torch, as llm-compressor's `ExpertMLPWithGate.copy_from_experts_module` does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import PlanError
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import HALF, verdict
from bridge.planning.memory import PIECE, SCRATCH, working_set
from bridge.reporting.loading import loading_line, loadings
from bridge.targets.hf.experts import MIXED_EXPERTS, OTHERS_UNQUANTIZED
from tests import once
from tests.covering import grid
from tests.models.export_families import tokens
from tests.oracles import export_oracle as oracle
from tests.oracles.compressed_oracle import qparams
from tests.sweep.build import FAMILIES
from tests.sweep.build import build as build_family
from tests.targets.hf import test_vllm_split_experts
from tests.targets.hf.test_hf_stacked import build, granite, llama4


def qwen3_vl() -> Any:
    """Of experts whose matrices are no squares."""
    fields = FAMILIES["Qwen3VLMoeForConditionalGeneration"]
    text = fields["text_config"] | {"moe_intermediate_size": 256}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "Qwen3VLMoeForConditionalGeneration", fields | {"text_config": text})
        return build_family("Qwen3VLMoeForConditionalGeneration")


MODELS = {
    "llama4": lambda: build(make=llama4),  # [experts, in, out]
    "granite": lambda: build(make=granite),  # [experts, out, in], under names of its own
    "qwen3-vl": qwen3_vl,
    "granite-hybrid": lambda: build_family("GraniteMoeHybridForCausalLM"),
}
PRESETS = ("W4A16", "FP8_DYNAMIC", "NVFP4A16")


def source(name: str) -> Path:
    return once.directory(f"stacks-{name}", lambda part: oracle.save(MODELS[name](), part))


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Module -> its weight [out, in], of all experts."""
    modules = {}
    for name, stack in tensors.items():
        if stack.ndim != 3 or "conv" in name:
            continue
        block = name.replace(".experts.", ".").replace(".weight", "").rpartition(".")[0]
        for e, matrix in enumerate(stack.transpose(1, 2) if "feed_forward" in name else stack):
            if "gate_up" in name or "input_linear" in name:
                halves = matrix.chunk(2)
                modules |= {
                    f"{block}.experts.{e}.{which}_proj": half
                    for which, half in zip(("gate", "up"), halves, strict=True)
                }
            else:
                modules[f"{block}.experts.{e}.down_proj"] = matrix
    return modules


@grid({"model": MODELS, "name": PRESETS}, first=[("llama4", "W4A16"), ("granite", "NVFP4A16")])
def test_experts_are_those_of_compressed_tensors(model: str, name: str, tmp_path: Path) -> None:
    bridge.convert(source(model), "hf", f"ct:{name}", tmp_path / "out", format="compressed-tensors", verify=False)
    ours, weights = (
        load_file(tmp_path / "out" / "model.safetensors"),
        apart(load_file(source(model) / "model.safetensors")),
    )
    preset = preset_name_to_scheme(name, ["Linear"])
    preset.format = infer_module_format(torch.nn.Linear, preset)
    compressor = BaseCompressor.get_value_from_registry(preset.format.value)
    assert len(weights) >= 9
    for module, weight in weights.items():
        block, projection = module.rpartition(".")[::2]
        pair = ("gate_proj", "up_proj") if projection != "down_proj" else ("down_proj",)
        above = max(weights[f"{block}.{one}"].abs().max() for one in pair)
        parts = {"weight": weight.contiguous(), **qparams(weight, preset, above)}
        for part, tensor in compressor.compress(parts, preset).items():
            assert torch.equal(ours[f"{module}.{part}"].view(torch.uint8), tensor.view(torch.uint8)), (module, part)
    assert not any(tensor.ndim == 3 and "conv" not in name for name, tensor in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "scheme", "format_"), [("llama4", "fp8_pc_pt", "compressed-tensors"), ("granite", "int4_awq", "modelopt")]
)
def test_the_report_measures_each_expert(model: str, scheme: str, format_: str, tmp_path: Path) -> None:
    calib = [*tokens(), tokens()[0]]
    report = bridge.convert(source(model), "hf", scheme, tmp_path / "out", calib=calib, format=format_)
    assert report.passed
    names = [row.name for row in report.parity.tensors if ".experts." in row.name]
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    one, other = names[:6:3]
    assert one != other and one.split(".experts.")[0] == other.split(".experts.")[0]
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()
    save_file(tensors, path, {"format": "pt"})
    again = bridge.verify(tmp_path / "out", against=source(model))
    assert [row.name for row in again.parity.tensors if not row.passed] == [one, other]


def test_a_step_holds_one_expert() -> None:
    """Twice, as read and as cut, and a piece that is coded; all experts of a layer would be five times that."""
    plan = bridge.plan(source("llama4"), "hf", "int4_wo", format="compressed-tensors")
    steps = [step for step in plan.quantized if step.inputs[0].expert is not None]
    for step in steps:
        expert = plan.sources[step.source].nbytes // plan.sources[step.source].shape[0]
        assert working_set(step, plan.sources) <= 2 * expert + PIECE * (1 + SCRATCH)
    assert len(steps) == 2 * 5 * 3


@pytest.mark.parametrize("format_", ["compressed-tensors", "awq", "deepseek", "modelopt"])
def test_experts_that_a_recipe_keeps_stay_in_one_tensor_and_are_listed(format_: str, tmp_path: Path) -> None:
    """Under the module that holds them, and in compressed-tensors by a pattern of what vLLM asks for."""
    recipe = tmp_path / "recipe.toml"
    scheme = {"deepseek": "fp8_block"}.get(format_, "int4_wo")
    recipe.write_text(f'base = "{scheme}"\n[[rule]]\nmodules = ["*.output_linear", "*.input_linear"]\nquant = "none"\n')
    bridge.convert(source("granite"), "hf", recipe, tmp_path / "out", format=format_, verify=False)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours["model.layers.1.block_sparse_moe.input_linear.weight"].ndim == 3
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    listed = section.get("ignore") or section.get("modules_to_not_convert")
    if format_ == "modelopt":
        assert any(pattern.startswith("model.layers.1.block_sparse_moe") for pattern in listed)
        return
    assert "model.layers.1.block_sparse_moe.experts" in listed
    assert ("re:^model\\.layers\\.1\\.block_sparse_moe\\.experts\\." in listed) == (format_ == "compressed-tensors")


def recipe(path: Path, base: str, quant: str, *modules: str) -> Path:
    path.write_text(f'base = "{base}"\n[[rule]]\nmodules = {json.dumps(modules)}\nquant = "{quant}"\n')
    return path


@pytest.mark.parametrize("format_", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("quant", ["none", "int8_wo"])
def test_stacks_of_a_layer_that_differ_are_refused(format_: str, quant: str, tmp_path: Path) -> None:
    """A program would find two formats in one module of experts, or both in one list of unquantized modules."""
    rules = recipe(tmp_path / "half.toml", "int4_wo", quant, "*.1.*.output_linear")
    for allow_split in (False, True):
        with pytest.raises(PlanError) as told:
            bridge.plan(source("granite"), "hf", rules, format=format_, allow_split=allow_split)
        stacks = ", ".join(f"model.layers.1.block_sparse_moe.{end}_linear" for end in ("input", "output"))
        assert f"{stacks}: {MIXED_EXPERTS}" in str(told.value)


@pytest.mark.parametrize(
    ("quant", "modules"),
    [("none", "*.1.*.w2"), ("none", "*.1.*.experts.2.*"), ("none", "*.1.*.w[13]"), ("fp8_pc_pt", "*.1.*.w2")],
)
def test_modules_of_experts_of_a_layer_that_differ_are_refused_unless_asked(
    quant: str, modules: str, tmp_path: Path
) -> None:
    rules = recipe(tmp_path / "half.toml", "int8_wo", quant, modules)
    mixtral = oracle.source("mixtral", "bf16")
    told = ", ".join(f"model.layers.1.block_sparse_moe.experts.{{0..2}}.{name}" for name in ("w1", "w3", "w2"))
    with pytest.raises(PlanError, match="--allow-split") as refused:
        bridge.plan(mixtral, "hf", rules, format="compressed-tensors")
    assert f"{told}: {MIXED_EXPERTS}" in str(refused.value)
    plan = bridge.plan(mixtral, "hf", rules, format="compressed-tensors", allow_split=True)
    assert any(note.startswith(f"{told}: {MIXED_EXPERTS}") for note in plan.notes)
    said = verdict(load_runtime("vllm"), plan)
    assert said.how == "no" and HALF in said.why_not and ".experts.{0..2}.w2" in said.why_not
    whole = bridge.plan(mixtral, "hf", "int8_wo", format="compressed-tensors")
    assert verdict(load_runtime("vllm"), whole).how == "run"


def test_what_no_program_loads_says_what_to_write_instead() -> None:
    """Of four programs that refuse ModelOpt's int4, one reads the experts in no format, which helps nobody."""
    line = loading_line(loadings(bridge.plan(source("granite"), "hf", "int4_wo", format="modelopt")))
    assert line == "no program as it is written; for vLLM: --for vllm"
    plan = bridge.plan(source("granite"), "hf", "int4_wo", format="compressed-tensors")
    assert loading_line(loadings(plan)).startswith(("SGLang", "vLLM"))


def test_pre_scales_without_a_place_are_written_in_modelopts_format_only() -> None:
    """As the pages say: Llama 4's shared expert reads what routed ones read, too, which ModelOpt leaves unquantized."""
    for format_ in ("compressed-tensors", "awq", "gptq"):
        with pytest.raises(PlanError, match=r"shared_expert\.gate_proj: no place for its pre-scales"):
            bridge.plan(source("llama4"), "hf", "int4_awq", format=format_)
    plan = bridge.plan(source("llama4"), "hf", "int4_awq", format="modelopt")
    assert not any(".experts." in step.matrix for step in plan.quantized)


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["compressed-tensors", "awq", "modelopt"])
def test_pre_scales_of_granite_have_a_place_in_every_format(format_: str, tmp_path: Path) -> None:
    data: Any = {"calib": [*tokens(), tokens()[0]], "format": format_, "progress": False}
    assert bridge.convert(source("granite"), "hf", "int4_awq", tmp_path / "out", **data).passed
    assert any(
        ".0.block_sparse_moe.experts.4.down_proj." in name for name in load_file(tmp_path / "out/model.safetensors")
    )


def test_a_stack_stays_unquantized_beside_one_that_cannot_be_quantized(tmp_path: Path) -> None:
    rules = recipe(tmp_path / "half.toml", "nvfp4_wo", "int8_wo", "*.1.*.down_proj")
    plan = bridge.plan(source("llama4"), "hf", rules, format="modelopt")
    assert f"model.layers.1.feed_forward.experts.gate_up_proj: stays unquantized: {OTHERS_UNQUANTIZED}" in plan.notes
    experts = [step.source for step in plan.quantized if "experts" in step.source]
    assert sorted(experts) == [f"model.layers.0.feed_forward.experts.{name}_proj" for name in ("down", "gate_up")]


@pytest.mark.parametrize("format_", ["compressed-tensors", "awq", "gptq", "modelopt"])
def test_only_the_layer_whose_experts_are_kept_is_listed(format_: str, tmp_path: Path) -> None:
    rules = recipe(tmp_path / "layer.toml", "int4_wo", "none", "*.1.*put_linear")
    bridge.convert(source("granite"), "hf", rules, tmp_path / "out", format=format_, verify=False, progress=False)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    listed = section.get("ignore") or section.get("modules_to_not_convert") or list(section["dynamic"])
    named = [name.replace("\\", "") for name in listed if "router" not in name and "block_sparse_moe" in name]
    assert named and all("model.layers.1.block_sparse_moe" in name for name in named)


def test_experts_of_other_names_stay_unquantized_and_the_plan_says_so() -> None:
    made = once.directory("stacks-jetmoe", lambda part: oracle.save(build_family("JetMoeForCausalLM"), part))
    plan = bridge.plan(made, "hf", "int8_wo")
    (note,) = [note for note in plan.notes if "input_linear" in note]
    assert "stays unquantized: experts of a kind that no program is known to read quantized" in note


def test_experts_whose_rows_alternate_stay_unquantized_and_the_plan_says_so(tmp_path: Path) -> None:
    """gpt-oss; vLLM passes over a module of each of its experts."""
    plan: Any = bridge.plan(oracle.save(build(), tmp_path / "source"), "hf", "int4_wo", format="compressed-tensors")
    assert any("experts" in note and "from one tensor only" in note for note in plan.notes)


@pytest.mark.parametrize("scheme", ["fp8_pc_pt", "nvfp4_wo", "int4_wo"])
def test_vllm_gets_the_output_that_quantizes_the_experts_too(scheme: str) -> None:
    """Its contract has ModelOpt's form for Llama 4 neither in one tensor nor with experts that stay as they are."""
    plan = bridge.plan(source("llama4"), "vllm", scheme)
    assert plan.options["format"] == "compressed-tensors"
    assert any(".experts.3.up_proj." in output.spec.name for step in plan.quantized for output in step.outputs)


@pytest.mark.parametrize(
    ("model", "format_", "how"),
    [("llama4", "modelopt", "in one tensor"), ("granite", "compressed-tensors", "as modules of each")],
)
def test_transformers_and_others_are_told_what_they_do_not_read(model: str, format_: str, how: str) -> None:
    plan = bridge.plan(source(model), "hf", "fp8", format=format_)
    names = ("sglang", "vllm") if format_ == "modelopt" else ("transformers",)
    for name in names:
        assert f"no run and no source shows that it reads experts of {plan.architecture} {how}" in (
            verdict(load_runtime(name), plan).why_not
        )


def test_architectures_that_a_run_shows_are_those_of_the_runs() -> None:
    runs = {name for c in load_runtime("vllm").contracts for name, known in c.split.items() if known.how == "run"}
    assert runs == set(test_vllm_split_experts.MODELS)


def test_experts_as_the_hub_has_qwen3_vl_give_the_same_files(tmp_path: Path) -> None:
    """[experts, in, out]; transformers 5.12 and on turns them while it loads, and saves [experts, out, in]."""
    made = source("qwen3-vl")
    shutil.copytree(made, tmp_path / "hub")
    tensors = load_file(made / "model.safetensors")
    turned = {name: t.transpose(1, 2).contiguous() if "experts" in name else t for name, t in tensors.items()}
    save_file(turned, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    for directory, out in ((made, "ours"), (tmp_path / "hub", "theirs")):
        options: Any = {"format": "compressed-tensors", "verify": False, "progress": False}
        bridge.convert(directory, "hf", "int4_wo", tmp_path / out, **options)
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama4", "granite"])
def test_what_is_written_is_a_source_too(model: str, tmp_path: Path) -> None:
    """As are checkpoints of llm-compressor, which have these names."""
    options: Any = {"format": "compressed-tensors", "progress": False}
    first = tmp_path / "first"
    bridge.convert(source(model), "hf", "int4_wo", first, verify=False, **options)
    assert bridge.convert(first, "hf", None, tmp_path / "copied", **options).passed
    one, other = (load_file(out / "model.safetensors") for out in (first, tmp_path / "copied"))
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    data = [*tokens(), tokens()[0]]
    assert bridge.convert(first, "hf", "fp8", tmp_path / "fp8", calib=data, **options).passed
    plain = loadings(bridge.plan(first, "hf", "none"))  # transformers has stacks, and would leave them random
    assert {one.how for one in plain} == {"no"}
    assert all("unquantized experts of" in one.where for one in plain if "expert" in one.where)
    assert {one.how for one in loadings(bridge.plan(source(model), "hf"))} != {"no"}
