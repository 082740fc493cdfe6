"""The unified Hugging Face checkpoint: how quantized tensors are spelled and what lies beside them; reads no weight.

A *spelling* is one way of writing the same quantized numbers: names, shapes, packing, and the JSON for a runtime.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bridge.values import Coding, Format, Numeric, Site

if TYPE_CHECKING:
    from bridge.planning import Plan

# What `--format` accepts -> the module that has the functions of `Spelling`.
SPELLINGS = {"modelopt": "bridge.unified.modelopt", "compressed-tensors": "bridge.unified.compressed"}


@dataclass(frozen=True)
class Part:
    """One stored tensor of a quantized module: which part of the step it is, its name, shape and dtype as stored."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str


class Spelling(Protocol):
    """What target `hf` asks of a spelling; satisfied by a module."""

    def refuse(self, format_: Format) -> str:
        """Why this format cannot be written so ("" if it can)."""

    def refuse_stack(self, format_: Format, site: Site) -> str:
        """Why experts that one tensor holds cannot be written so ("" if they can)."""

    def refuse_kv(self, kv: Numeric) -> str:
        """Why the KV cache cannot be quantized so ("" if it can)."""

    def misfits(self, format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
        """What of a weight [out, in] does not fit the format, each with its remedy."""

    def coding(self, format_: Format, site: Site, dtype: str, export: str) -> Coding:
        """How codes and scales of a weight of `dtype` are spelled when it is exported as `export`."""

    def parts(self, format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
        """The tensors of a module whose weight is [out, in]: the codes first, then its companions in their order.

        Of a stack of experts the shape is as it is stored.
        """

    def kv_parts(self, attention: str, dtype: str) -> list[Part]:
        """The scales of keys and values of one attention module, in a model of `dtype`."""

    def unifies(self, format_: Format) -> bool:
        """Whether modules that read the same input share pre-scales, input amax and per-tensor weight amax."""

    def joins(self, format_: Format) -> bool:
        """Whether gate and up of an expert, which some models hold as one matrix, share their per-tensor amax."""

    def folds(self, format_: Format) -> bool:
        """Whether a shared pre-scale is multiplied into the norm before it."""

    def beside(self, plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
        """File -> content of what tells a runtime how the tensors are quantized; config.json is among them."""


def spelling(name: str) -> Spelling:
    """Return the spelling called `name`, one of `SPELLINGS`."""
    return importlib.import_module(SPELLINGS[name])
