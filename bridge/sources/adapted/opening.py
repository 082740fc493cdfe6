"""Open an adapter with its base."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.core.errors import SourceError, UsageError
from bridge.core.remote.path import as_path
from bridge.core.text import named, nearest
from bridge.sources.adapted.settings import CONFIG
from bridge.sources.hub import snapshot
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.sources.adapted.adapter import Adapter

MODES = ("merge", "keep")


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
    from bridge.sources.adapted.kept import FOLDER

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


def open_adapted(
    model: Any,
    config: Any = None,
    tokenizer: Any = None,
    base: Any = None,
    mode: str = "merge",
    root: Path | None = None,
) -> Source:
    """Open it with `base`, None for the one that the adapter names; SourceError if the two do not fit.

    `root`: the local directory of a hub id.
    """
    if mode not in MODES:
        raise UsageError(f"adapter={mode!r} (--adapter): unknown; {nearest(mode, MODES)}")
    if is_peft_model(model):
        if base is not None:
            raise UsageError("base= (--base): a PeftModel has its base; leave it out")
        from bridge.sources.adapted.live import unwrapped
        from bridge.sources.memory import open_model as open_memory

        whole, adapter = unwrapped(model)
        return combined(open_memory(whole, config, tokenizer), adapter, mode)
    from bridge.sources.adapted.adapter import open_adapter

    adapter = open_adapter(root or cast(Path, as_path(model)), str(model))
    if tokenizer is not None:
        adapter = replace(adapter, beside={})
    return combined(_base(adapter, base, config, tokenizer), adapter, mode)


def open_with(model: Any, config: Any, tokenizer: Any, base: Any, mode: str | None) -> Source | None:
    """Open `model` if it is an adapter; None if it is not. Only arguments for adapters make it look at the hub."""
    if recognizes(model):
        return open_adapted(model, config, tokenizer, base, mode or "merge")
    if base is None and mode is None:
        return None
    path = as_path(model)
    if path is not None and not path.exists() and is_adapter(root := snapshot(model)):
        return open_adapted(model, config, tokenizer, base, mode or "merge", root)
    raise UsageError(
        f"base= (--base) and adapter= (--adapter) are for an adapter, which {str(model)[:200]} is not: give the "
        "adapter's directory as the model, and the model under it as base="
    )


def combined(base: Source, adapter: Adapter, mode: str) -> Source:
    """Merge the adapter into its base while it is read, or keep it beside."""
    if mode == "keep":
        from bridge.sources.adapted.kept import KeptSource, check_kept

        check_kept(adapter)
        return KeptSource(base, adapter)
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


def _base(adapter: Adapter, base: Any, config: Any, tokenizer: Any) -> Source:
    """Open the base that was given, or that the adapter names."""
    from bridge.sources.opening import open_source

    if base is not None:
        source = open_source(base, config, tokenizer)
        if hasattr(source, "adapter"):
            raise SourceError(f"{adapter.where}: its base {source.where} has an adapter, too; give the plain base")
        return source
    name = adapter.settings.base
    if not name:
        raise SourceError(f"{adapter.where}: {CONFIG} does not name its base; give base= (--base)")
    beside = adapter.root / name if adapter.root and not Path(name).is_absolute() else None
    near = beside is not None and (name.startswith(".") or not Path(name).exists()) and _is_directory(beside)
    place = str(beside.resolve()) if near and beside else name
    try:
        return open_source(place, config, tokenizer)
    except SourceError as error:
        raise SourceError(
            f"{adapter.where}: its base {name!r}, which {CONFIG} names, cannot be opened; give base= (--base)\n"
            f"  {error}"
        ) from error


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


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
