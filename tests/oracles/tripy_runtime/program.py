"""Compile and run: what needs no input is computed once, at compile time, as an engine folds its constants.

So whatever is wrong with a weight or its scale is a compile error, mapped by nvtripy to the user's line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.oracles.tripy_runtime.evaluate import evaluate
from tests.oracles.tripy_runtime.ir import DYNAMIC, FuncOp, Module, Value
from tests.oracles.tripy_runtime.memory import Array, MemRefValue, MTRTException, PointerType


class CompileError(Exception):
    """A graph that cannot be compiled; nvtripy reads the diagnostics to find the user's code."""

    def __init__(self, value: Value, reason: object) -> None:
        super().__init__(f"{value.op}: {reason}")
        self.error_diagnostics = [SimpleNamespace(location=value.location)]


def _in_order(results: Iterable[Value]) -> list[Value]:
    """Every value that the results need, each after its inputs. A stack: graphs are deeper than Python may recurse."""
    ordered: dict[int, Value] = {}
    stack = [(value, False) for value in results]
    while stack:
        value, inputs_done = stack.pop()
        if id(value) in ordered:
            continue
        if inputs_done:
            ordered[id(value)] = value
        else:
            stack += [(value, True), *((needed, False) for needed in value.inputs)]
    return list(ordered.values())


@dataclass(frozen=True)
class Executable:
    """The values left to compute for each call, and those that no input changes."""

    function: FuncOp
    steps: list[Value]
    folded: dict[int, Array]

    def get_signature(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get_num_results=lambda: len(self.function.returned))


def translate_mlir_to_executable(module: Module) -> Executable:
    """Fold what does not depend on an input, so that a program holds the values left to compute for each call."""
    (function,) = module.body
    dependent = {id(argument) for argument in function.arguments}
    steps: list[Value] = []
    folded: dict[int, Array] = {}
    for value in _in_order(function.returned):
        if id(value) in dependent:
            continue
        if any(id(needed) in dependent for needed in value.inputs):
            dependent.add(id(value))
            steps.append(value)
            continue
        try:
            folded[id(value)] = evaluate(value, [folded[id(needed)] for needed in value.inputs])
        except Exception as error:
            raise CompileError(value, error) from error
    return Executable(function, steps, folded)


@dataclass(frozen=True)
class RuntimeSessionOptions:
    num_devices: int
    device_id: int


class RuntimeSession:
    def __init__(self, options: RuntimeSessionOptions, executable: Executable) -> None:
        self.executable = executable

    def execute_function(
        self, name: str, *, in_args: Sequence[MemRefValue], stream: Any, client: Any
    ) -> list[MemRefValue]:
        program = self.executable
        _check_arguments(program.function, in_args)
        arrays = dict(program.folded)
        arrays |= {id(value): given.array for value, given in zip(program.function.arguments, in_args, strict=True)}
        for value in program.steps:
            try:
                arrays[id(value)] = evaluate(value, [arrays[id(needed)] for needed in value.inputs])
            except Exception as error:
                raise MTRTException(f"InternalError: {value.op} at {value.location}: {error}") from error
        return [MemRefValue.of(arrays[id(value)], PointerType.device) for value in program.function.returned]


def _check_arguments(function: FuncOp, given: Sequence[MemRefValue]) -> None:
    """Refuse wrong types and extents outside the profile, in the words by which nvtripy knows them."""
    profiles = function.arg_attrs or [{}] * len(given)
    for declared, memref, attributes in zip(function.arguments, given, profiles, strict=True):
        if memref.dtype is not declared.type.dtype:
            raise MTRTException(f"InvalidArgument: function expects a memref type with element type {declared.type}")
        fixed = zip(memref.shape, declared.type.shape, strict=False)
        low, high = attributes.get("tensorrt.shape_profile", (None, None))
        within = low is None or all(a <= extent <= b for a, extent, b in zip(low, memref.shape, high, strict=False))
        if len(memref.shape) != declared.type.rank or any(a != b != DYNAMIC for a, b in fixed) or not within:
            raise MTRTException(f"InternalError: failed to set input shape: {memref.shape}")


class CompilerClient:
    def __init__(self, context: Any) -> None:
        self.context = context

    def get_compilation_task(self, name: str, options: Sequence[str]) -> SimpleNamespace:
        return SimpleNamespace(run=lambda module: None)
