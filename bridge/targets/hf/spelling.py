"""The interface of spellings of a quantized Hugging Face checkpoint.

A *spelling* is one way to write the same quantized numbers: names, shapes, packing, and the JSON for a runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from bridge.core.values import Encoding, Format, Numeric, Site, TensorSpec
from bridge.planning.plan import Output, Plan

# Value of `--format` -> the module, or the object of a module, with the functions of `Spelling`.
SPELLINGS = {
    "modelopt": "bridge.targets.hf.modelopt",
    "compressed-tensors": "bridge.targets.hf.compressed_tensors",
    "awq": "bridge.targets.hf.weight_only:AWQ",
    "gptq": "bridge.targets.hf.weight_only:GPTQ",
    "deepseek": "bridge.targets.hf.weight_only:DEEPSEEK",
}


@dataclass(frozen=True)
class Part:
    """One stored tensor of a quantized module: its part in the step, and its name, shape and dtype as stored."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    def output(self, expression: str) -> Output:
        """The part as a plan has it."""
        return Output(TensorSpec(self.name, self.shape, self.dtype), self.part, expression)


@dataclass(frozen=True)
class Traits:
    """What a spelling can hold. `prescales`: pre-scales beside the weights; else norms and other matrices take them.

    `mixes`: modules in different formats. `transposed`: codes and block scales are stored [in, out].
    `stacks`: how architectures begin whose experts stay in one tensor. `fuses`: how those begin whose pre-scales of
    NVFP4 are multiplied into the matrix before.
    """

    prescales: bool = False
    mixes: bool = False
    transposed: bool = False
    stacks: tuple[str, ...] = ()
    fuses: tuple[str, ...] = ()


class Spelling(Protocol):
    """The interface of a spelling; a module or an object satisfies it."""

    TRAITS: Traits

    def why_unsupported(self, format_: Format) -> str:
        """Why no checkpoint in this spelling can hold the format ("" if one can)."""

    def holds_stack(self, format_: Format) -> bool:
        """True if one tensor of all experts of a layer, in architectures of `Traits.stacks`, may have the format."""

    def why_kv_unsupported(self, kv: Numeric) -> str:
        """Why the KV cache cannot have this numeric ("" if it can)."""

    def incompatibilities(self, format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
        """Why a weight [out, in] does not fit the format, each reason with its remedy."""

    def coding(self, format_: Format, site: Site, dtype: str, export: str) -> Encoding:
        """The encoding of a weight of `dtype` that is exported as `export`."""

    def parts(self, format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
        """The tensors of a module (weight [out, in], a stack as stored): codes first, companions in their order."""

    def kv_parts(self, attention: str, dtype: str) -> list[Part]:
        """The scales of keys and values of one attention module, in a model of `dtype`."""

    def unifies(self, format_: Format) -> bool:
        """True if modules that read the same input share pre_quant_scale, input amax and per-tensor weight amax."""

    def joins(self, format_: Format) -> bool:
        """True if gate and up of an expert share their per-tensor amax also where scales are a module's own."""

    def config_files(self, plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
        """File -> content of config.json and other JSON files that tell a runtime how tensors are quantized."""


@cache
def spelling(name: str) -> Spelling:
    """Return the spelling called `name`, one of `SPELLINGS`."""
    return EntryPoint(name, SPELLINGS[name], "").load()  # type: ignore[no-any-return]
