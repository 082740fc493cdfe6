"""Versions of this package and of those that it works with."""

from __future__ import annotations

import importlib.metadata
from functools import cache

__version__ = "0.1.0"

PACKAGES = ("torch", "transformers", "nvidia-modelopt", "onnx", "onnx-ir", "onnxruntime", "numpy", "numba")


def versions() -> dict[str, str]:
    """Return the versions of installed packages that may have affected the result."""
    present = {package: version for package in PACKAGES if (version := installed(package))}
    return {"qbridge": __version__, **present}


@cache  # a look takes a millisecond, and packages do not change while a process runs
def installed(package: str) -> str:
    """Return the version of an installed package; "" if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
