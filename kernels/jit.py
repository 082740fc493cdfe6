"""The decorators of kernels.

`build.py` compiles them ahead of time, with numba, in a process of its own; what runs them needs no numba, which takes
longer to start than a small conversion. The options are part of the arithmetic: no `fastmath` (it replaces a division
by a multiplication with the reciprocal, which changes codes), `error_model="numpy"` (division without a test for zero,
so loops are vectorized). A kernel and the functions that it calls are in one file, which is compiled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge._kernels.native import Kernel

BUILDING = False  # `build.py` sets it in the process that compiles, before it imports kernels
OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}  # `_nrt`: kernels allocate nothing

Function = Callable[..., Any]


def kernel(*signatures: str, scratch: Callable[..., tuple[Any, ...]] | None = None) -> Callable[[Function], Any]:
    """Make a function a kernel, compiled for each of `signatures`.

    A signature has a word for each argument: int64, float32 ..., or an array as uint8[:,:], C-contiguous, with = behind
    it if the kernel writes to it. `bits[:,:]` stands for uint16 (bfloat16) and uint32 (float32), the same in a whole
    signature. A kernel returns nothing.

    scratch: makes arrays of the arguments of a call, which follow them. They are not in a call.
    """

    def decorate(function: Function) -> Any:
        expanded = [each for signature in signatures for each in expand(signature)]
        if not BUILDING:
            return Kernel(function, expanded, scratch)
        compiled = inner(function)
        compiled.words = expanded
        return compiled

    return decorate


def inner(function: Function) -> Any:
    """Make a function callable from kernels of its file."""
    return _compiled(function)


def estimate(function: Function) -> Any:
    """`inner` of a sum that may be added in any order: it bounds another one, and never is a result.

    Several floats are added at once. Rounding by a magic number would be optimized away: write `np.rint`.
    """
    return _compiled(function, fastmath={"reassoc", "nsz", "contract"})


def expand(signature: str) -> list[tuple[str, ...]]:
    """A signature as words, one for each width of `bits`."""
    widths = ("uint16", "uint32") if "bits" in signature else ("",)
    return [tuple(word.replace("bits", width) for word in signature.split()) for width in widths]


def _compiled(function: Function, **options: Any) -> Any:
    if not BUILDING:
        return function
    import numba

    return numba.njit(**OPTIONS, **options)(function)
