"""Stamp the layers that were not exported from equal layers that were.

At most two layers of each kind are exported. The second is the template of all later ones; it must equal the first node
by node, compared backwards from their results. This finds everything that depends on a layer's index (a scale by index,
a parameter shared across layers); the caller then exports the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from bridge.targets.onnx.export.layers import Layers

MODULE = "bridge.module"  # on nodes: the live module that made it
KV = "bridge.kv"  # on values: "3.key" is read by the attention of layer 3
KINDS = ("key", "value", "conv_state", "recurrent_state")
SLOT = re.compile(r"(past_key_values|present)\.(\d+)\.(key|value|conv_state|recurrent_state)")


class Refused(Exception):
    """These layers cannot be stamped; the message says why."""


@dataclass
class _Block:
    """One exported layer. `carry` is its input hidden state, `exit` its output hidden state."""

    nodes: list[ir.Node]
    inputs: list[tuple[ir.Value | None, ...]]  # as exported; the nodes are rewired later
    carry: ir.Value | None = None
    exit: ir.Value | None = None
    caches: dict[str, ir.Value] = field(default_factory=dict)


def stamp_layers(model: ir.Model, layers: Layers, keep: Sequence[int]) -> None:
    """Extend the graph of layers `keep` to all `layers`, in place; after Refused `model` is unusable."""
    graph = model.graph
    blocks = _find_blocks(graph, layers.path, len(keep))
    _find_carries(graph, blocks, _tainted(graph))
    pairs: dict[object, list[int]] = {}
    for position, layer in enumerate(keep):
        pairs.setdefault(layers.kinds[layer], []).append(position)
    shared: set[ir.Value] = set()
    for pair in pairs.values():
        if len(pair) == 2:
            shared |= _Comparison(blocks, pair[0], pair[1], layers.path).run()
    _check_singles(blocks, [p[0] for p in pairs.values() if len(p) == 1], shared, _tainted(graph), layers.path)
    template = {kind: pair[-1] for kind, pair in pairs.items()}
    _Stamper(graph, layers, list(keep), blocks, template).run()


def _numbered(name: str | None, path: str) -> re.Match[str] | None:
    """Match the name of a weight, cache or module of a layer: the text before its number, the number, the rest."""
    return re.fullmatch(rf"(past_key_values\.|present\.|{re.escape(path)}\.)(\d+)(\..*)?", name or "")


def _renumbered(name: str, path: str, numbers: Mapping[int, int]) -> str:
    """Name of the same weight, cache or module in the layer that `numbers` gives; other names stay as they are."""
    match = _numbered(name, path)
    return f"{match[1]}{numbers.get(int(match[2]), match[2])}{match[3] or ''}" if match else name


def _find_blocks(graph: ir.Graph, path: str, count: int) -> list[_Block]:
    """Group nodes by layer. The optimizer's own nodes (a fused Split) have no module: they go with their readers."""
    where: dict[ir.Node, int | None] = {}
    for node in reversed(list(graph)):
        match = _numbered(node.metadata_props.get(MODULE), path)
        where[node] = int(match[2]) if match else None
        if MODULE not in node.metadata_props:
            users = {where.get(user) for out in node.outputs for user, _ in out.uses()}
            where[node] = users.pop() if len(users) == 1 else None
    blocks = [_Block([], []) for _ in range(count)]
    for node in graph:
        index = where[node]
        if index is None:
            continue
        blocks[index].nodes.append(node)
        blocks[index].inputs.append(tuple(node.inputs))
        for out in node.outputs:
            if KV in out.metadata_props:
                blocks[index].caches[out.metadata_props[KV].split(".")[1]] = out
    return blocks


def _tainted(graph: ir.Graph) -> set[ir.Value]:
    """Values that depend on a weight or a cache; shapes, masks, positions, cos and sin do not."""
    tainted = {v for v in graph.initializers.values() if v.const_value is None}
    tainted |= {v for v in graph.inputs if SLOT.fullmatch(v.name or "")}
    for node in graph:
        if node.op_type not in ("Shape", "Size") and any(v in tainted for v in node.inputs):
            tainted.update(node.outputs)
    return tainted


def _find_carries(graph: ir.Graph, blocks: list[_Block], tainted: set[ir.Value]) -> None:
    """Find the hidden state, which must be the only value that goes from each layer to the next."""
    home = {node: i for i, block in enumerate(blocks) for node in block.nodes}
    for i, block in enumerate(blocks):
        leaving: set[ir.Value] = set()
        for node in block.nodes:
            for out in node.outputs:
                if out not in tainted:
                    continue
                users = [user for user, _ in out.uses() if user.op_type not in ("Shape", "Size")]
                targets = {home.get(user) for user in users} - {i}
                if targets - {i + 1 if i + 1 < len(blocks) else None}:
                    raise Refused(f"a value of layer {i} is used outside the next layer")
                if targets or (out.is_graph_output() and KV not in out.metadata_props):
                    leaving.add(out)
        if len(leaving) != 1:
            raise Refused(f"{len(leaving)} values go from a layer to the next, not one hidden state")
        (block.exit,) = leaving
        if i + 1 < len(blocks):
            blocks[i + 1].carry = block.exit


