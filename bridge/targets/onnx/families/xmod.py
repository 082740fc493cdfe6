"""X-MOD, which has an adapter for each language."""

from __future__ import annotations

from typing import Any

from bridge.targets.onnx.export.family import Family


def _adapter(self: Any, lang_ids: Any, hidden_states: Any) -> Any:
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


FAMILY = Family(methods={"XmodOutput": {"lang_adapter": _adapter}})
