"""Which of ggml's block types holds the codes of a scheme."""

from __future__ import annotations

from bridge.core.dtypes import DTYPES, K_QUANTS, SEARCHED
from bridge.core.values import Encoding, Format, Numeric, code_bits
from bridge.quant.codec.ggml_library import INSTALL, is_installed
from bridge.quant.schemes.load import load_scheme
from bridge.targets.gguf.file_types import FILE_TYPES

# General.file_type: llama.cpp's number of what most weights are (LLAMA_FTYPE_*), beside those of `file_types`.
NUMBERS = {"float32": 0, "float16": 1, "q3_k": 11, "q4_k": 14, "q5_k": 16, "bfloat16": 32, "mxfp4": 38, "nvfp4": 39}
INTEGERS = ("int8", "int4")
ALL = "q8_0, int8_wo (Q8_0), q4_0, int4_wo (Q4_0), mxfp4_wo (MXFP4), nvfp4_wo (NVFP4), q4_k to q6_k, q4_k_m and others"


# What llama-quantize makes of the head, or of the embedding that is the head, in files of other types than these: Q6_K.
HEADS = {"q8_0": "q8_0", "mxfp4": "q8_0"}
# The same of an embedding beside a head; the type of the file in others. get_rows leaves out NVFP4's second scale.
EMBEDDINGS = {"mxfp4": "q8_0", "nvfp4": "q6_k"}
NARROW = "q8_0"  # for rows that K-quants do not divide; llama-quantize takes it for Q6_K, Q5_0 for Q4_K, Q5_1 for Q5_K


def vocabulary_scheme(kind: str, width: int, head: bool) -> str:
    """The scheme of the head, or of an embedding beside one, in a file of block type `kind`; "" if no block fits."""
    chosen = HEADS.get(kind, "q6_k") if head else EMBEDDINGS.get(kind, kind)
    chosen = NARROW if chosen in K_QUANTS and width % DTYPES[chosen].block else chosen
    return "" if width % DTYPES[chosen].block else chosen


def block_type(format_: Format) -> str:
    """The ggml type whose blocks hold the codes of a format; "" if none does."""
    if len(format_.weight) > 1:
        return ""
    first = format_.weight[0]
    if first.dtype in SEARCHED:
        return first.dtype
    across = first.block[0] if first.per == "block" and len(first.block) == 1 else 0
    if first.dtype == "float4_e2m1fn":
        known = {(32, "float8_e8m0fnu"): "mxfp4", (16, "float8_e4m3fn"): "nvfp4"}
        return known.get((across, first.scale_dtype), "")
    if first.scale_dtype != "float32" or not (first.per == "channel" or (across and across % 32 == 0)):
        return ""
    return {"int8": "q8_0", "int4": "q4_0"}.get(first.dtype, "")


def file_number(name: str) -> int:
    """General.file_type of a file type, or of a file whose weights mostly have the type `name`."""
    return FILE_TYPES[name].number if name in FILE_TYPES else NUMBERS[name]


def format_of(kind: str, weighted: bool) -> Format:
    """The format whose blocks are of a type; those that llama.cpp searches are weighed by an importance matrix."""
    if kind in ("q8_0", "q4_0") and not (weighted and kind in SEARCHED):
        return load_scheme(kind).format
    return Format((Numeric(kind, "block", (DTYPES[kind].block,)),), None, "imatrix" if weighted else "max")


def why_unsupported(format_: Format) -> str:
    """Why llama.cpp has no place for a format, with the nearest scheme; "" if it has."""
    first, entry = format_.weight[0], format_.input
    if format_.prescales:
        return f"llama.cpp divides no input by a pre-scale, as {format_.algorithm} needs; use {_nearest(first)}"
    if entry is not None and (entry.static or block_type(format_) or first.dtype in INTEGERS):
        return f"llama.cpp rounds activations by itself, to 8 bits in blocks; use {_nearest(first)}"
    if not block_type(format_):
        per = f"blocks of {'×'.join(map(str, first.block))}" if first.block else f"a scale per {first.per}"
        return f"ggml has no block type for {first.dtype} in {per}; use {_nearest(first)}; known: {ALL}"
    if first.dtype in SEARCHED and not is_installed():
        return INSTALL
    return ""


def _nearest(first: Numeric) -> str:
    if first.dtype == "float4_e2m1fn":
        return "nvfp4_wo" if first.block == (16,) else "mxfp4_wo"
    if first.dtype != "int4" and (blocks := f"q{code_bits(first.dtype)}_k") in K_QUANTS:
        return blocks
    return "int4_wo" if first.dtype == "int4" else "int8_wo"


def coding(format_: Format) -> Encoding:
    """How codes and scales are stored; integers are coded under scales that are rounded to float16 first."""
    packed = block_type(format_)
    return Encoding(packed=packed, scale_dtype="float16" if packed in ("q8_0", "q4_0") else "float32")


def rounding_note(format_: Format) -> str:
    """What changes beside the scheme's codes in other targets, for the plan; "" if nothing does."""
    first = format_.weight[0]
    if first.dtype not in INTEGERS or first.block == (DTYPES["q8_0"].block,):
        return ""
    of = f"block of {first.block[0]}" if first.block else first.per
    return f"each {of} becomes {block_type(format_).upper()} blocks of 32 that repeat its scale, rounded to float16"
