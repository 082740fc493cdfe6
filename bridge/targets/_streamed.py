"""What targets share that stream tensors into files with JSON beside them; knows no runtime and no layout."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.dtypes import DTYPES
from bridge.values import TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion, Written


def main_dtype(specs: Mapping[str, TensorSpec]) -> str:
    """The float dtype that most of a checkpoint's values have."""
    counts = Counter[str]()
    for spec in specs.values():
        if DTYPES[spec.dtype].floating:
            counts[spec.dtype] += spec.size
    return counts.most_common(1)[0][0]


def write(conversion: Conversion, directory: Path, beside: Mapping[str, bytes]) -> Written:
    """Run the plan into its files, then write `beside`: file -> content."""
    from bridge.conversion import Written
    from bridge.stream import run

    streamed = run(conversion, directory, threading.Event())
    for name, content in beside.items():
        (directory / name).write_bytes(content)
    return Written(policies=streamed.policies, notes=streamed.notes())
