"""BLIP-2, whose decoder is a whole model inside of another."""

from __future__ import annotations

from typing import Any

from bridge.targets.onnx.export.calls.states import filled, present
from bridge.targets.onnx.export.calls.text import Flat
from bridge.targets.onnx.export.family import Family


class Inner(Flat):
    """A decoder that is a whole model inside of another: BLIP-2."""

    model: Any

    def forward(self, inputs: dict[str, Any], past: list[Any]) -> tuple[Any, ...]:
        writer = self.model.language_model
        out = writer(**inputs, past_key_values=filled(writer.config, self.kinds, past), use_cache=True)
        return (out.logits, *present(out.past_key_values))


FAMILY = Family(decoder=Inner, inner_decoder=True)
