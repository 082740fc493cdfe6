"""Rotary settings of a config, and the frequencies that they give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.core.arrays import np

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a config, in the form of transformers 5."""

    theta: float
    kind: str
    scaling: Mapping[str, Any]
    local: float  # theta of the layers with a window
    share: float  # part of a head that is turned


def rope_of(config: Mapping[str, Any], theta: float = 1e4, share: float = 1.0) -> Rope:
    """Rotary settings, from `rope_parameters`, or `rope_theta` and `rope_scaling` of older versions.

    `theta`, `share`: what the architecture has without an entry.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full = given.get(FULL, given) if isinstance(given, Mapping) else {}
    local = given.get(SLIDING, {}) if isinstance(given, Mapping) else {}
    base = float(full.get("rope_theta") or config.get("rope_theta") or theta)
    part = full.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    near = local.get("rope_theta") or config.get("rope_local_base_freq") or 1e4
    return Rope(base, str(full.get("rope_type") or full.get("type") or "default"), full, float(near), part or share)


def frequencies(rope: Rope, head_dim: int, context: int) -> np.ndarray:
    """The angle of each pair of channels per position, float32 [head_dim / 2]; `kind` is default, linear or llama3.

    As transformers computes them (`inv_freq`), but rounded once: float32 powers differ by an ulp between libraries.
    """
    plain = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "linear":
        plain = plain / float(rope.scaling["factor"])
    elif rope.kind == "llama3":
        plain = plain / llama3_factors(rope, head_dim, context)
    return plain.astype(np.float32)


def llama3_factors(rope: Rope, head_dim: int, context: int) -> np.ndarray:
    """What each frequency is divided by, float32, as `_compute_llama3_parameters` of transformers scales them."""
    given = rope.scaling
    factor, low, high = (float(given[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = int(given.get("original_max_position_embeddings") or context)
    factors = []
    for at in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (at / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
