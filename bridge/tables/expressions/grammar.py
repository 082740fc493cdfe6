"""Parses the right side of rows and dims: Python's expression syntax against a white list, which is never `eval`ed.

row   = role | op(row, ..., count=formula)        interleave(attn.q.weight, attn.k.weight, groups=kv_heads)
formula = names, numbers, lists, + - * // %, comparisons, `in`, and / or / not, functions      head_dim or hidden
function = len(list) | range(count) | sliding(layers, [local, full])      the kinds of layers, local ones first
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bridge.errors import PlanError, nearest
from bridge.tables.files import Place
from bridge.tables.ops import OPS

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MOST = 1 << 16  # that a formula counts to
LONGEST, DEEPEST = 4096, 48  # characters, and nodes within each other, of an expression: what walks one calls itself
_FUNCTIONS = {"len": 1, "range": 1, "sliding": 2}  # and how many arguments each takes
_ORDER: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Spelling(Protocol):
    """How an op is written: its name, how many inputs it takes, the counts it is told, and whether it may not be."""

    @property
    def name(self) -> str: ...
    @property
    def least(self) -> int: ...
    @property
    def most(self) -> int | None: ...
    @property
    def counts(self) -> tuple[str, ...]: ...
    @property
    def optional(self) -> bool: ...


@dataclass(frozen=True)
class Formula:
    """A number or condition over dims and config fields; equal when it reads the same."""

    text: str
    tree: ast.expr = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def names(self) -> frozenset[str]:
        """Every name the formula mentions."""
        called = {node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        return frozenset(n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n not in called)

    @property
    def needs(self) -> frozenset[str]:
        """The names it cannot do without: one that stands before an `or` may be missing."""
        return frozenset(_needs(self.tree))

    def value(self, names: Mapping[str, object]) -> object:
        """Compute the formula; PlanError when a config field is null or has the wrong type."""
        return _value(self.tree, names, self.text)

    def count(self, names: Mapping[str, object]) -> int:
        """Compute the formula and insist on an integer."""
        value = self.value(names)
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlanError(f"`{self.text}` must be a whole number, it is {value!r}; {_given(self, names)}")
        return value


@dataclass(frozen=True)
class Ref:
    """A role: what a tensor means."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call:
    """An op over expressions, told counts."""

    op: str
    args: tuple[Expr, ...]
    counts: tuple[tuple[str, Formula], ...] = ()

    def __str__(self) -> str:
        return f"{self.op}({', '.join([*map(str, self.args), *(f'{k}={v}' for k, v in self.counts)])})"


Expr = Ref | Call


def roles_in(expr: Expr) -> tuple[str, ...]:
    """Return the roles of `expr`, left to right."""
    return (expr.name,) if isinstance(expr, Ref) else tuple(r for arg in expr.args for r in roles_in(arg))


def ops_in(expr: Expr) -> frozenset[str]:
    """Return the ops of `expr`."""
    return frozenset() if isinstance(expr, Ref) else frozenset({expr.op}).union(*map(ops_in, expr.args))


def formulas_in(expr: Expr) -> tuple[Formula, ...]:
    """Return the formulas of all counts in `expr`."""
    if isinstance(expr, Ref):
        return ()
    return tuple(v for _, v in expr.counts) + tuple(f for arg in expr.args for f in formulas_in(arg))


def parse_row(
    text: str, place: Place, roles: Container[str], dims: Container[str], ops: Mapping[str, Spelling] = OPS
) -> Expr:
    """Parse the value of a row over `ops`; TableError names what is unknown and what is near.

    >>> str(parse_row("transpose(mlp.fc1.weight)", Place("x.toml", 1, "..."), ["mlp.fc1.weight"], []))
    'transpose(mlp.fc1.weight)'
    """
    return _row(_parse(text, place), place, roles, dims, ops)


def parse_formula(text: str, place: Place, names: Container[str] | None = None) -> Formula:
    """Parse a dim or condition; `names` are the names it may use (None: any)."""
    return _formula(_parse(text, place), place, names)


