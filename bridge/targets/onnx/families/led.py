"""LED, whose encoder attends as Longformer does."""

from __future__ import annotations

from typing import Any

from bridge.targets.onnx.export.family import Family
from bridge.targets.onnx.families.longformer import attend, masks_of


def _led(
    self: Any, input_ids: Any = None, attention_mask: Any = None, global_attention_mask: Any = None, **_: Any
) -> Any:
    from transformers.models.led.modeling_led import LEDEncoderBaseModelOutput

    states = self.layernorm_embedding(self.embed_tokens(input_ids) + self.embed_positions(input_ids.shape))
    masks = masks_of(states, attention_mask, global_attention_mask)
    for layer in self.layers:
        states = layer(states, attention_mask=None, **masks)[0]
    return LEDEncoderBaseModelOutput(last_hidden_state=states)


FAMILY = Family(
    methods={"LEDEncoderSelfAttention": {"forward": attend}, "LEDEncoder": {"forward": _led}},
    counted=True,
)
