"""What TensorRT compiled each quantized matrix to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

LAYERS = "Layers:"  # begins the one message of the log that lists the layers of an engine
_PART = re.compile(r"(Inputs|Constants): \[(.*?)\](?=, (?:Constants|Outputs|TacticName))", re.DOTALL)
_DATATYPE = re.compile(r"Datatype: (\w+)")
_KIND = re.compile(r"LayerType: (\w+)")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_WEIGHT = re.compile(r"(?P<module>.+)/weight(?:_2)?/dequantize")
# The types of layers that multiply matrices; `correlation` is a convolution.
PRODUCTS = ("gemm", "runtime_fusion", "correlation")
CODES = {"FP8": "FP8", "Int8": "INT8", "Int4": "INT4", "FP4E2M1": "FP4"}
DEQUANTIZED = "dequantized"


def compiled_modules(layers: str, modules: Iterable[str]) -> dict[str, str]:
    """Quantized matrix -> "FP8" for codes on both sides, "weight-only INT4", or "dequantized".

    A matrix has a product for each profile; the one that uses fewest codes counts.

    layers: the message of the builder's log that begins with "Layers:".
    """
    found: dict[str, list[str]] = {}
    for line in layers.splitlines():
        kind = _KIND.search(line)
        if kind is None or kind[1] not in PRODUCTS:
            continue
        operands = {name: _DATATYPE.findall(text) for name, text in _PART.findall(line)}
        computes = _computes(operands)
        for node in _NODE.findall(line):
            if (match := _WEIGHT.fullmatch(node)) and computes:
                found.setdefault(match["module"], []).append(computes)
    return {name: max(found.get(name, [DEQUANTIZED]), key=lambda what: what.startswith("weight")) for name in modules}


def _computes(operands: Mapping[str, list[str]]) -> str:
    """In what a product multiplies; "" if no operand has codes."""
    weights = [CODES[kind] for kind in operands.get("Constants", []) if kind in CODES]
    inputs = [CODES[kind] for kind in operands.get("Inputs", []) if kind in CODES]
    if not weights:  # a kernel before makes FP8 of INT4: both sides are inputs
        return inputs[0] if len(inputs) > 1 else ""
    return weights[0] if weights[0] in inputs else f"weight-only {weights[0]}"


def quantized_modules(onnx_path: Path) -> list[str]:
    """The quantized matrices of a graph that this package wrote, by the names of their DequantizeLinear nodes."""
    import onnx

    nodes = onnx.load(onnx_path, load_external_data=False).graph.node
    found = (_WEIGHT.fullmatch(node.name) for node in nodes if node.op_type.endswith("DequantizeLinear"))
    return list(dict.fromkeys(match["module"] for match in found if match))
