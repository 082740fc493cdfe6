"""A plan is complete, consistent, and made before any weight is read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import bridge
from bridge.api import plans as opening
from bridge.core.errors import PlanError, SchemeError, SourceError, UsageError
from bridge.core.mappings import mappings
from bridge.core.parsing.typed_json import typed
from bridge.planning.plan import Plan
from bridge.planning.target import Drafted
from bridge.targets import load_target
from bridge.targets.hf.steps import MIXED
from tests.models.sources_made import CONFIG, MadeSource, llama_shapes, made_llama

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"

SCHEMES_OF_STANDARD_ONNX = (
    "fp8",
    "fp8_block",
    "int8",
    "int8_sq",
    "int8_wo",
    "int4_wo",
    "int4_awq",
    "w4a8_awq",
    "nvfp4_wo",
)


def headers_only(**config: object) -> MadeSource:
    """A source whose every read fails."""
    source = made_llama()
    settled = {**CONFIG, **config}
    shapes = llama_shapes(settled)
    specs = {n: source.specs[n] for n in shapes if n in source.specs}
    return MadeSource({}, specs, settled, broken=frozenset(specs))


@pytest.mark.parametrize("quant", [None, *SCHEMES_OF_STANDARD_ONNX])
def test_planning_reads_no_weight(quant: str | None) -> None:
    assert bridge.plan(headers_only(), target="trt", quant=quant).outputs


@pytest.mark.parametrize("quant", SCHEMES_OF_STANDARD_ONNX)
def test_every_source_tensor_is_written_tied_or_dropped(quant: str) -> None:
    plan = bridge.plan(headers_only(), target="trt", quant=quant)
    assert {step.source for step in plan.steps if step.source} | set(plan.tied) | set(plan.dropped) == set(plan.sources)


@pytest.mark.parametrize("quant", SCHEMES_OF_STANDARD_ONNX)
def test_no_two_outputs_have_one_name(quant: str) -> None:
    names = [output.spec.name for output in bridge.plan(headers_only(), target="trt", quant=quant, kv="fp8").outputs]
    assert len(names) == len(set(names))


def test_linear_weights_are_planned_transposed_and_heads_are_kept_with_the_reason() -> None:
    plan = bridge.plan(headers_only(), target="trt", quant="fp8")
    shapes = {output.spec.name: (output.spec.shape, output.spec.dtype) for output in plan.outputs}
    assert shapes["model.layers.1.mlp.down_proj.weight"] == ((384, 128), "float8_e4m3fn")
    assert shapes["model.layers.1.mlp.down_proj.input_scale"] == ((), "float32")
    kept = {step.source: step.kept for step in plan.steps if step.kept}
    assert kept["lm_head.weight"] == "output head"
    assert "not a matrix multiplication" in kept["model.norm.weight"]


def test_a_plan_survives_json() -> None:
    plan = bridge.plan(headers_only(), target="trt", quant="w4a8_awq", kv="fp8")
    assert typed(Plan, json.loads(json.dumps(plan.to_dict()))) == plan


def test_digest_changes_with_what_is_written() -> None:
    plans = [bridge.plan(headers_only(), target="trt", quant=quant) for quant in ("fp8", "int8_wo", "fp8")]
    assert plans[0].digest == plans[2].digest != plans[1].digest


def test_digest_does_not_tell_where_the_source_lies() -> None:
    plan = bridge.plan(headers_only(), target="trt", quant="fp8")
    assert replace(plan, memory=plan.memory + 1).digest == plan.digest


def test_quantizing_a_tied_head_makes_it_a_tensor_of_its_own(tmp_path: Path) -> None:
    recipe = tmp_path / "head.toml"
    recipe.write_text('base = "int8_wo"\n[[rule]]\nmodules = ["lm_head"]\nquant = "int8_wo"\n')
    source = headers_only(tie_word_embeddings=True)
    plan = bridge.plan(source, target="trt", quant=recipe)
    shapes = {output.spec.name: output.spec for output in plan.outputs}
    assert shapes["lm_head.weight"].dtype == "int8"
    assert shapes["lm_head.weight"].shape == (128, 80)
    assert shapes["model.embed_tokens.weight"].dtype == "float32"
    assert "lm_head.weight" in bridge.plan(source, target="trt", quant="int8_wo").tied


@pytest.mark.parametrize(
    ("quant", "options", "says"),
    [
        ("fp8_pc_pt", {}, "not per token"),
        ("mxfp4_wo", {}, "blocks of 16"),
        ("nvfp4", {}, "custom_ops"),
        ("mxfp8", {}, "custom_ops"),
        ("nvfp4", {}, "or use nvfp4_wo$"),
        ("mxfp8", {}, "or use fp8$"),
    ],
)
def test_a_scheme_the_target_cannot_express_is_refused_with_the_remedy(quant: str, options: dict, says: str) -> None:
    with pytest.raises(SchemeError, match=says) as error:
        bridge.plan(headers_only(), target="trt", quant=quant, **options)
    assert "layers.{0..2}" in str(error.value)


@pytest.mark.parametrize("quant", ["nvfp4", "mxfp8"])
def test_custom_ops_make_dynamic_schemes_expressible(quant: str) -> None:
    assert bridge.plan(headers_only(), target="trt", quant=quant, custom_ops=True).quantized


def test_dimensions_that_do_not_divide_into_blocks_name_modules_and_remedy(tmp_path: Path) -> None:
    changed = {**CONFIG, "intermediate_size": 320}
    made = made_llama()
    shapes = llama_shapes(changed)
    specs = {n: type(s)(n, shapes[n], s.dtype) for n, s in made.specs.items()}
    source = MadeSource({}, specs, changed)
    recipe = tmp_path / "own.toml"
    recipe.write_text((mappings() / "schemes" / "int4_wo.toml").read_text())
    with pytest.raises(PlanError) as error:
        bridge.plan(source, target="trt", quant=str(recipe))
    text = str(error.value)
    assert "model.layers.{0..2}.mlp.down_proj: in = 320 does not divide into blocks of 128" in text
    assert "block = 64" in text
    notes = bridge.plan(source, target="trt", quant="int4_wo").notes  # by name: what divides is taken, and told
    assert any(note.startswith("INT4 blocks of 64 instead of 128: model.layers.0.mlp.down_proj") for note in notes)
    recipe.write_text('base = "int4_wo"\n[[rule]]\nroles = ["attn.o.weight"]\nquant = "none"\n')
    assert bridge.plan(source, target="trt", quant=str(recipe)).notes == notes  # rules name schemes, too


def test_unknown_words_are_told_the_known_ones() -> None:
    for call, says in (
        ({"target": "trtt"}, "nearest: trt"),
        ({"target": "trt", "quant": "fp9"}, "nearest: fp8"),
        ({"target": "trt", "opsett": 21}, "nearest: opset"),
        ({"target": "trt", "task": "causal"}, "nearest: causal-lm"),
        ({"target": "trt", "dtype": "fp61"}, "'fp61' is not a dtype of graphs; use fp32, fp16 or bf16"),
    ):
        with pytest.raises(UsageError, match=says):
            bridge.plan(headers_only(), **call)


@pytest.mark.parametrize("target", ["trt", "ort"])
def test_a_config_without_a_model_type_is_refused_before_its_graph_is_made(target: str) -> None:
    typed = """--config '{"model_type": "..."}'"""
    with pytest.raises(PlanError, match=f"config.json has no model_type.*{re.escape(typed)}"):
        bridge.plan(str(TINY), target=target, config={"model_type": None})


def test_a_checkpoint_without_a_model_type_is_said_to_load_nowhere(tmp_path: Path) -> None:
    """transformers finds the class by it, and so do the servers that open config.json with transformers."""
    report = bridge.convert(TINY, "hf", out=tmp_path / "out", config={"model_type": None}, verify=False)
    assert any(note.startswith("config.json has no model_type") for note in report.notes)
    assert {program.how for program in report.programs} == {"no"} and not report.command
    with pytest.raises(ValueError, match="model type"):
        transformers.AutoConfig.from_pretrained(tmp_path / "out")
    plain = bridge.convert(TINY, "hf", out=tmp_path / "plain", verify=False)
    assert {program.how for program in plain.programs} == {"run", "read"} and plain.command


@pytest.mark.parametrize("target", ["hf", "gguf", "trt"])
@pytest.mark.parametrize(
    ("given", "says"),
    [({"hiden_act": "gelu"}, "nearest: hidden_act"), ({"rms_norm_eps": "banana"}, "should be a number")],
)
def test_a_given_entry_that_is_none_is_refused(target: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        bridge.plan(TINY, target, config=given)


def test_half_graphs_need_an_opset_with_float32_scales() -> None:
    plan = bridge.plan(headers_only(), target="trt", quant="fp8", dtype="fp16")
    assert plan.options["opset"] == 23
    with pytest.raises(UsageError, match="to float16 with float32 scales; use 23 to 24"):
        bridge.plan(headers_only(), target="trt", quant="fp8", dtype="fp16", opset=21)


def test_kv_without_a_scheme_and_dynamic_kv_are_refused() -> None:
    with pytest.raises(UsageError, match="needs a scheme"):
        bridge.plan(headers_only(), target="trt", kv="fp8")
    with pytest.raises(PlanError, match="  KV cache: standard ONNX cannot compute scales at run time"):
        bridge.plan(headers_only(), target="trt", quant="fp8", kv="nvfp4")


def test_what_a_problem_is_about_is_told_whatever_its_text_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [
        ("", "config.json has rope_parameters = {'type': 'x'}, of such a checkpoint it would be None"),
        ("a: layers.0.weight", "is odd"),
        ("a: layers.1.weight", "is odd"),
        ("a: layers.1.weight", "is short: 3 of 4"),
    ]
    source, target = headers_only(), load_target("trt")
    structure = opening.structure_of(source)
    scheme = opening.scheme_of("fp8", None, structure, source)
    assert scheme
    draft = type(target).draft
    monkeypatch.setattr(type(target), "draft", lambda *given: replace(draft(*given), problems=[*problems]))
    assert opening.incompatibilities_of(source, structure, "trt", scheme) == problems
    with pytest.raises(PlanError) as refused:
        bridge.plan(source, target="trt", quant="fp8")
    assert [line.strip() for line in str(refused.value).splitlines()[1:]] == [
        problems[0][1], "a: layers.{0..1}.weight: is odd", "a: layers.1.weight: is short: 3 of 4",
    ]  # fmt: skip


@pytest.mark.parametrize("quant", [None, "fp8"])
def test_a_tensor_that_a_target_forgets_is_told(quant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, target = "model.layers.1.mlp.up_proj.weight", load_target("hf")
    draft = type(target).draft

    def forgetful(*given: Any) -> Drafted:
        drafted = draft(*given)
        return replace(drafted, steps=[step for step in drafted.steps if step.source != lost])

    monkeypatch.setattr(type(target), "draft", forgetful)
    with pytest.raises(PlanError, match=re.escape(lost)):
        bridge.plan(headers_only(), target="hf", quant=quant)


def test_a_matrix_kept_apart_from_those_it_is_fused_with_is_refused_unless_asked(tmp_path: Path) -> None:
    recipe = tmp_path / "apart.toml"
    recipe.write_text('base = "fp8_pc_pt"\n[[rule]]\nroles = ["attn.q.weight"]\nlayers = [1]\nquant = "none"\n')
    modules = ", ".join(f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
    with pytest.raises(PlanError, match="--allow-split") as told:
        bridge.plan(TINY, "hf", recipe)
    assert f"{modules}: {MIXED}" in str(told.value)
    (note,) = [note for note in bridge.plan(TINY, "hf", recipe, allow_split=True).notes if "the same input" in note]
    assert note == f"{modules}: {MIXED}"
    assert not any("the same input" in note for note in bridge.plan(TINY, "hf", "fp8_pc_pt").notes)


@pytest.mark.parametrize("verb", [bridge.plan, bridge.convert, bridge.calibrate, bridge.sensitivity])
def test_an_unknown_scheme_is_refused_before_the_model_is_opened_and_the_nearest_is_named(verb: Any) -> None:
    words = {"target": "hf"} if verb in (bridge.plan, bridge.convert) else {}
    with pytest.raises(UsageError) as caught:
        verb("no/such-model", quant="fp9", **words)
    assert str(caught.value).startswith("quant='fp9' is unknown; nearest: fp8; ") and len(str(caught.value)) < 150
