"""Load the compiled kernels before they are needed."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules


def load_kernels() -> None:
    """Call a kernel, so that numba fills its registries, without SciPy, whose BLAS no kernel uses: 0.1 s, not 0.35.

    Only the command line calls it: nothing else compiles with numba in its process.
    """
    blas = "scipy.linalg.cython_blas"
    hidden = blas not in sys.modules
    if hidden:
        sys.modules[blas] = None  # type: ignore[assignment]  # makes its import fail
    try:
        _call_one()
    finally:
        if hidden:
            del sys.modules[blas]


def load_every_kernel() -> None:
    """Import all kernels and call one, so that none is imported or compiled for the first time later."""
    import bridge._kernels as kernels

    for module in iter_modules(kernels.__path__):
        import_module(f"{kernels.__name__}.{module.name}")
    _call_one()


def _call_one() -> None:
    """numba imports its registries at the first call in a process."""
    import numpy as np

    from bridge.quant.codec.arrays import amax

    amax(np.zeros((1, 1), np.uint16), "bfloat16", 1, 1)
