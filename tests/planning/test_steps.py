"""The layout of a step follows from its site and format; a plan copies what its source holds quantized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge
from bridge.core.errors import BridgeError, SchemeError
from bridge.core.parsing.typed_json import typed
from bridge.planning.plan import Layout, Plan, Step
from bridge.sources.opening import open_source
from tests.models.sources_made import MadeSource, made_llama
from tests.tables import foreign
from tests.tables.checkpoints import headers
from tests.targets.dcp.test_torchtitan import LLAMA, OSS
from tests.verification.test_tensors import statistics

MODELS = ("examples/models/tiny-llama", "examples/models/tiny-gpt2")
TARGETS = ("hf", "trt", "tripy", "trtllm", "megatron", "torchtitan")
SCHEMES = (None, "fp8", "int8_wo", "int4_wo", "fp8_block", "nvfp4_wo")
EXTENTS = {"hidden_size": 192, "intermediate_size": 320, "num_local_experts": 5, "head_dim": 32}


def stacked() -> MadeSource:
    """The headers of a gpt-oss, whose experts are one tensor a layer; every read fails."""
    config = LLAMA | foreign.CONFIGS["gpt_oss"] | OSS | EXTENTS
    specs = headers(config)
    return MadeSource({}, specs, config, broken=frozenset(specs))


def plans() -> Iterator[Plan]:
    """Plans of the example models and of a gpt-oss; what a target refuses is left out."""
    for target in TARGETS:
        for quant in SCHEMES:
            for model in (*MODELS, stacked()):
                for kv in (None, "fp8") if quant else (None,):
                    try:
                        yield bridge.plan(model, target, quant, kv=kv)
                    except BridgeError:
                        continue


def expected(step: Step) -> Layout:
    """Written out from what each part of the program asked of a step before its plan decided."""
    if step.attention:
        return Layout.SCALES
    if step.format is None:
        return Layout.PLAIN
    assert step.site
    if step.site.layout in ("stack_in_out", "stack_out_in") and step.format.weight[0].per == "block":
        return Layout.EXPERTS
    stored_in_out = step.site.layout == "in_out" and not any(part.transposed for part in step.inputs)
    return Layout.WHOLE if step.transpose or stored_in_out else Layout.ROWS


@pytest.mark.slow
def test_every_layout_occurs_and_is_what_site_and_format_say() -> None:
    seen: dict[Layout, int] = dict.fromkeys(Layout, 0)
    for plan in plans():
        for step in plan.steps:
            assert step.layout is expected(step), (plan.target, plan.scheme, step.source)
            assert bool(step.inputs) == (step.layout is not Layout.SCALES)
            assert not plan.copies(step)
            seen[step.layout] += 1
    assert all(seen.values()), seen


def test_a_layout_is_not_part_of_a_plans_json_or_digest() -> None:
    plan = bridge.plan(MODELS[0], "trt", "int8_wo")
    digest = plan.digest
    assert {step.layout for step in plan.steps} == {Layout.PLAIN, Layout.WHOLE}
    assert plan.digest == digest
    assert not any("layout" in step for step in plan.to_dict()["steps"])
    again = typed(Plan, json.loads(json.dumps(plan.to_dict())))
    assert [step.layout for step in again.steps] == [step.layout for step in plan.steps]


def test_a_plan_copies_the_weights_and_scales_that_its_source_holds_quantized(tmp_path: Path) -> None:
    source = made_llama("bfloat16")
    source.config = {**source.config, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    bridge.convert(source, "hf", "fp8", tmp_path / "hf", kv="fp8", calib=statistics(source, False), verify=False)
    quantized = open_source(tmp_path / "hf").quantized
    assert quantized
    plan = bridge.plan(tmp_path / "hf", "hf")
    names = {site.weight for step in plan.steps if plan.copies(step) and (site := step.site)}
    assert names == {stored.spec.name for stored in quantized.tensors.stored.values()}
    modules = {step.attention for step in plan.steps if plan.copies(step) and step.layout is Layout.SCALES}
    assert modules == set(quantized.tensors.attention)
    assert modules and names
    assert any(step.layout is Layout.PLAIN for step in plan.steps)
    for quant in ("none", "int8_wo"):
        anew = bridge.plan(tmp_path / "hf", "hf", quant)
        assert not any(anew.copies(step) for step in anew.steps)


def test_no_recipe_has_the_name_of_a_copied_source(tmp_path: Path) -> None:
    recipe = tmp_path / "stored.toml"
    recipe.write_text('base = "int8_wo"\n[[rule]]\nlayers = [0]\nquant = "none"\n')
    with pytest.raises(SchemeError, match=r"stored\.toml: the name 'stored' means .* rename the recipe's file"):
        bridge.plan(MODELS[0], "hf", recipe)
