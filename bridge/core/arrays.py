"""NumPy, imported at its first use.

Its import takes a tenth of a second, which plans of checkpoints need not wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
else:

    class _Deferred:
        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)  # found without this function from now on
            return value

    np = _Deferred()

__all__ = ["np"]