def _check_singles(
    blocks: list[_Block], singles: list[int], shared: set[ir.Value], tainted: set[ir.Value], path: str
) -> None:
    """A layer that is the only one of its kind may read only the hidden state, its own weights and shared values."""
    for i in singles:
        own = {out for node in blocks[i].nodes for out in node.outputs}
        for value in (v for inputs in blocks[i].inputs for v in inputs if v in tainted and v not in own):
            match = _numbered(value.name, path)
            mine = match is not None and int(match[2]) == i
            if i and value is not blocks[i].carry and value not in shared and not mine:
                raise Refused(
                    f"layer {i} is the only one of its kind and reads {value.name or 'a value'}, "
                    "which no other layer reads"
                )


class _Comparison:
    """Compare two layers of one kind node by node, backwards from their results."""

    def __init__(self, blocks: list[_Block], first: int, second: int, path: str) -> None:
        self.first, self.second, self.path = first, second, path
        self.a, self.b = blocks[first], blocks[second]
        self.in_a, self.in_b = set(self.a.nodes), set(self.b.nodes)
        self.pairs: dict[ir.Value, ir.Value] = {}  # second -> first
        self.shared: set[ir.Value] = set()
        self.entry: ir.Value | None = self.a.carry

    def run(self) -> set[ir.Value]:
        """Return the outside values that both read; Refused if the second cannot replace the first."""
        if self.a.caches.keys() != self.b.caches.keys():
            raise Refused("layers of one kind keep different caches")
        todo = [(self.b.exit, self.a.exit), *((self.b.caches[k], self.a.caches[k]) for k in sorted(self.b.caches))]
        seen: set[ir.Node] = set()
        while todo:
            x, y = todo.pop()
            if x is None or y is None:
                if x is not y:
                    raise self._differ("an optional input")
                continue
            if self.pairs.setdefault(x, y) is not y:
                raise self._differ(f"{x.name} has two counterparts")
            if self._outside(x, y):
                continue
            p, q = x.producer(), y.producer()
            assert p is not None and q is not None
            if p in seen:
                continue
            seen.add(p)
            self._same_node(p, q)
            todo += [(u, v) for u, v in zip(p.outputs, q.outputs, strict=True) if u is not x and u.uses()]
            todo += list(zip(p.inputs, q.inputs, strict=True))
        missing = self.in_b - seen
        if missing:
            raise self._differ(f"{min(n.name or '' for n in missing)} does not affect the layer's results")
        return self.shared

    def _outside(self, x: ir.Value, y: ir.Value) -> bool:
        """Match two values made outside their layers; False if both are made inside, where nodes must match."""
        if x is y:
            self.shared.add(x)
            return True
        inside = x.producer() in self.in_b, y.producer() in self.in_a
        if all(inside):
            return False
        if x is self.b.carry and not inside[1]:
            if self.entry is None:
                self.entry = y
            if y is self.entry:
                return True
        if any(inside) or x.producer() or y.producer():
            raise self._differ(f"{x.name} against {y.name}")
        kind = x.dtype == y.dtype and x.shape == y.shape
        if x.const_value is not None and y.const_value is not None:
            same = kind and x.const_value.tobytes() == y.const_value.tobytes()
        else:
            same = kind and _renumbered(x.name or "", self.path, {self.second: self.first}) == y.name
        if not same:
            raise self._differ(f"{x.name} against {y.name}")
        return True

    def _same_node(self, p: ir.Node, q: ir.Node) -> None:
        same = p.op_identifier() == q.op_identifier() and len(p.inputs) == len(q.inputs)
        if not same or len(p.outputs) != len(q.outputs) or not _same_attributes(p, q):
            raise self._differ(f"{p.op_type} {p.name} against {q.op_type} {q.name}")

    def _differ(self, what: str) -> Refused:
        return Refused(f"exported layers {self.first} and {self.second} of one kind differ: {what}")


def _same_attributes(p: ir.Node, q: ir.Node) -> bool:
    if p.attributes.keys() != q.attributes.keys():
        return False
    for key, a in p.attributes.items():
        b = q.attributes[key]
        if a.type != b.type or a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            return False
        if a.type == ir.AttributeType.TENSOR:
            s, t = a.as_tensor(), b.as_tensor()
            if (s.dtype, s.shape, s.tobytes()) != (t.dtype, t.shape, t.tobytes()):
                return False
        elif a.value != b.value:
            return False
    return True


