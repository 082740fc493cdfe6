"""Pack two 4-bit codes to a byte, unpack them, transpose."""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel

TILE = 64  # bytes of a cache line: a column of 64 codes fills one line of the transpose


@kernel("uint8[:,:] uint8[:,:]=")
def pack(codes, out):
    """Pack neighbours of a row, the even one into the low nibble.  codes: (rows, 2 n) uint8; out: (rows, n) uint8."""
    for r in range(codes.shape[0]):
        pairs = codes[r].view(np.uint16)
        line = out[r]
        for i in range(line.size):
            v = np.uint16(pairs[i])
            line[i] = np.uint8(np.uint16(v & np.uint16(15)) | np.uint16(np.uint16(v >> np.uint16(4)) & np.uint16(0xF0)))


@kernel("uint8[:,:] uint8[:,:]=")
def pack_rows(codes, out):
    """Pack neighbouring rows, the even one into the low nibble.  codes: (2 n, cols) uint8; out: (n, cols) uint8."""
    for r in range(out.shape[0]):
        low = codes[2 * r]
        high = codes[2 * r + 1]
        line = out[r]
        for i in range(line.size):
            line[i] = np.uint8(np.uint8(low[i] & np.uint8(15)) | np.uint8(high[i] << np.uint8(4)))


@kernel("uint8[:,:] int64 uint8[:,:]=")
def unpack(packed, signed, out):
    """Undo `pack`; `signed` extends the sign to the byte.  packed: (rows, n) uint8; out: (rows, 2 n) uint8."""
    flip = np.uint8(8) if signed else np.uint8(0)
    for r in range(packed.shape[0]):
        line = packed[r]
        target = out[r]
        for i in range(line.size):
            v = np.uint8(line[i])
            target[2 * i] = np.uint8(np.uint8(np.uint8(v & np.uint8(15)) ^ flip) - flip)
            target[2 * i + 1] = np.uint8(np.uint8(np.uint8(v >> np.uint8(4)) ^ flip) - flip)


@kernel("uint8[:,:] int64 uint8[:,:]=")
def unpack_rows(packed, signed, out):
    """Undo `pack_rows`; `signed` extends the sign to the byte.  packed: (n, cols) uint8; out: (2 n, cols) uint8."""
    flip = np.uint8(8) if signed else np.uint8(0)
    for r in range(packed.shape[0]):
        line = packed[r]
        low = out[2 * r]
        high = out[2 * r + 1]
        for i in range(line.size):
            v = np.uint8(line[i])
            low[i] = np.uint8(np.uint8(np.uint8(v & np.uint8(15)) ^ flip) - flip)
            high[i] = np.uint8(np.uint8(np.uint8(v >> np.uint8(4)) ^ flip) - flip)


@kernel(*(f"{word}[:,:] int64 {word}[:,:]= int64 int64 int64" for word in ("uint8", "uint16", "uint32", "uint64")))
def transpose(source, source_col, target, target_col, rows, cols):
    """target[c, target_col + r] = source[r, source_col + c] for r < rows, c < cols; any dtype, both C-contiguous.

    Tiles of 64 x 64 keep the strided side inside the first-level cache.
    """
    for c0 in range(0, cols, TILE):
        c1 = min(cols, c0 + TILE)
        for r0 in range(0, rows, TILE):
            r1 = min(rows, r0 + TILE)
            for c in range(c0, c1):
                line = target[c]
                for r in range(r0, r1):
                    line[target_col + r] = source[r, source_col + c]


@inner
def _swap(a, b, shift, mask):
    t = np.uint64(np.uint64(np.uint64(a >> shift) ^ b) & mask)
    return np.uint64(a ^ np.uint64(t << shift)), np.uint64(b ^ t)


def _scratch(*_):
    return (np.empty((TILE, TILE // 8), np.uint64),)


@kernel("uint8[:,:] int64 uint8[:,:]= int64 int64 int64 uint64[:,:]", scratch=_scratch)
def transpose_bytes(source, source_col, target, target_col, rows, cols, tile):
    """`transpose` of uint8 where both row lengths, both columns, `rows` and `cols` are multiples of 8.

    Eight words of eight bytes are transposed in registers: three rounds of exchanges of 4, 2 and 1 bytes.
    """
    src, dst = source.view(np.uint64), target.view(np.uint64)
    for c0 in range(source_col // 8, (source_col + cols) // 8, TILE // 8):
        words = min(TILE // 8, (source_col + cols) // 8 - c0)
        for r0 in range(0, rows, TILE):
            high = min(TILE, rows - r0)
            for r in range(high):
                for k in range(words):
                    tile[r, k] = src[r0 + r, c0 + k]
            for k in range(words):
                for r in range(0, high, 8):
                    four, two, one = np.uint64(32), np.uint64(16), np.uint64(8)
                    low32, low16, low8 = (
                        np.uint64(0x00000000FFFFFFFF),
                        np.uint64(0x0000FFFF0000FFFF),
                        np.uint64(0x00FF00FF00FF00FF),
                    )
                    a, e = _swap(tile[r, k], tile[r + 4, k], four, low32)
                    b, f = _swap(tile[r + 1, k], tile[r + 5, k], four, low32)
                    c, g = _swap(tile[r + 2, k], tile[r + 6, k], four, low32)
                    d, h = _swap(tile[r + 3, k], tile[r + 7, k], four, low32)
                    a, c = _swap(a, c, two, low16)
                    b, d = _swap(b, d, two, low16)
                    e, g = _swap(e, g, two, low16)
                    f, h = _swap(f, h, two, low16)
                    a, b = _swap(a, b, one, low8)
                    c, d = _swap(c, d, one, low8)
                    e, f = _swap(e, f, one, low8)
                    g, h = _swap(g, h, one, low8)
                    at, to = (c0 + k) * 8 - source_col, (target_col + r0 + r) // 8
                    dst[at, to] = a
                    dst[at + 1, to] = b
                    dst[at + 2, to] = c
                    dst[at + 3, to] = d
                    dst[at + 4, to] = e
                    dst[at + 5, to] = f
                    dst[at + 6, to] = g
                    dst[at + 7, to] = h
