"""Place the experts that one tensor of the source holds.

They stay in it, become modules of each, or stay unquantized with a note. All stacks of a layer have one fate: programs
hold its experts as one module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from bridge.core.text import fold_problems, grouped
from bridge.core.values import Format, Site, TensorSpec
from bridge.planning.target import Draft
from bridge.targets.hf.spelling import Spelling
from bridge.targets.stacks import PAIRS, Matrix, container, modules_of

UNQUANTIZED = "stays unquantized: {why}"
NO_READER = "no program is known to read these experts quantized"
STACKED_ONLY = "programs read these experts from one tensor only, for which ModelOpt has fp8, nvfp4 and nvfp4_wo"
OTHERS_UNQUANTIZED = "programs read the experts of a layer in one format, and the others of this layer stay unquantized"
MIXED_EXPERTS = (
    "these are experts of one layer, which differ in format or are quantized in part; programs hold them as one module "
    "in one format (vLLM refuses others): give all of them one, or quant = 'none', in a recipe"
)
OTHER_FORMAT = "; format='compressed-tensors' (--format compressed-tensors) has other schemes, a module an expert"

Stack = tuple[TensorSpec, Site, Format | str | None]  # with its format, or why it has none


class Experts:
    """The stacks of a draft: in one tensor as the spelling has them, as modules of each expert, or unquantized.

    `stacks`: weight -> the modules that it becomes. `draft`: the draft, in which stacks that no module is made of are
    unquantized.
    """

    def __init__(self, draft: Draft, spelling: Spelling) -> None:
        self._given, self._spelling = draft, spelling
        self.stacks: dict[str, list[Matrix]] = {}
        self.problems: list[tuple[str, str]] = []
        self._kept: dict[str, tuple[str, str]] = {}  # weight -> module, reason
        for layer in grouped(self._stacked(), lambda stack: stack[1].experts):
            self._place(layer)

    @property
    def draft(self) -> Draft:
        kept = {weight: why for weight, (_, why) in self._kept.items()}
        return replace(self._given, formats={**self._given.formats, **kept})

    @property
    def formats(self) -> dict[str, Format]:
        """Module -> its format."""
        known = self._given.quantized
        return {m.site.module: known[m.slice.module] for matrices in self.stacks.values() for m in matrices}

    @property
    def notes(self) -> list[str]:
        kept = (self._kept[name] for name in self._given.structure.order if name in self._kept)
        return fold_problems([(module, UNQUANTIZED.format(why=why)) for module, why in kept])

    def of_layer(self, weight: str) -> list[Matrix]:
        """All matrices of the experts of a layer, expert by expert, if `weight` is its first stack; else none."""
        stacks = self._layers[container(weight)[0]]
        if weight != stacks[0]:
            return []
        return sorted((m for name in stacks for m in self.stacks[name]), key=lambda m: m.site.expert or 0)

    @cached_property
    def _layers(self) -> dict[str, list[str]]:
        layers: dict[str, list[str]] = {}
        for weight in (name for name in self._given.structure.order if name in self.stacks):
            layers.setdefault(container(weight)[0], []).append(weight)
        return layers

    def _stacked(self) -> Iterator[Stack]:
        for spec, site in self._given.copied():
            if site and site.stacked:
                yield spec, site, self._given.formats.get(site.weight)

    def _place(self, layer: list[Stack]) -> None:
        """Decide on the stacks of one layer: if one cannot be quantized, none is."""
        joined = self._given.structure.joined
        split = {
            spec.name: modules_of(spec, site, joined.get(spec.name, ""))
            for spec, site, format_ in layer
            if isinstance(format_, Format) and not (self._stays_stacked and self._spelling.holds_stack(format_))
        }
        kept = {spec.name: site.keep for spec, site, format_ in layer if site.keep and format_ == site.keep}
        kept |= {name: why for name, matrices in split.items() if (why := self._why_kept(matrices))}
        if kept:
            stays = [(spec, site) for spec, site, form in layer if spec.name in kept or isinstance(form, Format)]
            self._kept |= {spec.name: (site.module, kept.get(spec.name, OTHERS_UNQUANTIZED)) for spec, site in stays}
            return
        self.stacks |= split
        if len({format_ if isinstance(format_, Format) else None for _, _, format_ in layer}) > 1:
            self.problems += [(site.module, MIXED_EXPERTS) for _, site, _ in layer]

    def _why_kept(self, matrices: list[Matrix]) -> str:
        """Why a stack that cannot stay in one tensor, of these matrices, stays unquantized; "" if it does not."""
        if PAIRS in self._given.structure.joined.values():  # vLLM's gpt_oss.py passes over a module an expert
            return STACKED_ONLY
        if self._stays_stacked:
            return STACKED_ONLY + OTHER_FORMAT
        return "" if matrices else NO_READER

    @property
    def _stays_stacked(self) -> bool:
        """Whether the spelling has the experts of this architecture in one tensor."""
        return self._given.structure.architecture.startswith(self._spelling.TRAITS.stacks)
