"""Give mixture-of-experts blocks separate expert matrices for the export.

transformers 5 stacks the experts in 3-D parameters. Its own loops depend on data (`eager`), have no ONNX translation
(`grouped_mm`), or gather whole matrices per token (`batched_mm`), which a quantized engine would dequantize for every
token. Here every expert runs on all tokens, times its routing weight: E / k times the flops.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

from bridge.core.errors import ExportError
from bridge.targets.onnx.export.family import families_of


def unstack_experts(model: Any, stacked: bool = False) -> None:
    """Give each expert of `model` (meta parameters) its own 2-D parameters and the dense forward, in place.

    Names are expressions over the live parameter, in the live orientation: `down_proj[3]`, and for a fused gate and up
    `gate_up_proj[3, gate]`, `gate_up_proj[3, up]`. `stacked`: the checkpoint has stacks, too: gate and up stay one
    matrix, and biases stay in their stack.
    """
    families = families_of(model)
    own = {kind for family in families for kind in family.methods}
    stacks = {kind for family in families for kind in family.stacks}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in stacks:
            for key in list(module._parameters):
                _unstack(module, key, True)
        if kind in own or not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
            continue
        if getattr(module, "has_post_expert_norm", False):  # transformers 5.20 has it first
            raise ExportError(f"{name}: experts with a norm after each expert are not supported; use target hf")
        for key in list(module._parameters):
            if not (stacked and key.endswith("_bias")):
                _unstack(module, key, stacked)
        module.forward = types.MethodType(_dense_forward, module)


def _unstack(module: Any, key: str, stacked: bool) -> None:
    from torch import nn

    stack = module._parameters.pop(key)
    split = key in ("gate_up_proj", "gate_up_proj_bias") and not stacked and not _own_gate(module)
    for e in range(stack.shape[0]):
        one = stack[e]
        if not split:
            module._parameters[f"{key}[{e}]"] = nn.Parameter(one, requires_grad=False)
            continue
        axis = one.dim() - 1 if module.is_transposed else 0
        half = one.narrow(axis, 0, one.shape[axis] // 2).contiguous()
        for part in ("gate", "up"):
            module._parameters[f"{key}[{e}, {part}]"] = nn.Parameter(half, requires_grad=False)


def _own_gate(module: Any) -> bool:
    """True if the class joins gate and up in its own way (gpt-oss): then they stay one matrix."""
    from transformers.integrations.moe import _default_apply_gate

    return module._apply_gate.__func__ is not _default_apply_gate or not module.is_concatenated


def _linear(module: Any, x: Any, key: str, expert: int, part: str = "") -> Any:
    from torch.nn import functional

    suffix = f"[{expert}, {part}]" if part else f"[{expert}]"
    weight, stack = module._parameters[key + suffix], module._parameters.get(f"{key}_bias")
    bias = module._parameters.get(f"{key}_bias{suffix}") if stack is None else stack[expert]
    if module.is_transposed:
        y = x @ weight
        return y if bias is None else y + bias
    return functional.linear(x, weight, bias)


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


def _dense_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    zeros = getattr(self, "zero_expert_num", 0)
    routing = by_expert(top_k_index, top_k_weights, self.num_experts + zeros)
    total = mixed((_expert(self, hidden_states, e) for e in range(self.num_experts)), routing)
    if not zeros:
        return total
    return total + (hidden_states * routing[:, self.num_experts :].sum(1, keepdim=True)).to(total.dtype)


def _expert(self: Any, hidden_states: Any, expert: int) -> Any:
    if not self.has_gate:
        inner = self.act_fn(_linear(self, hidden_states, "up_proj", expert))
    elif f"gate_up_proj[{expert}]" in self._parameters:
        inner = self._apply_gate(_linear(self, hidden_states, "gate_up_proj", expert))
    else:
        gate = _linear(self, hidden_states, "gate_up_proj", expert, "gate")
        inner = self.act_fn(gate) * _linear(self, hidden_states, "gate_up_proj", expert, "up")
    return _linear(self, inner, "down_proj", expert)
