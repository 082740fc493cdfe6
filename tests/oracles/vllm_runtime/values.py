"""The values of codes as checkpoints store them, in float32; it asks no server."""

from __future__ import annotations

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def unpacked(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Codes of 32-bit words, lowest bits first, along an axis; they may lie across the ends of words."""
    words = words.movedim(axis, -1)
    if 32 % bits:
        stream = ((words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1).flatten(-2)
        stream = stream[..., : stream.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
        return (stream << torch.arange(bits, dtype=torch.int32)).sum(-1).movedim(-1, axis)
    codes = (words.unsqueeze(-1) >> (torch.arange(32 // bits, dtype=torch.int32) * bits)) & (2**bits - 1)
    return codes.reshape(*words.shape[:-1], -1).movedim(-1, axis)


def fp4(codes: torch.Tensor) -> torch.Tensor:
    """Values of bytes that hold two e2m1 codes each, the low one first."""
    both = torch.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1).long()
    return E2M1[both & 7] * torch.where(both & 8 > 0, -1.0, 1.0)


def blocks(values: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """Values in blocks along the last axis, times one scale a block."""
    return (values.unflatten(-1, (-1, size)) * scale.unsqueeze(-1)).flatten(-2)


def tiles(values: torch.Tensor, scale: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Values in tiles of the last two axes, times one scale a tile; the last of each may be smaller."""
    spread = scale.float().repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)
    return values.float() * spread[..., : values.shape[-2], : values.shape[-1]]
