"""Read config.json of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError, UsageError
from bridge.core.parsing import load_json, parse_json


def settle_config(config: dict[str, Any] | None, given: Any) -> dict[str, Any]:
    """Return the model's config, changed or replaced by what the caller gave; it must have `architectures`."""
    if isinstance(given, str | Path):
        config = {**(config or {}), **read_json(Path(given), f"config={given}")}
    elif isinstance(given, Mapping):
        config = {**(config or {}), **given}
    elif hasattr(given, "to_dict"):
        whole = given.to_dict()
        config = {**whole, "architectures": whole.get("architectures") or (config or {}).get("architectures")}
    elif given is not None:
        raise UsageError(f"config= takes a dict, a config object or a path, not {type(given).__name__}")
    if config is None:
        raise SourceError("config.json is missing; put it beside the weights, or give config=")
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        kind = config.get("model_type")
        example = f" (model_type is {kind!r})" if kind else ""
        given_as = json.dumps({"architectures": [_class_of(kind) or "LlamaForCausalLM"]})
        raise SourceError(
            f"config.json has no architectures{example}: the model class is unknown; give the class that it was saved "
            f"from: config={given_as}, or --config FILE with that JSON in it"
        )
    return config


def _class_of(model_type: Any) -> str:
    """The class with a head that transformers has for a model type; "" if it knows none, or is not installed."""
    if not isinstance(model_type, str):
        return ""
    try:
        from transformers.models.auto import modeling_auto
    except ImportError:
        return ""
    for names in ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL"):
        name = getattr(modeling_auto, f"{names}_MAPPING_NAMES").get(model_type)
        if isinstance(name, str):
            return name
    return ""


def config_file(root: Path) -> dict[str, Any] | None:
    """Return the content of a directory's config.json; None without one."""
    path = root / "config.json"
    return read_json(path) if path.is_file() else None


def read_json(file: Path | bytes, where: str = "") -> dict[str, Any]:
    """Return the JSON object of a file, or of its content; SourceError if it is none. `where`: its name in messages."""
    name = where or ("" if isinstance(file, bytes) else file.name)  # a remote file has a path of its own class
    try:
        content = parse_json(file) if isinstance(file, bytes) else load_json(file)
    except (ValueError, OSError) as error:
        raise SourceError(f"{name}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{name}: must hold a JSON object, not {type(content).__name__}")
    return content
