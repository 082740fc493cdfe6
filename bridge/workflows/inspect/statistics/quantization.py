"""How tensors are quantized: by a scheme, or by Transformer Engine.

fp8_current_scaling: its kernels and `reference_current_scaling.py`, one factor bound / amax for a tensor.
fp8_delayed_scaling: `transformer_engine/pytorch/quantization.py: _default_sf_compute`. Gradients of both in E5M2 as its
`Format.HYBRID`. fp8_block_scaling: `Float8BlockScaling`, blocks of 1 x 128, weights 128 x 128, scales
rounded down to powers of two, which are scales of ours rounded up. mxfp8, nvfp4: the schemes of these names; of nvfp4
without Hadamard transform, stochastic rounding and blocks of 16 x 16 for weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bridge.core.dtypes import DTYPES, SEARCHED
from bridge.core.values import AFFINE, MAXBOUND, Numeric
from bridge.quant.schemes.catalog import named_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.inspect.routes import TENSORS

CURRENT, DELAYED, BLOCKS = "fp8_current_scaling", "fp8_delayed_scaling", "fp8_block_scaling"
RECIPES = (CURRENT, DELAYED, BLOCKS, "mxfp8", "nvfp4")  # Transformer Engine's words
_BACKWARD = ("gradient", "dgrad")
_E4M3, _E5M2, _POWERS = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
# FakeQuant's `quant_format`: dtype, and whether blocks of 32 have a power of two (MX).
FORMATS = {"FP8E4M3": (_E4M3, False), "FP8E5M2": (_E5M2, False), "MXFP8E4M3": (_E4M3, True), "MXFP8E5M2": (_E5M2, True)}
BOUNDS = {**MAXBOUND, _E5M2: 57344.0}
LEAST = {_E4M3: 2.0**-9, _E5M2: 2.0**-16, "float4_e2m1fn": 0.5, "int8": 1.0, "int4": 1.0}


@dataclass(frozen=True)
class Quantization:
    """Number formats, one after the other, and whether the tensor's scale is fixed before the tensor is seen.

    `multiplied`: codes are made of x * (bound / amax) and stand for code * (1 / (bound / amax)), as Transformer
    Engine's FP8; else of x / (amax / bound), as ModelOpt's. `twice`: bound / amax is bound * (1 / amax), as torch
    divides a number by a tensor. `amax`: the one that is taken unmeasured, 0 for none.
    """

    numeric: tuple[Numeric, ...]
    multiplied: bool = False
    twice: bool = False
    static: bool = False
    amax: float = 0.0

    @property
    def bound(self) -> float:
        """The largest magnitude of a code."""
        return BOUNDS[self.numeric[0].dtype]

    @property
    def unit(self) -> int:
        """What the width of a row must be a multiple of: blocks of ggml and groups of MLX are coded as a whole."""
        dtype = self.numeric[0].dtype
        if dtype in AFFINE:
            return self.numeric[0].block[0]
        return DTYPES[dtype].block if dtype in SEARCHED else 1

    @property
    def least(self) -> float | None:
        """The least magnitude of a code but 0: what is below half of it times the scale becomes 0.

        None of two formats, one after the other, and of ggml's, whose blocks have a least value each.
        """
        return LEAST.get(self.numeric[0].dtype) if len(self.numeric) == 1 else None

    @property
    def turns(self) -> bool:
        """Whether the transpose has other scales, so that `_columnwise` differs."""
        first = self.numeric[0]
        return first.per != "tensor" and not (len(first.block) == 2 and first.block[0] == first.block[1])


def of_recipe(recipe: str, tensor: str) -> Quantization:
    """The quantization of a tensor under one of `RECIPES`."""
    assert tensor in TENSORS
    if recipe in (CURRENT, DELAYED):
        dtype = _E5M2 if tensor in _BACKWARD else _E4M3
        delayed = recipe == DELAYED
        return Quantization((Numeric(dtype, "tensor"),), multiplied=True, twice=delayed, static=delayed)
    if recipe == BLOCKS:
        block = (128, 128) if tensor in ("weight", "wgrad") else (128,)
        return Quantization((Numeric(_E4M3, "block", block, _POWERS),))
    found = of_scheme(named_scheme(recipe), tensor)
    assert found is not None
    return replace(found, static=False)


def of_format(quant_format: str) -> Quantization:
    """The quantization of one of `FORMATS`."""
    dtype, blocks = FORMATS[quant_format]
    if blocks:
        return Quantization((Numeric(dtype, "block", (32,), _POWERS),))
    return Quantization((Numeric(dtype, "tensor"),), multiplied=True, twice=True)


def of_scheme(scheme: Scheme, tensor: str) -> Quantization | None:
    """The quantization of a tensor under the scheme's own format; None if the scheme leaves it unquantized."""
    return of_numerics(scheme.weight, scheme.input, tensor)


def of_numerics(weight: tuple[Numeric, ...], numeric: Numeric | None, tensor: str) -> Quantization | None:
    """The quantization of a tensor by the numerics of weights and inputs; None where inputs stay as they are."""
    assert tensor in TENSORS
    if tensor in ("weight", "wgrad"):
        return Quantization(weight)
    if numeric is None:
        return None
    if numeric.per == "token":
        numeric = replace(numeric, per="channel")  # a row is a token
    return Quantization((numeric,), static=numeric.static, amax=numeric.constant)
