"""Import `nvtripy`, or explain how to install it."""

from __future__ import annotations

from typing import Any

from bridge.core.errors import CannotRun

INSTALL = "pip install nvtripy -f https://nvidia.github.io/TensorRT-Incubator/packages.html"  # from Tripy's README
SERIES = "0.1."  # parameter placeholders are not public in nvtripy: another series may have moved them


def nvtripy() -> Any:
    """Return the module `nvtripy`; CannotRun names what is missing and the command that installs it."""
    try:
        import nvtripy
    except (ImportError, OSError) as error:  # OSError: its compiled part does not find CUDA's libraries
        raise CannotRun(f"Tripy modules need nvtripy with its compiler and runtime ({error}): {INSTALL}") from error
    if not nvtripy.__version__.startswith(SERIES):
        raise CannotRun(
            f"nvtripy {nvtripy.__version__} is not a {SERIES}x version, which the modules here are written for: "
            f"pip install 'nvtripy=={SERIES}*'{INSTALL.partition('nvtripy')[2]}"
        )
    return nvtripy
