"""Maxima, scales and codes of weights on a GPU.

A block is read once. The bits are those of the CPU's `scales.py`, `quotient.py`, `fp8.py`, `fp4.py`, `integer.py`,
`layout.py` and `groups.py`, and the formulas are explained there. Divisions are IEEE's (`/` of Triton is not, in
float32), no product is fused with a sum, and rounding adds magic numbers. Values that are not finite get codes without
a meaning: the caller looks at the maxima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

OPTIONS = {"enable_fp_fusion": False}
VALUES = 4096  # of a program, if its blocks are smaller

# Kinds of scales: float32, or rounded to 16 bits; e4m3 under another scale, or times one (compressed-tensors); powers
# of two, rounded up (ModelOpt) or at 1.75 (compressed-tensors); the casts of `groups.py`, the last two by a product.
SINGLE, BRAIN, HALF, E4M3, TIMES, E8M0, POWERS, QUOTIENT, PRODUCT, POWER = range(10)
FP8, FP4, INTEGER = range(3)  # codes
NONE, TO_BRAIN, TO_HALF = range(3)  # roundings of weights and quotients

_SINGLE, _BRAIN, _HALF, _E4M3, _TIMES = map(tl.constexpr, (SINGLE, BRAIN, HALF, E4M3, TIMES))
_E8M0, _POWERS, _QUOTIENT, _PRODUCT, _POWER = map(tl.constexpr, (E8M0, POWERS, QUOTIENT, PRODUCT, POWER))
_FP8, _FP4, _TO_BRAIN, _TO_HALF = map(tl.constexpr, (FP8, FP4, TO_BRAIN, TO_HALF))


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _single(u):
    return u.to(tl.float32, bitcast=True)


@triton.jit
def _widened(loaded):
    if loaded.dtype == tl.int16:  # bfloat16
        return _single(loaded.to(tl.int32) << 16)
    return loaded.to(tl.float32)


@triton.jit
def _rounded(x, TO: tl.constexpr):
    """x as float32, rounded to 16 bits or not."""
    if TO == _TO_BRAIN:
        u = _bits(x)
        a = u & 0x7FFFFFFF
        return _single(((a + 0x7FFF + ((a >> 16) & 1)) & 0x7FFF0000) | (u & -0x80000000))
    elif TO == _TO_HALF:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def _e4m3(x):
    u = _bits(x)
    c = tl.minimum(u & 0x7FFFFFFF, 0x43E00000)  # 448
    e = tl.maximum(c & 0x7F800000, 0x3C800000)  # 2^-6
    m = e + 0x0A000000
    code = _bits(_single(c) + _single(m)) - m + (e >> 20) - 0x3C8
    return code | ((u >> 24) & 0x80)


@triton.jit
def _e2m1(x):
    c = tl.minimum(_bits(x) & 0x7FFFFFFF, 0x40C00000)  # 6
    e = tl.maximum(c & 0x7F800000, 0x3F800000)  # 1
    m = e + 0x0B000000
    code = _bits(_single(c) + _single(m)) - m + (e >> 22) - 0xFE
    return code | tl.where(x < 0.0, 8, 0)


@triton.jit
def _of_e4m3(code):
    """The values of e4m3 codes without a sign: 2^120 moves the exponent's bias, subnormals included."""
    return _single(code << 20) * 1.329227995784916e36


@triton.jit
def _power(exponent):
    return _single(tl.maximum(exponent << 23, 0x400000))  # 2^-127 is subnormal


@triton.jit
def _scales(a, above, bound, least, TO: tl.constexpr, KIND: tl.constexpr):
    """The scales of maxima as stored, as integers, and what their weights are divided by or, by product, multiplied."""
    if KIND == _E4M3:
        q = tl.div_rn(a, above * bound)
        stored = _e4m3(tl.minimum(tl.maximum(tl.where(q == 0.0, 1.0, q), 0.001953125), 448.0))
        return stored, tl.maximum(_of_e4m3(stored) * above, 1.401298464324817e-45)
    elif KIND == _TIMES:
        code = _e4m3(tl.minimum(_rounded(tl.div_rn(a, bound), TO) * above, 448.0))
        stored = tl.where(code == 0, 0x20, code)
        return stored, tl.div_rn(_of_e4m3(stored), above)
    elif KIND == _E8M0:
        u = _bits(tl.div_rn(a, bound))
        stored = tl.where(u <= 0x400000, 0, (u + 0x7FFFFF) >> 23)
        return stored, _power(stored)
    elif KIND == _POWERS:
        exponent = ((_bits(a) + 0x200000) >> 23) - TO
        stored = tl.where(a == 0.0, 127, tl.minimum(tl.maximum(exponent, 0), 254))
        return stored, _power(stored)
    elif KIND == _QUOTIENT:
        s = tl.maximum(tl.div_rn(a, bound), least)
        return _bits(s), s
    elif KIND == _PRODUCT:
        a = tl.maximum(a, least)
        one = tl.full(a.shape, 1.0, tl.float32)
        return _bits(tl.div_rn(a, bound)), tl.div_rn(one, a) * bound
    elif KIND == _POWER:
        s = _power((_bits(tl.div_rn(tl.maximum(a, least), bound)) + 0x7FFFFF) >> 23)
        one = tl.full(a.shape, 1.0, tl.float32)
        return _bits(s), tl.div_rn(one, s)
    else:
        s = tl.where(a == 0.0, 1.0, tl.maximum(tl.div_rn(tl.maximum(a, least), bound), 1.401298464324817e-45))
        if KIND == _BRAIN:
            s = _rounded(tl.maximum(s, 9.183549615799121e-41), _TO_BRAIN)
            return _bits(s) >> 16, s
        elif KIND == _HALF:
            half = tl.maximum(s, 5.960464477539063e-08).to(tl.float16)
            return half.to(tl.int16, bitcast=True).to(tl.int32), half.to(tl.float32)
        else:
            return _bits(s), s


