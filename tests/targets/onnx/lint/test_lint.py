"""Each rule of the lint has a model that breaks it, and models that keep all of them pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from bridge.core.errors import VerifyError
from bridge.targets.onnx.lint import EITHER_SIGN, RULES, Finding, lint
from tests.targets.onnx.lint.lint_models import (
    Sketch,
    Tensor,
    cut,
    filled,
    fp8,
    half_with_float_scale,
    linear,
    link,
    mxfp8,
    nvfp4,
    scrawl,
    single,
    topk_sketch,
    weight_only,
)

CLEAN = {
    "int8": linear, "fp8": fp8, "int4": lambda: weight_only(T.INT4, 64), "nvfp4": nvfp4,
    "int8 blocks": lambda: weight_only(T.INT8, 32, axis=1), "half": half_with_float_scale, "mxfp8": mxfp8,
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_a_model_that_keeps_the_rules_passes(name: str, tmp_path: Path) -> None:
    sketch = CLEAN[name]()
    assert [str(finding) for finding in lint(sketch.write(tmp_path), custom_ops=sketch.custom_ops)] == []


@dataclass(frozen=True)
class Case:
    """`spoil` changes the sketch, `damage` the written files; `says` is part of the message."""

    rule: str
    says: str
    start: Callable[[], Sketch] = linear
    spoil: Callable[[Sketch], object] = lambda sketch: None
    damage: Callable[[Path], object] = lambda folder: None


def put(name: str, tensor: Tensor) -> Callable[[Sketch], object]:
    return lambda sketch: sketch.tensors.update({name: tensor})


def nodes(*changes: Callable[[list[onnx.NodeProto]], object]) -> Callable[[Sketch], object]:
    return lambda sketch: [change(sketch.nodes) for change in changes]


def attribute(at: int, **values: object) -> Callable[[Sketch], object]:
    def change(sketch: Sketch) -> None:
        node = sketch.nodes[at]
        kept = [a for a in node.attribute if a.name not in values]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(k, v) for k, v in values.items())])

    return change


def both(*changes: Callable[[Sketch], object]) -> Callable[[Sketch], object]:
    return lambda sketch: [change(sketch) for change in changes]


def with_opset(opset: int) -> Callable[[Sketch], object]:
    return lambda sketch: setattr(sketch, "opset", opset)


def takes(*shape: int | str | None) -> Callable[[Sketch], object]:
    return lambda sketch: sketch.inputs.update(x=(T.FLOAT, shape))


def weight_through(op: str) -> Callable[[Sketch], object]:
    def change(sketch: Sketch) -> None:
        sketch.nodes.insert(2, helper.make_node(op, ["w"], ["moved"], name="n_moved"))
        sketch.nodes[3].input[0] = "moved"
        if op == "Transpose":
            sketch.tensors["w"] = filled(T.INT8, (96, 128), 3)

    return change


def codes_through_concat(sketch: Sketch) -> None:
    sketch.nodes.insert(1, helper.make_node("Concat", ["xq", "xq"], ["joined"], name="n_joined", axis=0))
    sketch.nodes[2].input[0] = "joined"


def computed_scale(sketch: Sketch) -> None:
    sketch.nodes.insert(0, helper.make_node("ReduceMax", ["x"], ["amax"], name="n_amax", keepdims=0))
    sketch.nodes[1].input[1] = "amax"


def int4_activation(sketch: Sketch) -> None:
    sketch.tensors["in_zero"] = filled(T.INT4, (), 0)
    sketch.tensors["in_zero"].data = b"\0"


def stacked_scale(sketch: Sketch) -> None:
    sketch.inputs["x"] = (T.FLOAT, (2, "batch", 128))
    sketch.outputs["y"] = (T.FLOAT, (2, "batch", 96))
    sketch.tensors["w"] = filled(T.INT8, (2, 128, 96), 3)
    sketch.tensors["w_scale"] = filled(T.FLOAT, (2, 2, 96), 0.5)
    attribute(0, axis=1)(sketch)


def fp4_activation(sketch: Sketch) -> None:
    sketch.tensors["in_zero"] = Tensor(T.FLOAT4E2M1, (), b"\0")


def two_scales(sketch: Sketch) -> None:
    op = "TRT_FP4DynamicQuantize"
    sketch.nodes = [helper.make_node(op, ["x", "s"], ["q", "b"], name="n_q", domain="trt", axis=-1)]
    sketch.tensors["s"] = filled(T.FLOAT, (2,), 0.5)
    sketch.node("TRT_MXFP8DequantizeLinear", ["q", "b"], "y", domain="trt")


def local_function(model: onnx.ModelProto) -> None:
    imports = [helper.make_opsetid("", 21)]
    body = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("local", "F", ["a"], ["b"], body, imports))
    model.opset_import.append(helper.make_opsetid("local", 1))


def edit(change: Callable[[onnx.ModelProto], object]) -> Callable[[Sketch], object]:
    return lambda sketch: setattr(sketch, "edit", change)


def header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Sketch], object]:
    return lambda sketch: setattr(sketch, "header", change)


def computed_cache(sketch: Sketch) -> None:
    sketch.nodes.insert(0, helper.make_node("Relu", ["c"], ["computed"]))
    sketch.nodes[1].input[0] = "computed"


def place(key: str, value: str, tensor: int = 2) -> Callable[[Sketch], object]:
    def change(model: onnx.ModelProto) -> None:
        for entry in model.graph.initializer[tensor].external_data:
            if entry.key == key:
                entry.value = value

    return edit(change)


F4 = (T.FLOAT, (2, 3, 5, 8))
GROWING = (T.FLOAT, (2, 3, "tokens", 8))
SCALE_INF = Tensor(T.FLOAT, (96,), np.array([0.5] * 95 + [np.inf], np.float32).tobytes())
COS = (T.FLOAT, (9, 4))
INDEX = (T.INT64, (1, 4))
EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
QKV = {"q": F4, "k": F4, "v": F4}


def heads(queries: int, values: int = 0) -> dict[str, tuple[int, tuple[int | str, ...]]]:
    """Q, K and V of these extents of a head."""
    sizes = {"q": queries, "k": queries, "v": values or queries}
    return {name: (T.FLOAT16, (2, 3, 5, size)) for name, size in sizes.items()}


CASES = [
    Case("qdq-type", "uint8: TensorRT documents UINT8 on DLA only", spoil=put("in_zero", filled(T.UINT8, (), 0))),
    Case("qdq-type", "int16: TensorRT documents no", spoil=put("in_zero", Tensor(T.INT16, (), b"\0\0"))),
    Case("zero-point", "no zero point and no output_dtype", spoil=nodes(lambda n: n[0].input.pop())),
    Case("zero-point", "zero point is not 0", spoil=put("in_zero", filled(T.INT8, (), 7))),
    Case(
        "zero-point", "1 zero points for 96 scales",
        spoil=nodes(lambda n: n[2].input.append("in_zero")),
    ),
    Case(
        "output-dtype", "leave the zero point out", half_with_float_scale,
        nodes(lambda n: n[1].input.append("in_zero")),
    ),
    Case("scale-constant", "amax is computed at run time", spoil=computed_scale),
    Case("scale-positive", "1 scales are zero, negative, NaN or infinite", spoil=put("w_scale", SCALE_INF)),
    Case("scale-positive", "96 scales are zero", spoil=put("w_scale", filled(T.FLOAT, (96,), 0))),
    Case("scale-positive", "1 scales", spoil=put("in_scale", filled(T.FLOAT, (), -0.5))),
    Case("scale-positive", "768 scales", nvfp4, put("w_scale", filled(T.FLOAT8E4M3FN, (8, 96), 0))),
    Case("scale-type", "scale is float16, but the input float32", spoil=put("in_scale", filled(T.FLOAT16, (), 0.5))),
    Case("scale-type", "scale is int32", spoil=put("in_scale", Tensor(T.INT32, (), b"\1\0\0\0"))),
    Case(
        "scale-type", "output_dtype another type", half_with_float_scale,
        both(put("w_scale", filled(T.FLOAT16, (96,), 0.5)), attribute(2, output_dtype=T.FLOAT)),
    ),
    Case(
        "mx-scale", "TRT_MXFP8DequantizeLinear", lambda: weight_only(T.FLOAT8E4M3FN, 32, opset=24),
        put("w_scale", filled(T.FLOAT8E8M0, (4, 96), 127)),
    ),
    Case(
        "block-scale-type", "are float32, the output float16", lambda: weight_only(T.INT4, 64, opset=23),
        attribute(0, output_dtype=T.FLOAT16),
    ),
    Case("block-scale-type", "are float32, the output bfloat16", nvfp4, attribute(1, output_dtype=T.BFLOAT16)),
    Case("scale-rank", "rank 3", lambda: weight_only(T.INT8, 64), stacked_scale),
    Case("activation-per-tensor", "128 scales on an activation", spoil=put("in_scale", filled(T.FLOAT, (128,), 0.5))),
    Case("scale-axis", "axis 1 would fit", spoil=attribute(2, axis=0)),
    Case("scale-axis", "axis 2 is outside", spoil=attribute(2, axis=2)),
    Case(
        "block-scale", "extent 96 does not divide into 5", lambda: weight_only(T.INT8, 32, axis=1),
        put("w_scale", filled(T.FLOAT, (128, 5), 0.5)),
    ),
    Case(
        "block-scale", "2 axes are blocked", lambda: weight_only(T.INT8, 32, axis=1),
        put("w_scale", filled(T.FLOAT, (64, 3), 0.5)),
    ),
    Case("block-scale", "0 axes are blocked", lambda: weight_only(T.INT8, 1)),
    Case("block-scale", "block_size is 64, but the", lambda: weight_only(T.INT8, 32), attribute(0, block_size=64)),
    Case("block-scale", "write axis=0", lambda: weight_only(T.INT8, 32), attribute(0, axis=1)),
    Case("block-scale", "write block_size=32", lambda: weight_only(T.INT8, 32), attribute(0, block_size=0)),
    Case("block-scale", "must have the data's rank", spoil=attribute(2, block_size=32)),
    Case(
        "block-scale", "the last two only", lambda: weight_only(T.INT8, 64),
        both(
            stacked_scale, put("w_scale", filled(T.FLOAT, (1, 128, 96), 0.5)), attribute(0, axis=0, block_size=2),
        ),
    ),
    Case("int4", "int4 on an activation", spoil=int4_activation),
    Case("int4", "blocks of 8", lambda: weight_only(T.INT4, 8)),
    Case(
        "int4", "without blocks", lambda: weight_only(T.INT4, 64),
        both(put("w_scale", filled(T.FLOAT, (96,), 0.5)), attribute(0, axis=1, block_size=0)),
    ),
    Case(
        "int4", "odd number", lambda: weight_only(T.INT4, 64),
        both(
            put("w", Tensor(T.INT4, (9, 7), b"\x11" * 32)), put("w_scale", filled(T.FLOAT, (), 0.5)),
            attribute(0, axis=1, block_size=0),
        ),
    ),
    Case(
        "fp4", "FP4 blocks of 32", nvfp4,
        both(put("w_scale", filled(T.FLOAT8E4M3FN, (4, 96), 0x38)), attribute(1, block_size=32)),
    ),
    Case("fp4", "under one float32 scale", lambda: weight_only(T.FLOAT4E2M1, 16, opset=23)),
    Case("fp4", "TRT_FP4DynamicQuantize", lambda: linear(23), fp4_activation),
    Case("weight-direct", "goes into Identity (n_moved)", spoil=weight_through("Identity")),
    Case("weight-direct", "goes into Transpose (n_moved)", spoil=weight_through("Transpose")),
    Case("code-flow", "TensorRT documents no Concat of quantized types", spoil=codes_through_concat),
    Case(
        "code-flow", "only QuantizeLinear makes codes",
        spoil=nodes(lambda n: n.pop(0), lambda n: n.insert(0, helper.make_node("Cast", ["x"], ["xq"], to=T.INT8))),
    ),
    Case(
        "integer-op", "TensorRT has no DynamicQuantizeLinear",
        lambda: single("DynamicQuantizeLinear", {"x": (T.FLOAT, ("batch", 8))}, 21, 3)(),
    ),
    Case("opset", "opset 19 is outside 21..25", spoil=with_opset(19)),
    Case("opset", "opset 26", spoil=with_opset(26)),
    Case("opset-feature", "has block_size since opset 21", lambda: weight_only(T.INT8, 32), with_opset(19)),
    Case("opset-feature", "has output_dtype since opset 23", half_with_float_scale, with_opset(21)),
    Case("opset-feature", "has FP4 since opset 23", nvfp4, with_opset(21)),
    Case("opset-feature", "ONNX has Attention since opset 23", single("Attention", QKV, 21)),
    Case("ir-version", "ir_version 14 is outside 10..13", spoil=lambda s: setattr(s, "ir", 14)),
    Case("ir-version", "ir_version 8", spoil=lambda s: setattr(s, "ir", 8)),
    Case("domain", "runs in TensorRT only", mxfp8, lambda s: setattr(s, "custom_ops", False)),
    Case("domain", "domain com.microsoft (FusedMatMul)", spoil=nodes(
        lambda n: n.append(helper.make_node("FusedMatMul", ["xd", "wd"], ["y"], name="n_y", domain="com.microsoft")),
        lambda n: n.pop(3),
    )),
    Case("domain", "TRT_Magic is unknown to TensorRT", mxfp8, nodes(lambda n: setattr(n[1], "op_type", "TRT_Magic"))),
    Case("domain", "domain trt is used, but not imported", mxfp8, lambda s: setattr(s, "domains", ())),
    Case("domain", "domain aten is imported, but not used", spoil=lambda s: setattr(s, "domains", ("aten",))),
    Case("function", "inline it", spoil=edit(local_function)),
    Case("custom-block", "block_size 16", mxfp8, attribute(0, block_size=16)),
    Case("custom-block", "last or second to last", mxfp8, both(takes(32, 2, 32), attribute(0, axis=0))),
    Case("custom-block", "extent width", mxfp8, takes("batch", "width")),
    Case("custom-block", "constant of one element", mxfp8, two_scales),
    Case("topk", "K is 3840", topk_sketch(3840)),
    Case("attention", "past_key / past_value", single("Attention", {**QKV, "_": F4, "pk": F4, "pv": F4}, 23, 3)),
    Case("attention", "softcap", single("Attention", QKV, 23, softcap=30.0)),
    Case("attention", "present or score outputs", single("Attention", {**QKV, "_": F4, "pk": F4, "pv": F4}, 23, 3)),
    Case("attention", "attn_mask has rank 2", single("Attention", {**QKV, "m": (T.FLOAT, (5, 5))}, 23)),
    Case("attention-form", "no kernel of float32", single("Attention", QKV, 23)),
    Case("attention-form", "multiples of 8 up to 256", single("Attention", heads(100), 23)),
    Case("attention-form", "multiples of 8 up to 256", single("Attention", heads(264), 23)),
    Case("attention-form", "takes equal ones", single("Attention", heads(24, 16), 23)),
    Case("tensor-scatter", "4-D caches along axis -2", single("TensorScatter", {"c": F4, "u": F4}, 24, axis=1)),
    Case("tensor-scatter", "of one length, not of tokens", single("TensorScatter", {"c": GROWING, "u": F4}, 24)),
    Case("tensor-scatter", "no circular mode", single("TensorScatter", {"c": F4, "u": F4}, 24, mode="circular")),
    Case("tensor-scatter", "an input of the graph", single("TensorScatter", {"c": F4, "u": F4}, 24), computed_cache),
    Case(
        "rotary", "position_ids are int32",
        single("RotaryEmbedding", {"x": F4, "c": COS, "s": COS, "p": (T.INT32, (2, 5))}, 23),
    ),
    Case("scatter", "reduction", single("ScatterND", {"x": F4, "i": INDEX, "u": (T.FLOAT, (1,))}, 21, reduction="add")),
    Case("border", "axis 0 is dynamic without a name", spoil=takes(None, 128)),
    Case("border", "has no shape", spoil=edit(lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"))),
    Case("border", "declared twice", spoil=edit(lambda m: m.graph.output.append(m.graph.output[0]))),
    Case("missing-value", "read by n_wd, but has no producer", spoil=edit(lambda m: m.graph.initializer.pop(2))),
    Case("external-path", "must be a plain file name", spoil=place("location", "../model.safetensors")),
    Case("external-path", "must be a plain file name", spoil=place("location", "/model.safetensors")),
    Case("external-file", "does not exist", spoil=place("location", "other.safetensors")),
    Case("external-file", "symbolic link", damage=link(lambda old, new: new.symlink_to(old.name))),
    Case("external-file", "hard link", damage=link(os.link)),
    Case("external-bounds", " bytes", damage=cut),
    Case("external-bounds", "length is 12, but [128, 96] of int8 needs 12288", spoil=place("length", "12")),
    Case("external-bounds", "not a number of bytes", spoil=place("offset", "many")),
    Case("external-overlap", "offsets are wrong", spoil=edit(lambda m: setattr(
        m.graph.initializer[3].external_data[1], "value", str(int(m.graph.initializer[2].external_data[1].value) + 4)
    ))),
    Case("initializer-data", "the weight was never written", spoil=edit(lambda m: (
        m.graph.initializer[2].ClearField("data_location"), m.graph.initializer[2].ClearField("external_data")
    ))),
    Case("safetensors", "not a safetensors file", damage=scrawl),
    Case("safetensors", "is not in the header", spoil=header(lambda h: h.pop("w_scale"))),
    Case("safetensors", "dtype I8 / U8", spoil=header(lambda h: h["w"].update(dtype="U8"))),
    Case("safetensors", "shape [128, 96] / [96, 128]", spoil=header(lambda h: h["w"].update(shape=[96, 128]))),
    Case("safetensors", "the file has", spoil=header(lambda h: h["w"].update(data_offsets=[0, 99999999]))),
    Case("unused", "no node reads this initializer", spoil=put("left", filled(T.FLOAT, (3,)))),
    Case("unused", "unused bytes", spoil=header(lambda h: h.update(left=EMPTY))),
    Case("checker", "onnx.checker refuses", spoil=nodes(lambda n: setattr(n[3], "op_type", "NoSuchOp"))),
]  # fmt: skip


def findings_of(case: Case, folder: Path) -> list[Finding]:
    sketch = case.start()
    case.spoil(sketch)
    path = sketch.write(folder)
    case.damage(folder)
    return lint(path, custom_ops=sketch.custom_ops)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}: {case.says}")
def test_a_model_that_breaks_a_rule_is_found(case: Case, tmp_path: Path) -> None:
    found = findings_of(case, tmp_path)
    assert any(f.rule == case.rule and case.says in f.message for f in found), [str(f) for f in found]


def test_every_rule_has_a_failing_example_a_source_and_its_own_name() -> None:
    names = [rule.id for rule in RULES]
    assert len(set(names)) == len(names)
    assert {case.rule for case in CASES} == set(names)
    assert all(rule.source and rule.about for rule in RULES)


def test_values_of_weights_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.targets.onnx.lint.model import Model

    read: list[str] = []
    plain = Model.chunks
    monkeypatch.setattr(Model, "chunks", lambda self, tensor: read.append(tensor.name) or plain(self, tensor))
    assert lint(nvfp4().write(tmp_path)) == []
    assert sorted(set(read)) == ["w_scale", "w_scale_2"]


def test_scales_of_either_sign_pass_where_onnx_runtime_alone_reads(tmp_path: Path) -> None:
    """Its own quantizer writes negative ones of INT4; others, and those of zero or NaN, stay wrong."""

    def int4() -> Sketch:
        return weight_only(T.INT4, 64)

    for make, value, bad in (
        (int4, -0.5, []), (int4, 0.0, ["192 scales are zero, NaN"]), (int4, float("nan"), ["192 scales are zero, NaN"]),
        (linear, -0.5, ["96 scales are zero, negative"]),
    ):  # fmt: skip
        sketch = make()
        sketch.tensors["w_scale"] = filled(T.FLOAT, sketch.tensors["w_scale"].dims, value)
        found = lint(sketch.write(tmp_path), rules=[EITHER_SIGN])
        assert len(found) == len(bad) and all(said in one.message for one, said in zip(found, bad, strict=True))


def test_scales_beyond_one_chunk_are_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.targets.onnx.lint.model.CHUNK", 64)
    sketch = linear()
    sketch.tensors["w_scale"] = SCALE_INF
    assert [f.rule for f in lint(sketch.write(tmp_path))] == ["scale-positive"]


def test_a_tied_tensor_may_share_its_region(tmp_path: Path) -> None:
    sketch = linear()
    sketch.tensors["in_scale_2"] = filled(T.FLOAT, (), 0.5)
    sketch.nodes[1].input[1] = "in_scale_2"

    def share(model: onnx.ModelProto) -> None:
        first, last = model.graph.initializer[0], model.graph.initializer[4]
        last.external_data[1].value = first.external_data[1].value

    sketch.edit = share
    assert "external-overlap" not in {f.rule for f in lint(sketch.write(tmp_path))}


def test_a_directory_stands_for_its_model(tmp_path: Path) -> None:
    linear().write(tmp_path)
    assert lint(tmp_path) == []


@pytest.mark.parametrize("content", [None, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
def test_a_file_that_is_no_onnx_is_one_clear_error(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(VerifyError, match=r"model\.onnx: (no such file|not an ONNX file)"):
        lint(tmp_path / "model.onnx")


def test_a_malformed_node_does_not_keep_the_other_rules_from_running(tmp_path: Path) -> None:
    sketch = linear()
    del sketch.nodes[2].input[1:]
    sketch.tensors["in_zero"] = filled(T.UINT8, (), 0)
    found = {f.rule: f.message for f in lint(sketch.write(tmp_path))}
    assert "uint8" in found["qdq-type"]
    assert "cannot be checked" in found["scale-constant"]
    assert "onnx.checker refuses" in found["checker"]


@pytest.mark.parametrize(("allowed", "severities"), [(True, set()), (None, {"warning"}), (False, {"error"})])
def test_custom_ops_weigh_what_the_caller_says(allowed: bool | None, severities: set[str], tmp_path: Path) -> None:
    assert {f.severity for f in lint(mxfp8().write(tmp_path), custom_ops=allowed)} == severities
