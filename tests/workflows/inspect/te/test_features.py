"""Features: their options, names of statistics, structs inside structs."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.workflows.inspect.routes import ALIASES, QUANT_STATS, QuantStat, TensorStat
from bridge.workflows.inspect.statistics.quantization import FORMATS, RECIPES
from bridge.workflows.inspect.te.features import KINDS, Feature, parse_feature
from bridge.workflows.inspect.te.stat_names import TENSOR_STATS, parse_quant_stats, parse_tensor_stats
from bridge.workflows.inspect.te.where import Known, Where


def parse(name: str, quant: str = "", **words: Any) -> Feature:
    where = Where(name, Known(load_scheme(quant) if quant else None))
    feature = parse_feature(name, {"enabled": True, **words}, where)
    assert feature is not None, where.problems.lines()
    assert not where.problems.lines()
    return feature


def problem(name: str, quant: str = "", **words: Any) -> str:
    where = Where(name, Known(load_scheme(quant) if quant else None))
    assert parse_feature(name, {"enabled": True, **words}, where) is None
    return "\n".join(where.problems.lines())


def places(feature: Feature) -> list[tuple[str, str]]:
    return [(use.tensor, use.gemm) for use in feature.uses]


# statistics of a tensor


@pytest.mark.parametrize("stat", [*TENSOR_STATS, "p50", "p99", "p99.9", "p99.99"])
def test_every_statistic_of_a_tensor_is_known(stat: str) -> None:
    (use,) = parse("LogTensorStats", tensors=["weight"], stats=[stat]).uses
    assert [one.name for one in use.options.stats] == [stat]


@pytest.mark.parametrize("stat", ["p49", "p100", "p99.999", "p5", "MIN", "variance", 3, {"min": 1}, {}])
def test_another_statistic_is_an_error(stat: Any) -> None:
    assert "is unknown; known: amin, cur_amax, " in problem("LogTensorStats", tensors=["weight"], stats=[stat])


def test_the_blockwise_range_has_a_size_and_dims() -> None:
    where = Where("")
    words = [{"max_blockwise_dynamic_range": given} for given in ({}, {"block_size": 8}, {"dims": 2, "block_size": 16})]
    stats = parse_tensor_stats([*words, "max_blockwise_dynamic_range"], where)
    assert not where.problems.lines()
    assert [(stat.block_size, stat.dims) for stat in stats] == [(32, 1), (8, 1), (16, 2)]  # the text is the first again
    assert stats[2].label("gradient") == "max_blockwise_dynamic_range_block_size_16_dims_2"
    assert stats[2].label("activation") == stats[2].label("gradient") + "_max_over_orientations"
    assert TensorStat("min").label("weight") == "min"


@pytest.mark.parametrize("words", [3, {"block_size": 0}, {"dims": 3}, {"dims": True}, {"block_size": "8"}, {"size": 8}])
def test_a_wrong_block_is_an_error(words: Any) -> None:
    text = problem("LogTensorStats", tensors=["weight"], stats=[{"max_blockwise_dynamic_range": words}])
    assert "max_blockwise_dynamic_range" in text
    assert "block_size" in text


@pytest.mark.parametrize("stats", [None, [], {}, 4])
def test_statistics_are_needed(stats: Any) -> None:
    assert "stats" in problem("LogTensorStats", tensors=["weight"], stats=stats)
    assert "stats is missing; expected a list" in problem("LogTensorStats", tensors=["weight"])


# statistics of quantization


@pytest.mark.parametrize("stat", [*QUANT_STATS, *ALIASES])
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_mse", "fp8_block", "fp8_block_scaling", "fp8_current_scaling"])
def test_a_statistic_of_quantization_has_its_scheme_before_it(scheme: str, stat: str) -> None:
    where = Where("")
    (parsed,) = parse_quant_stats([f"{scheme}_{stat}"], where)
    assert parsed == QuantStat(ALIASES.get(stat, stat), scheme, False, stat)
    assert parsed.label() == f"{scheme}_{stat}"


@pytest.mark.parametrize("scheme", [*scheme_names(), *RECIPES])
def test_every_scheme_may_be_asked_about(scheme: str) -> None:
    before = parse("LogQuantizedTensorStats", tensors="weight", stats=[f"{scheme}_sqnr"])
    beside = parse("LogQuantizedTensorStats", tensors="weight", stats="sqnr", scheme=scheme)
    assert [use.options.stats for use in before.uses] == [use.options.stats for use in beside.uses]


def test_without_a_scheme_it_is_the_sessions_or_an_error() -> None:
    (use,) = parse("LogFp8TensorStats", "mxfp8", tensors="weight", stats=["mse", "scale_inv_min_columnwise"]).uses
    assert [stat.label() for stat in use.options.stats] == ["mse", "scale_inv_min_columnwise"]
    text = problem("LogFp8TensorStats", tensors="weight", stats=["mse"])
    assert "statistic 'mse' names no scheme, and the session quantizes nothing; write fp8_mse, or pass quant=" in text


def test_nvfp4s_own_feature_means_nvfp4() -> None:
    (use,) = parse("LogNvfp4TensorStats", "int8", tensors="weight", stats=["underflows%", "mse"]).uses
    assert [stat.label() for stat in use.options.stats] == ["nvfp4_underflows%", "nvfp4_mse"]


@pytest.mark.parametrize(
    ("scheme", "turns"),
    [
        ("mxfp8", True), ("fp8_block_scaling", True), ("nvfp4", True), ("int8_wo", True), ("fp8_pc_pt", True),
        ("fp8", False), ("fp8_block", False), ("fp8_current_scaling", False), ("fp8_delayed_scaling", False),
    ],
)  # fmt: skip
def test_columnwise_is_for_blocks_that_are_not_square(scheme: str, turns: bool) -> None:
    where = Where("")
    stats = parse_quant_stats([f"{scheme}_mse_columnwise"], where)
    assert bool(stats) == turns
    assert ("the transpose has the same values" in "".join(where.problems.lines())) == (not turns)


@pytest.mark.parametrize(
    ("stat", "nearest"),
    [
        ("underflows", "underflows%"),
        ("mxfp8_scale_inv", "scale_min"),
        ("delayed_scaling_mse", "fp8_delayed_scaling"),
    ],
)
def test_spellings_of_the_documentation_that_are_wrong_are_told(stat: str, nearest: str) -> None:
    assert f"nearest: {nearest}" in problem("LogFp8TensorStats", "fp8", tensors="weight", stats=[stat])


# tensors and GEMMs


@pytest.mark.parametrize("name", ["LogFp8TensorStats", "LogNvfp4TensorStats"])
def test_outputs_of_gemms_are_not_quantized_in_transformer_engine(name: str) -> None:
    text = problem(name, tensors=["output"], stats=["fp8_mse"])
    assert "tensor 'output' is unknown here; known: activation, gradient, weight" in text
    parse("LogQuantizedTensorStats", tensors=["output", "wgrad", "dgrad"], stats=["fp8_mse"])


def test_structs_are_over_the_outer_options() -> None:
    feature = parse(
        "LogTensorStats", stats=["max"], freq=2, end_step=9,
        tensors_struct=[{"tensor": "activation", "stats": ["min"], "freq": 3}, {"tensor": "wgrad", "start_step": 4}],
    )  # fmt: skip
    first, second = feature.uses
    assert (first.options.stats, second.options.stats) == ((TensorStat("min"),), (TensorStat("max"),))
    assert [use.schedule.next_due(0) for use in feature.uses] == [3, 4]
    assert [use.schedule.next_due(9) for use in feature.uses] == [None, None]


def test_tensors_are_inside_gemms_if_both_are_structs() -> None:
    feature = parse(
        "FakeQuant",
        quant_format="FP8E4M3",
        gemms_struct=[
            {"gemm": "fprop", "tensors": ["activation", "weight"]},
            {"gemm": "wgrad", "tensors_struct": [{"tensor": "gradient", "quant_format": "FP8E5M2"}], "freq": 2},
        ],
    )
    assert places(feature) == [("activation", "fprop"), ("weight", "fprop"), ("gradient", "wgrad")]
    assert [use.options.quant_format for use in feature.uses] == ["FP8E4M3", "FP8E4M3", "FP8E5M2"]
    assert feature.uses[2].schedule.next_due(0) == 2


def test_a_plain_list_of_gemms_takes_a_struct_of_tensors() -> None:
    feature = parse(
        "FakeQuant", gemms=["fprop", "wgrad"],
        tensors_struct=[{"tensor": "activation", "scheme": "int8"}, {"tensor": "weight", "quant_format": "MXFP8E4M3"}],
    )  # fmt: skip
    assert places(feature) == [("activation", "fprop"), ("weight", "fprop"), ("activation", "wgrad")]
    assert feature.uses[2].options.scheme == "int8"


def test_a_whole_layer_is_its_three_gemms_and_old_names_are_the_new_ones() -> None:
    for name in ("DisableQuantizationLayer", "DisableFP8Layer"):
        feature = parse(name)
        assert feature.name == "DisableQuantizationLayer"
        assert places(feature) == [("", "fprop"), ("", "dgrad"), ("", "wgrad")]
    assert parse("DisableFP8GEMM", gemms="dgrad") == parse("DisableQuantizationGEMM", gemms=["dgrad"])


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("LogTensorStats", {}, "tensors is missing; known: activation, "),
        ("LogTensorStats", {"tensors": []}, "tensors = an empty list; expected a list of names"),
        ("LogTensorStats", {"tensors": ["weight"], "tensors_struct": [{"tensor": "weight"}]}, "both given; write one"),
        ("LogTensorStats", {"tensors_struct": [{"stats": ["min"]}]}, "an entry without `tensor`: stats"),
        ("LogTensorStats", {"tensors_struct": ["weight"]}, "tensors_struct: expected a list of entries"),
        ("LogTensorStats", {"tensors_struct": [{"tensor": "weight"}] * 2}, "tensors_struct has 'weight' twice"),
        ("LogTensorStats", {"tensors": "weight", "gemms": ["fprop"]}, "option 'gemms' is unknown"),
        ("LogTensorStats", {"tensors_struct": [{"tensor": "weight", "enabled": True}]}, "option 'enabled' is unknown"),
        ("DisableQuantizationGEMM", {}, "gemms is missing; known: fprop, dgrad, wgrad"),
        ("DisableQuantizationGEMM", {"gemms": "fprop", "tensors": "weight"}, "option 'tensors' is unknown"),
        ("DisableQuantizationLayer", {"gemms": "fprop"}, "option 'gemms' is unknown"),
        (
            "FakeQuant",
            {"gemms_struct": [{"gemm": "fprop", "tensors": "weight", "enabled": True}]},
            "'enabled' is unknown",
        ),
        ("FakeQuant", {"gemms_struct": [{"gemm": "fprop"}]}, "gemms_struct: fprop: tensors is missing"),
        ("FakeQuant", {"gemms_struct": [{"gemm": "fprop", "tensors": "act"}]}, "gemms_struct: fprop: tensor 'act'"),
        ("FakeQuant", {"gemms_struct": [{"gemm": "fprop", "tensors": "weight"}] * 2}, "gemms_struct has 'fprop' twice"),
        (
            "FakeQuant",
            {"gemms_struct": [{"gemm": "fprop"}], "tensors": ["weight"]},
            "tensors stands beside gemms_struct",
        ),
        ("FakeQuant", {"tensors": ["weight"]}, "gemms is missing"),
        ("FakeQuant", {"gemms": ["fprop"]}, "tensors is missing"),
        ("FakeQuant", {"gemms": ["fprop"], "tensors": ["weight"]}, "quant_format or scheme: both are missing"),
        (
            "FakeQuant",
            {"gemms": ["fprop"], "tensors": ["weight"], "quant_format": next(iter(FORMATS)), "scheme": "fp8"},
            "quant_format or scheme: both are given",
        ),
        ("FakeQuant", {"gemms": ["fprop"], "tensors": ["weight"], "scheme": "fp9"}, "scheme 'fp9' is unknown"),
        ("DumpTensors", {"tensors": ["weight"]}, "writes nothing; set high_precision_tensor"),
        ("DumpTensors", {"tensors": ["weight"], "quantized_tensor": "yes"}, "quantized_tensor = 'yes'; expected True"),
        ("PerTensorScaling", {"gemms": ["fprop"], "tensors": ["output"]}, "tensor 'output' is unknown here"),
        ("LogQuantizedTensorStats", {"tensors": "weight", "stats": "mse", "scheme": 8}, "scheme 8 is unknown"),
    ],
)
def test_a_feature_that_is_not_right_says_why(name: str, words: dict[str, Any], text: str) -> None:
    assert text in problem(name, **words)


@pytest.mark.parametrize(("quant", "allowed"), [("fp8", True), ("int8_sq", True), ("mxfp8", False), ("int4_wo", False)])
def test_per_tensor_scaling_needs_a_scheme_of_static_scales(quant: str, allowed: bool) -> None:
    words = {"gemms": ["fprop"], "tensors": ["activation"]}
    if allowed:
        assert parse("PerTensorScaling", quant, **words).changes
    else:
        assert "the session has none; pass quant='fp8'" in problem("PerTensorScaling", quant, **words)
    assert "the session has none" in problem("PerTensorScaling", **words)


def test_dumps_say_which_of_the_two_tensors() -> None:
    (use,) = parse("DumpTensors", tensors="weight", high_precision_tensor=True).uses
    assert (use.options.high_precision_tensor, use.options.quantized_tensor) == (True, False)


def test_only_two_features_change_tensors() -> None:
    assert [kind.name for kind in KINDS.values() if kind.changes] == ["FakeQuant", "PerTensorScaling"]
