from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tables.ops import OPS, Amax, Array, Refusal, Shape

DTYPES = ["uint8", "uint16", "int32", "float32", "float64"]


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Shape], dict[str, int]]:
    """An op with inputs that fit it: random groups, heads and rows, all behind the first axis alike."""
    name = draw(st.sampled_from([op for op in sorted(OPS) if op != "shift"]))
    size = st.integers(1, 4)
    groups, tail = draw(size), tuple(draw(st.lists(size, max_size=2)))
    inputs = draw(st.integers(2, 4))
    match name:
        case "concat":
            return name, [(draw(size), *tail) for _ in range(inputs)], {}
        case "interleave":
            return name, [(groups * draw(size), *tail) for _ in range(inputs)], {"groups": groups}
        case "stack":
            return name, [(groups, *tail)] * inputs, {}
        case "transpose":
            return name, [(groups, draw(size))], {}
        case "rope":
            return name, [(groups * 2 * draw(size), *tail)], {"heads": groups}
        case "pad":
            return name, [(draw(st.integers(1, 9)), *tail)], {"multiple": groups}
    kernel = dict(zip(("channels", "height", "width"), draw(st.tuples(size, size, size)), strict=True))
    if draw(st.booleans()):
        return name, [(groups, math.prod(kernel.values()))], kernel
    return name, [(groups, *kernel.values())], {}


def _arrays(shapes: Sequence[Shape], dtype: str, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 200, shape).astype(dtype) for shape in shapes]


@given(calls(), st.sampled_from(DTYPES), st.integers(0, 9))
def test_inverse_undoes_apply_bit_by_bit(call: tuple[str, list[Shape], dict[str, int]], dtype: str, seed: int) -> None:
    name, shapes, counts = call
    arrays = _arrays(shapes, dtype, seed)
    made = OPS[name].apply(arrays, counts)
    assert made.shape == OPS[name].shape(shapes, counts)
    assert made.dtype == dtype
    back = OPS[name].inverse(made, shapes, counts)
    assert len(back) == len(arrays)
    for array, again in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(array, again)


@given(calls(), st.integers(0, 9))
def test_ops_lose_and_invent_nothing(call: tuple[str, list[Shape], dict[str, int]], seed: int) -> None:
    name, shapes, counts = call
    arrays = [array + 1.0 for array in _arrays(shapes, "float64", seed)]
    made = OPS[name].apply(arrays, counts).ravel()
    np.testing.assert_array_equal(np.sort(made[made != 0]), np.sort(np.concatenate([a.ravel() for a in arrays])))


def amax_of(array: Array, block: tuple[int | None, ...]) -> Amax:
    """max |x| of every block; the last one of an axis may be short."""
    values = np.abs(array)
    for axis, width in enumerate(block):
        starts = np.arange(0, values.shape[axis], width or values.shape[axis])
        values = np.maximum.reduceat(values, starts, axis=axis)
    return Amax(values, block)


@given(calls(), st.data(), st.integers(0, 9))
def test_amax_commutes_with_layout(
    call: tuple[str, list[Shape], dict[str, int]], data: st.DataObject, seed: int
) -> None:
    name, shapes, counts = call
    arrays = [array - 100 for array in _arrays(shapes, "float64", seed)]
    block = tuple(data.draw(st.sampled_from([None, 1, 2, 3])) for _ in shapes[0])
    try:
        lifted = OPS[name].lift([amax_of(array, block) for array in arrays], shapes, counts)
    except Refusal as refusal:
        assert "would cut inside a block" in str(refusal)
        # whole extents beside single values behind the first axis do not lie together once they are one axis
        assert any(width not in (None, 1) for width in block) or set(block[1:]) == {None, 1}
        return
    direct = amax_of(OPS[name].apply(arrays, counts), lifted.block)
    np.testing.assert_array_equal(lifted.values, direct.values)


