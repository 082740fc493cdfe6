"""Llama 4: stacks of experts, complex rotary embeddings, and images as tiles."""

from __future__ import annotations

from typing import Any

import torch

from bridge.targets.onnx.export.family import Family


def _experts(self: Any, hidden_states: Any) -> Any:
    """It gets the tokens once for each expert, times its routing weight."""
    outputs = []
    for e, tokens in enumerate(hidden_states.view(self.num_experts, -1, self.hidden_size)):
        gate, up = (tokens @ self._parameters[f"gate_up_proj[{e}]"]).chunk(2, dim=-1)
        outputs.append((up * self.act_fn(gate)) @ self._parameters[f"down_proj[{e}]"])
    return torch.cat(outputs)


def _features(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    states = model.get_image_features(pixel_values, return_dict=True).last_hidden_state
    features: torch.Tensor = model.multi_modal_projector(states.reshape(-1, states.shape[-1]))
    return features


FAMILY = Family(
    methods={"Llama4TextExperts": {"forward": _experts}},
    stacks=("Llama4TextExperts",),
    heads_axis={"Llama4TextRotaryEmbedding": 2},
    features=_features,
)
