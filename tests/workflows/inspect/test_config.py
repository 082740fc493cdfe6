"""Every row of the table of config.yaml: what is accepted, what is an error, and what the error says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bridge.core.errors import InspectError, UsageError
from bridge.quant.schemes.load import load_scheme
from bridge.workflows.inspect.config.features import KINDS, Feature, OwnFeature
from bridge.workflows.inspect.config.layers import CONV, EXPERT, Layer
from bridge.workflows.inspect.config.read import InspectConfig, read_config
from bridge.workflows.inspect.config.resolve import generic_uses, load_routing, resolve
from bridge.workflows.inspect.config.stat_names import TensorStat
from tests.work import counted

ROLES = {"q_proj": "attn.q.weight", "down_proj": "mlp.down.weight"}
LAYERS = (
    *(
        Layer(f"model.layers.{n}.{part}", (role,), n)
        for n in range(4)
        for part, role in (("self_attn.q_proj", "attn.q.weight"), ("mlp.down_proj", "mlp.down.weight"))
    ),
    Layer("lm_head", ("head.weight",)),
)
STATS = {"enabled": True, "tensors": ["activation"], "stats": ["min"]}
FAKE = {"enabled": True, "gemms": ["fprop"], "tensors": ["activation", "weight"], "quant_format": "FP8E4M3"}


def section(layers: Any = None, **features: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "layers": layers or {"layer_types": ["all"]},
        "transformer_engine": features or {"LogTensorStats": STATS},
    }


def one(config: Mapping[str, Any], **options: Any) -> Feature:
    (feature,) = read_config(config, **options).sections[0].features
    return feature


def names(layers: Any) -> list[str]:
    """The layers that a section with this selector is about."""
    return [*load_routing({"s": section(layers)}, LAYERS).layers]


def refusal(config: Any, layers: tuple[Layer, ...] | None = None, **options: Any) -> str:
    with pytest.raises(InspectError) as caught:
        read_config(config, **options) if layers is None else load_routing(config, layers, **options)
    return str(caught.value)


# the file


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_config(tmp_path / "config.yaml")
    with pytest.raises(UsageError, match="only a model and an output may be at an address"):
        read_config("https://host/config.yaml")
    with pytest.raises(UsageError, match="a path, a dict or None, not list"):
        read_config([])  # type: ignore[arg-type]


def test_a_file_and_a_dict_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
first:
  enabled: True
  layers:
    layer_name_regex_pattern: .*(fc1|self_attn).*
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors_struct:
      - tensor: activation
        stats: [mean, max_blockwise_dynamic_range: {block_size: 16, dims: 2}]
        freq: 10
        start_step: 5
        end_step: 100
"""
    )
    entry = {
        "tensor": "activation", "freq": 10, "start_step": 5, "end_step": 100,
        "stats": ["mean", {"max_blockwise_dynamic_range": {"block_size": 16, "dims": 2}}],
    }  # fmt: skip
    log = {"LogTensorStats": {"enabled": True, "tensors_struct": [entry]}}
    same = {"first": section({"layer_name_regex_pattern": ".*(fc1|self_attn).*"}, **log)}
    of_file, of_dict = read_config(path), read_config(same)
    assert of_file.sections == of_dict.sections
    assert of_file.digest == of_dict.digest
    assert (of_file.where, of_dict.where) == (str(path), "config")
    (use,) = of_file.sections[0].features[0].uses
    assert use.options.stats == (TensorStat("mean"), TensorStat("max_blockwise_dynamic_range", 16, 2))


def test_a_key_given_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a:\n  enabled: True\na:\n  enabled: False\n")
    assert "has the key 'a' twice" in refusal(path)


