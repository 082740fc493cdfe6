"""Outlines of plans: one module of each kind, and what contracts say of it is what they say of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import bridge
from bridge.core.errors import BridgeError
from bridge.core.values import main_dtype
from bridge.planning.contract_files import runtimes
from bridge.planning.contracts import misfits, verdict
from bridge.planning.outline import Outline, outline_of
from bridge.planning.plan import Layout, Plan
from bridge.sources.opening import open_source
from tests.models.decoder_families import build

FAMILIES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM")
# One expert of one layer, one layer's attention and one projection differ from the rest.
UNLIKE = """
scheme = "fp8_pc_pt"
[[rule]]
modules = ["*.layers.1.mlp.experts.2.*"]
quant = "int8_wo"
[[rule]]
modules = ["*.layers.0.self_attn.*"]
quant = "none"
[[rule]]
modules = ["*.layers.1.*.o_proj"]
quant = "int8_wo"
"""


@pytest.fixture(scope="module", params=FAMILIES)
def plans(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Plan]:
    """A family's plans with schemes and formats, as far as they can be made."""
    recipe = tmp_path_factory.mktemp("recipe") / "unlike.toml"
    recipe.write_text(UNLIKE)
    source = open_source(build(request.param))
    given: list[dict[str, Any]] = [
        {"quant": None}, {"quant": "fp8_pc_pt"}, {"quant": "int8_wo", "format": "modelopt"}, {"quant": "nvfp4_wo"},
        {"quant": "int4_wo", "group": 32, "format": "compressed-tensors"}, {"quant": recipe, "allow_split": True},
    ]  # fmt: skip
    return list(_made(source, given))


def _made(source: Any, given: list[dict[str, Any]]) -> Iterator[Plan]:
    for options in given:
        try:
            yield bridge.plan(source, "hf", **options)
        except BridgeError:
            continue


def test_contracts_say_the_same_of_an_outline_and_of_all_modules(plans: list[Plan]) -> None:
    assert len(plans) >= 2
    for plan in plans:
        plain = main_dtype(o.spec for step in plan.steps if step.layout is Layout.PLAIN for o in step.outputs)
        whole = Outline(plan, {}, plain)
        for runtime in runtimes():
            assert verdict(runtime, plan) == verdict(runtime, whole)
            for contract in runtime.contracts:
                assert sorted(misfits(runtime, contract, plan)) == sorted(misfits(runtime, contract, whole))


def test_an_outline_has_a_layer_of_each_kind_and_its_experts_of_each_kind() -> None:
    source = open_source(build("Qwen3MoeForCausalLM", num_hidden_layers=6, num_experts=8))
    plan = bridge.plan(source, "hf", "fp8_pc_pt")
    outline = outline_of(plan)
    experts = [name for name in outline.members if ".experts." in name]
    assert sorted(experts) == [f"model.layers.0.mlp.experts.0.{part}_proj" for part in ("down", "gate", "up")]
    assert outline.members[experts[0]][-1].startswith("model.layers.5.mlp.experts.7.")
    assert all(len(outline.members[name]) == 5 * 8 for name in experts)
    every = [module for members in outline.members.values() for module in members]
    sites = [step.site.module for step in plan.steps if step.site]
    assert sorted(every) == sorted(sites)


def test_the_work_of_contracts_does_not_grow_with_layers_and_experts() -> None:
    few, many = (
        outline_of(
            bridge.plan(build("Qwen3MoeForCausalLM", num_hidden_layers=layers, num_experts=experts), "hf", "fp8")
        )
        for layers, experts in ((2, 4), (6, 12))
    )
    assert len(few.plan.steps) == len(many.plan.steps)
