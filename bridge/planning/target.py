"""What planning asks of a target."""

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
    """What a target makes its steps from. `formats`: weight -> its format, or the reason why it is kept.

    `dropped`: source tensor -> why it is not copied, known before the target is asked. `side_files`: name -> file, or
    its content. `folder`: the part of a pipeline that is converted, "" if the source is none.
    """

    specs: Mapping[str, TensorSpec]
    config: Mapping[str, Any]
    structure: Structure
    scheme: Scheme | None
    formats: Mapping[str, Format | str]
    dropped: Mapping[str, str]
    options: Any
    side_files: Mapping[str, Path | bytes]
    folder: str = ""

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
    """What a target made of a draft: steps, source tensors that have no place in the output and why, what is wrong,
    and sentences for the plan that need the source's config.

    `problems`: the module or tensor that each is about, "" for none, and what is wrong with it.
    """

    steps: list[Step] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
