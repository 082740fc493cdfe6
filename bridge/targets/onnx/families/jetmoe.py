"""JetMoe, whose layers choose experts in loops that depend on data.

Here every expert runs on all tokens, as in `export.experts`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from bridge.targets.onnx.export.experts import by_expert, mixed
from bridge.targets.onnx.export.family import Family


def _gates(router: Any, tokens: Any) -> tuple[Any, Any]:
    """The experts that each token chooses, and their weights, [tokens, top k]."""
    scores, chosen = router.layer(tokens).float().topk(router.top_k, dim=1)
    return chosen, torch.softmax(scores, dim=1).type_as(tokens)


def _linear(self: Any, tokens: Any, expert: int) -> Any:
    return functional.linear(tokens, self._parameters[f"weight[{expert}]"])


def _mlp(self: Any, layer_input: Any) -> Any:
    tokens = layer_input.reshape(-1, self.input_size)
    chosen, gates = _gates(self.router, tokens)
    outputs = []
    for e in range(self.input_linear.num_experts):
        gate, up = self.input_linear(tokens, e).chunk(2, dim=-1)
        outputs.append(self.output_linear(self.activation(gate) * up, e))
    return mixed(outputs, by_expert(chosen, gates, len(outputs))).view(layer_input.shape) + self.bias


def _queries(self: Any, layer_input: Any) -> tuple[Any, None, tuple[Any, Any]]:
    """Queries of the experts that each token chooses, in its order, [batch, tokens, top k, features]."""
    batch, length, _width = layer_input.shape
    tokens = layer_input.reshape(-1, self.input_size)
    chosen, gates = _gates(self.router, tokens)
    queries = torch.stack([self.input_linear(tokens, e) for e in range(self.num_experts)], 1)
    places = chosen[:, :, None].expand(-1, -1, self.hidden_size)
    return queries.gather(1, places).view(batch, length, self.top_k, self.hidden_size), None, (chosen, gates)


def _reduce(self: Any, layer_input: Any, topo_info: tuple[Any, Any]) -> Any:
    """Each expert projects what attention gave for its own queries; zeros for tokens that did not choose it."""
    batch, length, _top, width = layer_input.shape
    chosen, gates = topo_info
    attended = layer_input.reshape(-1, self.top_k, width)
    places = chosen[:, :, None].expand(-1, -1, width)
    own = torch.zeros(attended.shape[0], self.num_experts, width, dtype=attended.dtype).scatter(1, places, attended)
    outputs = [self.output_linear(own[:, e], e) for e in range(self.num_experts)]
    return mixed(outputs, by_expert(chosen, gates, self.num_experts)).view(batch, length, self.input_size) + self.bias


FAMILY = Family(
    methods={
        "JetMoeParallelExperts": {"forward": _linear},
        "JetMoeMoE": {"forward": _mlp},
        "JetMoeMoA": {"map": _queries, "reduce": _reduce},
    },
    stacks=("JetMoeParallelExperts",),
)
