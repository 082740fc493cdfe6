from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.values import Slice, TensorSpec
from bridge.tables.dialects.layout import whole
from bridge.tables.expressions.ops import ALL, OPS, Rank
from bridge.tables.expressions.regions import Array, Block, Refusal, Shape
from tests.tables.gathered import gathered

DTYPES = ["uint8", "uint16", "int32", "float32", "float64"]


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Shape], dict[str, int]]:
    """An op with inputs that fit it: random groups, heads and rows, all behind the first axis alike."""
    name = draw(st.sampled_from([op for op in [*sorted(OPS), "transpose_heads", "unflatten"] if op != "shift"]))
    size = st.integers(1, 4)
    groups, tail = draw(size), tuple(draw(st.lists(size, max_size=1)))
    inputs = draw(st.integers(2, 4))
    match name:
        case "concat":
            return name, [(draw(size), *tail) for _ in range(inputs)], {}
        case "interleave":
            return name, [(groups * draw(size), *tail) for _ in range(inputs)], {"groups": groups}
        case "stack":
            return name, [(groups, *tail)] * inputs, {"experts": inputs}
        case "unsqueeze":
            shape = (groups, *tail)
            return name, [shape], draw(st.sampled_from([{}, {"axis": len(shape) - 1}]))
        case "transpose":
            return name, [(groups, draw(size))], {}
        case "unflatten" | "transpose_heads":
            return name, [(groups * draw(size), draw(size))], {"heads": groups}
        case "rope":
            return name, [(groups * 2 * draw(size), *tail)], {"heads": groups}
        case "pad":
            return name, [(draw(st.integers(1, 9)), *tail)], {"multiple": groups}
    raise AssertionError(name)


def applied(name: str, arrays: Sequence[Array], counts: dict[str, int]) -> Array:
    """What an op makes of arrays."""
    blocks = [(whole(str(at), array.shape, {"": array.shape}),) for at, array in enumerate(arrays)]
    made = gathered(ALL[name].make(blocks, counts, Rank()), {str(at): array for at, array in enumerate(arrays)})
    return made.reshape(ALL[name].shape([array.shape for array in arrays], counts))


def undone(name: str, made: Array, shapes: Sequence[Shape], counts: dict[str, int]) -> list[Array]:
    """The arrays that an op made `made` of."""
    found = ALL[name].undo((whole("made", made.shape, {"": shapes[0]}),), shapes, counts)
    return [gathered(blocks, {"made": made}).reshape(shape) for blocks, shape in zip(found, shapes, strict=True)]


def _arrays(shapes: Sequence[Shape], dtype: str, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 200, shape).astype(dtype) for shape in shapes]


@given(calls(), st.sampled_from(DTYPES), st.integers(0, 9))
def test_inverse_undoes_apply_bit_by_bit(call: tuple[str, list[Shape], dict[str, int]], dtype: str, seed: int) -> None:
    name, shapes, counts = call
    arrays = _arrays(shapes, dtype, seed)
    made = applied(name, arrays, counts)
    assert made.dtype == dtype
    back = undone(name, made, shapes, counts)
    assert len(back) == len(arrays)
    for array, again in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(array, again)


@given(calls(), st.integers(0, 9))
def test_ops_lose_and_invent_nothing(call: tuple[str, list[Shape], dict[str, int]], seed: int) -> None:
    name, shapes, counts = call
    arrays = [array + 1.0 for array in _arrays(shapes, "float64", seed)]
    made = applied(name, arrays, counts).ravel()
    np.testing.assert_array_equal(np.sort(made[made != 0]), np.sort(np.concatenate([a.ravel() for a in arrays])))


def test_interleave_gives_each_group_its_rows() -> None:
    q, k = np.array([0, 1, 2, 3, 4, 5]), np.array([10, 11])
    assert applied("interleave", [q, k], {"groups": 2}).tolist() == [0, 1, 2, 10, 3, 4, 5, 11]


def test_transpose_heads_turns_the_matrix_of_each_head_alone() -> None:
    array = np.arange(12).reshape(6, 2)
    turned = applied("transpose_heads", [array], {"heads": 2})
    np.testing.assert_array_equal(turned, array.reshape(2, 3, 2).transpose(0, 2, 1))
    np.testing.assert_array_equal(applied("unflatten", [array], {"heads": 2}), array.reshape(2, 3, 2))


def test_rope_puts_the_halves_of_a_head_side_by_side() -> None:
    assert applied("rope", [np.arange(12)], {"heads": 2}).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_pad_fills_up_with_zero_rows() -> None:
    assert applied("pad", [np.ones((3, 2), np.uint16)], {"multiple": 4}).tolist() == [[1, 1]] * 3 + [[0, 0]]


@given(st.lists(st.integers(-2048, 2048), min_size=1), st.integers(-2, 2))
def test_shift_is_undone_where_the_sum_is_exact(numbers: list[int], by: int) -> None:
    array = np.array(numbers, np.float32) / 1024
    made = applied("shift", [array], {"by": by})
    np.testing.assert_array_equal(undone("shift", made, [array.shape], {"by": by})[0], array)


