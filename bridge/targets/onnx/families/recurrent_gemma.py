"""RecurrentGemma, whose recurrent blocks keep their states in modules."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from bridge.targets.onnx.export.family import Family
from bridge.targets.onnx.export.recurrent.replace import SELECTIVE, recurrence


def _gated_block(
    self: Any, input_states: Any, position_ids: Any, attention_mask: Any, past_key_values: Any = None, **_: Any
) -> tuple[Any, None]:
    """RecurrentGemma's recurrent block, which keeps its states in modules and reads padding as tokens."""
    tokens, width = input_states.shape[1], self.conv1d_width
    new = whole = self.linear_x(input_states).transpose(1, 2)
    self.rg_lru.recurrent_states = None
    if past_key_values is not None:
        self.rg_lru.recurrent_states = past_key_values.get_recurrent_state(self.layer_idx)
        whole = past_key_values.update_conv_state(new, self.layer_idx, conv_kernel_size=width)
    whole = functional.pad(whole[..., -(tokens + width) :], (width, 0))
    end, x = whole.shape[-1], self.conv_1d.bias[:, None]
    for back in range(width):  # the token at position p has p tokens before it, whatever stands there
        taps = whole[..., end - back - tokens : end - back] * (position_ids >= back)[:, None]
        x = x + taps * self.conv_1d.weight[:, :, width - 1 - back]
    self.rg_lru._rnn_scan = _gated_scan
    x = self.rg_lru(x.transpose(1, 2), position_ids)
    if past_key_values is not None:
        past_key_values.update_recurrent_state(self.rg_lru.recurrent_states, self.layer_idx)
    return self.linear_out(x * self.act_fn(self.linear_y(input_states))), None


def _gated_scan(hidden_states: Any, recurrent_gate: Any, reset: Any, recurrent_states: Any) -> tuple[Any, Any]:
    """state = gate state + x, from nothing where a text begins: a selective scan of one state a channel."""
    x = hidden_states.transpose(1, 2).float()
    dt = -(recurrent_gate * ~reset).transpose(1, 2).float().log()  # infinite where a text begins
    one = x[:, :1] * 0 + 1
    state = x[..., 0] * 0 if recurrent_states is None else recurrent_states
    inputs = (dt, x, one, one, -torch.ones(x.shape[1], 1))
    y, state = recurrence(SELECTIVE, inputs, x.shape, state[..., None])
    return y.transpose(1, 2).to(hidden_states.dtype), state[..., 0]


FAMILY = Family(recurrences={"RecurrentGemmaRecurrentBlock": _gated_block})
