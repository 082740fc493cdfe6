"""What targets share that stream tensors into files with JSON beside them; knows no runtime and no layout."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.dtypes import DTYPES
from bridge.planning import STACKED
from bridge.values import Format, Site, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from bridge.conversion import Conversion, Written
    from bridge.planning import Plan
    from bridge.sources import Source


class Streamed:
    """What is alike in targets that run nothing they write; see `bridge.targets.Target`."""

    align = 8  # as the safetensors library writes
    runs = False
    base_memory = 64 << 20  # headers or an index with 100,000 tensors

    def refuse_stack(self, format_: Format, site: Site, options: Any) -> str:
        return STACKED

    def audit(self, directory: Path) -> list[str]:
        return []

    def damage(
        self, directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray]
    ) -> tuple[tuple[str, float], ...]:
        return ()


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
