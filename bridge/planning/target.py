"""The protocol between planning and a target: `Planner`, `Draft`, `Drafted`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bridge.core.values import Format, Numeric, Site, Structure, TensorSpec
from bridge.planning.plan import Step
from bridge.quant.schemes.scheme import Scheme


@dataclass(frozen=True)
class Draft:
    """What a target makes its steps from."""

    specs: Mapping[str, TensorSpec]
    """Every tensor of the source by name."""
    config: Mapping[str, Any]
    """The content of config.json."""
    structure: Structure
    """Which tensors are matrices of which modules, which read the same input, which are tied."""
    scheme: Scheme | None
    """The scheme, bound to these modules; None without quantization."""
    formats: Mapping[str, Format | str]
    """Weight -> its format, or the reason why it stays unquantized: "output head"."""
    dropped: Mapping[str, str]
    """Source tensor -> why it is not copied, as far as it is known without the target."""
    options: Any
    """An instance of the target's `Options`, with every `None` resolved."""
    side_files: Mapping[str, Path | bytes]
    """Name -> file to copy, or its content."""
    folder: str = ""
    """The part of a diffusion pipeline that is converted, `transformer`; "" for other models."""

    @property
    def sites(self) -> dict[str, Site]:
        """Weight -> its site."""
        return {site.weight: site for site in self.structure.sites}

    @property
    def quantized(self) -> dict[str, Format]:
        """Module -> its format, for those that are quantized."""
        found = ((site.module, self.formats.get(site.weight)) for site in self.structure.sites)
        return {module: format_ for module, format_ in found if isinstance(format_, Format)}

    def copied(self) -> Iterator[tuple[TensorSpec, Site | None]]:
        """Every source tensor that is written, with its site; a quantized head that is tied comes as its own, last."""
        tied, sites = self.structure.tied, self.sites
        for name, spec in self.specs.items():
            if name not in tied and name not in self.dropped:
                yield spec, sites.get(name)
        for site in self.structure.sites:
            if site.weight in tied and isinstance(self.formats.get(site.weight), Format):
                yield self.specs[tied[site.weight]], site

    def why_plain(self, spec: TensorSpec, site: Site | None) -> str:
        """Why a tensor is copied as it is."""
        kept = self.formats.get(site.weight) if site else None
        if isinstance(kept, str):
            return kept
        if site and self.scheme is None:
            return "no scheme was asked for"
        roles = self.structure.roles.get(spec.name, ())
        return roles[0].rsplit(".", 1)[0] + ": not a matrix multiplication" if roles else "not a matrix multiplication"


@dataclass
class Drafted:
    """A target's answer to a draft."""

    steps: list[Step] = field(default_factory=list)
    """The steps, in the order of the output's files."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Source tensor that the output's format cannot hold -> why."""
    copies: dict[str, str] = field(default_factory=dict)
    """Source tensor -> the tensor that is written for both; conversion refuses them if they differ."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """What is wrong, each after the module or tensor that it is about ("" for none); planning raises them together."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the plan that need the source's config."""
    disk: int = 0
    """Bytes that the target writes beside the tensors of the steps: engines."""
    memory: int = 0
    """Bytes that the target holds beside `base_memory` and the tensors of the running steps: a tokenizer."""


class Planner(Protocol):
    """The half of a target that planning asks. Every method reads names and shapes only."""

    name: str
    """The word that users type."""
    writes: tuple[str, ...]
    """Globs of every file it may write; a side file of that name is not copied."""
    base_memory: int
    """Bytes that writing needs besides the tensors of the running steps."""
    Options: type[Any]
    """A frozen dataclass: its fields are the options of `convert` and the flags of the command line."""

    def why_unsupported(self, format_: Format, options: Any) -> str:
        """Why no model can carry this format ("" if it can): the runtime has no such numeric."""

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: Any) -> str:
        """Why the KV cache cannot be quantized so ("" if it can); messages put "KV cache: " before it."""

    def why_stack_unsupported(self, format_: Format, site: Site, options: Any) -> str:
        """Why experts that one tensor holds cannot be quantized so ("" if they can)."""

    def why_kept(self, format_: Format, site: Site) -> str:
        """Why this one site stays unquantized under a format that the target has ("" if it is quantized)."""

    def draft(self, draft: Draft) -> Drafted:
        """Make the steps: every output tensor, from which slices of which source tensors; reads no weight."""

    def notes(self, structure: Structure, options: Any) -> tuple[str, ...]:
        """Sentences for the plan: costs and departures that the user should know before the run."""

    def resolve(self, options: Any, structure: Structure, scheme: Any, specs: Any) -> Any:
        """Options with every `None` replaced by what this model and scheme need; UsageError if they contradict."""
