"""llama.cpp's compiled code in the wheel `xllamacpp`, as a C library."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from bridge.core.errors import SchemeError
from bridge.core.version import install

INSTALL = f"only llama.cpp's own quantizer makes its codes: {install('gguf')}"


def is_installed() -> bool:
    """Whether llama.cpp's code is here; it is not loaded."""
    return _file() is not None


@cache
def ggml() -> ctypes.CDLL:
    """The library; nothing is imported. SchemeError if it is not installed."""
    file = _file()
    if file is None:
        raise SchemeError(INSTALL)
    return ctypes.CDLL(str(file))


def _file() -> Path | None:
    spec = find_spec("xllamacpp")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for suffix in EXTENSION_SUFFIXES:
            if (file := Path(folder) / f"xllamacpp{suffix}").is_file():
                return file
    return None