def parse_shape(text: str, place: Place, names: Container[str]) -> tuple[Formula, ...]:
    """Parse the shape of a role: formulas with commas between them."""
    tree = _parse(text, place)
    return tuple(_formula(node, place, names) for node in (tree.elts if isinstance(tree, ast.Tuple) else [tree]))


def _parse(text: str, place: Place) -> ast.expr:
    if len(text) > LONGEST:
        raise place.error(f"an expression of {len(text)} characters; at most {LONGEST} are read")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise place.error(f"`{text}` is not an expression: {why}") from error
    level: list[ast.AST] = [tree]
    for _ in range(DEEPEST):
        level = [inner for node in level for inner in ast.iter_child_nodes(node)]
    if level:
        raise place.error(f"`{text}` is nested more than {DEEPEST} deep")
    return tree


def _row(
    node: ast.expr, place: Place, roles: Container[str], dims: Container[str], ops: Mapping[str, Spelling]
) -> Expr:
    if isinstance(node, ast.Attribute | ast.Name):
        name = ast.unparse(node)
        if name not in roles:
            raise place.error(f"role `{name}` is unknown", hint=_near(name, roles))
        return Ref(name)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise place.error(f"`{ast.unparse(node)}` is neither a role nor an op", hint='"attn.q.weight", "concat(a, b)"')
    op = ops.get(node.func.id)
    if op is None:
        raise place.error(f"op `{node.func.id}` is unknown", hint=nearest(node.func.id, ops))
    if not op.least <= len(node.args) <= (op.most or len(node.args)):
        wants = f"{op.least}" if op.least == op.most else f"{op.least} or more"
        raise place.error(f"`{op.name}` takes {wants} inputs, not {len(node.args)}")
    counts = {str(keyword.arg): _formula(keyword.value, place, dims) for keyword in node.keywords}
    for key in counts:
        if key not in op.counts:
            takes = nearest(key, op.counts) if op.counts else f"`{op.name}` takes no count"
            raise place.error(f"`{op.name}` has no count `{key}`", hint=takes)
    if counts.keys() != set(op.counts) and not (op.optional and not counts):
        missing = ", ".join(k for k in op.counts if k not in counts)
        raise place.error(f"`{op.name}` must be told {missing}", hint=f"{op.name}(..., {missing.split(', ')[0]}=...)")
    args = tuple(_row(arg, place, roles, dims, ops) for arg in node.args)
    return Call(op.name, args, tuple(counts.items()))


def _near(name: str, known: Container[str]) -> str:
    """Name roles of the same stem only: the whole vocabulary would drown the message."""
    names = list(known) if isinstance(known, Mapping | list | tuple | set | frozenset) else []
    stem = name.split(".")[0]
    return nearest(name, [n for n in names if n.split(".")[0] == stem] or names)


def _formula(node: ast.expr, place: Place, names: Container[str] | None) -> Formula:
    text = ast.unparse(node)
    _allow(node, text, place)
    formula = Formula(text, node)
    for name in sorted(formula.names):
        if names is not None and name not in names:
            known = list(names) if isinstance(names, Mapping | list | tuple | set | frozenset) else []
            raise place.error(f"`{name}` is neither a dim nor a field under [config]", hint=nearest(name, known))
    return formula


def _needs(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Name(id=name):
            yield name
        case ast.BoolOp(op=ast.Or(), values=values):
            yield from _needs(values[-1])
        case ast.Call(args=arguments):
            for argument in arguments:
                yield from _needs(argument)
        case _:
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    yield from _needs(part)


def _allow(node: ast.expr, text: str, place: Place) -> None:
    """Refuse every construct outside the white list."""
    parts: list[ast.expr]
    match node:
        case ast.Name() | ast.Constant(value=bool() | int() | str() | None):
            parts = []
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            parts = [node.left, node.right]
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            parts = [node.operand]
        case ast.BoolOp():
            parts = node.values
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()]):
            parts = [node.left, *node.comparators]
        case ast.Compare(ops=[op]) if type(op) in _ORDER:
            parts = [node.left, *node.comparators]
        case ast.List():
            parts = node.elts
        case ast.Call(func=ast.Name(id=name), keywords=[]) if len(node.args) == _FUNCTIONS.get(name):
            parts = node.args
        case _:
            allowed = "names, numbers, lists, + - * // %, comparisons, in, and / or / not, len(x), range(n), "
            allowed += "sliding(layers, [local, full])"
            raise place.error(f"`{ast.unparse(node)}` in `{text}` is not allowed here", hint=allowed)
    for part in parts:
        _allow(part, text, place)


