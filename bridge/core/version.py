"""Versions of packages, and whether their code is as it was installed."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

__version__ = "0.1.0"

_loaded_here: set[str] = set()  # "transformers", if this package was the first to need it

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


def changed(package: Path | None = None) -> int:
    """When a checkout was last changed, since its version stays the same; 0 for an installed package."""
    package = package or Path(__file__).resolve().parent.parent
    if not (package.parent / "mappings").is_dir() or (package / "_mappings").is_dir():  # a wheel has its tables inside
        return 0
    return max((path.stat().st_mtime_ns for path in package.rglob("*.py")), default=0)


def loads_transformers() -> None:
    """Note that this package loads transformers now; called before it does so."""
    if "transformers" not in sys.modules:
        _loaded_here.add("transformers")


def transformers_is_as_installed() -> bool:
    """False if somebody else loaded transformers in this process, and may have patched it or registered classes."""
    return "transformers" not in sys.modules or "transformers" in _loaded_here
