"""Fuse RMS norms, and the residual sums before them.

RMSNormalization is standard since opset 23; SkipSimplifiedLayerNormalization is what ONNX Runtime itself makes of a sum
and a norm.
"""

from __future__ import annotations

import onnx_ir as ir

from bridge.targets.ort.edit import MICROSOFT, add_node, extents, input_of, made_by, number


def fuse_norms(model: ir.Model) -> int:
    """Fuse every RMS norm; return how many there were."""
    return sum(_fuse(node) for node in list(model.graph) if node.op_type == "Mul")


def _fuse(node: ir.Node) -> bool:
    """`node` multiplies x / sqrt(mean(x^2) + epsilon) by the weight, on either side."""
    for at in (0, 1):
        scaled, weight = made_by(node.inputs[at], "Mul"), node.inputs[1 - at]
        value, epsilon = _normalized(scaled)
        if value is None or weight is None or len(extents(weight)) != 1:
            continue
        out, name = node.outputs[0], str(node.name)
        total = made_by(value, "Add")
        terms = total.inputs if total is not None else ()
        alike = len(terms) == 2 and all(t is not None and len(extents(t)) == 3 for t in terms)
        if total is not None and alike and extents(terms[0]) == extents(terms[1]):  # type: ignore[arg-type]
            normed, summed = (ir.val(f"{name}/{n}", out.dtype, out.shape) for n in ("normed", "summed"))
            skip = ir.node(
                "SkipSimplifiedLayerNormalization", [*terms, weight], {"epsilon": epsilon}, domain=MICROSOFT,
                outputs=[normed, ir.val(""), ir.val(""), summed], name=name,
            )  # fmt: skip
            assert total.graph is not None
            total.graph.insert_after(total, skip)
            ir.convenience.replace_all_uses_with([out, total.outputs[0]], [normed, summed])
            return True
        attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
        like = (out.dtype, extents(out))
        normed = add_node(node, "RMSNormalization", [value, weight], f"{name}/normed", like, attributes)
        ir.convenience.replace_all_uses_with(out, normed)
        return True
    return False


def _normalized(scaled: ir.Node | None) -> tuple[ir.Value | None, float]:
    """x and epsilon of x * (mean(x^2) + epsilon)^-1/2 over the last axis; (None, 0) of anything else."""
    root = made_by(made_by_input(scaled, 1, "Reciprocal"), "Sqrt")
    total = made_by(input_of(root, 0), "Add")
    mean = made_by(input_of(total, 0), "ReduceMean")
    square = made_by(input_of(mean, 0), "Pow")
    value = input_of(scaled, 0)
    epsilon = number(input_of(total, 1))
    powers = number(input_of(square, 1)) == 2 and number(input_of(mean, 1)) == -1
    if value is None or epsilon is None or not powers or input_of(square, 0) is not value:
        return None, 0.0
    return value, epsilon


def made_by_input(node: ir.Node | None, at: int, kind: str) -> ir.Value | None:
    """What the `kind` that computes an input of `node` reads."""
    return input_of(made_by(input_of(node, at), kind), 0)
