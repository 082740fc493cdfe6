"""What decides a graph beside config.json.

How an embedding model pools, and the size of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.parsing.limited import parse_json
from bridge.sources.config_json import read_json

MODULES = "modules.json"  # of sentence-transformers: what follows the model
IMAGES = "preprocessor_config.json"
# Switches of sentence-transformers before 5 -> words since then.
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}
Files = Mapping[str, Path | bytes]


def read_pooling(files: Files) -> tuple[str, str]:
    """How a checkpoint's vectors are made ("mean", "mean normalized", ...), or "" and why the graph makes none.

    Both are "" for a checkpoint that is not of sentence-transformers.
    """
    if MODULES not in files:
        return "", ""
    modules = _modules(files[MODULES])
    kinds = [kind for kind, _ in modules[1:]]
    if kinds[:1] != ["Pooling"] or set(kinds[1:]) - {"Normalize"}:
        return "", _why_none(f"{MODULES} lists {', '.join(kinds) or 'nothing'} behind the model")
    name = f"{modules[1][1]}/config.json"
    if name not in files:
        return "", _why_none(f"{name} is missing, which {MODULES} names")
    config = read_json(files[name], name)
    words = config.get("pooling_mode") or [MODES.get(key, key) for key in config if _is_on(config, key)]
    mode = ", ".join([words] if isinstance(words, str) else words)
    if mode not in MODES.values():
        return "", _why_none(f"its pooling is {mode or 'not given'}")
    return f"{mode} normalized" if "Normalize" in kinds else mode, ""


def _modules(file: Path | bytes) -> list[tuple[str, str]]:
    """Class and folder of each part of a model of sentence-transformers."""
    try:
        entries = parse_json(file if isinstance(file, bytes) else file.read_bytes())
        return [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (ValueError, OSError, TypeError, LookupError) as error:
        raise SourceError(
            f"{MODULES}: no list of modules with type and path: {error}; mend it, or remove it"
        ) from error


def _is_on(config: Mapping[str, Any], key: str) -> bool:
    return key.startswith("pooling_mode_") and bool(config[key])


def _why_none(reason: str) -> str:
    known = ", ".join(MODES.values())
    return f"no output sentence_embedding: {reason}, and graphs pool by {known} and normalize; do it after the graph"


def read_image_size(files: Files) -> tuple[int, int] | None:
    """Height and width that the image processor makes, for models whose config has no size; None if unknown."""
    if IMAGES not in files:
        return None
    settings = read_json(files[IMAGES], IMAGES)
    size = settings.get("crop_size") if settings.get("do_center_crop") else settings.get("size")
    size = size or settings.get("size")
    if isinstance(size, int):
        return size, size
    height, width = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (None, None)
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None
