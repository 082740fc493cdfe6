"""Classes with a text model inside, by table: what a trace finds, logits from roles, bytes of outputs, refusals."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.numpy import load_file

import bridge
from bridge.cli.check import check_paths
from bridge.core.errors import BridgeError, PlanError, SchemeError, SourceError
from bridge.core.values import TensorSpec
from bridge.planning import structure as planning
from bridge.planning.trace import trace_structure
from bridge.sources.opening import open_source
from bridge.tables.architectures.by_table import structure_by_table
from bridge.tables.architectures.composite import text_model
from bridge.tables.architectures.match import match
from bridge.tables.dialects.layout import locate, role_shapes
from tests.tables.composites import COMPOSITES, HUB, as_on_the_hub, model_of, with_draft_layer, with_stacks
from tests.tables.gathered import gathered
from tests.tables.test_arch import TOLERANCE
from tests.tables.tiny import Tiny, reference, saved

Make = Callable[[str], Path]
TOWERS = r"(^|\.)(visual|vision_tower|multi_modal_projector|mm_projector)\."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    def make(case: str) -> Tiny:
        directory = tmp_path_factory.mktemp(case)
        tiny = saved(model_of(case), directory)
        if COMPOSITES[case][0] not in HUB:
            return tiny
        as_on_the_hub(directory)
        config = json.loads((directory / "config.json").read_text())
        return replace(tiny, config=config, tensors=load_file(directory / "model.safetensors"))

    return cache(make)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Checkpoints in bfloat16; `+stacks` and `+drafts` at the end of a name give the form."""

    def make(name: str) -> Path:
        case, _, form = name.partition("+")
        directory = tmp_path_factory.mktemp("saved")
        torch.manual_seed(0)
        model_of(case).to(torch.bfloat16).save_pretrained(directory)
        if COMPOSITES[case][0] in HUB:
            as_on_the_hub(directory)
        if "stacks" in form:
            with_stacks(directory, directory)
        if "drafts" in form:
            with_draft_layer(directory)
        return directory

    return cache(make)


# no trace of Kimi K2.5: transformers 5.23 cannot say how it would save the class
FORMS = [*(case for case in COMPOSITES if case != "kimi_k25"), "qwen3_5_moe_vl+stacks", "qwen3_5_vl+drafts"]


@pytest.mark.parametrize("name", FORMS)
def test_a_composite_table_says_what_a_trace_finds(checkpoint: Make, name: str) -> None:
    source = open_source(checkpoint(name))
    told = structure_by_table(source.config, source.specs)
    traced = trace_structure(source)
    assert told is not None
    for field in ("architecture", "attention", "tied", "embeddings", "joined", "states"):
        assert getattr(told, field) == getattr(traced, field), field
    assert told.groups and told.roles and not told.traced
    # inside this class the experts do not run on fake tensors: a trace knows neither groups nor what text reaches
    without: dict[str, Any] = {"shares": "", "roles": ()} | ({"unreached": ""} if traced.ungrouped else {})
    assert (traced.ungrouped != "") == (name == "mistral3-mistral4")
    assert traced.ungrouped or told.groups == traced.groups
    assert told.ignored.keys() == traced.ignored.keys()
    order = tuple(name for name in traced.order if name not in told.ignored)
    sites = [replace(site, **without) for site in traced.sites]
    assert told.order == order
    assert [replace(site, **without) for site in told.sites] == sites


@pytest.mark.parametrize("case", [case for case in COMPOSITES if "tied" not in case])
def test_roles_of_the_text_model_give_the_logits_of_the_whole_class(made: Callable[[str], Tiny], case: str) -> None:
    """Each token has one position in all three directions of the tower's rotary embedding, so it turns as text does."""
    tiny = made(case)
    text = text_model(tiny.config)
    assert text is not None
    rest = {name: spec for name, spec in tiny.specs.items() if not re.search(TOWERS, name)}
    matched = match(text.table, text.architecture, text.config, rest)
    assert not matched.unknown and not matched.missing
    found = locate(matched)
    shapes = role_shapes(text.table.roles.roles, {role for role, _, _ in found}, matched.names)
    roles = {
        at: torch.from_numpy(gathered(blocks, tiny.tensors).reshape(shapes[at[0]])).double()
        for at, blocks in found.items()
    }
    logits = reference(COMPOSITES[case][1], replace(tiny, config=text.config), roles)
    assert float((logits - tiny.outputs).abs().max() / tiny.outputs.abs().max()) < TOLERANCE