def test_a_file_that_is_not_yaml_and_an_empty_one_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: [1")
    assert "cannot be read as YAML" in refusal(path)
    path.write_text("")
    assert "expected sections" in refusal(path)
    path.write_text("a: !!python/object/apply:os.system [ls]\n")
    assert str(path) in refusal(path)


@pytest.mark.parametrize("words", [{"a": {"enabled": False}}, {}, {"a": section(LogTensorStats={"enabled": False})}])
def test_nothing_enabled_is_an_error(words: dict[str, Any]) -> None:
    assert "no feature is enabled" in refusal(words)


def test_enabled_is_needed_and_says_true_or_false() -> None:
    words = section()
    del words["enabled"]
    assert "section 's': `enabled` is missing" in refusal({"s": words})
    log = {"tensors": ["weight"], "stats": ["min"]}
    assert "section 's': LogTensorStats: `enabled` is missing" in refusal({"s": section(LogTensorStats=log)})
    assert "enabled = 'yes'" in refusal({"s": {**section(), "enabled": "yes"}})


def test_what_is_not_enabled_is_not_looked_at() -> None:
    parked = {"enabled": False, "layers": 3, "anything": {}}
    config = {"parked": parked, "s": section(LogTensorStats=STATS, DumpTensors={"enabled": False, "wrong": 1})}
    read = read_config(config)
    assert [each.name for each in read.sections] == ["s"]
    assert [feature.name for feature in read.sections[0].features] == ["LogTensorStats"]


# unknown words


@pytest.mark.parametrize(
    ("config", "text", "nearest"),
    [
        ({"s": {**section(), "layer": {}}}, "section 's': 'layer' is unknown", "layers"),
        ({"s": {**section(), "LogFp8TensorStats": {}}}, "write it under transformer_engine", "LogTensorStats"),
        ({"s": section(LogTensorStat=STATS)}, "LogTensorStat: the feature is unknown", "LogTensorStats"),
        ({"s": section(LogTensorStats={**STATS, "frequ": 2})}, "option 'frequ' is unknown", "freq"),
        ({"s": section(LogTensorStats={**STATS, "stats": ["cur_max"]})}, "statistic 'cur_max' is unknown", "cur_amax"),
        ({"s": section(LogTensorStats={**STATS, "tensors": ["activ"]})}, "tensor 'activ' is unknown", "activation"),
        ({"s": section(FakeQuant={**FAKE, "gemms": ["prop"]})}, "gemm 'prop' is unknown", "fprop"),
        ({"s": section(FakeQuant={**FAKE, "quant_format": "FP8"})}, "quant_format 'FP8' is unknown", "FP8E"),
        ({"s": section(LogFp8TensorStats={**STATS, "stats": ["fp9_mse"]})}, "scheme 'fp9' is unknown", "fp8"),
        ({"s": section({"layer_type": "fc1"})}, "layers: 'layer_type' is unknown", "layer_types"),
        ({"s": section({"roles": ["attn.qq"]})}, "layers: no role is called 'attn.qq'", "attn.q"),
    ],
)
def test_an_unknown_word_is_an_error_with_the_nearest_known_one(
    config: dict[str, Any], text: str, nearest: str
) -> None:
    message = refusal(config)
    assert text in message
    assert "known: " in message
    assert f"nearest: {nearest}" in message


def test_all_mistakes_are_told_at_once_with_those_about_the_model() -> None:
    config = {
        "a": section({"layer_numbers": "3-1"}, LogTensorStats={**STATS, "tensors": ["wieght"], "freq": 0}),
        "b": section({"exact_layer_names": ["lm_haed"]}, FakeQuant={**FAKE, "gemms": ["fprp"]}),
        "c": {"layers": {"layer_types": ["fc1"]}, "bridge": {"LogTensorStats": {**STATS, "stats": ["men"]}}},
    }
    lines = refusal(config, LAYERS).split("\n")
    assert lines[0] == "config: 8 problems"
    for text in ("3-1", "wieght", "freq = 0", "lm_haed", "fprp", "`enabled` is missing", "'men'", "matches no layer"):
        assert sum(text in line for line in lines) == 1, text


# selecting layers


def test_a_regex_is_searched_and_the_other_keys_are_ignored() -> None:
    found = names({"layer_name_regex_pattern": r"\.2\.mlp", "layer_types": ["q_proj"], "layer_numbers": [0]})
    assert found == ["model.layers.2.mlp.down_proj"]
    assert "is not a regular expression" in refusal({"s": section({"layer_name_regex_pattern": "("})})


def test_types_are_parts_of_names_and_all_is_every_layer() -> None:
    assert names({"layer_types": ["lm_", "s.1.mlp"]}) == ["model.layers.1.mlp.down_proj", "lm_head"]
    assert len(names({"layer_types": "all"})) == len(names({"layer_types": ["all"]})) == len(LAYERS)


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        (3, [3]), ("1-3", [1, 2, 3]), ([3, "1-2"], [1, 2, 3]), ([0], [0]), (-1, [3]), ([0, "-2..-1"], [0, 2, 3]),
        ("-3--2", [1, 2]), (["0", 2], [0, 2]),
    ],
)  # fmt: skip
def test_numbers_are_accepted_in_all_forms(numbers: Any, found: list[int]) -> None:
    layers = names({"layer_numbers": numbers, "layer_types": "mlp"})
    assert layers == [f"model.layers.{n}.mlp.down_proj" for n in found]


