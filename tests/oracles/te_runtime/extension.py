"""The module `transformer_engine_torch`, as far as modules and the debug features call it."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.oracles.te_runtime import casts, layers

DTYPES = {
    "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}  # fmt: skip
# The places of scales among those of a module.
FORWARD = {
    f"GEMM{n}_{name}": 3 * n - 3 + at for n in (1, 2, 3) for at, name in enumerate(("INPUT", "WEIGHT", "OUTPUT"))
}
BACKWARD = {f"GRAD_{name}{n}": 2 * n - 2 + at for n in (1, 2, 3) for at, name in enumerate(("OUTPUT", "INPUT"))}


class _Numbers(type):
    """An enumeration that has whatever member is asked of it."""

    __members__: dict[str, int]

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.__members__.setdefault(name, len(cls.__members__))


class _Extension(types.ModuleType):
    """Names that nothing here calls are enumerations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Numbers(name, (), {"__members__": {}})
        setattr(self, name, made)
        return made


@torch.no_grad()  # as a kernel, which autograd does not see
def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Tensor | None, quantizer: Any, dtype: Any, bias: Tensor | None,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any, size: int, accumulate: bool, *_: Any,
    **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """op(b) @ op(a) of what the inputs stand for, with torch's own functions of a Linear's three products."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    assert not gelu and quantizer is None and more.get("comm_overlap") is None and more.get("alpha", 1.0) == 1.0
    a, b = casts.operand(a, not transa), casts.operand(b, transb)
    rows, cols = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    to_bias = None
    if transa:
        made = linear(b, a, None if grad or bias is None else bias.to(a.dtype))
    elif transb:
        made = cols.t().mm(rows)
        to_bias = cols.sum(0) if grad and bias is not None else None
    else:
        made = cols.mm(rows).reshape(*b.shape[:-1], a.shape[-1])
    if dtype is not None:
        made = made.to(TE_DType_To_Torch[dtype])
    if out is not None:
        made = out.add_(made) if accumulate else out.copy_(made)
    return made, to_bias, None, None


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The gradient of the bias, and the quantized gradient."""
    return gradient.reshape(-1, gradient.shape[-1]).sum(0), quantizer(gradient)


def install() -> None:
    """Put the module where Transformer Engine imports it."""
    made: Any = _Extension("transformer_engine_torch")
    made.DType = enum.IntEnum("DType", DTYPES)
    made.FP8FwdTensors, made.FP8BwdTensors = enum.IntEnum("Fwd", FORWARD), enum.IntEnum("Bwd", BACKWARD)
    made.quantize, made.dequantize, made.create_empty_quantized_tensor = casts.quantize, casts.dequantize, casts.empty
    made.generic_gemm, made.bgrad_quantize = generic_gemm, bgrad_quantize
    made.layernorm_fwd, made.layernorm_bwd = layers.layernorm_fwd, layers.layernorm_bwd
    made.rmsnorm_fwd, made.rmsnorm_bwd = layers.rmsnorm_fwd, layers.rmsnorm_bwd
    made.gelu, made.dgelu, made.dbias_dgelu = layers.gelu, layers.dgelu, layers.dbias_dgelu
    made.get_cublasLt_version, made.get_cudnn_version = lambda: 130000, lambda: 91000
    made.get_num_cublas_streams = lambda: 1
    sys.modules[made.__name__] = made
