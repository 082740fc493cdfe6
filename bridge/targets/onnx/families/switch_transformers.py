"""Switch Transformers, whose router gives each expert a number of tokens."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from bridge.targets.onnx.export.experts import mixed
from bridge.targets.onnx.export.family import Family


def _forward(self: Any, hidden_states: Any, selected_experts: Any, routing_weights: Any) -> Any:
    """Its router gives each expert's tokens as zeros and ones, [tokens, 1, experts]: none beyond the capacity."""
    outputs = (self[f"expert_{e}"](hidden_states) for e in range(self.num_experts))
    return mixed(outputs, selected_experts.squeeze(1) * routing_weights)


def _route(self: Any, hidden_states: Any) -> tuple[Any, Any, None]:
    """As transformers, which casts the matrix of the module itself."""
    bias = None if self.classifier.bias is None else self.classifier.bias.to(self.dtype)
    scores = functional.linear(hidden_states.to(self.dtype), self.classifier.weight.to(self.dtype), bias)
    best, chosen = scores.softmax(-1).to(hidden_states.dtype).max(-1, keepdim=True)
    taken = functional.one_hot(chosen.squeeze(-1), self.num_experts)
    return taken * (taken.cumsum(-2) <= self.expert_capacity), best, None


def _stack(self: Any, *args: Any, use_cache: Any = None, **given: Any) -> Any:
    """transformers hands the decoder's `use_cache` to the encoder as well, which raises."""
    return type(self).forward(self, *args, use_cache=use_cache if self.is_decoder else None, **given)


FAMILY = Family(
    methods={
        "SwitchTransformersExperts": {"forward": _forward},
        "SwitchTransformersTop1Router": {"forward": _route},
        "SwitchTransformersStack": {"forward": _stack},
    }
)
