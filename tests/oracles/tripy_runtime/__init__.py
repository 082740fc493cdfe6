"""Lets the real `nvtripy` front end answer on a CPU: stands in, with NumPy, for the compiler and runtime it imports.

The cut is below nvtripy's dialect: its checks, its tracing, `Tensor.eval` and `tp.compile` stay its own code. It must
never take the place of the real runtime where that can run.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.oracles.tripy_runtime import dialect, frames, ir, memory, program

NAME = "mlir_tensorrt"


def install() -> Any:
    """Import nvtripy: on its own runtime where that and a GPU are there, else on the stand-in."""
    if "nvtripy" in sys.modules or _real_runtime_works():
        return importlib.import_module("nvtripy")
    tensorrt = sys.modules.get("tensorrt")
    sys.modules.update(_modules())
    try:
        nvtripy = importlib.import_module("nvtripy")
        for module in (nvtripy.utils.stack_info, nvtripy.frontend.module.parameter):
            module.get_stack_info = frames.get_stack_info
        return nvtripy
    finally:
        # nvtripy reads TensorRT's dtypes once, at import. Afterwards others must see again whether TensorRT is there.
        del sys.modules["tensorrt"]
        if tensorrt is not None:
            sys.modules["tensorrt"] = tensorrt


def is_stand_in() -> bool:
    """Whether nvtripy, as it is imported now, runs on the stand-in."""
    return getattr(sys.modules.get(f"{NAME}.runtime.api"), "MemRefValue", None) is memory.MemRefValue


def _real_runtime_works() -> bool:
    import torch

    return torch.cuda.is_available() and importlib.util.find_spec(NAME) is not None


def _modules() -> dict[str, ModuleType]:
    """Every module that nvtripy imports from below the cut, by the name it asks for."""

    def module(**members: object) -> ModuleType:
        made = ModuleType(NAME)
        made.__spec__ = ModuleSpec(NAME, None)  # without one, `find_spec` raises for a module that is imported
        vars(made).update(members)
        return made

    def api(*members: Any) -> ModuleType:
        return module(**{member.__name__: member for member in members})

    kept = [memory.MTRTException, memory.MemRefValue, memory.PointerType, memory.RuntimeClient, memory.ScalarTypeCode]
    runtime = module(api=api(*kept, program.Executable, program.RuntimeSession, program.RuntimeSessionOptions))
    dialects = module(
        func=api(ir.FuncOp, ir.ReturnOp),
        affine=api(ir.AffineMap),
        _ods_common=module(get_op_result_or_value=lambda value: value),
        tensorrt=dialect,
    )
    compiled = api(program.CompilerClient, program.Executable, program.translate_mlir_to_executable)
    compiler = module(api=compiled, ir=ir, dialects=dialects)
    dtypes = ["float32", "float16", "fp8", "bfloat16", "int4", "int8", "int32", "int64", "bool"]
    return {
        "tensorrt": module(**{name: name for name in dtypes}),
        NAME: module(runtime=runtime, compiler=compiler),
        f"{NAME}.runtime": runtime,
        f"{NAME}.runtime.api": runtime.api,
        f"{NAME}.compiler": compiler,
        f"{NAME}.compiler.api": compiled,
        f"{NAME}.compiler.ir": ir,
        f"{NAME}.compiler.dialects": dialects,
        **{
            f"{NAME}.compiler.dialects.{name}": getattr(dialects, name)
            for name in ("func", "affine", "_ods_common", "tensorrt")
        },
    }
