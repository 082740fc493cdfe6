"""Open a model: try the kinds of sources in order."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.core.addresses import check_length, check_local, is_remote
from bridge.core.entry_points import registered
from bridge.core.errors import SourceError, UsageError
from bridge.core.machine import without_collection
from bridge.core.remote.path import as_path
from bridge.core.text import nearest
from bridge.sources.adapted.opening import combined, is_adapter, is_peft_model, recognizes
from bridge.sources.adapted.settings import CONFIG
from bridge.sources.configs.diffusion import is_diffusion_model
from bridge.sources.hub import snapshot
from bridge.sources.source import Source, SourceKind, completed, is_source

if TYPE_CHECKING:
    from bridge.sources.adapted.adapter import Adapter

# In this order; the last takes every remaining string and path, and says what is wrong. By name, because importing
# every kind would load modules that most models do not need: a third of the time of opening one.
KINDS = ("memory", "megatron", "meta", "torchtitan", "gguf", "hf")
MODES = ("merge", "keep")  # of an adapter


@without_collection()
def open_source(
    model: Any, config: Any = None, tokenizer: Any = None, base: Any = None, adapter: str | None = None
) -> Source:
    """Open a `transformers` model in memory, a directory, .nemo or .gguf, a hub id (`org/name@revision`), or a Source.

    A directory at s3://, gs://, az://, https:// or hf:// is read there, by byte range.

    `config`: a dict whose entries replace those of config.json, a config object, or a path to a JSON file.
    `tokenizer`: an object, or a directory or hub id to load it from instead of the model's own.
    `base`, `adapter`: of a LoRA adapter, the model under it, and whether it is merged ("merge") or kept apart ("keep").

    >>> source = open_source("examples/models/tiny-llama")
    >>> source.dialect, source.specs["model.norm.weight"].shape
    ('hf', (128,))
    """
    if is_source(model):
        if config is not None or tokenizer is not None:
            raise UsageError("config= and tokenizer= go to the source itself when `model` is a Source already")
        if base is not None or adapter is not None:
            raise UsageError("base= and adapter= go to an adapter's directory, not to a Source")
        return completed(model)
    if isinstance(model, str) and not model.strip():
        raise UsageError("model is an empty string; give a directory or a hub id")
    check_length(model)
    check_local(config=config, tokenizer=tokenizer)
    for entry in registered("bridge.sources"):
        kind = cast(SourceKind, entry.load())  # these come first and can so replace a built-in one
        if kind.recognizes(model):
            return completed(kind.open_model(model, config, tokenizer))
    if is_remote(model):
        from bridge.core.remote.opening import open_remote

        model = open_remote(model)
    if adapted := _open_with(model, config, tokenizer, base, adapter):
        return adapted
    for name in KINDS:
        kind = cast(SourceKind, importlib.import_module(f"bridge.sources.{name}"))
        if kind.recognizes(model):
            return kind.open_model(model, config, tokenizer)
    if is_diffusion_model(model):  # it is not a torch module
        raise SourceError(
            f"{type(model).__name__} in memory: a pipeline; give one of its models (pipeline.transformer, "
            "pipeline.unet), or the directory that pipeline.save_pretrained writes"
        )
    raise UsageError(
        f"cannot take a model from {type(model).__name__}; give a transformers model, a directory or a hub id"
    )


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
        from bridge.sources.adapted.adapter import unwrapped
        from bridge.sources.memory import open_model as open_memory

        whole, adapter = unwrapped(model)
        return combined(open_memory(whole, config, tokenizer), adapter, mode)
    from bridge.sources.adapted.adapter import open_adapter

    adapter = open_adapter(root or cast(Path, as_path(model)), str(model))
    if tokenizer is not None:
        adapter = replace(adapter, side_files={})
    return combined(_base(adapter, base, config, tokenizer), adapter, mode)


def _open_with(model: Any, config: Any, tokenizer: Any, base: Any, mode: str | None) -> Source | None:
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


def _base(adapter: Adapter, base: Any, config: Any, tokenizer: Any) -> Source:
    """Open the base that was given, or that the adapter names."""
    if base is not None:
        source = open_source(base, config, tokenizer)
        if source.adapter:
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
