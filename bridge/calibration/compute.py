"""Run the model in float32 for calibration: `compute="fp32"`."""

from __future__ import annotations

from typing import Any, cast

from bridge.calibration.data import check_compute
from bridge.sources.memory import MemorySource
from bridge.sources.source import Delegate, Source


def source_for(source: Source, compute: str | None) -> Source:
    """Return a source whose model runs in the dtype that was asked for; the stored weights stay as they are."""
    check_compute(compute)
    return source if compute is None else cast("Source", _InFloat32(source))


def model_in_memory(source: Source) -> MemorySource | None:
    """The model in memory that a source is, or runs in another dtype; None for other sources."""
    stored = source._source if isinstance(source, _InFloat32) else source
    return stored if isinstance(stored, MemorySource) else None


class _InFloat32(Delegate):
    """A source whose model has float32 weights of its own, with the values of the stored ones."""

    runs_in = "float32"

    def load_skeleton(self) -> Any:
        return self._source.load_skeleton().float()

    def load_model(self) -> Any:
        from bridge.calibration.modelopt import copy_modules

        return copy_modules(self._source.load_model()).float()


def has_bf16_instructions() -> bool:
    """Whether torch has fast bfloat16 on this CPU: AVX-512 BF16 or AMX on x86; true where torch cannot tell."""
    import platform

    import torch

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    asked = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return not all(asked) or any(ask() for ask in asked if ask)