@triton.jit
def _codes(x, by, low, high, CODE: tl.constexpr, CAST: tl.constexpr, ROUND: tl.constexpr, TIMES_BY: tl.constexpr):
    x = _rounded(x, CAST)
    q = x * by if TIMES_BY else tl.div_rn(x, by)
    q = _rounded(q, ROUND)
    if CODE == _FP8:
        return _e4m3(q)
    elif CODE == _FP4:
        return _e2m1(q)
    else:
        return _bits(tl.minimum(tl.maximum(q, low), high) + 12582912.0) & 0xFF


@triton.jit
def _blocks(
    values, above, codes, scale, largest, rows, cols, groups, wide, bound, least, low, high,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr,
    TO: tl.constexpr, CODE: tl.constexpr, CAST: tl.constexpr, ROUND: tl.constexpr, NIBBLES: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    """Blocks of DOWN x BLOCK values, GROUPS of them.  ACROSS: the power of two above BLOCK."""
    program = tl.program_id(0)
    group = program.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = tl.arange(0, DOWN * ACROSS)
    row = (group // wide)[:, None] * DOWN + (at // ACROSS)[None, :]
    across = (at % ACROSS)[None, :]
    col = (group % wide)[:, None] * BLOCK + across
    inside = (row < rows) & (col < cols) & (across < BLOCK)
    x = _widened(tl.load(values + row * cols + col, mask=inside, other=0))
    most = tl.max(_bits(x) & 0x7FFFFFFF, 1)
    stored, by = _scales(_single(most), tl.load(above), bound, least, TO, KIND)
    tl.store(scale + group, stored, mask=group < groups)
    tl.store(largest + program, tl.max(most, 0))
    made = _codes(x, by[:, None], low, high, CODE, CAST, ROUND, KIND >= _PRODUCT)
    if NIBBLES:
        even, odd = tl.split(tl.reshape(made, (GROUPS, ACROSS // 2, 2)))
        pair = 2 * tl.arange(0, ACROSS // 2)[None, :]
        col = (group % wide)[:, None] * BLOCK + pair
        row = (group // wide)[:, None] + 0 * pair
        byte = ((even & 15) | (odd << 4)) ^ FLIP
        tl.store(codes + (row * cols + col) // 2, byte, mask=(row < rows) & (col < cols) & (pair < BLOCK))
    else:
        tl.store(codes + row * cols + col, made ^ FLIP, mask=inside)


@triton.jit
def _rows(
    values, codes, scale, largest, cols, bound, least, low, high, BLOCK: tl.constexpr, KIND: tl.constexpr,
    CODE: tl.constexpr, CAST: tl.constexpr, ROUND: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """A whole row, which is read again from the cache."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * cols
    at = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, cols, BLOCK):
        x = _widened(tl.load(values + start + first + at, mask=first + at < cols, other=0))
        most = tl.maximum(most, _bits(x) & 0x7FFFFFFF)
    own = tl.max(most, 0, keep_dims=True)
    stored, by = _scales(_single(own), 1.0, bound, least, 0, KIND)
    tl.store(scale + row + tl.arange(0, 1), stored)
    tl.store(largest + row + tl.arange(0, 1), own)
    for first in range(0, cols, BLOCK):
        x = _widened(tl.load(values + start + first + at, mask=first + at < cols, other=0))
        made = _codes(x, by, low, high, CODE, CAST, ROUND, False)
        tl.store(codes + start + first + at, made ^ FLIP, mask=first + at < cols)


@triton.jit
def _under(
    values, divisor, codes, largest, n, low, high, BLOCK: tl.constexpr, CODE: tl.constexpr, CAST: tl.constexpr,
    ROUND: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Codes under one scale."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = _widened(tl.load(values + at, mask=at < n, other=0))
    tl.store(largest + program, tl.max(_bits(x) & 0x7FFFFFFF, 0))
    made = _codes(x, tl.load(divisor), low, high, CODE, CAST, ROUND, False)
    tl.store(codes + at, made ^ FLIP, mask=at < n)


@dataclass(frozen=True)
class Codes:
    """How values become codes: what they are, the range of integers, roundings before and after the division.

    `nibbles`: two codes of a row share a byte. `flip`: what each byte is xored with.
    """

    code: int
    low: float = 0.0
    high: float = 0.0
    cast: int = NONE
    round: int = NONE
    nibbles: bool = False
    flip: int = 0


@dataclass(frozen=True)
class Scaled:
    """How maxima become scales.

    `to`: what quotients of `TIMES` are rounded to; of `POWERS`, the exponent of the bound.
    """

    kind: int
    bound: float
    least: float = 0.0
    to: int = NONE


STORED = {BRAIN: torch.int16, HALF: torch.int16, **dict.fromkeys((E4M3, TIMES, E8M0, POWERS), torch.uint8)}
Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes uint8, scales as stored or the integers of their bits,
# and maxima of some values as float32, NaN and infinity included


def by_block(
    values: torch.Tensor, block: tuple[int, int], scaled: Scaled, codes: Codes, above: torch.Tensor | None = None
) -> Made:
    """Codes of a matrix in blocks (down, across), short at its edges, and scales (down, across) of them.

    values: (rows, cols), contiguous, bfloat16, float16 or float32.  above: () float32, of `E4M3` and `TIMES`.
    `down` is a power of two; with nibbles it is 1, and columns and `across` are even.
    """
    (rows, cols), (down, across), device = values.shape, block, values.device
    high, wide = triton.cdiv(rows, down), triton.cdiv(cols, across)
    padded = triton.next_power_of_2(across)
    at_once = max(VALUES // (down * padded), 1)
    programs = triton.cdiv(high * wide, at_once)
    made = torch.empty((rows, cols // 2 if codes.nibbles else cols), dtype=torch.uint8, device=device)
    scale = torch.empty((high, wide), dtype=STORED.get(scaled.kind, torch.int32), device=device)
    largest = torch.empty(programs, dtype=torch.int32, device=device)
    one = torch.ones((), device=device) if above is None else above
    with torch.cuda.device_of(values):  # Triton starts on the current device, which may be another
        _blocks[(programs,)](
            _words(values), one, made, scale, largest, rows, cols, high * wide, wide, scaled.bound, scaled.least,
            codes.low, codes.high, DOWN=down, ACROSS=padded, BLOCK=across, GROUPS=at_once, KIND=scaled.kind,
            TO=scaled.to, CODE=codes.code, CAST=codes.cast, ROUND=codes.round, NIBBLES=codes.nibbles,
            FLIP=codes.flip, num_warps=8 if down * padded > VALUES else 4, **OPTIONS,
        )  # fmt: skip
    return made, scale, largest.view(torch.float32)


def by_row(values: torch.Tensor, scaled: Scaled, codes: Codes) -> Made:
    """The same with a scale (rows, 1) for each row."""
    (rows, cols), device = values.shape, values.device
    made = torch.empty((rows, cols), dtype=torch.uint8, device=device)
    scale = torch.empty((rows, 1), dtype=STORED.get(scaled.kind, torch.int32), device=device)
    largest = torch.empty(rows, dtype=torch.int32, device=device)
    with torch.cuda.device_of(values):
        _rows[(rows,)](
            _words(values), made, scale, largest, cols, scaled.bound, scaled.least, codes.low, codes.high,
            BLOCK=min(triton.next_power_of_2(cols), VALUES), KIND=scaled.kind, CODE=codes.code, CAST=codes.cast,
            ROUND=codes.round, FLIP=codes.flip, **OPTIONS,
        )  # fmt: skip
    return made, scale, largest.view(torch.float32)


def under(values: torch.Tensor, divisor: torch.Tensor, codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a tensor under one scale, () float32, and maxima of some values."""
    programs, made = triton.cdiv(values.numel(), VALUES), torch.empty_like(values, dtype=torch.uint8)
    largest = torch.empty(programs, dtype=torch.int32, device=values.device)
    with torch.cuda.device_of(values):
        _under[(programs,)](
            _words(values), divisor, made, largest, values.numel(), codes.low, codes.high, BLOCK=VALUES,
            CODE=codes.code, CAST=codes.cast, ROUND=codes.round, FLIP=codes.flip, **OPTIONS,
        )  # fmt: skip
    return made, largest.view(torch.float32)


def _words(values: torch.Tensor) -> torch.Tensor:
    """bfloat16 as int16: the interpreter widens its subnormal numbers wrongly."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values
