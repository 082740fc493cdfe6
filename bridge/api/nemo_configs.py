"""The former path of `bridge.compat.nemo_configs`."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("bridge.compat.nemo_configs"), name)
