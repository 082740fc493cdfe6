"""Layers that were not exported are stamped from those that were; refuses wherever two layers are not provably alike.

Of each kind of layer at most two are exported. The second is the template of all that follow; it must equal the first
node by node, walked backwards from what they give: so whatever depends on a layer's place (a scale by index, a
parameter shared across layers) is found, and the caller exports the whole model instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from bridge.graph.skeleton import Layers

MODULE = "bridge.module"  # on nodes: the live module that made it
KV = "bridge.kv"  # on values: "3.key", what attention of layer 3 reads
_SLOT = re.compile(r"(past_key_values|present)\.(\d+)\.(key|value)")


class Refused(Exception):
    """These layers cannot be stamped; the message says why."""


@dataclass
class _Block:
    """One exported layer. `carry` is the hidden state it is given, `exit` the one it gives on."""

    nodes: list[ir.Node]
    inputs: list[tuple[ir.Value | None, ...]]  # as exported: the nodes themselves are rewired later
    carry: ir.Value | None = None
    exit: ir.Value | None = None
    caches: dict[str, ir.Value] = field(default_factory=dict)


def stamp_layers(model: ir.Model, layers: Layers, keep: Sequence[int]) -> None:
    """Make the graph of layers `keep` the graph of all `layers`, in place; Refused leaves `model` useless."""
    graph = model.graph
    blocks = _find_blocks(graph, layers.path, len(keep))
    _find_carries(graph, blocks, _tainted(graph))
    pairs: dict[object, list[int]] = {}
    for position, layer in enumerate(keep):
        pairs.setdefault(layers.kinds[layer], []).append(position)
    shared: set[ir.Value] = set()
    for pair in pairs.values():
        if len(pair) == 2:
            shared |= _Twins(blocks, pair[0], pair[1], layers.path).prove()
    _check_singles(blocks, [p[0] for p in pairs.values() if len(p) == 1], shared, _tainted(graph), layers.path)
    template = {kind: pair[-1] for kind, pair in pairs.items()}
    _Stamper(graph, layers, list(keep), blocks, template).run()


def _block_index(node: ir.Node, path: str) -> int | None:
    module = node.metadata_props.get(MODULE, "")
    if not module.startswith(path + "."):
        return None
    return int(module[len(path) + 1 :].split(".", 1)[0])


def _find_blocks(graph: ir.Graph, path: str, count: int) -> list[_Block]:
    """Group nodes by layer. The optimizer's own nodes (a fused Split) name no module: they go with their consumers."""
    where: dict[ir.Node, int | None] = {}
    for node in reversed(list(graph)):
        where[node] = _block_index(node, path)
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
    """Values that depend on a weight or a cache. Shapes do not, nor masks, positions, cos and sin."""
    tainted = {v for v in graph.initializers.values() if v.const_value is None}
    tainted |= {v for v in graph.inputs if _SLOT.fullmatch(v.name or "")}
    for node in graph:
        if node.op_type not in ("Shape", "Size") and any(v in tainted for v in node.inputs):
            tainted.update(node.outputs)
    return tainted


def _find_carries(graph: ir.Graph, blocks: list[_Block], tainted: set[ir.Value]) -> None:
    """Find the one value that crosses from each layer to the next, and nothing else may."""
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
            raise Refused(f"{len(leaving)} values cross from a layer to the next, not one hidden state")
        (block.exit,) = leaving
        if i + 1 < len(blocks):
            blocks[i + 1].carry = block.exit


def _check_singles(
    blocks: list[_Block], singles: list[int], shared: set[ir.Value], tainted: set[ir.Value], path: str
) -> None:
    """A kind with one layer has no twin: it may take only the hidden state, its own weights and what twins share."""
    for i in singles:
        own = {out for node in blocks[i].nodes for out in node.outputs}
        for value in (v for inputs in blocks[i].inputs for v in inputs if v in tainted and v not in own):
            name = value.name or ""
            mine = name.startswith(f"{path}.{i}.") or name.startswith(f"past_key_values.{i}.")
            if i and value is not blocks[i].carry and value not in shared and not mine:
                raise Refused(f"layer {i} is the only one of its kind and reads {name}, which no other layer reads")


class _Twins:
    """Walks two layers of one kind backwards from their results, pair by pair."""

    def __init__(self, blocks: list[_Block], first: int, second: int, path: str) -> None:
        self.first, self.second, self.path = first, second, path
        self.a, self.b = blocks[first], blocks[second]
        self.in_a, self.in_b = set(self.a.nodes), set(self.b.nodes)
        self.pairs: dict[ir.Value, ir.Value] = {}  # second -> first
        self.shared: set[ir.Value] = set()
        self.entry: ir.Value | None = self.a.carry

    def prove(self) -> set[ir.Value]:
        """Return the outside values that both read; raise Refused unless the second can stand for the first."""
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
                raise self._differ(f"{x.name} plays two parts")
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
            raise self._differ(f"{min(n.name or '' for n in missing)} has no part in the layer's results")
        return self.shared

    def _outside(self, x: ir.Value, y: ir.Value) -> bool:
        """Match two values made outside their layers; False when both are made inside, then their nodes must match."""
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
            same = kind and _rename(x.name or "", self.path, self.second, self.first) == y.name
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


