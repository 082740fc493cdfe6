"""List the layers of a model that can be inspected.

A layer is one matrix that inputs are multiplied by: a Linear, a Conv1D, a convolution, a module of Megatron-Core, or
one expert of a stack. Roles come from the architecture's table (transformers), or from the dialect whose rows match
most parameters (Megatron-Core, torchtitan). Without either, layers have names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bridge.core.errors import BridgeError
from bridge.core.values import Site
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.match import architecture_of
from bridge.tables.architectures.roles import load_roles
from bridge.workflows.inspect.changes.gemms import why_fixed
from bridge.workflows.inspect.config.dialect_roles import dialect_meanings
from bridge.workflows.inspect.config.layers import (
    CONV,
    CONV1D,
    EXPERT,
    LINEAR,
    Layer,
    Meaning,
    clean,
    expert_name,
    number_in,
)

if TYPE_CHECKING:
    from bridge.sources.source import Source

INSIDE = "an expert inside one module"
_NUMBERED = re.compile(r"weight\d+")
Meanings = Mapping[tuple[str, int | None], Meaning]  # by live parameter and expert


def layers_of(model: Any, source: Source | None = None) -> tuple[Layer, ...]:
    """The layers of a live model, in its order; `source`: what it was loaded from."""
    model = unwrapped(model)
    meanings = _meanings(model, source)
    return tuple(layer for name, module in model.named_modules() for layer in _layers(name, module, meanings))


def not_listed(model: Any) -> list[str]:
    """Names of modules of Megatron-Core that hold the matrices of experts in another way: GroupedMLP, GroupedLinear."""
    return [
        clean(name)
        for name, module in unwrapped(model).named_modules()
        if "Grouped" in type(module).__name__ and any(_NUMBERED.fullmatch(key) for key in module._parameters)
    ]


def unwrapped(model: Any) -> Any:
    """A model without the wrappers for compilation and parallel training, which keep it as a child."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (model.module if _is_parallel(model) else None)
        if inner is None:
            return model
        model = inner


def _is_parallel(model: Any) -> bool:
    return [name for name, _ in model.named_children()] == ["module"] and not model._parameters


def _layers(name: str, module: Any, meanings: Meanings) -> Iterator[Layer]:
    """The layers whose weight a module has."""
    shown = clean(name)
    weight = module._parameters.get("weight")
    kind = _kind(module)
    meaning = meanings.get((f"{shown}.weight", None))
    if kind or (meaning and weight is not None and weight.ndim == 2 and not _is_router(meaning)):
        yield _layer(shown, meaning, kind or LINEAR, name, fixed=why_fixed(module))
        return
    for parameter, tensor in module._parameters.items():
        if tensor is None or tensor.ndim != 3:
            continue
        key = f"{shown}.{parameter}"
        if (key, 0) in meanings or (key, None) in meanings or type(module).__name__.endswith("Experts"):
            for expert in range(tensor.shape[0]):
                meaning = meanings.get((key, expert)) or meanings.get((key, None))
                if meaning is None and getattr(module, "is_transposed", False):
                    meaning = Meaning((), None, turned=True)
                yield _layer(expert_name(shown, expert, parameter), meaning, EXPERT, name, parameter, expert, INSIDE)


def _layer(
    name: str, meaning: Meaning | None, kind: str, module: str, parameter: str = "weight", expert: int | None = None,
    fixed: str = "",
) -> Layer:  # fmt: skip
    number = meaning.number if meaning and meaning.number is not None else number_in(name)
    turned = kind == CONV1D or (kind == EXPERT and meaning is not None and meaning.turned)
    return Layer(name, meaning.roles if meaning else (), number, kind, module, parameter, expert, turned, fixed)


def _kind(module: Any) -> str:
    """The kind of a torch or transformers module with one weight, "" for any other."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return LINEAR
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return CONV
    is_conv1d = any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils" for base in type(module).__mro__
    )
    return CONV1D if is_conv1d else ""


def _is_router(meaning: Meaning) -> bool:
    """Whether a module chooses experts: its output is not that of a GEMM."""
    return any(load_roles().roles[role].kind == "router" for role in meaning.roles)


def _meanings(model: Any, source: Source | None) -> Meanings:
    if source is not None or _is_transformers(model):
        return _of_structure(model, source)
    return dialect_meanings(model)


def _is_transformers(model: Any) -> bool:
    return hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "to_json_string")


def _of_structure(model: Any, source: Source | None) -> Meanings:
    """Meanings by the architecture's table; none if there is no table, or the model does not fit it."""
    from bridge.sources.live_models.checkpoint_names import live_names
    from bridge.sources.memory import open_model
    from bridge.tables.architectures.structure import structure

    model = _without_wrappers(model)
    try:
        source = source or open_model(model)
        if load_arch(architecture_of(source.config)) is None:
            return {}
        sites = structure(source.config, source.specs).sites
        origins = live_names(model, source.specs)
    except BridgeError:
        return {}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    meanings: dict[tuple[str, int | None], Meaning] = {}
    for site in sites:
        if f"{site.module}.weight" in own:  # a tied head, too, whose weight is stored as the embedding
            _add(meanings, (f"{site.module}.weight", None), site)
        elif site.weight in origins:
            for part in origins[site.weight].parts:
                _add(meanings, (part.live, part.expert), site, part.order == (1, 0))
    return meanings


def _without_wrappers(model: Any) -> Any:
    """The model, or a copy without weights if wrappers of its blocks (compilation, FSDP) put parts into its names."""
    if all(clean(name) == name for name, _ in model.named_modules()):
        return model
    from bridge.sources.live_models.meta_device import build_meta, resolve_config

    return build_meta(resolve_config(model.config), type(model), model.dtype)


def _add(
    meanings: dict[tuple[str, int | None], Meaning], key: tuple[str, int | None], site: Site, turned: bool = False
) -> None:
    """Add the roles of a site to a live parameter, which may be several sites joined."""
    before = meanings[key].roles if key in meanings else ()
    stored = site.layout.endswith("in_out")
    meanings[key] = Meaning(tuple(dict.fromkeys((*before, *site.roles))), site.layer, stored != turned)
