"""Schemes as a user's own file may have them: numerics that no shipped scheme has, in formats of target `hf`."""

from __future__ import annotations

from dataclasses import replace

from bridge.core.values import Numeric
from bridge.quant.describe import contract_words
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme

FP8 = "float8_e4m3fn"


def own(weight: Numeric, entry: Numeric | None = None) -> Scheme:
    """A scheme of one's own; its name is what a contract calls it."""
    scheme = replace(load_scheme("int8_wo"), weight=(weight,), input=entry)
    return replace(scheme, name=contract_words(scheme.format).replace(" | ", "-").replace(" ", "_"))


INT4 = [own(Numeric("int4", "channel")), *(own(Numeric("int4", "block", (size,))) for size in (64, 32))]
INT8 = [own(Numeric("int8", "block", (size,))) for size in (128, 64, 32)]
NARROW = [own(Numeric(f"int{bits}", "block", (size,))) for bits in (2, 3, 5, 6) for size in (64, 32)]
CHANNELS, TENSORS = own(Numeric(FP8, "channel")), own(Numeric(FP8, "tensor"))
STATIC = own(Numeric(FP8, "channel"), Numeric(FP8, "tensor"))
TOKENS = own(Numeric(FP8, "tensor"), Numeric(FP8, "token", dynamic=True))
