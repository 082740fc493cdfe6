"""Layers of a base, as peft takes them.

Without a model where the architecture's table is enough; a model without weights takes eight seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from bridge.sources.source import Source
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.match import architecture_of

if TYPE_CHECKING:  # it imports torch
    from bridge.core.values import Structure
    from bridge.sources.live_models.checkpoint_names import LiveSlice

KINDS = {"out_in": "linear", "in_out": "conv1d"}  # layout of a site -> kind of a layer


class Layers(Protocol):
    """The modules of a model by the names that they have in peft."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of tensors that are one -> another name of the same."""

    def kind(self, module: str) -> str | None:
        """`linear`, `conv1d` (an input a row), `embedding` or `conv`; "" for another module, None for none."""

    def shape(self, module: str, name: str = "weight") -> tuple[int, ...]:
        """The shape of a parameter."""

    def parameters(self, module: str) -> tuple[str, ...]:
        """The names of a module's own parameters, in the order of the model."""

    def says(self, module: str, name: str) -> Any:
        """An attribute of a module, None without it."""

    def stored(self, module: str, name: str) -> dict[str, LiveSlice | None]:
        """The stored tensors that hold a parameter, with the part that each holds; {} if none or if joined."""


class TableLayers:
    """Layers whose names in peft and in the checkpoint are the same."""

    def __init__(self, base: Source, structure: Structure) -> None:
        self._specs = base.specs
        self.tied = both_ways(structure.tied)
        self._kinds = {site.module: KINDS[site.layout] for site in structure.sites if _plain(site)}
        self._kinds |= dict.fromkeys(structure.embeddings, "embedding")

    def kind(self, module: str) -> str | None:
        return self._kinds.get(module, "")

    def shape(self, module: str, name: str = "weight") -> tuple[int, ...]:
        return self._specs[f"{module}.{name}"].shape

    def parameters(self, module: str) -> tuple[str, ...]:
        return ()

    def says(self, module: str, name: str) -> Any:
        return None

    def stored(self, module: str, name: str) -> dict[str, LiveSlice | None]:
        return {f"{module}.{name}": None} if f"{module}.{name}" in self._specs else {}

    def covers(self, modules: Iterable[str], values: Iterable[str]) -> bool:
        """Whether these layers, and tensors that are replaced, can be told without a model."""
        return all(module in self._kinds and f"{module}.weight" in self._specs for module in modules) and all(
            name in self._specs for name in values
        )


class ModelLayers:
    """Layers of the model without weights, with the names of transformers 5, which stacks experts."""

    def __init__(self, base: Source) -> None:
        from bridge.sources.live_models.checkpoint_names import live_names, live_parts, tied_names

        model = base.load_skeleton()
        self._origins = live_names(model, base.specs)
        self._parts = live_parts(self._origins)
        self._modules = dict(model.named_modules())
        self.tied = both_ways(tied_names(model))

    def kind(self, module: str) -> str | None:
        return _kind_of(self._modules[module]) if module in self._modules else None

    def shape(self, module: str, name: str = "weight") -> tuple[int, ...]:
        return tuple(getattr(self._modules[module], name).shape)

    def parameters(self, module: str) -> tuple[str, ...]:
        return tuple(name for name, _ in self._modules[module].named_parameters(recurse=False))

    def says(self, module: str, name: str) -> Any:
        return getattr(self._modules[module], name, None)

    def stored(self, module: str, name: str) -> dict[str, LiveSlice | None]:
        live = f"{module}.{name}"
        if module not in self._modules:  # a projection of an expert, which the model stacks
            return {live: None} if live in self._origins else {}
        found = self._parts.get(live, {})
        if any(self._origins[target].ref is None for target in found.values()):
            return {}
        return {target: part if part.index else None for part, target in found.items()}


def layers_of(base: Source, modules: Iterable[str], values: Iterable[str], parameters: bool) -> Layers:
    """Return the layers, without a model if it covers these; `parameters`: whether peft wraps parameters by name."""
    if not parameters and load_arch(architecture_of(base.config)) is not None:
        from bridge.tables.architectures.structure import structure

        layers = TableLayers(base, structure(base.config, base.specs))
        if layers.covers(modules, values):
            return layers
    return ModelLayers(base)


def both_ways(tied: Mapping[str, str]) -> dict[str, str]:
    """Each tensor of a pair -> the other one.

    >>> both_ways({"lm_head.weight": "embed.weight"})
    {'lm_head.weight': 'embed.weight', 'embed.weight': 'lm_head.weight'}
    """
    return {**tied, **{name: alias for alias, name in tied.items()}}


def _plain(site: Any) -> bool:
    """Whether a site is a layer in every version of transformers: routers and experts are parameters in some."""
    return site.layout in KINDS and site.expert is None and site.keep != "router"


def _kind_of(module: Any) -> str:
    """What peft's LoRA takes a module for; "" for what it does not take as a layer."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, Conv1D):
        return "conv1d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "conv" if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else ""
