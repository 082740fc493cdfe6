"""Recognize an adapter, and combine it with its base."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import SourceError
from bridge.core.remote.path import as_path
from bridge.core.text import named
from bridge.sources.adapted.settings import CONFIG
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.sources.adapted.adapter import Adapter


def recognizes(model: object) -> bool:
    """Take peft's models, and directories with adapter_config.json that have no model of their own."""
    if is_peft_model(model):
        return True
    root = as_path(model)
    return root is not None and is_adapter(root)


def mode_of(model: object, out: Path) -> str | None:
    """How an adapter became part of an output; None for a model that is no adapter."""
    if not recognizes(model):
        return None
    from bridge.sources.adapted.copied import FOLDER

    return "keep" if (out / FOLDER / CONFIG).is_file() else "merge"


def is_adapter(root: Path) -> bool:
    """Whether a directory has an adapter, and no model of its own."""
    if not (root / CONFIG).is_file():
        return False
    return not any(any(root.glob(name)) for name in ("model*.safetensors", "pytorch_model*.bin"))


def is_peft_model(model: object) -> bool:
    """Whether peft made it; before peft is imported there is none."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def combined(base: Source, adapter: Adapter, mode: str) -> Source:
    """Merge the adapter into its base while it is read, or keep it beside."""
    if mode == "keep":
        from bridge.sources.adapted.copied import CopiedAdapterSource, check_copied_adapter

        check_copied_adapter(adapter)
        return CopiedAdapterSource(base, adapter)
    if base.quantized:
        raise SourceError(
            f"{adapter.where}: its base {base.where} is quantized, and LoRA is not merged into codes; keep the adapter "
            "apart (adapter='keep', --adapter keep), or dequantize the base first: convert it with quant='none'"
        )
    from bridge.sources.adapted.match import match
    from bridge.sources.adapted.source import AdaptedSource

    changes = match(adapter, base)
    _check_finite(adapter, changes)
    import torch

    return AdaptedSource(base, adapter, changes, torch.get_num_threads())


def _check_finite(adapter: Adapter, changes: Any) -> None:
    """SourceError for a factor that is NaN or infinite; what it replaces whole is checked with every other tensor."""
    import torch

    names = {
        name
        for change in changes.values()
        if change.delta
        for name in (change.delta.a, change.delta.b, change.delta.magnitude)
        if name
    }
    wrong = [name for name in sorted(names) if not torch.isfinite(adapter.tensor(name)).all()]
    if wrong:
        raise SourceError(f"{adapter.where}: {named(wrong)}: NaN or infinite; save the adapter of an earlier step")