def _value(node: ast.expr, names: Mapping[str, object], text: str) -> object:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, names, text)
        case ast.UnaryOp(operand=operand):
            return -_integer(operand, names, text)
        case ast.BinOp(left=left, op=op, right=right):
            divisor = _integer(right, names, text)
            if divisor == 0 and isinstance(op, ast.FloorDiv | ast.Mod):
                raise PlanError(f"`{text}` divides by zero: {ast.unparse(right)} is 0 in the config")
            return _ARITHMETIC[type(op)](_integer(left, names, text), divisor)
        case ast.BoolOp(op=op, values=values):
            result: object = None
            for operand in values:
                result = _value(operand, names, text)
                if bool(result) == isinstance(op, ast.Or):
                    break
            return result
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compare(op, left, right, names, text)
        case ast.List(elts=elements):
            return [_value(element, names, text) for element in elements]
        case ast.Call(func=ast.Name(id="range"), args=[argument]):
            return tuple(range(_few(_integer(argument, names, text), text)))
        case ast.Call(func=ast.Name(id="sliding"), args=[count, argument]):
            return _sliding(_integer(count, names, text), _value(argument, names, text), text)
        case ast.Call(args=[argument]):
            found = _value(argument, names, text)
            if isinstance(found, Mapping | list | tuple):
                return len(found)
            raise PlanError(f"`{text}` needs a list, the config has {ast.unparse(argument)} = {found!r}")
    raise AssertionError(f"not on the white list: {ast.dump(node)}")


def _sliding(layers: int, pattern: object, text: str) -> list[str]:
    """The kinds of all layers as transformers calls them: some that see a window, then some that see everything."""
    match pattern:
        case [int() as local, int() as full] if local >= 0 and full >= 0 and local + full:
            kinds = ("sliding" if layer % (local + full) < local else "full" for layer in range(_few(layers, text)))
            return [f"{kind}_attention" for kind in kinds]
    raise PlanError(f"`{text}` needs two counts of layers, it has {pattern!r}")


def _few(count: int, text: str) -> int:
    """Refuse to count to what a config may claim: no model has so many layers or experts."""
    if count > MOST:
        raise PlanError(f"`{text}` counts to {count}; at most {MOST} are supported")
    return count


def _compare(op: ast.cmpop, left: ast.expr, right: ast.expr, names: Mapping[str, object], text: str) -> bool:
    if type(op) in _ORDER:
        return _ORDER[type(op)](_integer(left, names, text), _integer(right, names, text))
    a, b = _value(left, names, text), _value(right, names, text)
    if isinstance(op, ast.Eq | ast.NotEq):
        return (a == b) == isinstance(op, ast.Eq)
    if not isinstance(b, list | tuple | Mapping):
        raise PlanError(f"`{text}` needs a list, the config has {ast.unparse(right)} = {b!r}")
    return (a in b) == isinstance(op, ast.In)


def _integer(node: ast.expr, names: Mapping[str, object], text: str) -> int:
    value = _value(node, names, text)
    if not isinstance(value, int):
        raise PlanError(f"`{text}` needs a whole number, the config has {ast.unparse(node)} = {value!r}")
    return value


def _given(formula: Formula, names: Mapping[str, object]) -> str:
    return "given " + ", ".join(f"{name} = {names.get(name)!r}" for name in sorted(formula.names))
