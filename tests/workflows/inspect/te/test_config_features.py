"""Features of config.yaml: how they add up, contradict, default and are routed."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.quant.schemes.load import load_scheme
from bridge.workflows.inspect.layers import CONV, EXPERT, Layer
from bridge.workflows.inspect.routes import TensorStat
from bridge.workflows.inspect.te.features import KINDS
from bridge.workflows.inspect.te.read import InspectConfig, read_config
from bridge.workflows.inspect.te.resolve import generic_uses, load_routing
from bridge.workflows.inspect.te.where import OwnFeature
from tests.workflows.inspect.te.test_config import FAKE, LAYERS, STATS, one, refusal, section


def test_features_of_two_sections_add_up() -> None:
    config = {
        "a": section({"layer_types": "mlp"}),
        "b": section({"layer_numbers": 0}, LogFp8TensorStats={**STATS, "stats": ["fp8_mse"]}),
    }
    routing = load_routing(config, LAYERS)
    both = routing.at("model.layers.0.mlp.down_proj", "activation")
    assert [(route.section, route.feature) for route in both] == [("a", "LogTensorStats"), ("b", "LogFp8TensorStats")]
    assert [route.section for route in routing.at("model.layers.0.self_attn.q_proj", "activation")] == ["b"]


def test_two_sections_that_change_the_same_tensor_of_the_same_gemm_are_an_error() -> None:
    other = {**FAKE, "quant_format": "FP8E5M2", "tensors": ["weight"]}
    config = {"a": section(FakeQuant=FAKE), "b": section({"layer_numbers": [1, 2]}, FakeQuant=other)}
    message = refusal(config, LAYERS)
    assert "sections 'a' (FakeQuant) and 'b' (FakeQuant) both change weight of fprop of " in message
    assert "model.layers.{1..2}.mlp.down_proj" in message
    for change in ({"gemms": ["dgrad"]}, {"tensors": ["output"]}):
        assert load_routing({**config, "b": section(FakeQuant={**other, **change})}, LAYERS)
    apart = {"a": section({"layer_numbers": 0}, FakeQuant=FAKE), "b": section({"layer_numbers": 1}, FakeQuant=other)}
    assert load_routing(apart, LAYERS)


def test_changes_at_other_steps_do_not_contradict_each_other() -> None:
    late = {**FAKE, "quant_format": "FP8E5M2", "start_step": 11}
    early = {**FAKE, "end_step": 10}
    assert load_routing({"a": section(FakeQuant=early), "b": section(FakeQuant=late)}, LAYERS)
    assert "both change" in refusal(
        {"a": section(FakeQuant=early), "b": section(FakeQuant={**late, "start_step": 9})}, LAYERS
    )


def test_two_features_of_a_section_may_not_change_the_same_tensor_either() -> None:
    scaling = {"enabled": True, "gemms": ["fprop"], "tensors": ["weight"]}
    message = refusal({"s": section(FakeQuant=FAKE, PerTensorScaling=scaling)}, session=load_scheme("fp8"))
    assert "section 's': FakeQuant and PerTensorScaling both change weight of fprop" in message


def test_both_namespaces_are_one() -> None:
    words = {**section(LogTensorStats=STATS), "bridge": {"DisableQuantizationLayer": {"enabled": True}}}
    assert [each.name for each in read_config({"s": words}).sections[0].features] == [
        "LogTensorStats", "DisableQuantizationLayer",
    ]  # fmt: skip
    message = refusal({"s": {**section(LogTensorStats=STATS), "bridge": {"LogTensorStats": STATS}}})
    assert "LogTensorStats is given under transformer_engine and bridge; write it once" in message


# tensors, GEMMs, features in the section itself


def test_a_text_is_a_list_of_one_tensor() -> None:
    feature = one({"s": section(LogTensorStats={**STATS, "tensors": "activation"})})
    assert [use.tensor for use in feature.uses] == ["activation"]


def test_a_tensor_that_a_gemm_does_not_take_is_passed_over() -> None:
    feature = one({"s": section(FakeQuant={**FAKE, "gemms": ["fprop", "dgrad"], "tensors": ["activation"]})})
    assert [(use.tensor, use.gemm) for use in feature.uses] == [("activation", "fprop"), ("", "dgrad")]
    assert feature.uses[1].options.quant_format == ""  # dgrad is not quantized; nothing of it is fake-quantized


@pytest.mark.parametrize("name", ["FakeQuant", "PerTensorScaling"])
def test_a_feature_whose_gemms_take_none_of_its_tensors_is_an_error(name: str) -> None:
    words = {**FAKE} if name == "FakeQuant" else {"enabled": True}
    config = {"s": section(**{name: {**words, "gemms": ["fprop"], "tensors": ["gradient"]}})}
    text = "none of its GEMMs takes a tensor that it names; fprop takes activation, weight, output"
    assert text in refusal(config, session=load_scheme("fp8"))


def test_features_in_the_section_answer_explicit_calls_only() -> None:
    words = {"enabled": True, "tensors": ["mine"], "stats": ["MIN", "l2_norm"], "start_end_list": [[2, 4]]}
    config = {"s": {"enabled": True, "layers": {"layer_types": ["no layer of the model"]}, "LogTensorStats": words}}
    read = read_config(config)
    assert load_routing(config, LAYERS).routes == ()
    (use,) = generic_uses(read, "here is no layer of the model", "mine")
    assert use.options.stats == (TensorStat("min"), TensorStat("l2_norm"))
    assert [step for step in range(9) if use.schedule.due(step)] == [2, 3]  # without the end
    assert generic_uses(read, "elsewhere", "mine") == generic_uses(read, "here is no layer of the model", "x") == []
    words["stats"] = ["cur_amax"]
    assert "statistic 'cur_amax' is unknown; known: l1_norm, " in refusal(config)


@pytest.mark.parametrize(
    "name", sorted({*KINDS} - {"LogFp8TensorStats", "LogNvfp4TensorStats", "LogQuantizedTensorStats"})
)
def test_every_feature_takes_a_schedule(name: str) -> None:
    words = {
        "LogTensorStats": STATS,
        "DumpTensors": {"tensors": ["weight"], "high_precision_tensor": True},
        "FakeQuant": FAKE,
        "PerTensorScaling": {"gemms": ["fprop"], "tensors": ["weight"]},
        "DisableQuantizationGEMM": {"gemms": ["fprop"]},
        "DisableFP8GEMM": {"gemms": "fprop"},
    }
    given = {"enabled": True, **words.get(name, {}), "freq": 3, "start_step": 4}
    feature = one({"s": section(**{name: given})}, session=load_scheme("fp8"))
    assert {use.schedule.next_due(0) for use in feature.uses} == {6}


# the default, and classes of the caller's


def test_the_default_config_logs_activation_and_weight_of_every_layer() -> None:
    routing = load_routing(None, LAYERS)
    assert [*routing.layers] == [layer.name for layer in LAYERS]
    ranges, losses = (routing.at("lm_head", "weight")[n] for n in (0, 1))
    assert [stat.name for stat in ranges.options.stats] == ["cur_amax", "p99.9", "outlier_ratio", "nan%", "histogram"]
    labels = [stat.label() for stat in losses.options.stats]
    assert labels[:3] == ["fp8_sqnr", "fp8_cosine", "fp8_underflows%"]
    assert [label.split("_")[0] for label in labels[::3]] == ["fp8", "int8", "nvfp4", "mxfp8"]
    assert {route.tensor for route in routing.routes} == {"activation", "weight"}


def test_the_default_config_takes_the_scheme_of_the_session() -> None:
    losses = load_routing(None, LAYERS, session=load_scheme("int8_sq")).at("lm_head", "weight")[1]
    assert [stat.label() for stat in losses.options.stats] == ["sqnr", "cosine", "underflows%"]


def test_own_features_are_declared_and_take_any_options() -> None:
    calls = frozenset({"inspect_tensor_enabled", "inspect_tensor"})
    words = {"enabled": True, "tensors": ["weight"], "percentile": [99, {"of": "x"}]}
    config = {"s": section(Mine=words)}
    assert "Mine: the feature is unknown" in refusal(config)
    (route,) = load_routing(config, LAYERS[:1], own=[OwnFeature("Mine", calls)]).routes
    assert (route.tensor, route.gemm, route.own) == ("weight", "", True)
    assert route.options.config() == {"percentile": [99, {"of": "x"}], "tensor": "weight"}
    route.options.config()["percentile"].append(1)
    assert route.options.config()["percentile"] == [99, {"of": "x"}]
    words["percentile"] = []
    assert route.options.config()["percentile"] == [99, {"of": "x"}]
    with pytest.raises(TypeError):
        route.options.given["percentile"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("calls", "words", "places"),
    [
        ({"modify_tensor"}, {"gemms": ["wgrad"], "tensors": ["activation", "weight"]}, {("activation", "wgrad")}),
        ({"fp8_gemm_enabled"}, {"gemms": ["wgrad", "fprop"]}, {("", "wgrad"), ("", "fprop")}),
        ({"fp8_gemm_enabled"}, {"mine": 1}, {("", "")}),
        (
            {"fp8_gemm_enabled", "modify_tensor", "inspect_tensor"},
            {"gemms": ["fprop"], "tensors": ["weight"]},
            {("weight", "fprop"), ("", "fprop"), ("weight", "")},
        ),
    ],
)
def test_own_features_are_asked_by_what_their_calls_are_about(
    calls: set[str], words: dict[str, Any], places: set[tuple[str, str]]
) -> None:
    own = [OwnFeature("Mine", frozenset(calls))]
    feature = one({"s": section(Mine={"enabled": True, **words})}, own=own)
    assert {(use.tensor, use.gemm) for use in feature.uses} == places
    assert "gemm 'x' is unknown" in refusal({"s": section(Mine={"enabled": True, **words, "gemms": ["x"]})}, own=own)


# the routing


def test_a_routing_tells_what_is_due_when() -> None:
    config = {
        "a": section({"layer_types": "mlp"}, LogTensorStats={**STATS, "freq": 4}),
        "b": section(
            {"exact_layer_names": "lm_head"}, DisableFP8Layer={"enabled": True, "start_step": 3, "end_step": 3}
        ),
    }
    routing = load_routing(config, LAYERS)
    assert [len(routing.due(step)) for step in range(6)] == [4, 0, 0, 1, 4, 0]
    assert [routing.next_due(step) for step in (-1, 0, 3, 4)] == [0, 3, 4, 8]
    assert [*routing.due(3)] == ["lm_head"]
    assert [route.gemm for route in routing.due(3)["lm_head"]] == ["fprop", "dgrad", "wgrad"]
    assert routing.at("lm_head", gemm="dgrad")[0].feature == "DisableQuantizationLayer"
    assert routing.at("lm_head", "weight") == routing.at("absent", "weight") == ()


def test_routes_are_in_the_order_of_the_model() -> None:
    config = {"a": section({"exact_layer_names": "lm_head"}), "b": section({"layer_numbers": 0}, DumpTensors={
        "enabled": True, "tensors": "output", "high_precision_tensor": True})}  # fmt: skip
    assert [*load_routing(config, LAYERS).layers] == [LAYERS[0].name, LAYERS[1].name, "lm_head"]


def test_convolutions_are_logged_but_not_changed() -> None:
    layers = (Layer("conv1", kind=CONV, fixed="a convolution"), Layer("fc"))
    assert len(load_routing({"s": section()}, layers).routes) == 2
    assert "FakeQuant cannot change a convolution: conv1; name other layers" in refusal(
        {"s": section(FakeQuant=FAKE)}, layers
    )
    assert load_routing({"s": section({"layer_types": "fc"}, FakeQuant=FAKE)}, layers)


def test_experts_are_layers() -> None:
    layers = tuple(
        Layer(f"l.0.experts.{e}.w1", ("moe.up.weight",), 0, EXPERT, "l.0.experts", "w1", e) for e in range(3)
    )
    assert len(load_routing({"s": section({"modules": "*.experts.[12].*"})}, layers).layers) == 2


def test_nothing_of_a_routing_can_be_changed() -> None:
    read: InspectConfig = read_config(None)
    routing = load_routing(None, LAYERS)
    for value, name in ((read, "sections"), (routing, "routes"), (routing.routes[0], "tensor"), (LAYERS[0], "name")):
        with pytest.raises(AttributeError):
            setattr(value, name, ())
