"""Provenance of cached files: code, packages, machine and environment that make them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from bridge.core.version import installed

VARIABLES = (
    "DIFFUSERS_",
    "ONNX",
    "PYTORCH",
    "TORCH",
    "TRANSFORMERS_",
    "USE_HUB_KERNELS",
    "USE_TORCH",
    "XLA_",
)  # of the environment
# Ends of variables that change no graph; torch sets one of them.
WITHOUT_EFFECT = ("CACHE", "DIR", "HOME", "LOGS", "OFFLINE", "VERBOSITY", "WARNINGS")
# Packages for which transformers and diffusers have code of their own if they are there.
OPTIONAL = (
    "accelerate", "causal-conv1d", "flash-attn", "flash-linear-attention", "kernels", "mamba-ssm", "mambapy", "natten",
    "peft", "timm", "torchvision", "xformers", "xlstm",
)  # fmt: skip


def provenance(packages: Iterable[str]) -> list[object]:
    """Return what a cached file depends on, apart from the model. Imports none of the packages."""
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(VARIABLES) and not name.endswith(WITHOUT_EFFECT)
    )
    machine = [platform.machine(), platform.system(), sys.version_info[:2]]
    versions = {name: (installed(name), origin(name)) for name in (*packages, *OPTIONAL)}
    return [code(), versions, machine, variables]


def can_change(packages: Iterable[str]) -> bool:
    """Whether one of the packages is an editable install, whose results must not be cached."""
    return any(origin(name) == "editable" for name in (*packages, *OPTIONAL))


@cache
def code() -> str:
    """Return the digest of this package's code and tables: its version stays the same between releases."""
    package = Path(__file__).resolve().parents[2]
    return digest_of_files(package, package if (package / "_mappings").is_dir() else package.parent / "mappings")


def digest_of_files(*directories: Path) -> str:
    """Return the digest of the names and contents of the Python and TOML files."""
    whole = hashlib.sha256()
    for directory in sorted({*directories}):
        for path in sorted(path for path in directory.rglob("*") if path.suffix in (".py", ".toml")):
            whole.update(f"{path.relative_to(directory)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


@cache
def origin(package: str) -> str:
    """Return what identifies the code of an installed package, besides its version.

    "" if its version does, "editable" if its files may change. Of one that came from an address or a directory: the
    digest of its list of files, which has a digest of each.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # 20 ms

    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ""
    address = found.read_text("direct_url.json")
    if not address:
        return ""
    if json.loads(address).get("dir_info", {}).get("editable"):
        return "editable"
    return hashlib.sha256((address + (found.read_text("RECORD") or "")).encode()).hexdigest()
