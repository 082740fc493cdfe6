"""The KL divergence that each scheme may have.

Bounds follow from what was measured on real models, `mappings/quality.toml`.
"""

from __future__ import annotations

from functools import cache

from bridge.quant.schemes.quality import REAL, read_quality

# Another model, of 270 M parameters, had 0.65 to 1.34 times the largest KL of SmolLM2 in the seven schemes of both.
FACTOR = 2.0
LEAST = 0.05  # nats: a cost of 5 % of perplexity is no damage
MOST = 1.5  # nats: a model that answers 4 times as surprised is not worth its bits, whatever was measured
BY_BITS = (4, 8)  # bits whose largest measured KL stands for schemes without a row
A_BIT = 4.0  # the square of an error, and so the KL, falls by this with each bit


@cache
def divergence_bound(scheme: str, bits: int) -> float:
    """The most nats a token that a scheme may cost; `bits`: of a code, which decide for a scheme without a row.

    >>> divergence_bound("nvfp4_wo", 4) < divergence_bound("a recipe", 4) < divergence_bound("a recipe", 3)
    True
    """
    rows = read_quality()
    measured = [quality.kl for model, quality in rows.get(scheme, {}).items() if model in REAL and quality.kl]
    low, high = (_largest(count) for count in BY_BITS)
    by_bits = high if bits >= BY_BITS[1] else max(high, low * A_BIT ** (BY_BITS[0] - bits))
    return min(MOST, max(LEAST, FACTOR * (max(measured) if measured else by_bits)))


def _largest(bits: int) -> float:
    """The largest KL of a real model among schemes of so many bits a value, scales not counted."""
    rows = (quality for models in read_quality().values() for model, quality in models.items() if model in REAL)
    return max(quality.kl for quality in rows if quality.kl and quality.bits and int(quality.bits) == bits)
