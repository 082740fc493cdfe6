"""Packages that tests need, without importing them while tests are collected."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


def needs(package: str) -> None:
    """Skip the test file that says so if the package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)


class Lazy:
    """A module that is imported when an attribute is first taken: ModelOpt takes seconds."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __setattr__(self, attribute: str, value: Any) -> None:
        raise TypeError(f"patch {self._name}.{attribute} by its dotted name: pytest restores it only there")

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._name))

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or attribute == "_mock_name":  # pytest asks all that a test file holds
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