def _rename(name: str, path: str, old: int, new: int) -> str:
    """Name of layer `new`'s counterpart of a weight, cache or module of layer `old`."""
    slot = _SLOT.fullmatch(name)
    if slot:
        return f"{slot[1]}.{new}.{slot[3]}" if int(slot[2]) == old else name
    prefix = f"{path}.{old}"
    return f"{path}.{new}{name[len(prefix) :]}" if name == prefix or name.startswith(prefix + ".") else name


class _Stamper:
    """Puts the kept layers at their places and copies of the templates between them."""

    def __init__(
        self, graph: ir.Graph, layers: Layers, keep: list[int], blocks: list[_Block], template: dict[object, int]
    ) -> None:
        self.graph, self.layers, self.keep, self.blocks, self.template = graph, layers, keep, blocks, template
        self.slots: list[ir.Value] = []

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
        """Give the kept layers, which were exported as 0, 1, 2 ..., the names of their real places."""
        path = self.layers.path
        moved = []
        for value in list(self.graph.initializers.values()):
            del self.graph.initializers[value.name or ""]
            moved.append(value)
        for value in moved:
            value.name = self._placed(value.name or "")
            self.graph.initializers[value.name] = value
        for value in (*self.graph.inputs, *self.graph.outputs):
            value.name = self._placed(value.name or "")
        for position, block in enumerate(self.blocks):
            for node in block.nodes:
                if MODULE in node.metadata_props:
                    module = node.metadata_props[MODULE]
                    node.metadata_props[MODULE] = _rename(module, path, position, self.keep[position])
            for kind, value in block.caches.items():
                value.metadata_props[KV] = f"{self.keep[position]}.{kind}"

    def _placed(self, name: str) -> str:
        slot = _SLOT.fullmatch(name)
        if slot:
            return f"{slot[1]}.{self.keep[int(slot[2])]}.{slot[3]}"
        prefix = self.layers.path + "."
        index, dot, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or not index.isdigit():
            return name
        return f"{prefix}{self.keep[int(index)]}{dot}{rest}"

    def _copy(self, position: int, layer: int, carry: ir.Value, originals: dict[ir.Value, str]) -> ir.Value:
        block, path = self.blocks[position], self.layers.path
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
                metadata_props={
                    k: _rename(v, path, self.keep[position], layer) for k, v in node.metadata_props.items()
                },
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
        """The counterpart for `layer` of a weight or cache that the template reads; shared values are their own."""
        name = originals.get(value, "")
        renamed = _rename(name, self.layers.path, position, layer)
        if renamed == name or value.const_value is not None:
            return value
        if renamed in self.graph.initializers:
            return self.graph.initializers[renamed]
        shape = value.shape.copy() if value.shape is not None else None
        twin = ir.Value(name=renamed, shape=shape, type=value.type)
        if value.is_graph_input():
            self.graph.inputs.append(twin)
        else:
            self.graph.initializers[renamed] = twin
        return twin

    def _rewire_tail(self, carry: ir.Value) -> None:
        last = self.blocks[-1]
        assert last.exit is not None
        if carry is last.exit:
            return
        inner = set(last.nodes)
        _rewire([n for n, _ in last.exit.uses() if n not in inner and not _stamped(n)], last.exit, carry)
        for i, out in enumerate(self.graph.outputs):
            if out is last.exit:
                carry.name, out.name = out.name, carry.name
                self.graph.outputs[i] = carry

    def _order_slots(self) -> None:
        for values in (self.graph.inputs, self.graph.outputs):
            ordered = sorted(values, key=_slot_key)  # stable: the rest keeps its order, in front
            values.clear()
            values.extend(ordered)


def _stamped(node: ir.Node) -> bool:
    return bool(re.match(r"layer\d+\.", node.name or ""))


def _slot_key(value: ir.Value) -> tuple[int, int]:
    slot = _SLOT.fullmatch(value.name or "")
    return (int(slot[2]), ("key", "value").index(slot[3])) if slot else (-1, 0)


def _rewire(nodes: Iterable[ir.Node], old: ir.Value, new: ir.Value) -> None:
    for node in nodes:
        for i, value in enumerate(node.inputs):
            if value is old:
                node.replace_input_with(i, new)
