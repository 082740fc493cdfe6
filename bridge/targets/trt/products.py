"""The two TensorRTs: the full one needs a GPU."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from typing import Any

from bridge.core.errors import WriteError
from bridge.core.version import install, installed

INSTALL = 'pip install --extra-index-url https://pypi.nvidia.com "tensorrt>=10.15"'
INSTALL_RTX = install("tensorrt-rtx")
OLDEST = 10  # older versions of the full TensorRT have no strongly typed network
FULL, RTX = "tensorrt", "tensorrt_rtx_bindings"  # the modules, by which a product is named here
TITLES = {FULL: "TensorRT", RTX: "TensorRT for RTX"}
RTX_PACKAGE = "tensorrt-rtx-cu13-bindings"


class EngineUnavailable(WriteError):
    """No engine can be built on this machine: a package or a GPU is missing."""


def why_unavailable(product: str = FULL) -> str:
    """Why this machine cannot build an engine with a product, with the remedy; "" if it can."""
    if product == RTX:
        return _why_no_rtx()
    try:
        trt = importlib.import_module(FULL)
    except (ImportError, OSError) as error:  # OSError: the package is installed, its libraries are not
        return f"the package `tensorrt` cannot be imported ({error}); install it: {INSTALL}"
    if not hasattr(trt, "Builder"):
        return f"the package `tensorrt` is the placeholder without libraries (it has no Builder); install it: {INSTALL}"
    if major(trt) < OLDEST:
        return f"tensorrt {trt.__version__} is too old for strongly typed Q/DQ networks; install a newer one: {INSTALL}"
    if gpu_count() == 0:
        return "CUDA finds no NVIDIA GPU; build on the machine that will serve (see nvidia-smi there)"
    return ""


def _why_no_rtx() -> str:
    """The child process imports it: a library that fails to load must not end this one."""
    if importlib.util.find_spec(RTX) is None:
        return f"TensorRT for RTX is not installed; install it (Linux, x86-64): {INSTALL_RTX}"
    return ""


def rtx_version() -> str:
    """The installed version of TensorRT for RTX, 1.7.1.116; "" without one."""
    return "" if _why_no_rtx() else installed(RTX_PACKAGE) or ""


def major(trt: Any) -> int:
    """The first number of a TensorRT's version."""
    return int(str(trt.__version__).split(".")[0])


def gpu_count() -> int:
    """Number of GPUs by the CUDA driver itself, without a framework; 0 without a driver."""
    try:
        cuda, count = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"), ctypes.c_int(0)
        failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value
