"""TransformerEngine's config language, as `bridge.workflows.inspect.language` takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.inspect.language import Config, FeatureDirs
from bridge.workflows.inspect.layers import Layer
from bridge.workflows.inspect.routes import Routing
from bridge.workflows.inspect.te.callers import CallersFeatures
from bridge.workflows.inspect.te.classes import FeatureClass, load_features
from bridge.workflows.inspect.te.resolve import load_routing


@dataclass(frozen=True)
class Language:
    """The language, and the caller's feature classes by name."""

    classes: Mapping[str, FeatureClass]

    def routing(self, config: Config, layers: Sequence[Layer], session: Scheme | None) -> Routing:
        return load_routing(config, layers, session, self.classes.values())

    def features(self, routing: Routing, quantized: frozenset[str]) -> CallersFeatures:
        return CallersFeatures(self.classes, routing, quantized)


def open_language(feature_dirs: FeatureDirs) -> Language:
    """Load the feature classes of folders."""
    return Language(load_features(feature_dirs))
