"""Parse the expressions of rows and dims: Python syntax, never evaluated.

row   = role | op(row, ..., count=formula)        interleave(attn.q.weight, attn.k.weight, groups=kv_heads)
formula = names, numbers, lists, list[number], word[number], object['key'] or [number], + - * // %, comparisons, `in`,
          and / or / not, functions      a or b
function = len(list or word) | max(number or list) | range(count)
           | sliding(layers, [local, full])      the kinds of layers, local ones first
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from bridge.core.errors import PlanError
from bridge.core.mappings import Place
from bridge.core.text import nearest
from bridge.tables.expressions.ops import OPS, Op

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MAX_COUNT = 1 << 16  # the largest number that a formula counts to
MAX_LENGTH = 4096  # characters of an expression
MAX_DEPTH = 48  # nested nodes of an expression, which is walked by recursion
_FUNCTIONS = {"len": 1, "max": 1, "range": 1, "sliding": 2}  # name -> number of arguments
_ORDER: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class Formula:
    """A number or condition over dims and config fields; equal if the text is."""

    text: str
    tree: ast.expr = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def names(self) -> frozenset[str]:
        """All names in the formula."""
        called = {node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        return frozenset(n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n not in called)

    @property
    def needs(self) -> frozenset[str]:
        """The names that it requires: one before an `or` may be missing."""
        return frozenset(_needs(self.tree))

    def value(self, names: Mapping[str, object]) -> object:
        """Compute the formula; PlanError if a config field is null or has the wrong type."""
        return _value(self.tree, names, self.text)

    def count(self, names: Mapping[str, object]) -> int:
        """Compute the formula; PlanError if it is not an integer."""
        value = self.value(names)
        if isinstance(value, bool) or not isinstance(value, int):
            given = ", ".join(f"{name} = {names.get(name)!r}" for name in sorted(self.names))
            raise PlanError(f"`{self.text}` must be a whole number, it is {value!r}; given {given}")
        return value


@dataclass(frozen=True)
class Ref:
    """A role."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call:
    """An op over expressions, with counts."""

    op: str
    args: tuple[Expr, ...]
    counts: tuple[tuple[str, Formula], ...] = ()

    def __str__(self) -> str:
        return f"{self.op}({', '.join([*map(str, self.args), *(f'{k}={v}' for k, v in self.counts)])})"


Expr = Ref | Call


def roles_in(expr: Expr) -> tuple[str, ...]:
    """Return the roles of `expr`, left to right."""
    return (expr.name,) if isinstance(expr, Ref) else tuple(r for arg in expr.args for r in roles_in(arg))


def formulas_in(expr: Expr) -> tuple[Formula, ...]:
    """Return the formulas of all counts in `expr`."""
    if isinstance(expr, Ref):
        return ()
    return tuple(v for _, v in expr.counts) + tuple(f for arg in expr.args for f in formulas_in(arg))


def parse_row(
    text: str, place: Place, roles: Collection[str], dims: Collection[str], ops: Mapping[str, Op] = OPS
) -> Expr:
    """Parse the value of a row over `ops`; TableError names an unknown word and the nearest known one.

    >>> str(parse_row("transpose(mlp.fc1.weight)", Place("x.toml", 1, "..."), ["mlp.fc1.weight"], []))
    'transpose(mlp.fc1.weight)'
    """
    return _row(_parse(text, place), place, roles, dims, ops)


def parse_formula(
    text: str, place: Place, names: Collection[str] | None = None, let: Mapping[str, Formula] | None = None
) -> Formula:
    """Parse a dim or condition that may use `names` (None: any), and formulas by the names of `let`."""
    tree = _parse(text, place)
    formula = _formula(_Named(let or {}).visit(tree), place, names)
    return Formula(text, formula.tree) if let else formula


class _Named(ast.NodeTransformer):
    """Put formulas for their names."""

    def __init__(self, let: Mapping[str, Formula]) -> None:
        self._let = let

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._let[node.id].tree if node.id in self._let else node


def parse_shape(text: str, place: Place, names: Collection[str]) -> tuple[Formula, ...]:
    """Parse the shape of a role: formulas with commas between them."""
    tree = _parse(text, place)
    return tuple(_formula(node, place, names) for node in (tree.elts if isinstance(tree, ast.Tuple) else [tree]))


def _parse(text: str, place: Place) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise place.error(f"an expression of {len(text)} characters; at most {MAX_LENGTH} are supported")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise place.error(f"`{text}` is not an expression: {why}") from error
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [inner for node in level for inner in ast.iter_child_nodes(node)]
    if level:
        raise place.error(f"`{text}` is nested more than {MAX_DEPTH} deep")
    return tree


