"""Values of ggml's blocks against gguf-py's, on random bytes: every code, factor, scale and their rounding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from bridge.core.formats.gguf import TYPES, block_of
from bridge.quant.codec.ggml_values import KINDS, values


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_gguf_pys_to_the_bit(kind: str) -> None:
    number = gguf.GGMLQuantizationType(TYPES[kind])
    assert gguf.GGML_QUANT_SIZES[number] == block_of(kind)
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (4096, block_of(kind)[1]), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are infinite, and no numbers, too
        theirs, ours = gguf.quants.dequantize(blocks, number), values(blocks, kind)
    same = ours.view(np.uint32) == theirs.view(np.uint32)
    assert np.all(same | (np.isnan(ours) & np.isnan(theirs)))