@pytest.mark.parametrize(
    ("name", "shape", "counts", "block"),
    [
        ("concat", (6, 8), {}, (4, None)),
        ("interleave", (6, 8), {"groups": 2}, (2, None)),
        ("rope", (8, 8), {"heads": 2}, (2, None)),
        ("reshape", (4, 12), {"channels": 3, "height": 2, "width": 2}, (1, 4)),
    ],
)
def test_a_cut_inside_a_block_is_refused(
    name: str, shape: Shape, counts: dict[str, int], block: tuple[int | None, ...]
) -> None:
    inputs = [np.ones(shape)] * OPS[name].least
    with pytest.raises(Refusal, match="would cut inside a block"):
        OPS[name].lift([amax_of(a, block) for a in inputs], [shape] * len(inputs), counts)


def test_rope_keeps_an_amax_over_whole_heads() -> None:
    array = np.random.default_rng(0).normal(size=(12, 5))
    lifted = OPS["rope"].lift([amax_of(array, (6, 1))], [array.shape], {"heads": 2})
    np.testing.assert_array_equal(lifted.values, amax_of(OPS["rope"].apply([array], {"heads": 2}), (6, 1)).values)


def test_interleave_gives_each_group_its_rows() -> None:
    q, k = np.array([0, 1, 2, 3, 4, 5]), np.array([10, 11])
    assert OPS["interleave"].apply([q, k], {"groups": 2}).tolist() == [0, 1, 2, 10, 3, 4, 5, 11]


def test_rope_puts_the_halves_of_a_head_side_by_side() -> None:
    assert OPS["rope"].apply([np.arange(12)], {"heads": 2}).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_pad_fills_up_with_zero_rows() -> None:
    assert OPS["pad"].apply([np.ones((3, 2), np.uint16)], {"multiple": 4}).tolist() == [[1, 1]] * 3 + [[0, 0]]


@given(st.lists(st.integers(-2048, 2048), min_size=1), st.integers(-2, 2))
def test_shift_is_undone_where_the_sum_is_exact(numbers: list[int], by: int) -> None:
    array = np.array(numbers, np.float32) / 1024
    made = OPS["shift"].apply([array], {"by": by})
    np.testing.assert_array_equal(OPS["shift"].inverse(made, [array.shape], {"by": by})[0], array)
    bound = OPS["shift"].lift([amax_of(array, (None,))], [array.shape], {"by": by})
    assert bound.values >= amax_of(made, (None,)).values


def test_shift_refuses_bits() -> None:
    with pytest.raises(Refusal, match="widen them first"):
        OPS["shift"].apply([np.zeros(3, np.uint16)], {"by": 1})


@pytest.mark.parametrize(
    ("name", "shapes", "counts", "says"),
    [
        ("concat", [(2, 3), (2, 4)], {}, "differ behind the first axis"),
        ("interleave", [(6, 3), (5, 3)], {"groups": 3}, "cannot make 3 groups out of 5 rows"),
        ("interleave", [(6, 3), (6, 4)], {"groups": 3}, "`interleave` cannot join"),
        ("stack", [(2, 3), (3, 2)], {}, r"cannot put \(3, 2\) under \(2, 3\)"),
        ("transpose", [(2, 3, 4)], {}, "needs a matrix"),
        ("rope", [(6, 3)], {"heads": 2}, "cannot make 2 heads of pairs out of 6 rows"),
        ("pad", [(6, 3)], {"multiple": 0}, "multiple of 0"),
        ("reshape", [(6, 11)], {"channels": 3, "height": 2, "width": 2}, "cannot make 3 x 2 x 2"),
        ("reshape", [(6,)], {}, "at least a matrix"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shapes: list[Shape], counts: dict[str, int], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        OPS[name].shape(shapes, counts)


def test_amax_of_different_blocks_cannot_be_joined() -> None:
    a = np.ones((4, 4))
    with pytest.raises(Refusal, match="cannot join amax"):
        OPS["concat"].lift([amax_of(a, (1, None)), amax_of(a, (None, None))], [a.shape] * 2, {})
