"""Find the stored tensors that an adapter changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bridge.core.text import fold_problems, listed
from bridge.sources.adapted.adapter import Adapter
from bridge.sources.adapted.layers import Layers, layers_of
from bridge.sources.source import Source

if TYPE_CHECKING:  # it imports torch
    from bridge.sources.live_models.checkpoint_names import LiveSlice

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
EMBEDDED_A, EMBEDDED_B = "lora_embedding_A", "lora_embedding_B"
_FACTORS = (A, B, "lora_B.bias", MAGNITUDE, f"{MAGNITUDE}.weight", EMBEDDED_A, EMBEDDED_B)


@dataclass(frozen=True)
class Delta:
    """What is added to a live tensor, and the part of that tensor which is stored.

    `kind`: `linear`, `conv1d` (transformers' Linear with an input a row), `embedding`, `conv` (torch's convolutions),
    or `parameter`, as peft treats it: a stack of `experts`, `swapped` if its matrices have an output a row.
    """

    kind: str
    a: str
    b: str
    scaling: float
    shape: tuple[int, ...]
    magnitude: str = ""
    part: LiveSlice | None = None
    experts: int = 1
    swapped: bool = True


@dataclass(frozen=True)
class Change:
    """How one stored tensor changes: its values are `replaced`, then `delta` or a scaled `bias` is added."""

    replaced: str = ""
    delta: Delta | None = None
    bias: str = ""
    scaling: float = 1.0


def match(adapter: Adapter, base: Source) -> dict[str, Change]:
    """Return stored tensor -> its change; SourceError lists all that does not fit."""
    modules: dict[str, set[str]] = {}
    values: list[str] = []
    for name in adapter.specs:
        module, factor = _split(name)
        if factor:
            modules.setdefault(module, set()).add(factor)
        else:
            values.append(name)
    parameters = bool(adapter.settings.target_parameters)
    layers = layers_of(base, modules, [_live(name) for name in values], parameters)
    matcher = _Matcher(adapter, base, layers)
    for name in values:
        matcher.replace(name)
    nested: dict[str, list[str]] = {}
    for module in modules:
        bare = module
        while parameters and bare.endswith(".base_layer"):
            bare = bare.removesuffix(".base_layer")
        nested.setdefault(bare, []).append(module)
    for bare, names in nested.items():
        if parameters and layers.kind(bare) == "":
            matcher.parameters(bare, sorted(names, key=len, reverse=True))
        else:
            matcher.layer(bare, modules[names[0]])
    if matcher.problems:
        raise listed(f"{adapter.where} over {base.where}", fold_problems(matcher.problems))
    return matcher.changes


class _Matcher:
    """One adapter against the layers of a base."""

    def __init__(self, adapter: Adapter, base: Source, layers: Layers) -> None:
        self.adapter, self.base, self.layers = adapter, base, layers
        self.changes: dict[str, Change] = {}
        self.problems: list[tuple[str, str]] = []

    def problem(self, name: str, text: str) -> None:
        self.problems.append((name, text))

    def layer(self, module: str, factors: set[str]) -> None:
        """LoRA of one layer, or of an expert's projection, which live models stack."""
        kind, settings = self.layers.kind(module), self.adapter.settings
        if kind is None and not self.layers.stored(module, "weight"):
            return self.problem(module, "the base has no such module; is it the adapter of another base?")
        if kind == "":
            return self.problem(module, "LoRA of a module that is no linear layer, embedding or convolution")
        embedded = EMBEDDED_A in factors or EMBEDDED_B in factors
        a, b = (EMBEDDED_A, EMBEDDED_B) if embedded else (A, B)
        if missing := [factor for factor in (a, b) if factor not in factors]:
            return self.problem(module, f"the adapter lacks {', '.join(missing)}")
        if embedded != (kind == "embedding"):
            return self.problem(module, f"the adapter has {a} for a layer of kind {kind or 'linear'}")
        magnitude = next((m for m in (MAGNITUDE, f"{MAGNITUDE}.weight") if m in factors), "")
        if bool(magnitude) != settings.dora:
            has = "has" if magnitude else "has no"
            return self.problem(module, f"use_dora is {settings.dora}, and the adapter {has} {MAGNITUDE}")
        if kind == "conv" and self.layers.says(module, "groups") != 1:
            return self.problem(module, "LoRA of a grouped convolution, which peft does not merge either")
        for target, part in self.targets(module, "weight"):
            shape = self.base.specs[target].shape if kind is None else self.layers.shape(module)
            delta = Delta(
                kind or "parameter", f"{module}.{a}", f"{module}.{b}", settings.scaling(module), shape,
                f"{module}.{magnitude}" if magnitude else "", part,
            )  # fmt: skip
            self.add(module, target, delta)
        if "lora_B.bias" in factors:
            self.bias(module, f"{module}.lora_B.bias", settings.scaling(module))

    def parameters(self, module: str, nested: list[str]) -> None:
        """LoRA of a module's own parameters: peft wraps them in the order that they have, the first one innermost."""
        settings, targets = self.adapter.settings, self.adapter.settings.target_parameters
        names = {name: f"{module}.{name}" for name in self.layers.parameters(module)}
        wanted = [name for name, key in names.items() if any(key == t or key.endswith(f".{t}") for t in targets)]
        if len(wanted) != len(nested):
            have = ", ".join(wanted) or "none"
            return self.problem(module, f"the adapter has {len(nested)} pairs, and target_parameters name {have}")
        for name, stored in zip(wanted, nested, strict=True):
            shape, key = self.layers.shape(module, name), names[name]
            if len(shape) not in (2, 3) or {f"{stored}.{A}", f"{stored}.{B}"} - self.adapter.specs.keys():
                self.problem(key, "the adapter lacks a factor of this parameter")
                continue
            swapped = len(shape) == 2 or not self.layers.says(module, "is_transposed")
            experts = shape[0] if len(shape) == 3 else 1
            for target, part in self.targets(module, name):
                scaling = settings.scaling(key)
                delta = Delta("parameter", f"{stored}.{A}", f"{stored}.{B}", scaling, shape, "", part, experts, swapped)
                self.add(key, target, delta)

    def targets(self, module: str, name: str) -> list[tuple[str, LiveSlice | None]]:
        """The stored tensors that a live one is in, but of a tied one, which a merge would change in both places."""
        live = f"{module}.{name}"
        if live in self.layers.tied:
            self.problem(
                live,
                f"is tied to {self.layers.tied[live]}: a merge would change both; keep the adapter apart "
                "(adapter='keep', --adapter keep), or save the base with tie_word_embeddings=False and give that",
            )
            return []
        stored = self.layers.stored(module, name)
        if not stored:
            self.problem(live, "the base's checkpoint does not have it, or in another form; it cannot be merged")
        return list(stored.items())

    def replace(self, name: str) -> None:
        """A tensor that the adapter has whole: of modules_to_save, a trained bias, or the layer under an embedding."""
        live = _live(name)
        module, _, last = live.rpartition(".")
        if self.layers.kind(module) is None and not self.layers.stored(module, last):
            return self.problem(live, "the base has no such tensor; is it the adapter of another base?")
        for target, part in self.targets(module, last):
            shape, have = self.base.specs[target].shape, self.adapter.specs[name].shape
            if part is not None:
                return self.problem(live, "the base stores it in parts, and the adapter replaces it whole")
            if shape != have:
                vocab = "; a changed vocabulary needs a base with that many rows" if len(shape) == 2 else ""
                return self.problem(live, f"the adapter has {have}, and the base {shape}{vocab}")
            self.changes[target] = replace(self.changes.get(target, Change()), replaced=name)

    def add(self, module: str, target: str, delta: Delta) -> None:
        if why := self.misfit(delta, self.adapter.settings.rank(module)):
            return self.problem(module, why)
        self.changes[target] = replace(self.changes.get(target, Change()), delta=delta)

    def bias(self, module: str, name: str, scaling: float) -> None:
        if f"{module}.bias" not in self.base.specs:
            return self.problem(module, "lora_bias is True, and the layer has no bias to add it to")
        self.changes[f"{module}.bias"] = Change(bias=name, scaling=scaling)

    def misfit(self, delta: Delta, rank: int) -> str:
        """Say how the factors differ from the shape that they are added to."""
        a, b = self.adapter.specs[delta.a].shape, self.adapter.specs[delta.b].shape
        want_a, want_b = _factor_shapes(delta, rank)
        if (a, b) != (want_a, want_b):
            return (
                f"A {a} and B {b} do not fit a weight {delta.shape} of rank {rank}, which takes {want_a} and {want_b}; "
                "is it the adapter of another base?"
            )
        if delta.magnitude:
            out = delta.shape[1] if delta.kind in ("conv1d", "embedding") else delta.shape[0]
            size = self.adapter.specs[delta.magnitude].size
            if size != out:
                return f"{MAGNITUDE} has {size} values for {out} outputs; is it the adapter of another base?"
        return ""


def _split(name: str) -> tuple[str, str]:
    """A module and the factor of LoRA that a name ends with; the factor is "" for any other tensor."""
    factor = next((factor for factor in _FACTORS if name.endswith(f".{factor}")), "")
    return name.removesuffix(f".{factor}") if factor else name, factor


def _live(name: str) -> str:
    """The name in the base of a tensor that the adapter has whole."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _factor_shapes(delta: Delta, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = delta.shape
    if delta.kind in ("conv1d", "embedding"):
        return (rank, shape[0]), (shape[1], rank)
    if delta.kind == "conv":
        return (rank, *shape[1:]), (shape[0], rank, *(1 for _ in shape[2:]))
    if delta.kind == "parameter" and len(shape) == 3:
        out, in_ = (shape[1], shape[2]) if delta.swapped else (shape[2], shape[1])
        return (rank * shape[0], in_), (out, rank * shape[0])
    return (rank, shape[1]), (shape[0], rank)
