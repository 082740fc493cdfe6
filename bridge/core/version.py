"""Versions of this package and of those that it works with."""

from __future__ import annotations

import re
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
    from importlib.metadata import PackageNotFoundError, distribution  # 20 ms, which `qbridge --help` does not need

    try:
        text = distribution(package).read_text("METADATA") or ""
    except PackageNotFoundError:
        return ""
    # `importlib.metadata.version` parses every field of the file, with the description: 5 ms for each package
    found = re.search(r"^Version: *(\S+)", text.partition("\n\n")[0], re.MULTILINE)
    return found[1] if found else ""
