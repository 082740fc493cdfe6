"""Caches that are buffers of one length, updated by ONNX's TensorScatter.

A cache that grows by Concat is copied whole at every step; TensorRT updates a buffer in place, if its length is fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx_ir as ir

from bridge.core.errors import ExportError
from bridge.core.text import fold_layers
from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.onnx.run.runtime import PAST, WRITE_INDICES

SEQUENCE = 2  # the axis of tokens in a cache: batch, heads, tokens, features
# Nodes that keep a number as it is, with other axes of one.
MOVES = ("Squeeze", "Unsqueeze", "Reshape", "Identity")


def write_into_buffers(graph: Graph, length: int) -> None:
    """Make each cache a buffer of `length` tokens, in place; ExportError if the graph has another form.

    Adds the input `write_indices` [batch], int64: the place of a row's first new token, which is the number of tokens
    before it, padding included. `attention_mask` covers the whole buffer. Places behind the newest token are hidden,
    and must be finite.
    """
    main = graph.model.graph
    caches = [value for value in main.inputs if str(value.name).startswith(PAST)]
    masks = [value for value in main.inputs if value.name == "attention_mask"]
    if problems := [f"{name} {why}" for name, why in _misfits(caches, masks)]:
        raise ExportError(f"caches that cannot be buffers: {'; '.join(fold_layers(problems))}; {_remedy(length)}")
    indices = ir.val(WRITE_INDICES, ir.DataType.INT64, ["batch"])
    main.inputs.append(indices)
    _Lengths(graph, length, indices).replace(caches)
    for cache in caches:
        concat = next(node for node, _ in cache.uses() if node.op_type == "Concat")
        _scatter(main, concat, indices)
    for value in (*main.inputs, *main.outputs, *(value for node in main for value in node.outputs)):
        value.shape = _fixed(value.shape, length)


def _remedy(length: int) -> str:
    return f"leave out cache={length} (--cache {length}): caches then grow"


def _misfits(caches: list[ir.Value], masks: list[ir.Value]) -> Iterator[tuple[str, str]]:
    """Caches with another form than present = Concat(past, new) along the tokens; masks read in parts."""
    if not caches or len(masks) != 1:
        yield "the graph", "has none, or no mask"
    for mask in masks:
        if any(node.op_type in ("Slice", "Gather") for node, _ in mask.uses()):
            yield str(mask.name), "is read in parts, of the newest tokens"
    for cache in caches:
        if cache.shape is None or len(cache.shape) != SEQUENCE + 2 or _axis(cache, SEQUENCE) != "past_sequence":
            yield str(cache.name), "has no axis of tokens behind batch and heads"
            continue
        readers = Counter(node.op_type for node, _ in cache.uses() if node.op_type != "Shape")
        grown = [node for node, at in cache.uses() if node.op_type == "Concat" and at == 0 and _grows(node)]
        if readers != {"Concat": 1} or not grown:
            yield str(cache.name), f"is read by {', '.join(readers) or 'no node'}, not joined with new tokens alone"


def _grows(concat: ir.Node) -> bool:
    along = concat.attributes["axis"].as_int() in (SEQUENCE, SEQUENCE - 4)
    return along and len(concat.inputs) == 2 and concat.outputs[0].is_graph_output()


def _axis(value: ir.Value, axis: int) -> object:
    """An axis' extent or name."""
    extent = value.shape[axis] if value.shape is not None and axis < len(value.shape) else None
    return extent.value if isinstance(extent, ir.SymbolicDim) else extent


