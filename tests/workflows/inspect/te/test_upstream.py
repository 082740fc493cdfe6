"""Configs against nvdlfw-inspect's and TransformerEngine's own answers, kept in tests/oracles/inspect_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.workflows.inspect.layers import Layer, number_in
from bridge.workflows.inspect.routes import GEMMS, TAKES, TENSORS, Schedule
from bridge.workflows.inspect.te.options import merged, parse_schedule
from bridge.workflows.inspect.te.selectors import Selector, parse_selector
from bridge.workflows.inspect.te.where import Where

ANSWERS = json.loads((Path(__file__).parents[3] / "oracles" / "inspect_config.json").read_text())


def schedule(words: dict[str, Any], excluded: bool = False) -> Schedule:
    where = Where("")
    parsed = parse_schedule(words, where, excluded=excluded)
    found = where.problems.lines()
    assert not found or found[0].startswith(": never due"), found
    return parsed


@pytest.mark.parametrize("answer", ANSWERS["selectors"], ids=lambda answer: str(answer["layers"]))
def test_sections_select_the_layers_that_nvdlfw_inspect_selects(answer: dict[str, Any]) -> None:
    selector = parse_selector(answer["layers"], Where(""))
    assert isinstance(selector, Selector)
    if "error" in answer:  # the two forms of `layer_numbers` that it documents and refuses
        assert answer["layers"] in ({"layer_numbers": 3}, {"layer_numbers": "1-3"})
        return
    for name, theirs in answer["matches"].items():
        ours = selector.matches(Layer(name, number=number_in(name)), 0)
        if isinstance(theirs, bool):
            assert ours == theirs, name
        elif "exact_layer_names" in answer["layers"] or number_in(name) is None:
            assert not ours, name  # where it raises for a name without a number, or beside the exact ones
        else:
            assert number_in("layers.1.experts.2.w1") == 1  # it raises for two numbers; ours takes the first


@pytest.mark.parametrize("answer", ANSWERS["options"], ids=lambda answer: str(answer["words"]))
def test_options_are_merged_as_transformer_engine_merges_them(answer: dict[str, Any]) -> None:
    for place, theirs in answer["options"].items():
        tensor, gemm = place.split(",")
        names = ("tensors", "tensors_struct", "gemms", "gemms_struct", "enabled")
        plain = theirs and {key: value for key, value in theirs.items() if key not in names}
        assert merged(answer["words"], tensor, gemm) == plain, place
    assert len(answer["options"]) >= 6


def test_every_gemm_takes_three_of_the_six_tensors() -> None:
    assert set(TAKES) == set(GEMMS)
    assert all(set(tensors) < set(TENSORS) and len(tensors) == 3 for tensors in TAKES.values())


@pytest.mark.parametrize("answer", ANSWERS["schedules"], ids=lambda answer: str(answer["words"]))
def test_schedules_are_due_when_transformer_engines_are(answer: dict[str, Any]) -> None:
    parsed = schedule(answer["words"])
    if not any(due for due, _ in answer["asked"]):
        where = Where("")
        parse_schedule(answer["words"], where)
        assert "never due" in where.problems.lines()[0]
        return
    for step, (due, following) in enumerate(answer["asked"]):
        assert (parsed.due(step), parsed.next_due(step)) == (due, following), step


@pytest.mark.parametrize("answer", ANSWERS["schedules"], ids=lambda answer: str(answer["words"]))
def test_the_generic_feature_leaves_out_the_end_of_a_pair(answer: dict[str, Any]) -> None:
    pairs = [pair for pair in answer["words"].get("start_end_list", []) if pair[0] == pair[1]]
    if pairs or not any(answer["generic"]):
        return  # an empty pair, or never due: errors here
    parsed = schedule(answer["words"], excluded=True)
    assert [parsed.due(step) for step in range(len(answer["generic"]))] == answer["generic"]
