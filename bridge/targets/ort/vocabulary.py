"""Quantize the embedding, and the head, tied or not.

ONNX Runtime looks rows up in codes by GatherBlockQuantized. A tied head multiplies by the same codes in MatMulNBits;
a head of its own is quantized like every other matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from bridge.core.dtypes import DTYPES
from bridge.core.errors import ExportError
from bridge.core.values import EITHER, Encoding, Format, Numeric, Site, Slice, TensorSpec
from bridge.planning.plan import Output, Plan, Step
from bridge.planning.target import Draft
from bridge.targets.ort.edit import MICROSOFT, add_node, constant, extents

EMBEDDING, HEAD = ("embed.tokens.weight",), ("head.weight",)
BLOCKS = {"int4": 32, "int8": 64}  # along a row; a head in INT4 loses much in longer ones
# Two codes of 4 bits share a byte, each plus 8: the bytes of words of 32 bits.
BYTES = Encoding(packed="int32")


def format_of(codes: str, width: int) -> Format | None:
    """Codes in blocks along rows of `width` values; None if blocks do not divide them."""
    block, search = BLOCKS[codes], EITHER if codes == "int4" else ""
    return None if width % block else Format((Numeric(codes, "block", (block,), search=search),))


def quantize_vocabulary(steps: Sequence[Step], draft: Draft) -> tuple[list[Step], list[str]]:
    """The steps with codes of the embedding, which a tied head shares; and what the plan tells of it."""
    assert draft.scheme
    heads = [site for site in draft.structure.sites if site.roles == HEAD]
    formats = [form for site in heads if isinstance(form := draft.formats.get(site.weight), Format)]
    codes = (formats[0] if formats else draft.scheme.format).weight[0].dtype
    made, notes = [], []
    for step in steps:
        roles = draft.structure.roles.get(step.source, ())
        tied = [site for site in heads if draft.structure.tied.get(site.weight) == step.source]
        if step.site and step.site in tied:
            continue  # it shares the embedding's codes
        if step.site is None and EMBEDDING[0] in roles:
            spec = draft.specs[step.source]
            form = format_of(codes, spec.shape[1])
            if form is None:
                why = f"rows of {spec.shape[1]} do not divide into blocks of {BLOCKS[codes]}"
                notes.append(f"the embedding stays as it is: {why}")
            else:
                step = _coded(spec, form, tied)
        made.append(step)
    return made, notes


def _coded(spec: TensorSpec, form: Format, tied: Sequence[Site]) -> Step:
    module, (rows, width), numeric = spec.name.rpartition(".")[0], spec.shape, form.weight[0]
    stored = TensorSpec(spec.name, (rows, width * DTYPES[numeric.dtype].bits // 8), "uint8")
    scale = TensorSpec(f"{module}.weight_scale", (rows, width // numeric.block[0]), "float32")
    outputs = (
        Output(stored, "weight", f"codes({spec.name})"),
        Output(scale, "scale", f"scales of {numeric.block[0]} values along in"),
    )
    site = replace(tied[0], weight=spec.name) if tied else Site(module, spec.name, "out_in", EMBEDDING)
    return Step((Slice(spec.name, module=module),), outputs, site, form, coding=BYTES)


def is_coded(step: Step) -> bool:
    """Whether it is the embedding's."""
    return step.coding == BYTES and step.format is not None


def place_vocabulary(model: ir.Model, plan: Plan, names: Mapping[str, str], level: int) -> dict[str, str]:
    """Read the embedding's codes where the float graph reads the embedding; return `names` with the codes.

    names: initializer -> tensor of the checkpoint.  level: of MatMulNBits' accuracy.
    ExportError if something else than a lookup and a product reads it.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    step = next((step for step in plan.quantized if is_coded(step)), None)
    own = {name: initializer for initializer, name in names.items()}
    if step is None or step.source not in own:
        return dict(names)
    assert step.format
    value, numeric = model.graph.initializers[own[step.source]], step.format.weight[0]
    made = [_initializer(model.graph, output.spec) for output in step.outputs]
    settings = {"bits": DTYPES[numeric.dtype].bits, "block_size": numeric.block[0]}
    for node in [use.node for use in value.uses()]:
        product = _product(node)
        if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            _look_up(node, made, settings)
        elif product is not None:
            _multiply(product, made, settings, extents(value), level)
        else:
            raise ExportError(f"{step.source} is read by a {node.op_type}, which takes no codes; use vocabulary='keep'")
    RemoveUnusedNodesPass()(model)
    model.opset_imports[MICROSOFT] = 1
    left = {initializer: name for initializer, name in names.items() if name != step.source}
    return left | {str(one.name): output.spec.name for one, output in zip(made, step.outputs, strict=True)}


def _initializer(graph: ir.Graph, spec: TensorSpec) -> ir.Value:
    value = ir.val(f"{spec.name}/codes", ir.DataType(DTYPES[spec.dtype].onnx), ir.Shape(spec.shape))
    graph.initializers.add(value)
    return value


def _product(node: ir.Node) -> ir.Node | None:
    """The MatMul by the transposed matrix, whose one reader `node` is; None if it is another node."""
    uses = tuple(node.outputs[0].uses()) if node.op_type == "Transpose" else ()
    found = [use.node for use in uses if use.node.op_type == "MatMul" and use.idx == 1]
    return found[0] if len(found) == len(uses) == 1 else None


def _look_up(node: ir.Node, made: Sequence[ir.Value], settings: Mapping[str, int]) -> None:
    codes, scale = made
    old = node.outputs[0]
    attributes = {**settings, "gather_axis": 0, "quantize_axis": 1}
    inputs = [codes, node.inputs[1], scale]
    rows = add_node(
        node, "GatherBlockQuantized", inputs, f"{old.name}/rows", (old.dtype, extents(old)), attributes, MICROSOFT
    )
    ir.convenience.replace_all_uses_with(old, rows)


def _multiply(
    node: ir.Node, made: Sequence[ir.Value], settings: Mapping[str, int], shape: tuple[object, ...], level: int
) -> None:
    codes, scale = made
    out, width = (int(str(extent)) for extent in shape)
    blocks = width // settings["block_size"]
    as_blocks = constant(node.graph, np.array([out, blocks, -1], np.int64))
    like = (codes.dtype, (out, blocks, settings["block_size"] * settings["bits"] // 8))
    turned = add_node(node, "Reshape", [codes, as_blocks], f"{codes.name}/blocks", like)
    old = node.outputs[0]
    attributes = {**settings, "K": width, "N": out, "accuracy_level": level}
    product = add_node(
        node, "MatMulNBits", [node.inputs[0], turned, scale], f"{old.name}/product", (old.dtype, extents(old)),
        attributes, MICROSOFT,
    )  # fmt: skip
    if old.is_graph_output():
        outputs = node.graph.outputs if node.graph else []
        at = list(outputs).index(old)
        product.name, old.name = old.name, f"{old.name}/float"
        outputs[at] = product
    ir.convenience.replace_all_uses_with(old, product)
