"""Stamping on hand-made graphs of two or three layers: what is copied, and every reason to refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from bridge.targets.onnx.export.layers import Layers
from bridge.targets.onnx.export.stamp import KV, MODULE, Refused, stamp_layers

HIDDEN = 6


class _Maker:
    """Makes `hidden = layer(hidden)` graphs: each layer multiplies by its weight, scales and adds its cache."""

    def __init__(self, layers: int, scale: Callable[[int], float] = lambda _: 0.5) -> None:
        self.nodes: list[ir.Node] = []
        self.values: list[ir.Value] = []
        x = self.value("input", [2, HIDDEN])
        self.inputs, self.outputs = [x], []
        self.shared = self.constant("shared", 3.0)
        self.carry = self.node("", "MatMul", x, self.weight("embed"))
        for i in range(layers):
            self.layer(i, scale(i))

    def value(self, name: str, shape: list[int]) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))

    def weight(self, name: str) -> ir.Value:
        self.values.append(self.value(name, [HIDDEN, HIDDEN]))
        return self.values[-1]

    def constant(self, name: str, number: float) -> ir.Value:
        self.values.append(self.value(name, []))
        self.values[-1].const_value = ir.tensor(np.array(number, np.float32))
        return self.values[-1]

    def node(self, module: str, op: str, *inputs: ir.Value) -> ir.Value:
        node = ir.node(op, inputs, name=f"n{len(self.nodes)}", metadata_props={MODULE: module})
        node.outputs[0].name, node.outputs[0].dtype = f"v{len(self.nodes)}", ir.DataType.FLOAT
        self.nodes.append(node)
        return node.outputs[0]

    def layer(self, i: int, scale: float) -> None:
        past = self.value(f"past_key_values.{i}.key", [2, HIDDEN])
        self.inputs.append(past)
        key = self.node(f"h.{i}.attn", "MatMul", self.carry, self.weight(f"h.{i}.w"))
        present = self.node(f"h.{i}.attn", "Add", past, key)
        present.name, present.metadata_props[KV] = f"present.{i}.key", f"{i}.key"
        self.outputs.append(present)
        scaled = self.node(f"h.{i}", "Mul", present, self.constant(f"scale{scale}.{i}", scale))
        self.carry = self.node(f"h.{i}", "Add", self.node(f"h.{i}", "Mul", scaled, self.shared), self.carry)

    def model(self) -> ir.Model:
        result = self.node("", "MatMul", self.carry, self.weight("head"))
        result.name, result.shape = "result", ir.Shape([2, HIDDEN])
        graph = ir.Graph(
            self.inputs,
            [result, *self.outputs],
            nodes=self.nodes,
            initializers=self.values,
            opset_imports={"": 21},
            name="graph",
        )
        return ir.Model(graph, ir_version=10)


def _layers(kinds: str) -> Layers:
    return Layers("h", tuple(kinds))


def _run(model: ir.Model, folder: Path) -> dict[str, np.ndarray]:
    """Fill weights by name and run: the same names give the same numbers in every graph."""
    import onnxruntime as ort

    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            seed = np.random.default_rng(list(name.encode()))
            value.const_value = ir.tensor(seed.standard_normal((HIDDEN, HIDDEN)).astype(np.float32), name=name)
    ir.save(model, folder / "model.onnx")
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {
        i.name: np.random.default_rng(list(i.name.encode())).standard_normal(i.shape).astype(np.float32)
        for i in session.get_inputs()
    }
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize(
    ("kinds", "exported", "scales"),
    [
        ("aaaaa", [0, 1], {"a": 0.5}),
        ("abababb", [0, 1, 2, 3], {"a": 0.5, "b": 2.0}),
        ("aabaaab", [0, 1, 2, 6], {"a": 0.5, "b": 2.0}),
        ("baaaa", [0, 1, 2], {"a": 0.5, "b": 2.0}),
        ("aaaab", [0, 1, 4], {"a": 0.5, "b": 2.0}),
    ],
)
def test_stamped_graph_computes_what_the_whole_one_does(
    kinds: str, exported: list[int], scales: dict[str, float], tmp_path: Path
) -> None:
    layers = _layers(kinds)
    assert layers.representatives() == exported
    few = _Maker(len(exported), lambda i: scales[kinds[exported[i]]]).model()
    stamp_layers(few, layers, exported)
    whole = _Maker(len(kinds), lambda i: scales[kinds[i]]).model()
    assert [v.name for v in few.graph.inputs] == [v.name for v in whole.graph.inputs]
    assert [v.name for v in few.graph.outputs] == [v.name for v in whole.graph.outputs]
    weights = [{n for n, v in m.graph.initializers.items() if v.const_value is None} for m in (few, whole)]
    assert weights[0] == weights[1]
    marks = [{v.metadata_props.get(KV) for n in m.graph for v in n.outputs} for m in (few, whole)]
    assert marks[0] == marks[1]
    assert {n.metadata_props[MODULE] for n in few.graph} == {n.metadata_props[MODULE] for n in whole.graph}
    got, want = _run(few, tmp_path), _run(whole, tmp_path)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6, err_msg=name)


def test_a_constant_that_depends_on_the_layer_is_refused() -> None:
    few = _Maker(2, lambda i: 1.0 / (i + 1)).model()
    with pytest.raises(Refused, match="layers 0 and 1 of one kind differ"):
        stamp_layers(few, _layers("aaaa"), [0, 1])


def test_an_attribute_that_depends_on_the_layer_is_refused() -> None:
    maker = _Maker(0)
    for i in range(2):
        maker.layer(i, 0.5)
        maker.carry = maker.node(f"h.{i}", "LeakyRelu", maker.carry)
        maker.nodes[-1].attributes["alpha"] = ir.AttrFloat32("alpha", (i + 1) / 10)
    with pytest.raises(Refused, match="of one kind differ: LeakyRelu"):
        stamp_layers(maker.model(), _layers("aaaa"), [0, 1])


def test_two_hidden_states_between_layers_are_refused() -> None:
    maker = _Maker(1)
    second = maker.node("h.0", "Neg", maker.carry)
    maker.layer(1, 0.5)
    maker.carry = maker.node("h.1", "Add", maker.carry, second)
    with pytest.raises(Refused, match="2 values go from a layer to the next"):
        stamp_layers(maker.model(), _layers("aaaa"), [0, 1])


def test_a_hidden_state_that_the_end_collects_is_refused() -> None:
    maker = _Maker(1)
    early = maker.carry
    maker.layer(1, 0.5)
    maker.carry = maker.node("", "Add", maker.carry, early)
    with pytest.raises(Refused, match="value of layer 0 is used outside the next layer"):
        stamp_layers(maker.model(), _layers("aaaa"), [0, 1])


def test_a_weight_that_only_the_first_of_two_layers_reads_is_refused() -> None:
    maker = _Maker(1)
    maker.carry = maker.node("h.0", "MatMul", maker.carry, maker.weight("h.0.extra"))
    maker.layer(1, 0.5)
    with pytest.raises(Refused, match="of one kind differ"):
        stamp_layers(maker.model(), _layers("aaaa"), [0, 1])


def test_a_lone_layer_that_reads_another_layers_weight_is_refused() -> None:
    maker = _Maker(2)
    maker.layer(2, 2.0)
    maker.carry = maker.node("h.2", "MatMul", maker.carry, maker.weight("per_layer_table"))
    with pytest.raises(Refused, match="layer 2 is the only one of its kind and reads per_layer_table"):
        stamp_layers(maker.model(), _layers("aaab"), [0, 1, 3])
