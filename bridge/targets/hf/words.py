"""What the spellings of AutoAWQ, GPTQ and DeepSeek share.

The first two have integer weights in words of 32 bits, stored [in, out], and float inputs. Scales have the model's
dtype, or float16 in a float32 model, since no kernel takes float32 ones. The weight is divided by the stored scale, so
that nothing is lost at load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.core.values import Format, Numeric, Site
from bridge.core.version import __version__
from bridge.planning.plan import Plan
from bridge.targets.config_json import config_json
from bridge.targets.hf.spelling import Part

WRITER = f"qbridge {__version__}"
KEEP = 'keep these modules with a recipe (quant = "none")'


def scale_dtype(dtype: str) -> str:
    """The dtype of scales in a model of `dtype`."""
    return "float16" if dtype == "float32" else dtype


def why_unsupported(format_: Format, dtypes: tuple[str, ...], name: str) -> str:
    """Why a checkpoint of weights in one of `dtypes` cannot hold the format ("" if it can)."""
    first = format_.weight[0]
    if format_.input is not None or len(format_.weight) > 1:
        return f"{name} has weights only, and activations stay floats; use format='compressed-tensors' or 'modelopt'"
    if first.dtype not in dtypes or first.scale_dtype != "float32":
        words = " or ".join(dtype.upper() for dtype in dtypes)
        return f"{name} holds {words} weights, not {first.dtype}; use another scheme, or format='compressed-tensors'"
    return ""


def holds_stack(format_: Format) -> bool:
    return False


def why_kv_unsupported(name: str, kv: Numeric) -> str:
    return f"{name} has no scales of keys and values; leave kv out, or use format='modelopt'"


def kv_parts(attention: str, dtype: str) -> list[Part]:
    return []


def unifies(format_: Format) -> bool:
    """Formats with pre-scales: one that goes into a norm is that of all its readers."""
    return format_.prescales


def joins(format_: Format) -> bool:
    return False


def incompatibilities(format_: Format, site: Site, shape: tuple[int, int], per_word: tuple[int, int]) -> list[str]:
    """Why a weight does not fit; `per_word`: what `out` and `in` must be multiples of."""
    problems, block = [], format_.weight[0].block
    if site.layout == "in_out":
        problems.append(f"is stored [in, out] (Conv1D), and loaders of this format have only Linear; {KEEP}")
    if site.keep.startswith("output head"):
        problems.append(f"is an output head, which loaders of this format take unquantized; {KEEP}")
    for axis, extent, multiple in zip(("out", "in"), shape, per_word, strict=True):
        if extent % multiple:
            problems.append(f"{axis} = {extent} is no multiple of {multiple}: that many codes share a word; {KEEP}")
    if block and shape[1] % block[0]:
        problems.append(f"in = {shape[1]} does not divide into blocks of {block[0]}; {KEEP}")
    return problems


def config_files(plan: Plan, config: Mapping[str, Any], section: Mapping[str, Any] | None) -> dict[str, bytes]:
    """config.json, whose `quantization_config` is `section`, without it if nothing is quantized."""
    content = dict(section) if section and plan.quantized else None
    return {"config.json": config_json(config, content, bool(plan.untied))}


def pattern_of(module: str) -> str:
    """A regular expression that matches one module, for GPTQ's `dynamic`."""
    return f"-:^{re.escape(module)}$"
