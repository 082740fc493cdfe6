"""Which matrices of a denoiser stay unquantized, and which share their scales.

Both as ModelOpt does: the first in its examples for diffusers (the functions called `filter_func_*`), the second in its
export, which gives a scale in common to the projections of one attention alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from bridge.core.text import grouped
from bridge.core.values import InputGroup

# Why a module is kept -> parts of names. Errors in these reach every token of every step, and they take little time.
_KEPT = {
    "embedding of the step, the text or the patches": (
        "time_emb_proj", "time_embedding", "add_embedding", "pos_embed", "time_text_embed", "time_guidance_embed",
        "context_embedder", "x_embedder", "condition_embedder", "patch_embedding", "timestep_embedder", "adaln_single",
        "caption_projection",
    ),
    "first or last layer": ("conv_in", "conv_out", "norm_out"),
    "shortcut": ("conv_shortcut",),
}  # fmt: skip
_LAST = re.compile(r"proj_out(_\d)?")  # of the model, not of its blocks
# ModelOpt's example keeps these of Wan, which has 30 or 40 blocks.
_WAN_BLOCKS = re.compile(r"blocks\.(0|1|2|37|38|39)\.")
_ATTENTION = re.compile(r"(to_|to_added_)[qkv]|(add_)?[qkv]_proj|query|key|value")
_ADDED = re.compile(r"add_[qkv]_proj|to_added_[qkv]")


def why_kept(architecture: str, module: str) -> str:
    """Why a matrix stays unquantized unless a recipe names it, "" if it is quantized."""
    for why, parts in _KEPT.items():
        if any(part in module for part in parts):
            return why
    if _LAST.fullmatch(module):
        return "first or last layer"
    if architecture.startswith("Wan") and _WAN_BLOCKS.match(module):
        return "one of the first or last three blocks"
    return ""


def attention_groups(groups: Iterable[InputGroup]) -> tuple[InputGroup, ...]:
    """The groups that share scales: q, k and v of one attention, of the image and of the text apart."""
    result = []
    for group in groups:
        projections = [module for module in group.modules if _ATTENTION.fullmatch(module.rpartition(".")[2])]
        for modules in grouped(projections, _place):
            if len(modules) > 1:
                result.append(replace(group, modules=tuple(modules), norm="", alone=False, plus_one=False))
    return tuple(result)


def _place(module: str) -> tuple[str, bool]:
    parent, _, name = module.rpartition(".")
    return parent, _ADDED.fullmatch(name) is not None
