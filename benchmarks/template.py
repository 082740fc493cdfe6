"""Compare the graphs of two models of one family that differ in every size: what a template would have to know.

    python benchmarks/template.py

Both have three layers, so that nothing is stamped. A node is alike if its operator, its attributes and where its inputs
come from are; a constant is a value that the graph holds and the checkpoint does not.
"""

from __future__ import annotations

import sys
from typing import Any

import onnx_ir as ir

from bridge.targets.trt.graph.export import export_graph

COMMON = {"num_hidden_layers": 3, "vocab_size": 96, "max_position_embeddings": 64}
SIZES: tuple[dict[str, Any], dict[str, Any]] = (
    {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 88},
    {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 14, "intermediate_size": 130},
)
FAMILIES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
}  # fmt: skip


def main() -> None:
    """Print a row of each family."""
    print("| family | nodes | alike | constants | of them equal |\n|---|---|---|---|---|")
    for family in sys.argv[1:] or FAMILIES:
        first, second = (graph(family, size) for size in SIZES)
        pairs = list(zip(first, second, strict=False))
        alike = sum(node(a) == node(b) for a, b in pairs) if len(first) == len(second) else 0
        values = list(zip(constants(first), constants(second), strict=False))
        equal = sum(a == b for a, b in values)
        print(f"| {family} | {len(first)} and {len(second)} | {alike} | {len(values)} | {equal} |", flush=True)


def graph(family: str, size: dict[str, Any]) -> ir.Graph:
    """The float graph of a family, with a cache."""
    config = {"model_type": family, "architectures": [FAMILIES[family]], **COMMON, **size}
    return export_graph(config).model.graph


def node(one: ir.Node) -> tuple[Any, ...]:
    """What a template would write of a node: inputs by the operator and the place that they come from."""
    sources = [producer(value) for value in one.inputs]
    attributes = sorted((name, str(value.value)) for name, value in one.attributes.items())
    return one.op_type, one.domain, attributes, sources


def producer(value: ir.Value | None) -> tuple[str, int | None]:
    """Where an input comes from: an operator and its output, or a constant, an input or a weight."""
    if value is None:
        return "none", None
    made = value.producer()
    if made is not None:
        return made.op_type, value.index()
    return ("constant" if value.const_value is not None else "given"), None


def constants(of: ir.Graph) -> list[list[Any]]:
    """The values of the constants, in the order of their first use."""
    inputs = (value for one in of for value in one.inputs if value is not None)
    held = [value.const_value for value in dict.fromkeys(inputs) if value.const_value is not None]
    return [tensor.numpy().reshape(-1).tolist() for tensor in held]


if __name__ == "__main__":
    main()
