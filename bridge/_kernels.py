"""Makes `bridge._kernels` the directory `kernels/` beside the package in a checkout.

Must never hold a kernel itself. A wheel has the real package `bridge/_kernels/` (pyproject copies `kernels` there) and
not this file.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parent.parent / "kernels")]
