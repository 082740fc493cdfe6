"""The language that configs are written in, as a session uses it.

A language makes routes of a config and runs feature classes of the caller's. It is loaded by the name of its module, so
that nothing else here depends on it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.inspect.changes.layer_changes import LayerChanges
from bridge.workflows.inspect.layers import Layer
from bridge.workflows.inspect.routes import Routing

if TYPE_CHECKING:
    from torch import Tensor

LANGUAGE = "bridge.workflows.inspect.te.language"  # TransformerEngine's; has `open_language`
Config = str | Path | Mapping[str, Any] | None
FeatureDirs = str | Path | Sequence[str | Path] | None


class RunningFeatures:
    """The caller's feature classes in one session; here there are none."""

    @property
    def notes(self) -> list[str]:
        """Notes of the inspection: classes that no section of the config names."""
        return []

    def step(self, step: int) -> None:
        """Ask the classes what runs at a step."""

    def wanted(self, layer: str) -> frozenset[str]:
        """The tensors of a layer that a class looks at."""
        return frozenset()

    def see(self, layer: Layer, name: str, tensor: Tensor) -> None:
        """Hand a tensor of a layer over."""

    def change(self, changes: LayerChanges) -> None:
        """Add what the classes change in a layer."""


class ConfigLanguage(Protocol):
    """A language of configs, with the caller's feature classes."""

    def routing(self, config: Config, layers: Sequence[Layer], session: Scheme | None) -> Routing:
        """Read a config, None is the default one, and resolve it for layers; InspectError lists all mistakes."""

    def features(self, routing: Routing, quantized: frozenset[str]) -> RunningFeatures:
        """The feature classes for the routes of a session, which quantizes the layers `quantized`."""


def open_language(feature_dirs: FeatureDirs) -> ConfigLanguage:
    """The language with the classes of folders; UsageError or InspectError if these cannot be loaded."""
    language: ConfigLanguage = importlib.import_module(LANGUAGE).open_language(feature_dirs)
    return language
