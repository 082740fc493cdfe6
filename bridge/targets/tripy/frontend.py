"""Imports `nvtripy`, or says how to get it; everything that builds or loads Tripy modules asks here first."""

from __future__ import annotations

from typing import Any

from bridge.errors import CannotRun

INSTALL = "pip install nvtripy -f https://nvidia.github.io/TensorRT-Incubator/packages.html"  # from Tripy's README
SERIES = "0.1."  # placeholders for parameters are not public in nvtripy: another series may have moved them


def nvtripy() -> Any:
    """Return the module `nvtripy`; CannotRun names what is missing and the line that installs it."""
    try:
        import nvtripy
    except (ImportError, OSError) as error:  # OSError: its compiled half does not find CUDA's libraries
        raise CannotRun(f"Tripy modules need nvtripy with its compiler and runtime ({error}): {INSTALL}") from error
    if not nvtripy.__version__.startswith(SERIES):
        raise CannotRun(
            f"nvtripy {nvtripy.__version__} is not of the series {SERIES}x that the modules here are written for: "
            f"pip install 'nvtripy=={SERIES}*'{INSTALL.partition('nvtripy')[2]}"
        )
    return nvtripy
