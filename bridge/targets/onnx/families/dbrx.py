"""DBRX, whose experts stand below each other in one matrix."""

from __future__ import annotations

from typing import Any

from bridge.targets.onnx.export.experts import by_expert, mixed
from bridge.targets.onnx.export.family import Family


def _forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Its stacks have the experts below each other, [experts x features, features]."""
    tokens = hidden_states.reshape(-1, self.hidden_size)
    stacks = [
        stack.view(-1, self.ffn_hidden_size, self.hidden_size) for stack in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
    ]
    outputs = (self.mlp(tokens, *(stack[e] for stack in stacks)) for e in range(self.num_experts))
    return mixed(outputs, by_expert(top_k_index, top_k_weights, self.num_experts)).view(hidden_states.shape)


FAMILY = Family(methods={"DbrxExperts": {"forward": _forward}})