def _files(directory: Path, source: Path, quant: str, **options: Any) -> dict[str, bytes]:
    bridge.convert(source, "hf", quant=quant, out=directory, verify=False, overwrite=True, **options)
    reports = ("bridge.json", "report.json", "report.html", "README.md")  # they say how the plan was made
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.name not in reports}


@pytest.mark.parametrize(
    ("name", "quant", "options"),
    [
        ("mistral3-tied", "fp8_pc_pt", {}),
        ("gemma3_vl", "int8_wo", {}),
        ("mistral3-mistral4", "int8_wo", {}),
        ("qwen3_5_vl+drafts", "fp8_pc_pt", {}),
        ("qwen3_5_vl+drafts", "int8_wo", {"drafts": "quantize"}),
        ("qwen3_5_vl-tied", "fp8", {"calib": [torch.arange(1, 33)[None], torch.arange(9, 41)[None]], "kv": "fp8"}),
        ("qwen3_5_moe_vl", "int8_wo", {}),
        ("qwen3_5_moe_vl+stacks", "fp8_pc_pt", {"format": "compressed-tensors"}),
    ],
)
def test_an_output_by_table_has_the_bytes_of_one_by_trace(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, quant: str, options: dict[str, Any]
) -> None:
    by_table = _files(tmp_path / "out", checkpoint(name), quant, **options)
    monkeypatch.setattr(planning, "structure_by_table", lambda config, specs: None)
    by_trace = _files(tmp_path / "out", checkpoint(name), quant, **options)
    assert by_table == by_trace
    assert {"config.json", "model.safetensors"} <= by_table.keys()
    section = json.loads(by_table["config.json"])["quantization_config"]
    listed = section.get("ignore", section.get("modules_to_not_convert", ()))
    assert any(re.search("visual|vision_tower", module) for module in listed)


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_programs_that_serve_it_are_told_as_by_trace(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Their registries name the class: `read` evidence, as for every class that no run has shown."""

    def told() -> object:
        try:
            plan = bridge.plan(checkpoint("qwen3_5_vl+drafts"), "hf", quant="fp8_pc_pt", runtime=program)
        except SchemeError as error:
            return str(error)
        return plan.notes, [(step.site.module, step.format) for step in plan.steps if step.site]

    by_table = told()
    monkeypatch.setattr(planning, "structure_by_table", lambda config, specs: None)
    assert by_table == told()
    assert ("SGLang" in str(by_table)) == (program == "sglang")  # it makes in_proj_ba quantized


def test_a_plan_by_a_composite_table_loads_no_framework(checkpoint: Make) -> None:
    code = (
        "import sys, bridge; plan = bridge.plan(sys.argv[1], 'hf', quant='fp8_pc_pt'); "
        "print(plan.traced, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, checkpoint("qwen3_5_vl")], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False []"


@pytest.mark.parametrize("target", ["gguf", "megatron", "torchtitan", "trtllm", "trt", "ort"])
def test_other_targets_refuse_the_class_by_its_name(checkpoint: Make, target: str) -> None:
    with pytest.raises(BridgeError, match="Qwen3_5ForConditionalGeneration"):
        bridge.plan(checkpoint("qwen3_5_vl"), target)


def test_roles_of_the_text_model_can_be_named_in_recipes(checkpoint: Make, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('base = "fp8_pc_pt"\n[[rule]]\nroles = ["mlp.down.*"]\nquant = "none"\n')
    plan = bridge.plan(checkpoint("qwen3_5_vl"), "hf", quant=recipe)
    kept = {step.site.module for step in plan.steps if step.site and not step.format}
    assert {f"model.language_model.layers.{at}.mlp.down_proj" for at in range(3)} <= kept


# a class that transformers has by another name


@pytest.mark.parametrize("case", ["kimi_k25", "gemma3_vl"])
def test_names_of_the_hub_are_those_that_transformers_loads(checkpoint: Make, case: str) -> None:
    cls = getattr(transformers, COMPOSITES[case][0])
    _, told = cls.from_pretrained(checkpoint(case), output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_matrices_of_its_tower_are_those_of_transformers_and_are_kept(checkpoint: Make) -> None:
    source, model = open_source(checkpoint("kimi_k25")), model_of("kimi_k25").model
    told = structure_by_table(source.config, source.specs)
    assert told is not None
    kept = [site for site in told.sites if site.keep == "images"]
    theirs = [module for part in (model.vision_tower, model.mm_projector) for module in part.modules()]
    theirs = [module for module in theirs if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
    assert len(kept) == len(theirs) - 2 * 2  # in each of two blocks it has three matrices of one that is stored
    assert sorted(told.order) == sorted(source.specs)
    assert {site.module for site in kept} == {
        site.module for site in told.sites if not site.module.startswith("language_model.")
    }


def test_a_config_with_the_names_of_the_release_is_read(checkpoint: Make) -> None:
    source = open_source(checkpoint("kimi_k25"))
    tower = dict(source.config["vision_config"])
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size"):
        tower[f"vt_{name}"] = tower.pop(name)
    for axis in ("height", "width"):
        tower[f"init_pos_emb_{axis}"] = tower.pop(f"pos_emb_{axis}")
    text = source.config["text_config"] | {"model_type": "kimi_k2"}
    config = source.config | {"vision_config": tower, "text_config": text}
    assert structure_by_table(config, source.specs) == structure_by_table(source.config, source.specs)


def test_what_needs_no_model_is_written_and_what_does_is_refused(checkpoint: Make, tmp_path: Path) -> None:
    report = bridge.convert(checkpoint("kimi_k25"), "hf", quant="int8_wo", out=tmp_path / "out")
    assert report.passed
    before, after = (load_file(at / "model.safetensors") for at in (checkpoint("kimi_k25"), tmp_path / "out"))
    same = [name for name in before if re.search(TOWERS, name) or name.endswith("norm.weight")]
    assert len(same) > 40
    assert all(before[name].tobytes() == after[name].tobytes() for name in same)
    with pytest.raises(BridgeError, match="KimiK25ForConditionalGeneration"):
        bridge.convert(
            checkpoint("kimi_k25"), "hf", quant="fp8", out=tmp_path / "fp8", calib=[torch.ones(1, 8).long()] * 2
        )


# what does not fit


def _told(checkpoint: Make, change: Callable[[dict[str, TensorSpec], dict[str, Any]], object]) -> str:
    source = open_source(checkpoint("qwen3_5_vl"))
    specs, config = dict(source.specs), copy.deepcopy(dict(source.config))
    change(specs, config)
    with pytest.raises(PlanError) as told:
        structure_by_table(config, specs)
    return str(told.value)


QKV = "model.visual.blocks.{}.attn.qkv.weight"


def test_all_problems_of_tower_and_text_are_one_message(checkpoint: Make) -> None:
    def change(specs: dict[str, TensorSpec], config: dict[str, Any]) -> None:
        for name in (QKV.format(0), QKV.format(1), "model.language_model.norm.weight"):
            del specs[name]
        specs["model.visual.merger.norm.weight"] = TensorSpec("model.visual.merger.norm.weight", (7,), "bfloat16")
        specs["model.visual.deepstack.0.weight"] = TensorSpec("model.visual.deepstack.0.weight", (7,), "bfloat16")

    text = _told(checkpoint, change)
    assert text.startswith("Qwen3_5ForConditionalGeneration does not fit mappings/composites/qwen3_5_vl.toml and ")
    assert "mappings/arch/qwen3_5.toml: 4 problems" in text
    assert "missing  model.visual.blocks.{0..1}.attn.qkv.weight (96, 32)" in text
    assert "missing  model.language_model.norm.weight (48,)" in text
    assert "shape    model.visual.merger.norm.weight has (7,), the config gives (32,)" in text
    assert "unknown  model.visual.deepstack.0.weight" in text


def test_a_block_more_than_the_config_says_is_unknown(checkpoint: Make) -> None:
    text = _told(checkpoint, lambda specs, config: config["vision_config"].update(depth=1))
    assert "unknown  model.visual.blocks.1.attn.qkv.weight" in text


def test_a_million_missing_blocks_are_one_line(checkpoint: Make) -> None:
    text = _told(checkpoint, lambda specs, config: config["vision_config"].update(depth=1_000_000))
    assert "missing  model.visual.blocks.{2..10001}.attn.qkv.weight" in text
    assert len(text) < 20_000


@pytest.mark.parametrize("value", [True, -1, "27", 2_000_000])
def test_a_size_that_is_no_number_is_named_with_its_place(checkpoint: Make, value: object) -> None:
    text = _told(checkpoint, lambda specs, config: config["vision_config"].update(patch_size=value))
    assert text.startswith("vision_config.patch_size is ")
    assert text.endswith("; it should be a whole number up to 1,000,000")


def test_names_that_begin_otherwise_are_left_to_a_trace(checkpoint: Make) -> None:
    source = open_source(checkpoint("qwen3_5_vl"))
    specs = {name.removeprefix("model."): spec for name, spec in source.specs.items()}
    assert structure_by_table(source.config, specs) is None
    gemma = open_source(checkpoint("gemma3_vl"))
    specs = {name.replace(".vision_model.", "."): spec for name, spec in gemma.specs.items()}
    assert structure_by_table(gemma.config, gemma.specs) is not None and structure_by_table(gemma.config, specs) is None
    tower = gemma.config["vision_config"] | {"vision_use_head": True}
    assert structure_by_table(gemma.config | {"vision_config": tower}, gemma.specs) is None


@pytest.mark.parametrize("change", [{"patch_size": [4, 4]}, {"patch_size": None}])
def test_sizes_that_the_table_does_not_cover_are_left_to_a_trace(checkpoint: Make, change: dict[str, Any]) -> None:
    source = open_source(checkpoint("qwen3_5_vl"))
    config = source.config | {"vision_config": source.config["vision_config"] | change}
    assert structure_by_table(config, source.specs) is None


@pytest.mark.parametrize("text", [{"model_type": "llama"}, ["?"], {"model_type": ["?"]}, None])
def test_another_text_model_inside_is_left_to_a_trace(checkpoint: Make, text: object) -> None:
    assert text_model(open_source(checkpoint("qwen3_5_vl")).config | {"text_config": text}) is None


def test_values_that_no_text_model_takes_are_refused_when_it_is_opened(checkpoint: Make) -> None:
    config = copy.deepcopy(dict(open_source(checkpoint("qwen3_5_vl")).config))
    config["text_config"]["hidden_act"] = "silo"
    with pytest.raises(SourceError, match=r"text_config of .*hidden_act is 'silo'"):
        open_source(checkpoint("qwen3_5_vl"), config=config)


def test_the_doctor_finds_what_the_tower_lacks(checkpoint: Make, tmp_path: Path) -> None:
    config = json.loads((checkpoint("qwen3_5_vl") / "config.json").read_text())
    config["vision_config"]["depth"] = 3
    (tmp_path / "model.safetensors").symlink_to(checkpoint("qwen3_5_vl") / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    problems = [str(problem) for problem in check_paths([str(tmp_path)])]
    assert any("[tensors]" in text and "model.visual.blocks.2.attn.qkv.weight" in text for text in problems)
