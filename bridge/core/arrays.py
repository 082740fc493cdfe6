"""NumPy, imported at its first use; page-aligned arrays and reused buffers.

NumPy's import takes a tenth of a second, which plans of checkpoints need not wait for.

Copies out of the page cache are slow if their target is 1 to 63 bytes further into a page than their source: 130 to
320 us per megabyte instead of 60 (an AMD EPYC, Linux 6.18; `rep movsb` waits for its own stores). NumPy's memory begins
16 bytes into a page, and tensors in a file often begin at a page: exactly this case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike
else:

    class _Deferred:
        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)  # found without this function from now on
            return value

    np = _Deferred()

__all__ = ["PAGE", "Buffers", "aligned_empty", "np"]

PAGE = 4096
MIN_BUFFER = 1 << 20  # bytes: pieces differ in size, and a buffer that grows is allocated again


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return an uninitialized C-contiguous array whose address is a multiple of `PAGE`."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    room = np.empty(nbytes + PAGE, np.uint8)
    first = -room.__array_interface__["data"][0] % PAGE
    return room[first : first + nbytes].view(kind).reshape(shape)


@dataclass
class Buffers:
    """One thread's reused memory, by purpose."""

    memory: dict[str, np.ndarray] = field(default_factory=dict)

    def take(self, purpose: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Return an uninitialized array over the buffer for `purpose`; the next `take` of it reuses the memory."""
        kind = np.dtype(dtype)
        need = math.prod(shape) * kind.itemsize
        buffer = self.memory.get(purpose)
        if buffer is None or buffer.size < need:
            buffer = self.memory[purpose] = aligned_empty((max(need, MIN_BUFFER),), np.uint8)
        return buffer[:need].view(kind).reshape(shape)

    def piece(self, nbytes: int) -> np.ndarray:
        """Bytes of a tensor that is read piece by piece."""
        return self.take("piece", (nbytes,), np.uint8)
