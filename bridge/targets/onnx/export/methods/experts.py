"""Experts of classes that choose them in a way of their own.

Their loops over the experts that some token chose depend on data. Here every expert runs on all tokens, as in
`experts.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional

from bridge.targets.onnx.export.methods.replace import Methods

# Classes whose parameters of three axes hold a matrix an expert.
STACKS = ("JetMoeParallelExperts", "Llama4TextExperts")


def by_expert(chosen: Any, weights: Any, experts: int) -> Any:
    """The weight of each expert for each token, [tokens, experts]; zero for those that are not chosen."""
    return torch.zeros(chosen.shape[0], experts, dtype=weights.dtype).scatter(1, chosen, weights)


def mixed(outputs: Iterable[Any], routing: Any) -> Any:
    """The sum of the outputs of all experts [tokens, features], each times its weight."""
    total = None
    for e, output in enumerate(outputs):
        part = (output * routing[:, e : e + 1]).to(output.dtype)
        total = part if total is None else total + part
    return total


def _llama4_forward(self: Any, hidden_states: Any) -> Any:
    """It gets the tokens once for each expert, times its routing weight."""
    outputs = []
    for e, tokens in enumerate(hidden_states.view(self.num_experts, -1, self.hidden_size)):
        gate, up = (tokens @ self._parameters[f"gate_up_proj[{e}]"]).chunk(2, dim=-1)
        outputs.append((up * self.act_fn(gate)) @ self._parameters[f"down_proj[{e}]"])
    return torch.cat(outputs)


def _jetmoe_gates(router: Any, tokens: Any) -> tuple[Any, Any]:
    """The experts that each token chooses, and their weights, [tokens, top k]."""
    scores, chosen = router.layer(tokens).float().topk(router.top_k, dim=1)
    return chosen, torch.softmax(scores, dim=1).type_as(tokens)


def _jetmoe_linear(self: Any, tokens: Any, expert: int) -> Any:
    return functional.linear(tokens, self._parameters[f"weight[{expert}]"])


def _jetmoe_mlp(self: Any, layer_input: Any) -> Any:
    tokens = layer_input.reshape(-1, self.input_size)
    chosen, gates = _jetmoe_gates(self.router, tokens)
    outputs = []
    for e in range(self.input_linear.num_experts):
        gate, up = self.input_linear(tokens, e).chunk(2, dim=-1)
        outputs.append(self.output_linear(self.activation(gate) * up, e))
    return mixed(outputs, by_expert(chosen, gates, len(outputs))).view(layer_input.shape) + self.bias


def _jetmoe_queries(self: Any, layer_input: Any) -> tuple[Any, None, tuple[Any, Any]]:
    """Queries of the experts that each token chooses, in its order, [batch, tokens, top k, features]."""
    batch, length, _width = layer_input.shape
    tokens = layer_input.reshape(-1, self.input_size)
    chosen, gates = _jetmoe_gates(self.router, tokens)
    queries = torch.stack([self.input_linear(tokens, e) for e in range(self.num_experts)], 1)
    places = chosen[:, :, None].expand(-1, -1, self.hidden_size)
    return queries.gather(1, places).view(batch, length, self.top_k, self.hidden_size), None, (chosen, gates)


def _jetmoe_reduce(self: Any, layer_input: Any, topo_info: tuple[Any, Any]) -> Any:
    """Each expert projects what attention gave for its own queries; zeros for tokens that did not choose it."""
    batch, length, _top, width = layer_input.shape
    chosen, gates = topo_info
    attended = layer_input.reshape(-1, self.top_k, width)
    places = chosen[:, :, None].expand(-1, -1, width)
    own = torch.zeros(attended.shape[0], self.num_experts, width, dtype=attended.dtype).scatter(1, places, attended)
    outputs = [self.output_linear(own[:, e], e) for e in range(self.num_experts)]
    return mixed(outputs, by_expert(chosen, gates, self.num_experts)).view(batch, length, self.input_size) + self.bias


def _dbrx_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Its stacks have the experts below each other, [experts x features, features]."""
    tokens = hidden_states.reshape(-1, self.hidden_size)
    stacks = [
        stack.view(-1, self.ffn_hidden_size, self.hidden_size) for stack in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
    ]
    outputs = (self.mlp(tokens, *(stack[e] for stack in stacks)) for e in range(self.num_experts))
    return mixed(outputs, by_expert(top_k_index, top_k_weights, self.num_experts)).view(hidden_states.shape)


def _switch_forward(self: Any, hidden_states: Any, selected_experts: Any, routing_weights: Any) -> Any:
    """Its router gives each expert's tokens as zeros and ones, [tokens, 1, experts]: none beyond the capacity."""
    outputs = (self[f"expert_{e}"](hidden_states) for e in range(self.num_experts))
    return mixed(outputs, selected_experts.squeeze(1) * routing_weights)


def _switch_route(self: Any, hidden_states: Any) -> tuple[Any, Any, None]:
    """As transformers, which casts the matrix of the module itself."""
    bias = None if self.classifier.bias is None else self.classifier.bias.to(self.dtype)
    scores = functional.linear(hidden_states.to(self.dtype), self.classifier.weight.to(self.dtype), bias)
    best, chosen = scores.softmax(-1).to(hidden_states.dtype).max(-1, keepdim=True)
    taken = functional.one_hot(chosen.squeeze(-1), self.num_experts)
    return taken * (taken.cumsum(-2) <= self.expert_capacity), best, None


def _switch_stack(self: Any, *args: Any, use_cache: Any = None, **given: Any) -> Any:
    """transformers hands the decoder's `use_cache` to the encoder as well, which raises."""
    return type(self).forward(self, *args, use_cache=use_cache if self.is_decoder else None, **given)


def _xmod_adapter(self: Any, lang_ids: Any, hidden_states: Any) -> Any:
    """The adapters of all languages, each for the texts of its own."""
    normed = hidden_states
    if self.adapter_layer_norm is not None:
        normed = self.adapter_layer_norm(hidden_states)
    elif self.adapter_reuse_layer_norm:
        normed = self.LayerNorm(hidden_states)
    own = [(lang_ids == at).to(normed.dtype) for at in range(len(self.adapter_modules))]
    parts = [
        adapter(normed) * is_own[:, None, None]
        for adapter, is_own in zip(self.adapter_modules.values(), own, strict=True)
    ]
    return sum(parts, normed if self.ln_before_adapter else hidden_states)


# Class -> the methods that are replaced.
METHODS: Methods = {
    "Llama4TextExperts": {"forward": _llama4_forward},
    "JetMoeParallelExperts": {"forward": _jetmoe_linear},
    "JetMoeMoE": {"forward": _jetmoe_mlp},
    "JetMoeMoA": {"map": _jetmoe_queries, "reduce": _jetmoe_reduce},
    "DbrxExperts": {"forward": _dbrx_forward},
    "SwitchTransformersExperts": {"forward": _switch_forward},
    "SwitchTransformersTop1Router": {"forward": _switch_route},
    "SwitchTransformersStack": {"forward": _switch_stack},
    "XmodOutput": {"lang_adapter": _xmod_adapter},
}