def test_a_number_comes_from_the_role_else_from_the_name_and_without_one_nothing_matches() -> None:
    config = {"s": section({"layer_numbers": [0, "1-7"]})}
    layers = (
        Layer("stage.5.block.1.fc1", ("mlp.fc1.weight",), 7), Layer("x.fc1"), Layer("h.3.fc1", number=3),
    )  # fmt: skip
    assert [*load_routing(config, layers).layers] == ["stage.5.block.1.fc1", "h.3.fc1"]


def test_exact_names_select_and_one_that_the_model_lacks_is_an_error() -> None:
    assert names({"exact_layer_names": ["lm_head"]}) == ["lm_head"]
    assert names({"exact_layer_names": "lm_head"}) == ["lm_head"]
    message = refusal({"s": section({"exact_layer_names": ["lm_head", "model.layers.2.mlp.down"]})}, LAYERS)
    assert "section 's': exact_layer_names: the model has no layer 'model.layers.2.mlp.down'" in message
    assert "nearest: model.layers.2.mlp.down_proj" in message


def test_roles_and_modules_are_globs_that_are_anded() -> None:
    assert len(names({"roles": ["mlp.*"]})) == len(names({"roles": "mlp.down"})) == 4
    assert len(names({"roles": ["attn.q.weight", "head"]})) == 5
    assert names({"modules": ["model.layers.[01].*", "lm_*"], "roles": ["mlp.down", "head"]}) == [
        "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head",
    ]  # fmt: skip
    assert names({"roles": "mlp.down", "layer_numbers": -1}) == ["model.layers.3.mlp.down_proj"]
    assert names({"layer_name_regex_pattern": "s.0", "roles": "mlp.down"}) == ["model.layers.0.mlp.down_proj"]


def test_a_fused_layer_matches_by_any_of_its_roles() -> None:
    layers = (Layer("l.0.linear_qkv", ("attn.q.weight", "attn.k.weight", "attn.v.weight"), 0),)
    assert [*load_routing({"s": section({"roles": ["attn.k"]})}, layers).layers] == ["l.0.linear_qkv"]
    assert layers[0].role == "attn.q + attn.k + attn.v"


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        ({"layer_types": ["fc1"]}, "matches no layer; the model has lm_head, model.layers.{0..3}.mlp.down_proj, "),
        ({"layer_types": ["down_porj"]}, "nearest: model.layers.0.mlp.down_proj"),
        ({"roles": ["mlp.fc2"]}, "roles: the model has none of mlp.fc2; known: attn.q, head, mlp.down"),
        ({"layer_numbers": 17}, "section 's': matches no layer"),
        ({"modules": ["*.mlp.up_proj"]}, "nearest: model.layers.0.mlp.down_proj"),
    ],
)
def test_a_section_that_matches_no_layer_is_an_error_with_the_nearest_layers(selector: Any, text: str) -> None:
    assert text in refusal({"s": section(selector)}, LAYERS)


def test_the_nearest_of_very_many_layers_are_found_at_once() -> None:
    parts = ("gate_up_proj", "down_proj")
    layers = [
        Layer(f"l.{n}.mlp.experts.{e}.{part}", (), n, EXPERT) for n in range(60) for e in range(128) for part in parts
    ]
    wrong = section({"layer_types": ["down_porj"], "exact_layer_names": ["l.7.mlp.experts.9.down_prj"]})
    text, calls = counted(refusal, {"s": wrong}, tuple(layers))
    assert "nearest: l.7.mlp.experts.0.down_proj" in text
    assert calls < 20 * len(layers)


def test_layers_without_roles_are_said_to_have_none() -> None:
    assert "no table knows its layers; use modules" in refusal({"s": section({"roles": "mlp.*"})}, (Layer("x"),))


@pytest.mark.parametrize(
    "selector", [None, 3, {"layer_types": []}, {"layer_types": [1]}, {"layer_numbers": []}, {"layer_numbers": 1.5},
                 {"layer_numbers": ["a-b"]}, {"exact_layer_names": [""]}, {"layer_name_regex_pattern": ["a"]}],
)  # fmt: skip
def test_a_selector_of_another_form_is_an_error(selector: Any) -> None:
    assert "layers" in refusal({"s": {**section(), "layers": selector}})


# several sections


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
    assert resolve(read, LAYERS).routes == ()
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
    routing = resolve(read, LAYERS)
    for value, name in ((read, "sections"), (routing, "routes"), (routing.routes[0], "tensor"), (LAYERS[0], "name")):
        with pytest.raises(AttributeError):
            setattr(value, name, ())
