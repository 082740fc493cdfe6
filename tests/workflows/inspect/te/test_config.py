"""Every row of the table of config.yaml: what is accepted, what is an error, and what the error says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bridge.core.errors import InspectError, UsageError
from bridge.workflows.inspect.layers import EXPERT, Layer
from bridge.workflows.inspect.routes import TensorStat
from bridge.workflows.inspect.te.features import Feature
from bridge.workflows.inspect.te.read import read_config
from bridge.workflows.inspect.te.resolve import load_routing
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
