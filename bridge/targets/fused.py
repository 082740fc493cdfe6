"""Matrices that runtimes hold as one, which then share an FP8 scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bridge.core.values import Format

MIN_GROUP = 2  # a group of one shares nothing


def is_refit(format_: Format) -> bool:
    """Whether runtimes give the matrices that they fuse one scale, and quantize again those that had another.

    vLLM 0.33 and SGLang 0.5 (`requantize_with_max_scale`) and TensorRT-LLM (`rescale_fused_weights`) do so with FP8
    per tensor; TensorRT for RTX multiplies each by its own scale afterwards, in a kernel more. With the largest of the
    scales from the start, no code changes and no kernel is added.
    """
    first = format_.weight[0]
    return (first.dtype, first.per) == ("float8_e4m3fn", "tensor")


def block_of(module: str) -> str:
    """The parent of a module. Attention and MLP may read one input: runtimes fuse each in itself."""
    return module.rpartition(".")[0]


def fused_with(module: str, members: Sequence[str], formats: Mapping[str, Format]) -> tuple[str, ...]:
    """The modules that are held as one matrix, this one included: q, k and v, or gate and up; () if it is alone.

    members: the modules that read the same input.  formats: of the quantized modules.
    """
    fused = tuple(m for m in members if block_of(m) == block_of(module) and formats.get(m) == formats[module])
    return fused if len(fused) >= MIN_GROUP else ()
