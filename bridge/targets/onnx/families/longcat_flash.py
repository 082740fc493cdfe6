"""LongCat-Flash, whose last experts give the tokens as they are."""

from __future__ import annotations

import types
from typing import Any

from bridge.targets.onnx.export.family import Family


def _settle(model: Any) -> None:
    """Name what other classes of experts name."""
    from transformers.integrations.moe import _default_apply_gate

    for module in model.modules():
        if type(module).__name__ == "LongcatFlashExperts":
            module.has_gate = module.is_concatenated = True
            module.is_transposed = module.has_post_expert_norm = False
            module.num_experts = module.num_routed_experts
            module._apply_gate = types.MethodType(_default_apply_gate, module)


FAMILY = Family(settle=_settle)
