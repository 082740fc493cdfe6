"""How far what was written lies from the source, tensor by tensor; must never hold a whole decoded weight.

All sums are float64 in an order that only the shape decides: same numbers on every run and thread count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bridge._kernels.compare import compare as _compare
from bridge.quant import bits as _bits
from bridge.quant.bits import Array
from bridge.quant.blocks import grid
from bridge.quant.encode import decode
from bridge.values import Numeric


@dataclass(frozen=True)
class Parity:
    """Sums over source a and decoded b: `dot` = a . b, `source` = |a|^2, `decoded` = |b|^2, `error` = |a - b|^2.

    `worst` is the largest |a - b| / |a| of one block along the stored rows (of one row where scales are not per block).
    """

    dot: float
    source: float
    decoded: float
    error: float
    worst: float

    @property
    def cosine(self) -> float:
        """Cosine of the angle between source and decoded; 1 where both are zero, 0 where one is."""
        norm = math.sqrt(self.source) * math.sqrt(self.decoded)
        return self.dot / norm if norm else float(self.source == self.decoded)

    @property
    def norm_ratio(self) -> float:
        """|decoded| / |source|: sees the dropped scale that the cosine is blind to."""
        if not self.source:
            return 1.0 if not self.decoded else math.inf
        return math.sqrt(self.decoded / self.source)

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in decibels; infinite where nothing was lost."""
        if not self.error:
            return math.inf
        return 10 * math.log10(self.source / self.error) if self.source else -math.inf


def compare(
    bits: Array,
    dtype: str,
    arrays: dict[str, Array],
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
) -> Parity:
    """Return the parity of `encode`'s arrays with the weight they were made from.

    bits: storage array of `dtype` in the checkpoint's layout; the other arguments are those of `encode`.
    """
    blocks = grid(numeric[0], bits.shape, layout)
    flat = _bits.matrix(bits)
    sums = np.empty((blocks.rows, -(-blocks.cols // blocks.across), 4))
    if blocks.across == 1:
        sums = np.empty((blocks.rows, 1, 4))
    width = blocks.cols if blocks.across == 1 else blocks.across
    for first, chunk in _bits.chunks(flat, dtype, blocks.down):
        stop = first + len(chunk)
        values = decode(arrays, numeric, bits.shape, layout=layout, transpose=transpose, rows=(first, stop))
        _compare(chunk, _bits.matrix(values), width, sums[first:stop])
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(sums[..., 3] > 0, sums[..., 3] / sums[..., 1], 0.0)
    dot, source, decoded, error = (float(v) for v in sums.reshape(-1, 4).sum(axis=0))
    return Parity(dot, source, decoded, error, math.sqrt(float(relative.max())))