class _Lengths:
    """Replaces what is computed from the length of the past, which the shape of a buffer does not tell."""

    def __init__(self, graph: Graph, length: int, indices: ir.Value) -> None:
        self.main, self.length, self.indices = graph.model.graph, length, indices
        self.problems: list[str] = []

    def replace(self, caches: list[ir.Value]) -> None:
        """Make past and new tokens together the buffer's length, and places of new tokens those of each row."""
        for cache in caches:
            for node, _ in tuple(cache.uses()):
                start = node.attributes["start"].as_int() if "start" in node.attributes else 0
                end = node.attributes["end"].as_int() if "end" in node.attributes else SEQUENCE + 2
                if node.op_type == "Shape" and start <= SEQUENCE < end:
                    if (start, end) == (SEQUENCE, SEQUENCE + 1):
                        self._past(node.outputs[0])
                    else:
                        self.problems.append(f"{node.name} (Shape)")
        if self.problems:
            raise ExportError(
                f"the length of the past is read in a form that buffers do not have, by "
                f"{', '.join(fold_layers(self.problems))}; {_remedy(self.length)}"
            )

    def _past(self, past: ir.Value) -> None:
        for node, at in tuple(past.uses()):
            other = node.inputs[1 - at] if node.op_type == "Add" else None
            if node.op_type in MOVES and at == 0:
                self._past(node.outputs[0])
            elif other is not None and _counts_new(other):
                self._whole(node)
            elif other is not None and _ranges_over_new(other):
                self._places(node, other)
            else:
                self.problems.append(f"{node.name} ({node.op_type})")

    def _whole(self, total: ir.Node) -> None:
        """Past and new tokens: the buffer's length."""
        rank = len(total.outputs[0].shape or ())
        number = ir.tensor(self.length if rank == 0 else [self.length], ir.DataType.INT64, name=f"{total.name}/length")
        value = ir.Value(name=number.name, type=ir.TensorType(ir.DataType.INT64), const_value=number)
        value.shape = ir.Shape([1] * rank)
        self.main.register_initializer(value)
        total.outputs[0].replace_all_uses_with(value)

    def _places(self, places: ir.Node, new: ir.Value) -> None:
        """Places of new tokens in the buffer, [sequence], become those of each row, [batch, sequence]."""
        name = f"{places.name}/rows"
        axis = _constant(self.main, f"{name}/axis", [1])
        column = ir.node("Unsqueeze", [self.indices, axis], name=f"{name}/column")
        rows = ir.node("Add", [column.outputs[0], new], name=name)
        for node, extent in ((column, 1), (rows, "sequence")):
            node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["batch", extent])
        self.main.insert_before(places, [column, rows])
        for node, at in tuple(places.outputs[0].uses()):
            axes = node.inputs[1].const_value if node.op_type == "Unsqueeze" and at == 0 and node.inputs[1] else None
            wanted = [] if axes is None else axes.numpy().tolist()
            if 0 not in wanted:
                self.problems.append(f"{node.name} ({node.op_type})")
                continue
            kept = _constant(self.main, f"{node.name}/axes", [axis for axis in wanted if axis])
            node.replace_input_with(0, rows.outputs[0])
            node.replace_input_with(1, kept)
            _widen(node.outputs[0])


def _counts_new(value: ir.Value) -> bool:
    """Whether a number is that of new tokens."""
    node = value.producer()
    while node is not None and node.op_type in MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Shape" or node.inputs[0] is None or "start" not in node.attributes:
        return False
    return _axis(node.inputs[0], node.attributes["start"].as_int()) == "sequence"


def _ranges_over_new(value: ir.Value) -> bool:
    """Whether a value is 0, 1, 2 ... of the new tokens."""
    node = value.producer()
    if node is None or node.op_type != "Range":
        return False
    start, limit, step = node.inputs
    ends = [number.const_value.numpy().item() for number in (start, step) if number and number.const_value is not None]
    return ends == [0, 1] and limit is not None and _counts_new(limit)


def _constant(graph: ir.Graph, name: str, numbers: list[int]) -> ir.Value:
    tensor = ir.tensor(numbers, ir.DataType.INT64, name=name)
    shape, type_ = ir.Shape([len(numbers)]), ir.TensorType(ir.DataType.INT64)
    value = ir.Value(name=name, type=type_, shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _widen(value: ir.Value) -> None:
    """Forget extents of one at the batch, of a value and of those computed from it: rows have places of their own."""
    todo, seen = [value], {value}
    while todo:
        value = todo.pop()
        if value.shape is None or len(value.shape) < 3 or value.shape[0] != 1:
            continue
        value.shape = ir.Shape(["batch", *value.shape[1:]])
        following = {output for node, _ in value.uses() for output in node.outputs} - seen
        seen |= following
        todo += following


def _scatter(graph: ir.Graph, concat: ir.Node, indices: ir.Value) -> None:
    """Put TensorScatter in the place of a Concat; its output has the name of the old one.

    The mark of keys and values goes to the new ones: they are quantized before they are written, since TensorRT wants
    the updated buffer itself as an output.
    """
    old, update = concat.outputs[0], concat.inputs[1]
    assert update is not None
    node = ir.node("TensorScatter", [*concat.inputs, indices], {"axis": SEQUENCE - 4}, name=f"{concat.name}/write")
    new = node.outputs[0]
    new.type, new.shape = old.type, old.shape
    update.metadata_props.update(old.metadata_props)
    node.metadata_props.update(concat.metadata_props)
    graph.insert_before(concat, node)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(concat, safe=True)
    new.name, old.name = old.name, None


def _fixed(shape: ir.Shape | None, length: int) -> ir.Shape | None:
    if shape is None:
        return None
    extents = [extent.value if isinstance(extent, ir.SymbolicDim) else extent for extent in shape]
    return ir.Shape([length if extent in ("past_sequence", "total_sequence") else extent for extent in extents])
