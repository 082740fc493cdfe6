"""Separate a PeftModel in memory into its base and adapter."""

from __future__ import annotations

import copy
from typing import Any

from bridge.core.errors import SourceError
from bridge.sources.adapted.adapter import Adapter, live_adapter


def unwrapped(model: Any) -> tuple[Any, Adapter]:
    """Return a base that shares the caller's tensors, and the active adapter."""
    from peft import get_peft_model_state_dict

    where = f"{type(model).__name__} in memory"
    active = list(model.active_adapters)
    if len(active) != 1:
        raise SourceError(
            f"{where}: {len(active)} adapters are active ({', '.join(active) or 'none'}), and one is merged; "
            "model.set_adapter(...), or combine them: model.add_weighted_adapter(...)"
        )
    merged = [name for name, module in model.named_modules() if getattr(module, "merged_adapters", None)]
    if merged:
        raise SourceError(f"{where}: its adapter is merged into the base already; model.unmerge_adapter() first")
    name = active[0]
    content = model.peft_config[name].to_dict()
    content = {key: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for key, v in content.items()}
    if content.get("peft_type") != "LORA":
        raise SourceError(f"{where}: an adapter of type {content.get('peft_type')}, not LoRA; merge it with peft first")
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    adapter = live_adapter(where, name, content, state)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    base = copy.deepcopy(model, memo).unload()  # of the copy, whose modules are its own and whose tensors are not
    return base, adapter
