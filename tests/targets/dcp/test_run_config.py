"""run_config.yaml of odd configs: what they leave open is the class's default or asked for, and nothing breaks."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

import bridge
from bridge.core.errors import PlanError
from bridge.sources.configs.families import families
from bridge.targets.dcp.run_config import plain_rope
from tests.targets.dcp.test_megatron import ROPE, config_of
from tests.targets.dcp.test_torchtitan import made

FULL = {"rope_type": "default", "rope_theta": 1e6}
GEMMA3 = {"rope_theta": None, "rope_local_base_freq": None}


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "dynamic"])
@pytest.mark.parametrize("case", ["llama", "deepseek", "gemma3"])
def test_a_scaling_without_its_factor_is_refused(case: str, kind: str) -> None:
    config = config_of(case, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": kind})
    with pytest.raises(PlanError, match=f"rope_type '{kind}' needs its `factor`"):
        bridge.plan(made(config), "megatron")


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "trtllm"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_a_rope_that_is_no_object_is_refused(field: str, target: str) -> None:
    with pytest.raises(PlanError, match=f"{field} is 'linear'; it should be an object") as told:
        bridge.plan(made(config_of("llama", **{field: "linear"})), target)
    assert str(told.value).count("it should be") == 1


@pytest.mark.parametrize("name", [family.architecture for family in families() if family.theta])
def test_a_silent_config_has_the_base_that_transformers_gives_it(name: str) -> None:
    family = next(family for family in families() if family.architecture == name)
    theirs = getattr(transformers, name).config_class().rope_parameters
    assert plain_rope({}, family) == plain_rope({"rope_parameters": theirs}, family)


def test_gemma3_without_a_window_anywhere_is_refused() -> None:
    for rope in ({"full_attention": FULL}, {"full_attention": FULL, "sliding_attention": ROPE}):
        config = config_of("gemma3", **GEMMA3, rope_parameters=rope, layer_types=["full_attention"] * 3)
        with pytest.raises(PlanError, match=r"interleaved_attn_pattern = \[0, 1\]: must be"):
            bridge.plan(made(config), "megatron")


def test_gemma3_of_sliding_layers_alone_is_said_by_a_pattern_that_is_longer() -> None:
    bridge.plan(made(config_of("gemma3", layer_types=["sliding_attention"] * 3)), "megatron")
    with pytest.raises(PlanError, match=r"layer_types = .* would be read as"):
        bridge.plan(made(config_of("gemma3", layer_types=["sliding_attention", *["full_attention"] * 2])), "megatron")


@pytest.mark.parametrize("field", ["sliding_window", "query_pre_attn_scalar"])
def test_a_number_that_is_none_is_refused(field: str) -> None:
    with pytest.raises(PlanError, match=f"{field} = 'many' must be a"):
        bridge.plan(made(config_of("gemma3", **{field: "many"})), "megatron")


def test_a_refusal_names_the_entries_that_it_is_about_and_what_to_do() -> None:
    with pytest.raises(PlanError) as told:
        bridge.plan(made(config_of("llama", rms_norm_eps=-1)), "megatron")
    given = str(told.value).splitlines()[-1]
    assert (
        given
        == "  config.json: rms_norm_eps = -1; change it in config.json if that is meant, else take target hf or trt"
    )


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
@pytest.mark.parametrize("field", ["rope_interleave", "norm_topk_prob"])
def test_what_every_such_checkpoint_does_is_not_left_out(target: str, field: str) -> None:
    fine: dict[str, Any] = config_of("deepseek", **{field: True})
    bridge.plan(made(fine), target)
    with pytest.raises(PlanError, match=f"has {field} = False, of such a checkpoint it would be read as True"):
        bridge.plan(made(fine | {field: False}), target)
