"""The table of dtypes: bits, and codes of torch, safetensors, ONNX, NumPy.

Tensors are NumPy arrays of *bits*: bfloat16 as uint16, fp8 as uint8, 4-bit types packed two to a byte (low nibble
first) as uint8. So neither a framework nor `ml_dtypes` is needed to move them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.core.errors import UsageError
from bridge.core.text import nearest

if TYPE_CHECKING:
    import numpy as np

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # relative error of one rounding


@dataclass(frozen=True)
class DType:
    name: str
    bits: int
    safetensors: str  # 4-bit types have no code in use: they are stored as U8, two to a byte
    onnx: int  # TensorProto.DataType
    storage: str  # NumPy dtype that holds the bits
    floating: bool
    block: int = 1  # values that are stored together, with their scales
    size: int = 0  # bytes of a block; 0 without blocks

    def nbytes(self, count: int) -> int:
        """Bytes of `count` values."""
        return count // self.block * self.size if self.size else (count * self.bits + 7) // 8


_TABLE = (
    #      name                bits  safetensors  onnx  storage    floating
    DType("float64",           64,   "F64",       11,   "float64", True),
    DType("float32",           32,   "F32",       1,    "float32", True),
    DType("float16",           16,   "F16",       10,   "float16", True),
    DType("bfloat16",          16,   "BF16",      16,   "uint16",  True),
    DType("float8_e4m3fn",     8,    "F8_E4M3",   17,   "uint8",   True),
    DType("float8_e5m2",       8,    "F8_E5M2",   19,   "uint8",   True),
    DType("float8_e8m0fnu",    8,    "F8_E8M0",   24,   "uint8",   True),
    DType("float4_e2m1fn",     4,    "U8",        23,   "uint8",   True),
    DType("int64",             64,   "I64",       7,    "int64",   False),
    DType("int32",             32,   "I32",       6,    "int32",   False),
    DType("int16",             16,   "I16",       5,    "int16",   False),
    DType("int8",              8,    "I8",        3,    "int8",    False),
    DType("int4",              4,    "U8",        22,   "uint8",   False),
    DType("uint64",            64,   "U64",       13,   "uint64",  False),
    DType("uint32",            32,   "U32",       12,   "uint32",  False),
    DType("uint16",            16,   "U16",       4,    "uint16",  False),
    DType("uint8",             8,    "U8",        2,    "uint8",   False),
    DType("bool",              8,    "BOOL",      9,    "bool",    False),
)  # fmt: skip

# ggml's block types, in GGUF only: codes and scales of consecutive values of a row in one piece; `bits` of a code.
_BLOCKS = (
    #      name     bits  safetensors  onnx  storage  floating  block  size
    DType("q8_0",    8,    "",          0,    "uint8", False,    32,    34),
    DType("mxfp4",   4,    "",          0,    "uint8", False,    32,    17),
    DType("nvfp4",   4,    "",          0,    "uint8", False,    64,    36),
    DType("q4_0",    4,    "",          0,    "uint8", False,    32,    18),
    DType("q4_1",    4,    "",          0,    "uint8", False,    32,    20),
    DType("q5_0",    5,    "",          0,    "uint8", False,    32,    22),
    DType("q5_1",    5,    "",          0,    "uint8", False,    32,    24),
    DType("iq4_nl",  4,    "",          0,    "uint8", False,    32,    18),
    DType("q2_k",    2,    "",          0,    "uint8", False,    256,   84),
    DType("q3_k",    3,    "",          0,    "uint8", False,    256,   110),
    DType("q4_k",    4,    "",          0,    "uint8", False,    256,   144),
    DType("q5_k",    5,    "",          0,    "uint8", False,    256,   176),
    DType("q6_k",    6,    "",          0,    "uint8", False,    256,   210),
    DType("iq4_xs",  4,    "",          0,    "uint8", False,    256,   136),
)  # fmt: skip

DTYPES = {d.name: d for d in (*_TABLE, *_BLOCKS)}
BLOCKS = tuple(d.name for d in _BLOCKS)
K_QUANTS = tuple(d.name for d in _BLOCKS if d.block == 256)  # those of llama.cpp, and IQ4_XS, whose blocks are as long
# Numerics whose codes and scales llama.cpp's own quantizer searches together.
SEARCHED = tuple(d.name for d in _BLOCKS if d.name not in ("q8_0", "mxfp4", "nvfp4"))
FLOATING = tuple(d.name for d in _TABLE if d.floating)
FLOATS = ("float32", "float16", "bfloat16")  # dtypes that models compute in
FROM_SAFETENSORS = {d.safetensors: d.name for d in _TABLE if d.bits != 4}
SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}


def dtype(name: object) -> DType:
    """Return the row of `name` (`float16`, or short: `fp16`; `torch.float16`); UsageError names the known ones."""
    word = dtype_word(name)
    row = DTYPES.get(SHORT.get(word, word))
    if row is None:
        raise UsageError(f"dtype {word!r} is unknown; {nearest(word, [*DTYPES, *SHORT])}")
    return row


def dtype_word(given: object) -> str:
    """Return the name of a dtype: a string, or a dtype of torch, NumPy or Tripy.

    >>> import numpy
    >>> dtype_word("fp16"), dtype_word("torch.float16"), dtype_word(numpy.float16), dtype_word(numpy.dtype("float16"))
    ('fp16', 'float16', 'float16', 'float16')
    """
    name = given if isinstance(given, str) else getattr(given, "name", getattr(given, "__name__", given))
    return str(name).removeprefix("torch.")


def to_float32(bits: np.ndarray, name: str) -> np.ndarray:
    """Return the float32 values of a float32 / float16 / bfloat16 storage array; exact for all three."""
    import numpy as np

    if name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32, copy=False)


def from_float32(values: np.ndarray, name: str) -> np.ndarray:
    """Round float32 values to `name` (nearest, ties to even) and return its storage array.

    NaN stays NaN in bfloat16: the payload is set so that rounding cannot carry into infinity.
    """
    import numpy as np

    if name == "bfloat16":
        u = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (u + np.uint32(0x7FFF) + ((u >> 16) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[name].storage, copy=False)
