"""The decorators of kernels.

The options of `kernel` are part of the arithmetic: no `fastmath` (it replaces a division by a multiplication with the
reciprocal, which changes codes), `error_model="numpy"` (division without a test for zero, so loops are vectorized).

numba's cache does not notice a change of a function in another file than its caller: a kernel and the functions that it
calls are in one file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numba


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` at its first call; cache the machine code if a directory is writable."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError as error:  # raised at decoration when no cache directory can be written
        warnings.warn(
            f"kernels are compiled again in every process, about a second each: {error}; "
            "set NUMBA_CACHE_DIR to a writable directory",
            RuntimeWarning,
            stacklevel=1,  # this line, so Python shows it once for all kernels
        )
        return numba.njit(nogil=True, error_model="numpy")(function)


def estimate(function: Callable[..., Any]) -> Any:
    """Compile a sum that may be added in any order: it bounds another one, and never is a result.

    Several floats are added at once. Rounding by a magic number would be optimized away: write `np.rint`.
    """
    return numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})(function)