class _Stamper:
    """Place the kept layers and copy the templates between them."""

    def __init__(
        self, graph: ir.Graph, layers: Layers, keep: list[int], blocks: list[_Block], template: dict[object, int]
    ) -> None:
        self.graph, self.layers, self.keep, self.blocks, self.template = graph, layers, keep, blocks, template

    def run(self) -> None:
        carry: ir.Value | None = None
        originals = {v: v.name or "" for v in (*self.graph.initializers.values(), *self.graph.inputs)}
        self._place_kept()
        for layer, kind in enumerate(self.layers.kinds):
            if layer in self.keep:
                block = self.blocks[self.keep.index(layer)]
                if block.carry is not None:
                    assert carry is not None
                    _rewire(block.nodes, block.carry, carry)
                carry = block.exit
            else:
                assert carry is not None
                carry = self._copy(self.template[kind], layer, carry, originals)
        assert carry is not None
        self._rewire_tail(carry)
        self._order_slots()
        self.graph.sort()

    def _place_kept(self) -> None:
        """Rename the kept layers, which were exported as 0, 1, 2 ..., to their real indices."""
        path = self.layers.path

        def placed(name: str) -> str:
            match = _numbered(name, path)
            return f"{match[1]}{self.keep[int(match[2])]}{match[3] or ''}" if match else name

        initializers = list(self.graph.initializers.values())
        self.graph.initializers.clear()
        for value in initializers:
            value.name = placed(value.name or "")
            self.graph.initializers[value.name] = value
        for value in (*self.graph.inputs, *self.graph.outputs):
            value.name = placed(value.name or "")
        for position, block in enumerate(self.blocks):
            for node in block.nodes:
                if MODULE in node.metadata_props:
                    node.metadata_props[MODULE] = placed(node.metadata_props[MODULE])
            for kind, value in block.caches.items():
                value.metadata_props[KV] = f"{self.keep[position]}.{kind}"

    def _copy(self, position: int, layer: int, carry: ir.Value, originals: dict[ir.Value, str]) -> ir.Value:
        block, path, numbers = self.blocks[position], self.layers.path, {self.keep[position]: layer}
        assert block.carry is not None and block.exit is not None
        new: dict[ir.Value | None, ir.Value | None] = {None: None, block.carry: carry}
        for node, inputs in zip(block.nodes, block.inputs, strict=True):
            for value in inputs:
                if value not in new:
                    assert value is not None
                    new[value] = self._outside(value, originals, position, layer)
            copy = ir.Node(
                node.domain,
                node.op_type,
                [new[v] for v in inputs],
                node.attributes.values(),
                overload=node.overload,
                num_outputs=len(node.outputs),
                name=f"layer{layer}.{node.name}",
                metadata_props={key: _renumbered(text, path, numbers) for key, text in node.metadata_props.items()},
            )
            for old, out in zip(node.outputs, copy.outputs, strict=True):
                new[old] = out
                out.name, out.type = f"layer{layer}.{old.name}", old.type
                out.shape = old.shape.copy() if old.shape is not None else None
                if KV in old.metadata_props:
                    kind = old.metadata_props[KV].split(".")[1]
                    out.metadata_props[KV] = f"{layer}.{kind}"
                    if old.is_graph_output():
                        out.name = f"present.{layer}.{kind}"
                        self.graph.outputs.append(out)
            self.graph.append(copy)
        result = new[block.exit]
        assert result is not None
        return result

    def _outside(self, value: ir.Value, originals: dict[ir.Value, str], position: int, layer: int) -> ir.Value:
        """The counterpart in `layer` of a weight or cache that the template reads; shared values stay the same."""
        name = originals.get(value, "")
        renamed = _renumbered(name, self.layers.path, {position: layer})
        if renamed == name or value.const_value is not None:
            return value
        if renamed in self.graph.initializers:
            return self.graph.initializers[renamed]
        shape = value.shape.copy() if value.shape is not None else None
        counterpart = ir.Value(name=renamed, shape=shape, type=value.type)
        if value.is_graph_input():
            self.graph.inputs.append(counterpart)
        else:
            self.graph.initializers[renamed] = counterpart
        return counterpart

    def _rewire_tail(self, carry: ir.Value) -> None:
        last = self.blocks[-1]
        assert last.exit is not None
        if carry is last.exit:
            return
        inner = set(last.nodes)
        users = [node for node, _ in last.exit.uses() if node not in inner]
        _rewire([node for node in users if not re.match(r"layer\d+\.", node.name or "")], last.exit, carry)
        for i, out in enumerate(self.graph.outputs):
            if out is last.exit:
                carry.name, out.name = out.name, carry.name
                self.graph.outputs[i] = carry

    def _order_slots(self) -> None:
        for values in (self.graph.inputs, self.graph.outputs):
            ordered = sorted(values, key=_slot_key)  # stable: the rest keeps its order, in front
            values.clear()
            values.extend(ordered)


def _slot_key(value: ir.Value) -> tuple[int, int]:
    slot = SLOT.fullmatch(value.name or "")
    return (int(slot[2]), KINDS.index(slot[3])) if slot else (-1, 0)


def _rewire(nodes: Iterable[ir.Node], old: ir.Value, new: ir.Value) -> None:
    for node in nodes:
        for i, value in enumerate(node.inputs):
            if value is old:
                node.replace_input_with(i, new)
