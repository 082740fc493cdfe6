"""What the export of one family of models replaces and adds."""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.targets.onnx.export.calls.sound import SoundMasks
    from bridge.targets.onnx.export.calls.text import Call

HOME = "bridge.targets.onnx.families"
Methods = Mapping[str, Mapping[str, Callable[..., Any]]]  # class -> name -> method


@dataclass(frozen=True)
class Family:
    """The `FAMILY` of a module of `bridge.targets.onnx.families`. What is left out is done as for all other models."""

    methods: Methods = field(default_factory=dict)
    """Methods in the place of transformers' own, which depend on data."""
    counted: bool = False
    """The number of tokens that attend everywhere decides extents inside the graph."""
    settle: Callable[[Any], None] | None = None
    """Changes the model in place before anything else does."""
    stacks: tuple[str, ...] = ()
    """Classes whose parameters of three axes hold a matrix an expert."""
    recurrences: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Class of a layer -> its forward with the recurrence as one node."""
    cache: Callable[[type], Any] | None = None
    """Makes an empty cache that is also of a given class."""
    heads_axis: Mapping[str, int] = field(default_factory=dict)
    """Class of a complex rotary embedding -> the axis of heads in what its `apply_rotary_emb` rotates."""
    sound: SoundMasks | None = None
    """How the mask of an encoder's sounds becomes that of its states."""
    masks_sound: bool = False
    """Its tower of sound reads a mask."""
    features: Callable[..., Any] | None = None
    """Makes the features of images, if `get_image_features` alone does not."""
    vision: Callable[..., Call] | None = None
    """Returns the call of its tower."""
    tiles: int = 0
    """Images are tiles, so many of whose features are added to one."""
    embedding: type | None = None
    """The module that puts features into a text."""
    decoder: type | None = None
    """The module that continues embeddings."""
    seen_by: str = ""
    """The decoder's input that says which tokens see each other."""
    inner_decoder: bool = False
    """The decoder is a whole model, `language_model`."""
    call: Callable[..., Call] | None = None
    """Returns the call of any of its graphs."""


def family_of(config: Any) -> Family:
    """The family of a model with this config, by its `model_type`."""
    return _load(str(getattr(config, "model_type", "")).replace("-", "_"))


def families_of(model: Any) -> list[Family]:
    """The families of all modules of `model`, by the folder of their class in transformers."""
    paths = {tuple(type(module).__module__.split(".")) for module in model.modules()}
    folders = {path[2] for path in paths if path[:2] == ("transformers", "models") and len(path) > 2}
    return [_load(folder) for folder in sorted(folders & _names())]


def replace_methods(model: Any) -> None:
    """Settle `model` and give its modules the methods of their families, in place."""
    families = families_of(model)
    for family in families:
        if family.settle:
            family.settle(model)
    methods = {kind: own for family in families for kind, own in family.methods.items()}
    for module in model.modules():
        for name, method in methods.get(type(module).__name__, {}).items():
            setattr(module, name, types.MethodType(method, module))


@cache
def _names() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(importlib.import_module(HOME).__path__))


@cache
def _load(name: str) -> Family:
    # looked up in the list: the name comes from a config
    module = importlib.import_module(f"{HOME}.{name}") if name in _names() else None
    family: Family = getattr(module, "FAMILY", None) or Family()
    return family