@pytest.mark.parametrize(
    ("name", "shapes", "counts", "says"),
    [
        ("concat", [(2, 3), (2, 4)], {}, "differ after the first axis"),
        ("interleave", [(6, 3), (5, 3)], {"groups": 3}, "cannot make 3 groups out of 5 rows"),
        ("interleave", [(6, 3), (6, 4)], {"groups": 3}, "`interleave` cannot join"),
        ("transpose", [(2, 3, 4)], {}, "needs a matrix"),
        ("unflatten", [(6, 3)], {"heads": 5}, "cannot cut 6 between 5 heads"),
        ("transpose_heads", [(6,)], {"heads": 2}, "needs a matrix"),
        ("unsqueeze", [(2, 3)], {"axis": 2}, "cannot put axis 2 before another one"),
        ("rope", [(6, 3)], {"heads": 2}, "cannot make 2 heads of pairs out of 6 rows"),
        ("pad", [(6, 3)], {"multiple": 0}, "multiple of 0"),
        ("rope", [(12, 3)], {"heads": 0}, "cannot make 0 heads"),
        ("column", [(12, 3)], {"heads": 5}, "cannot cut 12 between 5 heads"),
        ("row", [(12,)], {}, "`row` needs a matrix"),
        ("row", [(12, 10)], {"heads": -2}, "cannot cut 10 between -2 heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shapes: list[Shape], counts: dict[str, int], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        ALL[name].shape(shapes, counts)


def test_rows_that_take_turns_are_one_rectangle_each_and_one_again() -> None:
    """gpt-oss: gate and up of an expert share the columns of a matrix stored [in, out]."""
    stored = np.arange(5 * 3 * 8).reshape(5, 3, 8)  # experts, in, gate and up in turns
    block = whole("gate_up", stored.shape, {"gate": (4, 3), "up": (4, 3)})
    experts = OPS["stack"].undo((block,), [(3, 8)] * 5, {"experts": 5})
    turned = OPS["transpose"].undo(experts[2], [(8, 3)], {})
    gate, up = OPS["interleave"].undo(turned[0], [(4, 3), (4, 3)], {"groups": 4})
    assert np.array_equal(gathered(gate, {"gate_up": stored}), stored[2].T[::2])
    assert np.array_equal(gathered(up, {"gate_up": stored}), stored[2].T[1::2])
    assert up[0].slice(TensorSpec("gate_up", stored.shape, "float32")) == Slice(
        "gate_up", None, (1, 8), transposed=True, expert=2, step=2
    )
    assert OPS["interleave"].make([gate, up], {"groups": 4}, Rank()) == turned[0]
    with pytest.raises(Refusal, match="one contiguous matrix"):
        OPS["transpose"].make([up], {}, Rank())


def test_halves_of_a_matrix_that_take_turns_are_one_rectangle() -> None:
    """gpt-oss out of Megatron, where an expert has its gate, then its up."""
    blocks = (whole("fc1", (5, 8, 3), {"gate": (4, 3), "up": (4, 3)}),)
    experts = OPS["stack"].undo(blocks, [(8, 3)] * 5, {"experts": 5})
    gate, up = OPS["concat"].undo(experts[2], [(4, 3), (4, 3)], {})
    (made,) = OPS["interleave"].make([gate, up], {"groups": 4}, Rank())
    assert made == Block("fc1", (16, 24), (0, 3), rope=8)
    stored = np.arange(5 * 8 * 3).reshape(5, 8, 3)
    assert np.array_equal(gathered((made,), {"fc1": stored}), stored[2][[0, 4, 1, 5, 2, 6, 3, 7]])
    (turned,) = OPS["transpose"].make([(made,)], {}, Rank())
    assert (turned.shape, turned.cut((1, 2)).rows) == ((3, 8), (1, 2))  # its heads lie across
    assert len(OPS["interleave"].make([up, gate], {"groups": 4}, Rank())) == 8
    assert len(OPS["interleave"].make([gate, up], {"groups": 2}, Rank())) == 4
    across = OPS["concat"].undo((Block("fc1", (4, 12), (0, 3)),), [(4, 3), (4, 3)], {})  # of two experts
    assert len(OPS["interleave"].make(across, {"groups": 4}, Rank())) == 8
    with pytest.raises(Refusal, match="reordered rows cannot be transposed while they are written"):
        turned.slice(TensorSpec("fc1", (5, 8, 3), "float32"))


def test_rows_of_two_tensors_do_not_take_turns_by_the_thousand() -> None:
    inputs = [(Block(name, (0, 2000), (0, 3)),) for name in ("gate", "up")]
    assert len(OPS["interleave"].make(inputs, {"groups": 1000}, Rank())) == 2000
    with pytest.raises(Refusal, match="2000 single rows of several tensors; they must be in one tensor"):
        OPS["interleave"].make(inputs, {"groups": 2000}, Rank())


def test_vectors_of_experts_are_rows_of_a_matrix() -> None:
    stored = np.arange(5 * 8).reshape(5, 8)
    spec = TensorSpec("bias", stored.shape, "float32")
    experts = OPS["stack"].undo((whole("bias", stored.shape, {"gate": (4,), "up": (4,)}),), [(8,)] * 5, {"experts": 5})
    gate, up = OPS["interleave"].undo(experts[3], [(4,), (4,)], {"groups": 4})
    assert gathered(gate, {"bias": stored}).tolist() == [24, 26, 28, 30]
    assert up[0].slice(spec) == Slice("bias", (3, 4), (1, 8), transposed=True, step=2)
    assert experts[3][0].slice(spec) == Slice("bias", (3, 4))
