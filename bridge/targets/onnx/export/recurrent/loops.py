"""The recurrences as ONNX loops, exact for every number of tokens.

One token is one step. States and everything inside are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from bridge.targets.onnx.export.recurrent.replace import CHUNKS, DELTA, DOMAIN, SELECTIVE

CHUNK = 64  # tokens of `ChunkScan` that are products of matrices: as transformers takes for the delta rule
Step = Callable[..., tuple[ir.Value, ir.Value]]
FLOAT, INT, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


class _Ops:
    """Makes nodes, in order."""

    def __init__(self) -> None:
        self.tape = ir.tape.Tape()

    def __call__(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self.tape.op(op, inputs, attributes)

    def integers(self, numbers: Sequence[int] | int) -> ir.Value:
        return self("Constant", value=ir.tensor(np.array(numbers, np.int64)))

    def swapped(self, value: ir.Value, rank: int) -> ir.Value:
        """The last two axes exchanged."""
        return self("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])

    def unsqueezed(self, value: ir.Value, axis: int) -> ir.Value:
        return self("Unsqueeze", value, self.integers([axis]))

    def scan(self, step: Step, rank: int, state: ir.Value, *rows: ir.Value) -> Any:
        """Run `step(ops, state, *rows)` for each of the first axis of `rows`; return the last state and all outputs.

        `step` returns the next state and an output, both of `rank` axes, and may read values from outside.
        """
        ops = _Ops()
        inputs = [ir.val(name, FLOAT) for name in ("state", *(f"row_{i}" for i in range(len(rows))))]
        outputs = step(ops, *inputs)
        for value in outputs:
            value.dtype, value.shape = FLOAT, ir.Shape([None] * rank)  # which ONNX Runtime asks for
        body = ir.Graph(inputs, outputs, nodes=ops.tape.nodes, name="body")
        given: dict[str, Any] = {"body": body, "num_scan_inputs": len(rows)}
        return self.tape.op_multi_out("Scan", [state, *rows], given, num_outputs=2)

    def loop(self, step: Step, times: ir.Value, value: ir.Value, number: ir.Value) -> ir.Value:
        """Run `step(ops, value, number)`, which returns the next of both, `times` times; return the last value."""
        ops = _Ops()
        inputs = [ir.val(name, kind) for name, kind in (("turn", INT), ("go", BOOL), ("value", FLOAT), ("number", INT))]
        made = step(ops, *inputs[2:])
        outputs = [ops("Identity", inputs[1]), *made]
        for out, kind in zip(outputs, (BOOL, FLOAT, INT), strict=True):
            out.dtype = kind
        inputs[0].shape = inputs[1].shape = ir.Shape([])
        body = ir.Graph(inputs, outputs, nodes=ops.tape.nodes, name="body")
        go = self("Constant", value=ir.tensor(np.array(True)))
        return self.tape.op_multi_out("Loop", [times, go, value, number], {"body": body}, num_outputs=2)[0]


def expand(model: ir.Model) -> None:
    """Replace the nodes of `replace.py` in place."""
    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        ops = _Ops()
        made = EXPANDED[node.op_type](ops, *node.inputs)
        for new in ops.tape.nodes:
            new.metadata_props.update(node.metadata_props)
        for old, value in zip(node.outputs, made, strict=True):
            value.name, value.type, value.shape = old.name, old.type, old.shape
            value.metadata_props.update(old.metadata_props)
        model.graph.insert_before(node, ops.tape.nodes)
        ir.convenience.replace_all_uses_with(node.outputs, made, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    model.graph.opset_imports.pop(DOMAIN, None)


def _selective(ops: _Ops, dt: Any, dtx: Any, b: Any, c: Any, a: Any, state: Any) -> tuple[ir.Value, ir.Value]:
    """Token by token: state = exp(dt a) state + dtx b, output = state c. dt, dtx: [batch, channels, tokens]."""

    def rows(value: ir.Value, axis: int) -> ir.Value:
        return ops.unsqueezed(ops("Transpose", value, perm=[2, 0, 1]), axis)

    def step(ops: _Ops, state: Any, dt: Any, dtx: Any, b: Any, c: Any) -> tuple[ir.Value, ir.Value]:
        kept = ops("Mul", state, ops("Exp", ops("Mul", dt, a)))
        state = ops("Add", kept, ops("Mul", dtx, b))
        return state, ops("MatMul", state, c)

    state, y = ops.scan(step, 3, state, rows(dt, 3), rows(dtx, 3), rows(b, 2), rows(c, 3))
    return ops("Transpose", ops("Squeeze", y, ops.integers([3])), perm=[1, 2, 0]), state


def _delta(ops: _Ops, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[ir.Value, ir.Value]:
    """Token by token: state decays by exp(g), k reads v from it, and is given beta of the difference."""
    if _extents(g, 3) == (1,):
        return _delta_chunks(ops, q, k, v, g, beta, state)

    def rows(value: ir.Value, last: bool) -> ir.Value:
        """tokens, batch, heads, 1, width; or width, 1."""
        return ops.unsqueezed(ops("Transpose", value, perm=[1, 0, 2, 3]), 4 if last else 3)

    def step(ops: _Ops, state: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[ir.Value, ir.Value]:
        state = ops("Mul", state, ops("Exp", g))
        change = ops("Mul", ops("Sub", v, ops("MatMul", k, state)), beta)
        state = ops("Add", state, ops("Mul", ops.swapped(k, 4), change))
        return state, ops("MatMul", q, state)

    state, y = ops.scan(
        step, 4, state, rows(q, False), rows(k, False), rows(v, False), rows(g, True), rows(beta, False)
    )
    return ops("Transpose", ops("Squeeze", y, ops.integers([3])), perm=[1, 0, 2, 3]), state


@dataclass(frozen=True)
class _Chunked:
    """Tokens in chunks of `size`, which is dynamic: one token is a chunk of one. What fills the last chunk is 0."""

    tokens: ir.Value
    size: ir.Value
    missing: ir.Value
    place: ir.Value
    upto: ir.Value  # [size, size]: 1 at each token of a chunk and those before it
    before: ir.Value  # the same without the token itself

    @staticmethod
    def of(ops: _Ops, value: ir.Value) -> _Chunked:
        tokens = ops("Shape", value, start=1, end=2)
        size = ops("Min", tokens, ops.integers([CHUNK]))
        place = ops("Range", ops.integers(0), ops("Squeeze", size), ops.integers(1))
        behind = ops("Sub", ops.unsqueezed(place, 1), place)
        upto = ops("Cast", ops("GreaterOrEqual", behind, ops.integers(0)), to=int(FLOAT))
        before = ops("Cast", ops("Greater", behind, ops.integers(0)), to=int(FLOAT))
        return _Chunked(tokens, size, ops("Mod", ops("Neg", tokens), size), place, upto, before)

    def rows(self, ops: _Ops, value: ir.Value, heads: Sequence[int], perm: Sequence[int], *width: int) -> ir.Value:
        """Chunks first, of [batch, tokens, all heads, *width]; `perm` is of batch, chunks, tokens, *heads, *width."""
        rank = 3 + len(width)
        pads = ops("Mul", self.missing, ops.integers([int(i == rank + 1) for i in range(2 * rank)]))
        shape = ops("Concat", ops.integers([0, -1]), self.size, ops.integers([*heads, *width]), axis=0)
        return ops("Transpose", ops("Reshape", ops("Pad", value, pads), shape), perm=perm)

    def whole(self, ops: _Ops, y: ir.Value, perm: Sequence[int], heads: int, width: int) -> ir.Value:
        """Undo `rows`."""
        y = ops("Reshape", ops("Transpose", y, perm=perm), ops.integers([0, -1, heads, width]))
        return ops("Slice", y, ops.integers([0]), self.tokens, ops.integers([1]))

    def decays(self, ops: _Ops, a: ir.Value, rank: int) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """What is left, after decays exp(a) [..., size] at each token.

        At each token of what came at each before it [size, size], at each of what came before the chunk [size, 1], and
        at the end of both. Exponents are sums of what lies between two tokens: differences of sums would cancel.
        """
        between = ops("CumSum", ops("Mul", ops.unsqueezed(a, rank), self.before), ops.integers(-2))
        inner = ops("Mul", ops("Exp", between), self.upto)
        outer = ops("Exp", ops("CumSum", a, ops.integers(-1)))
        last = ops("Gather", inner, ops.integers(-1), axis=rank - 1)
        end = ops.unsqueezed(ops("Gather", outer, ops.integers([-1]), axis=rank - 1), rank)
        return inner, ops.unsqueezed(outer, rank), ops.unsqueezed(last, rank), end


def _chunks(ops: _Ops, x: Any, a: Any, b: Any, c: Any, state: Any) -> tuple[ir.Value, ir.Value]:
    """Chunk by chunk: state[head] = exp(a) state + x b, output = state c.

    x: [batch, tokens, heads, width]; a: [batch, tokens, heads], 0 or less; b, c: [batch, tokens, groups, size]; state:
    [batch, heads, width, size].
    """
    (heads, width), (groups, size) = _extents(x, 2), _extents(b, 2)
    each = heads // groups
    chunks = _Chunked.of(ops, x)

    def step(ops: _Ops, state: Any, x: Any, a: Any, b: Any, c: Any) -> tuple[ir.Value, ir.Value]:
        inner, outer, last, end = chunks.decays(ops, a, 4)
        y = ops("MatMul", ops("Mul", ops("MatMul", c, ops.swapped(b, 5)), inner), x)
        y = ops("Add", y, ops("Mul", ops("MatMul", c, ops.swapped(state, 5)), outer))
        given = ops("MatMul", ops.swapped(ops("Mul", x, last), 5), b)
        return ops("Add", ops("Mul", state, end), given), y

    wide = [1, 0, 3, 4, 2, 5]  # chunks, batch, groups, heads of a group, tokens of a chunk, width
    state, y = ops.scan(
        step,
        5,
        ops("Reshape", state, ops.integers([0, groups, each, width, size])),
        chunks.rows(ops, x, [groups, each], wide, width),
        chunks.rows(ops, a, [groups, each], wide[:-1]),
        *(chunks.rows(ops, value, [groups, 1], wide, size) for value in (b, c)),
    )
    return chunks.whole(ops, y, [1, 0, 4, 2, 3, 5], heads, width), ops(
        "Reshape", state, ops.integers([0, heads, width, size])
    )


def _delta_chunks(ops: _Ops, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[ir.Value, ir.Value]:
    """`_delta` chunk by chunk, for one decay of each head: g, beta: [batch, tokens, heads, 1]."""
    (heads, width), (_, size) = _extents(v, 2), _extents(k, 2)
    chunks = _Chunked.of(ops, v)
    levels = ops("Cast", ops("Less", ops.integers([1 << i for i in range(CHUNK.bit_length() - 1)]), chunks.size), to=7)
    levels = ops("ReduceSum", levels, keepdims=0)

    def step(ops: _Ops, state: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[ir.Value, ir.Value]:
        inner, outer, last, end = chunks.decays(ops, ops("Squeeze", g, ops.integers([3])), 3)
        turned = ops.swapped(k, 4)
        own = ops("Mul", ops("MatMul", ops("Mul", k, beta), turned), ops("Mul", inner, chunks.before))
        change = ops("Sub", v, ops("MatMul", ops("Mul", k, outer), state))
        change = ops("MatMul", _inverse(ops, own, chunks, levels), ops("Mul", change, beta))
        y = ops("MatMul", ops("Mul", ops("MatMul", q, turned), inner), change)
        y = ops("Add", y, ops("MatMul", ops("Mul", q, outer), state))
        given = ops("MatMul", ops.swapped(ops("Mul", k, last), 4), change)
        return ops("Add", ops("Mul", state, end), given), y

    perm = [1, 0, 3, 2, 4]  # chunks, batch, heads, tokens of a chunk, width
    widths = ((q, size), (k, size), (v, width), (g, 1), (beta, 1))
    state, y = ops.scan(step, 4, state, *(chunks.rows(ops, value, [heads], perm, n) for value, n in widths))
    return chunks.whole(ops, y, perm, heads, width), state


def _inverse(ops: _Ops, own: ir.Value, chunks: _Chunked, levels: ir.Value) -> ir.Value:
    """The inverse of 1 + `own` [..., size, size], which is lower triangular without its diagonal.

    Blocks on the diagonal are inverted, of 1, 2, 4, ... rows: [[A, 0], [C, B]] has -B^-1 C A^-1 below A^-1 and B^-1.
    Powers of `own`, which would need no loop either, grow to 1e17 where keys repeat.
    """

    def step(ops: _Ops, inverse: Any, rows: Any) -> tuple[ir.Value, ir.Value]:
        at = ops("Div", chunks.place, rows)
        pair = ops("Div", at, ops.integers(2))
        same, other = (ops("Equal", ops.unsqueezed(value, 1), value) for value in (pair, at))
        below = ops("Mul", own, ops("Cast", ops("And", same, ops("Not", other)), to=int(FLOAT)))
        below = ops("MatMul", ops("MatMul", inverse, below), inverse)
        return ops("Sub", inverse, below), ops("Add", rows, rows)

    one = ops("Sub", chunks.upto, chunks.before)
    start = ops("Expand", one, ops("Shape", own))
    return ops.loop(step, levels, start, ops.integers(1))


def _extents(value: ir.Value, axis: int) -> tuple[int, ...]:
    assert value.shape is not None
    return tuple(int(extent) for extent in value.shape[axis:])  # type: ignore[arg-type]  # static


EXPANDED: dict[str, Callable[..., tuple[ir.Value, ir.Value]]] = {CHUNKS: _chunks, DELTA: _delta, SELECTIVE: _selective}
