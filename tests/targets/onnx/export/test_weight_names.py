"""Weights that the model joins of several tensors of the checkpoint."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from bridge.sources.live_models.checkpoint_names import LiveSlice
from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.onnx.export.weight_names import _join, _rows

NAME = "a.conv1d.weight"


def graph() -> Graph:
    weight = ir.Value(name=NAME, shape=ir.Shape([6, 1, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    reader = ir.node("Identity", [weight])
    inner = ir.Graph([], [reader.outputs[0]], nodes=[reader], initializers=[weight], name="g")
    return Graph(ir.Model(inner, ir_version=10), {NAME: NAME}, "", {}, {})


def parts(*ranges: tuple[int, int], columns: int = 4) -> dict[str, dict[LiveSlice, str]]:
    cut = {LiveSlice(NAME, (rows, (0, 1), (0, columns)), (0, 1, 2)): f"a.{i}" for i, rows in enumerate(ranges)}
    return {NAME: cut}


def test_a_joined_weight_is_read_from_its_tensors_in_order() -> None:
    made = graph()
    rows = _rows(NAME, parts((2, 6), (0, 2)), made.model.graph.initializers[NAME])
    assert rows == {"a.1": 2, "a.0": 4}
    _join(made, NAME, rows)
    concat, reader = made.model.graph
    assert concat.op_type == "Concat" and [value.name for value in concat.inputs] == ["a.1", "a.0"]
    assert reader.inputs[0] is concat.outputs[0] and concat.outputs[0].shape == [6, 1, 4]
    assert made.weights == {"a.1": "a.1", "a.0": "a.0"} and list(made.model.graph.initializers) == ["a.1", "a.0"]


@pytest.mark.parametrize("cut", [parts((0, 2)), parts((0, 2), (3, 6)), parts((0, 2), (2, 6), columns=2), {}])
def test_what_is_not_all_rows_of_a_weight_is_not_joined(cut: dict[str, dict[LiveSlice, str]]) -> None:
    assert _rows(NAME, cut, graph().model.graph.initializers[NAME]) == {}
