"""Whether a model has a ready Tripy module, from its config alone; imports no framework, so that a plan can say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.tripy.building import READY

ROPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length of the input
OWN = "write your own and fill it: bridge.targets.tripy.load(directory, module)"


def no_ready_module(config: Mapping[str, Any]) -> str:
    """Say why `build` will refuse what is made of this model, and what to do; "" where nothing here speaks against it.

    >>> no_ready_module({"architectures": ["GPT2LMHeadModel"]})
    ''
    """
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in READY:
        return f"there is no ready Tripy module for {architecture}; {OWN}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES:
        return f"the ready Tripy module of {architecture} has no rope_type {kind!r}; {OWN}"
    if config.get("per_layer_config"):
        return f"the layers of the ready Tripy module of {architecture} are alike, those of per_layer_config not; {OWN}"
    return ""
