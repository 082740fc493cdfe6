"""The largest magnitude of every block, NaN and infinity included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge.quant.codec.arrays import amax
from tests.oracles import codec_reference as reference

SHAPES = [(1, 1), (3, 5), (9, 37), (130, 129), (64, 160)]
BLOCKS = [
    (1, 10**6),
    (10**6, 10**6),
    (1, 2),
    (1, 16),
    (1, 32),
    (1, 128),
    (128, 128),
    (10**6, 1),
    (4, 1),
    (1, 3),
    (2, 64),
]


def storage(w: torch.Tensor) -> np.ndarray:
    return w.view(torch.int16).numpy().view(np.uint16) if w.dtype == torch.bfloat16 else w.numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_amax_is_the_reference_amax(dtype: str) -> None:
    rng = np.random.default_rng(5)
    for shape in SHAPES:
        w = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(getattr(torch, dtype))
        for block in BLOCKS:
            ours = amax(storage(w), dtype, *block)
            clipped = min(block[0], shape[0]), min(block[1], shape[1])
            np.testing.assert_array_equal(ours, reference.block_amax(w, *clipped).numpy(), err_msg=f"{shape} {block}")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_bad_value_shows_in_its_block_and_nowhere_else(bad: float, dtype: str) -> None:
    w = torch.ones(6, 48, dtype=getattr(torch, dtype))
    w[4, 33] = bad
    for block, at in (((1, 16), (4, 2)), ((1, 48), (4, 0)), ((3, 32), (1, 1)), ((6, 1), (0, 33))):
        found = amax(storage(w), dtype, *block)
        assert not np.isfinite(found[at])
        assert np.isnan(found[at]) == np.isnan(bad)
        assert np.isfinite(found).sum() == found.size - 1


def test_chunks_do_not_show_in_the_result() -> None:
    w = torch.from_numpy(np.random.default_rng(1).standard_normal((700, 1030)).astype(np.float32)).bfloat16()
    for block in ((128, 128), (700, 1030), (700, 1), (1, 1030)):
        np.testing.assert_array_equal(amax(storage(w), "bfloat16", *block), reference.block_amax(w, *block).numpy())
