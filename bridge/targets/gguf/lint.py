"""Check a written GGUF file against what llama.cpp's loader asks of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import SourceError
from bridge.core.formats.gguf import GgufFile, Typed

COUNTS = ("block_count", "embedding_length", "context_length", "feed_forward_length", "attention.head_count")


def lint(path: Path) -> list[str]:
    """Return a message for each violation."""
    try:
        file = GgufFile(path)
    except (SourceError, OSError) as error:
        return [f"error [files] {error}"]
    return [f"error [gguf] {path.name}: {text}" for text in (*_keys(file), *_tensors(file), *_tokens(file))]


def _keys(file: GgufFile) -> Iterator[str]:
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        yield "has no general.architecture, by which llama.cpp chooses its graph"
        return
    for name in COUNTS:
        value = file.metadata.get(f"{arch}.{name}")
        if not isinstance(value, int) or value < 1:
            yield f"{arch}.{name} is {value!r}; it should be a positive whole number"


def _tensors(file: GgufFile) -> Iterator[str]:
    layers = file.metadata.get(f"{file.metadata.get('general.architecture')}.block_count")
    found = {name.split(".")[1] for name in file.specs if name.startswith("blk.")}
    if isinstance(layers, int) and found != {str(number) for number in range(layers)}:
        yield f"has tensors of layers {', '.join(sorted(found))}; block_count is {layers}"
    for name, spec in file.specs.items():
        if (len(spec.shape) < 2 or "norm" in name) and spec.dtype != "float32":
            yield f"{name} is {spec.dtype}; llama.cpp adds and multiplies in float32 only"
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in file.specs:
            yield f"has no {name}"


def _tokens(file: GgufFile) -> Iterator[str]:
    tokens, embedding = file.metadata.get("tokenizer.ggml.tokens"), file.specs.get("token_embd.weight")
    if not isinstance(tokens, list) or embedding is None:
        return
    if len(tokens) != embedding.shape[0]:
        yield f"has {len(tokens)} tokens, and an embedding of {embedding.shape[0]} rows"
    for key in ("scores", "token_type"):
        values = file.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(values, list) and len(values) != len(tokens):
            yield f"tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens"
    for key, value in file.metadata.items():
        row = type(value) is int and 0 <= value < len(tokens)
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and not row:
            yield f"{key} is {value}, beyond the {len(tokens)} tokens"


def changed_keys(path: Path, wanted: Mapping[str, Any]) -> list[str]:
    """A message for each hyperparameter that is not what a model's config gives; tokens and names are left aside."""
    try:
        found = GgufFile(path).metadata
    except (SourceError, OSError):
        return []  # told by `lint`
    arch = found.get("general.architecture")
    return [
        f"error [gguf] {path.name}: {key} is {found.get(key)!r}, and the source's config gives {_plain(value)!r}; "
        "convert again"
        for key, value in wanted.items()
        if key.startswith(f"{arch}.") and not isinstance(value, np.ndarray) and _plain(found.get(key)) != _plain(value)
    ]


def _plain(value: Any) -> Any:
    """A value without its type, numbers as float32 has them."""
    value = value.value if isinstance(value, Typed) else value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value
