"""Configs of diffusers' models, and the parts of its pipelines.

Imports no framework. Programs of transformers name a class in `architectures`, diffusers in `_class_name`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.sources.config_json import read_json

INDEX = "model_index.json"
_CLASS = "_class_name"
PLACES = ("img_ids", "txt_ids")  # inputs: the positions of all tokens, the same for all rows
FLOAT32 = ("timestep", "guidance", *PLACES)  # inputs: steps and positions, whatever the model's dtype
# The parts that run once a step, and take nearly all of a pipeline's time; two of them share the steps of Wan 2.2.
_DENOISERS = ("transformer", "unet", "transformer_2")


def is_diffusion(config: object) -> bool:
    """Whether a config is of a model or pipeline of diffusers."""
    return isinstance(config, Mapping) and _CLASS in config and "model_type" not in config


def is_diffusion_model(model: object) -> bool:
    """Whether a live object is a model or pipeline of diffusers: the config of a new one does not name its class."""
    return any(kind.__module__.partition(".")[0] == "diffusers" for kind in type(model).__mro__)


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its class as `architectures`, where all of this package looks for it."""
    return {**config, "architectures": [config[_CLASS]]}


def without_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as diffusers reads it: it refuses keys that it does not know."""
    return {key: value for key, value in config.items() if not (key == "architectures" and is_diffusion(config))}


def denoiser_of(root: Path) -> str:
    """Return the name of the part of a pipeline's directory that is quantized; "" if `root` is no pipeline.

    SourceError if there is none that can be told.
    """
    if (root / "config.json").is_file() or not (root / INDEX).is_file():
        return ""
    index = read_json(root / INDEX, f"{root}: {INDEX}")
    parts = {name: part for name, part in index.items() if isinstance(part, list) and len(part) == 2 and any(part)}
    models = [name for name in _DENOISERS if parts.get(name, [None])[0] == "diffusers"]
    if len(models) == 1:
        return models[0]
    kind = f"{root}: a pipeline of diffusers ({index.get(_CLASS, 'without a class')})"
    if models:
        raise SourceError(
            f"{kind} with {len(models)} denoisers ({', '.join(models)}); give one at a time, such as "
            f"{root / models[0]}, and put the outputs in their places in a copy of the pipeline"
        )
    others = [str(root / name) for name, part in parts.items() if (root / name / "config.json").is_file()]
    known = f"; give the directory of one of its models: {', '.join(others)}" if others else ""
    raise SourceError(f"{kind} without a part called {', '.join(_DENOISERS[:-1])} of diffusers{known}")


def config_text(config: Mapping[str, Any]) -> bytes:
    """The content of config.json as `save_pretrained` of diffusers writes it."""
    return (json.dumps(without_architecture(config), indent=2, sort_keys=True) + "\n").encode()


def nested(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Put inputs with two names into dictionaries, as the model's forward takes them."""
    result: dict[str, Any] = {}
    for name, value in inputs.items():
        outer, _, inner = name.partition(".")
        if inner:
            result.setdefault(outer, {})[inner] = value
        else:
            result[name] = value
    return result
