"""The graph that nvtripy builds: typed values, one function, and where in nvtripy's trace a value comes from.

A builder records; nothing is computed here. Scalar types are the runtime's own codes, so there is one vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any

from tests.oracles.tripy_runtime.memory import Array, MemRefValue, ScalarTypeCode

DYNAMIC = -(2**63)


@dataclass(frozen=True)
class RankedTensorType:
    shape: tuple[int, ...]
    dtype: ScalarTypeCode | None

    @staticmethod
    def get(shape: Sequence[int], dtype: ScalarTypeCode) -> RankedTensorType:
        return RankedTensorType(tuple(shape), dtype)

    @property
    def rank(self) -> int:
        return len(self.shape)

    def is_dynamic_dim(self, axis: int) -> bool:
        return self.shape[axis] == DYNAMIC


# What a value has before nvtripy sets its own inferred type, which it does for every value it names.
UNDECLARED = RankedTensorType((), None)


@dataclass(eq=False)
class Value:
    """One result of one operation; `op` is the builder's name, `type` what nvtripy declared."""

    op: str
    inputs: tuple[Value, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    type: RankedTensorType = UNDECLARED
    location: str = field(default_factory=lambda: Location.current[-1].text)

    def set_type(self, declared: RankedTensorType) -> None:
        self.type = declared


class Scope:
    """A context manager that nvtripy enters and that means nothing here."""

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Context(Scope):
    def enable_multithreading(self, enabled: bool) -> None:
        return None


class Location(Scope):
    """Names the trace operation under construction: nvtripy finds the user's line by it when something fails."""

    current: list[Location] = []  # noqa: RUF012

    def __init__(self, text: str) -> None:
        self.text = text

    @staticmethod
    def unknown() -> Location:
        return Location('loc("unknown")')

    @staticmethod
    def name(name: str) -> str:
        return name

    @staticmethod
    def fused(locations: Sequence[str], metadata: str) -> Location:
        return Location(f'loc("{locations[0]}")')

    def __enter__(self) -> Location:
        Location.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        Location.current.pop()


class InsertionPoint(Scope):
    """Where new functions and the returned values go."""

    current: list[InsertionPoint] = []  # noqa: RUF012

    def __init__(self, body: Any) -> None:
        self.body = body

    def __enter__(self) -> InsertionPoint:
        InsertionPoint.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        InsertionPoint.current.pop()


class Module:
    """One function `main` and its attributes."""

    def __init__(self) -> None:
        self.body: list[FuncOp] = []
        self.operation = self
        self.attributes: dict[str, Any] = {}

    @staticmethod
    def create() -> Module:
        return Module()

    def get_asm(self, **_: object) -> str:
        return "\n".join(f"{len(f.arguments)} arguments -> {len(f.returned)} results" for f in self.body)


class FuncOp:
    def __init__(self, name: str, types: tuple[Sequence[RankedTensorType], Any], ip: InsertionPoint) -> None:
        self.arguments = [Value("argument", type=declared) for declared in types[0]]
        self.returned: list[Value] = []
        self.attributes: dict[str, Any] = {}
        self.arg_attrs: list[dict[str, Any]] = []
        ip.body.append(self)

    def add_entry_block(self) -> FuncOp:
        return self


def ReturnOp(values: Sequence[Value]) -> None:
    InsertionPoint.current[-1].body.returned = list(values)


class AffineMap:
    @staticmethod
    def get_permutation(permutation: Sequence[int]) -> tuple[int, ...]:
        return tuple(permutation)


def _constant(array: MemRefValue, type: ScalarTypeCode, shape: Sequence[int]) -> Array:
    if array.dtype is not type or array.shape != list(shape):
        raise TypeError(f"a constant of {array.dtype} {array.shape} is declared as {type} {list(shape)}")
    return array.array


_BOUNDS = re.compile(r"#tensorrt\.shape_profile<min=\[(.*)\], opt=\[.*\], max=\[(.*)\]>")


def _parse(text: str) -> Any:
    """A shape profile as (min, max); any other attribute as its text."""
    bounds = _BOUNDS.fullmatch(text)
    return tuple([int(n) for n in part.split(",") if n.strip()] for part in bounds.groups()) if bounds else text


def _get(get: Any) -> SimpleNamespace:
    return SimpleNamespace(get=get)


# By MLIR's names: an attribute is what it was made from, a scalar type is the runtime's code.
GIVEN = _get(lambda value: value)
ArrayAttr = BoolAttr = DenseI64ArrayAttr = DictAttr = StringAttr = TypeAttr = GIVEN
Attribute = SimpleNamespace(parse=_parse)
DenseElementsAttr = _get(_constant)
FunctionType = _get(lambda inputs, results: (inputs, results))
ShapedType = SimpleNamespace(get_dynamic_size=lambda: DYNAMIC)
BF16Type = _get(lambda: ScalarTypeCode.bf16)
F16Type = _get(lambda: ScalarTypeCode.f16)
F32Type = _get(lambda: ScalarTypeCode.f32)
Float8E4M3FNType = _get(lambda: ScalarTypeCode.f8e4m3fn)
IntegerType = SimpleNamespace(get_signless=lambda bits: ScalarTypeCode(f"i{bits}"))
