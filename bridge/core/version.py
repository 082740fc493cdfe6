"""Versions of packages, and whether their code is as it was installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
DISTRIBUTION = "quantbridge"  # `qbridge` is a stranger's on PyPI

MODEL_CODE = ("transformers", "diffusers")  # the packages whose code builds models
_loaded_here: set[str] = set()  # those of them that this package was the first to need

PACKAGES = ("torch", "transformers", "nvidia-modelopt", "onnx", "onnx-ir", "onnxruntime", "numpy", "numba")


def versions() -> dict[str, str]:
    """Return the versions of installed packages that may have affected the result."""
    present = {package: version for package in PACKAGES if (version := installed(package))}
    return {"qbridge": __version__, **present}


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return those of `versions` that took part; "unknown" for an absent package."""
    present = versions()
    return {package: present.get(package, "unknown") for package in packages}


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


def install(extra: str) -> str:
    """Return the command that installs an extra: from a checkout or a wheel, because the package is on no index."""
    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}[{extra}]'"
    return f"pip install '.[{extra}]' in bridge's checkout, or '{DISTRIBUTION}-{__version__}-py3-none-any.whl[{extra}]'"


def loads_transformers() -> None:
    """Note that this package loads transformers now, and diffusers if a model needs it; called before it does so."""
    _loaded_here.update(name for name in MODEL_CODE if name not in sys.modules)


def models_are_as_installed() -> bool:
    """False if somebody else loaded the code of models in this process, and may have patched it."""
    return all(name not in sys.modules or name in _loaded_here for name in MODEL_CODE)