def _row(node: ast.expr, place: Place, roles: Collection[str], dims: Collection[str], ops: Mapping[str, Op]) -> Expr:
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
        inputs = f"{op.least}" if op.least == op.most else f"{op.least} or more"
        raise place.error(f"`{op.name}` takes {inputs} inputs, not {len(node.args)}")
    counts = {str(keyword.arg): _formula(keyword.value, place, dims) for keyword in node.keywords}
    for key in counts:
        if key not in op.counts:
            takes = nearest(key, op.counts) if op.counts else f"`{op.name}` takes no count"
            raise place.error(f"`{op.name}` has no count `{key}`", hint=takes)
    if counts.keys() != set(op.counts) and not (op.optional and not counts):
        missing = ", ".join(k for k in op.counts if k not in counts)
        raise place.error(f"`{op.name}` needs {missing}", hint=f"{op.name}(..., {missing.split(', ')[0]}=...)")
    args = tuple(_row(arg, place, roles, dims, ops) for arg in node.args)
    return Call(op.name, args, tuple(counts.items()))


def _near(name: str, known: Collection[str]) -> str:
    """The known roles of the same stem: the whole vocabulary is too long for a message."""
    stem = name.split(".")[0]
    return nearest(name, [n for n in known if n.split(".")[0] == stem] or known)


def _formula(node: ast.expr, place: Place, names: Collection[str] | None) -> Formula:
    text = ast.unparse(node)
    _allow(node, text, place)
    formula = Formula(text, node)
    for name in sorted(formula.names):
        if names is not None and name not in names:
            raise place.error(f"`{name}` is neither a dim nor a field under [config]", hint=nearest(name, names))
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
        case ast.Compare(ops=[op]) if isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) or type(op) in _ORDER:
            parts = [node.left, *node.comparators]
        case ast.List():
            parts = node.elts
        case ast.Subscript():
            parts = [node.value, node.slice]
        case ast.Call(func=ast.Name(id=name), keywords=[]) if len(node.args) == _FUNCTIONS.get(name):
            parts = node.args
        case _:
            allowed = (
                "names, numbers, lists, list[number], object['key'], + - * // %, comparisons, in, and / or / not, "
            )
            allowed += "len(x), max(x), range(n), sliding(layers, [local, full])"
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
        case ast.Subscript(value=listed, slice=ast.Constant(value=str() as key)):
            return _member(_value(listed, names, text), key, text)
        case ast.Subscript(value=listed, slice=at):  # of an object: its entry of that number, null if it has none
            return _entry(_value(listed, names, text), _integer(at, names, text), text)
        case ast.List(elts=elements):
            return [_value(element, names, text) for element in elements]
        case ast.Call(func=ast.Name(id="range"), args=[argument]):
            return tuple(range(_few(_integer(argument, names, text), text)))
        case ast.Call(func=ast.Name(id="sliding"), args=[count, argument]):
            return _sliding(_integer(count, names, text), _value(argument, names, text), text)
        case ast.Call(func=ast.Name(id="max"), args=[argument]):
            return _largest(_value(argument, names, text), text)
        case ast.Call(args=[argument]):
            items = _value(argument, names, text)
            if isinstance(items, Mapping | list | tuple | str):
                return len(items)
            raise PlanError(f"`{text}` needs a list, the config has {ast.unparse(argument)} = {items!r}")
    raise AssertionError(f"not on the white list: {ast.dump(node)}")


def _entry(items: object, at: int, text: str) -> object:
    """The entry of a list, as of kinds by layer, or a letter of a word."""
    if isinstance(items, Mapping):
        return next((value for key, value in items.items() if str(key).isdecimal() and int(key) == at), None)  # "05"
    if isinstance(items, list | tuple | str) and 0 <= at < len(items):
        return items[at]
    raise PlanError(f"`{text}` needs a list with an entry {at}, the config has {items!r}")


def _member(items: object, key: str, text: str) -> object:
    """The entry of an object, as of rates by kind of layer."""
    if isinstance(items, Mapping) and key in items:
        return items[key]
    raise PlanError(f"`{text}` needs an object with {key!r}, the config has {items!r}")


def _largest(value: object, text: str) -> int:
    """The largest of a list, as of numbers by layer; a number is itself."""
    numbers = value if isinstance(value, list) else [value]
    if numbers and all(isinstance(number, int) for number in numbers):
        return int(max(numbers))
    raise PlanError(f"`{text}` needs a number or a list of them, the config has {value!r}")


def _sliding(layers: int, pattern: object, text: str) -> list[str]:
    """The kinds of all layers in transformers' words: `local` layers with a window, then `full` ones, repeated."""
    match pattern:
        case [int() as local, int() as full] if local >= 0 and full >= 0 and local + full:
            kinds = ("sliding" if layer % (local + full) < local else "full" for layer in range(_few(layers, text)))
            return [f"{kind}_attention" for kind in kinds]
    raise PlanError(f"`{text}` needs two counts of layers, it has {pattern!r}")


def _few(count: int, text: str) -> int:
    """Refuse counts of layers or experts that no model has."""
    if count > MAX_COUNT:
        raise PlanError(f"`{text}` counts to {count}; at most {MAX_COUNT} are supported")
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
