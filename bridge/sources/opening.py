"""Open a model: try the kinds of sources in order."""

from __future__ import annotations

import importlib
from typing import Any, cast

from bridge.core.addresses import check_length, check_local, is_remote
from bridge.core.entry_points import registered
from bridge.core.errors import SourceError, UsageError
from bridge.core.machine import without_collection
from bridge.sources.adapted.opening import open_with
from bridge.sources.configs.diffusion import is_diffusion_model
from bridge.sources.source import Source, SourceKind

# In this order; the last takes every remaining string and path, and says what is wrong. By name, because importing
# every kind would load modules that most models do not need: a third of the time of opening one.
KINDS = ("memory", "megatron", "meta", "torchtitan", "hf")


@without_collection()
def open_source(
    model: Any, config: Any = None, tokenizer: Any = None, base: Any = None, adapter: str | None = None
) -> Source:
    """Open a `transformers` model in memory, a directory, a .nemo, a hub id (`org/name@revision`), or a Source.

    A directory at s3://, gs://, az://, https:// or hf:// is read there, by byte range.

    `config`: a dict whose entries replace those of config.json, a config object, or a path to a JSON file.
    `tokenizer`: an object, or a directory or hub id to load it from instead of the model's own.
    `base`, `adapter`: of a LoRA adapter, the model under it, and whether it is merged ("merge") or kept apart ("keep").

    >>> source = open_source("examples/models/tiny-llama")
    >>> source.dialect, source.specs["model.norm.weight"].shape
    ('hf', (128,))
    """
    if all(hasattr(type(model), name) for name in ("read", "load_model", "load_tokenizer")):
        if config is not None or tokenizer is not None:
            raise UsageError("config= and tokenizer= go to the source itself when `model` is a Source already")
        if base is not None or adapter is not None:
            raise UsageError("base= and adapter= go to an adapter's directory, not to a Source")
        return cast(Source, model)
    if isinstance(model, str) and not model.strip():
        raise UsageError("model is an empty string; give a directory or a hub id")
    check_length(model)
    check_local(config=config, tokenizer=tokenizer)
    for entry in registered("bridge.sources"):
        kind = cast(SourceKind, entry.load())  # these come first and can so replace a built-in one
        if kind.recognizes(model):
            return kind.open_model(model, config, tokenizer)
    if is_remote(model):
        from bridge.core.remote.opening import open_remote

        model = open_remote(model)
    if adapted := open_with(model, config, tokenizer, base, adapter):
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
