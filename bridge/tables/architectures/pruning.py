"""What an architecture's table says of pruned models: section [prune].

    [prune.layers]  field of config.json = how it speaks of layers
    [prune.wants]   "formula over fields and dims of the pruned model" = "why it must hold"

A field of layers is a list or word with an entry for "each" (or one value for all), a list of "which" they are, the
count of the "first" ones of a kind, or the number of the "last" one of a kind (-1: the model's last). `each or formula`
gives the list of a config that has none. In a formula, `dropped` is whether layers are, `fewer` the dims that are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.core.mappings import TableFile
from bridge.tables.architectures.arch import ArchTable, let_of
from bridge.tables.expressions.grammar import Formula, parse_formula

_KINDS = ("each", "which", "first", "last")


@dataclass(frozen=True)
class LayerField:
    """How a field speaks of layers; `default` makes the list of a config without one."""

    kind: str
    default: Formula | None = None

    def of(self, value: Any, layers: Sequence[int]) -> Any:
        """The field's value when only `layers` are left."""
        if self.kind == "each":
            left = [value[layer] for layer in layers] if isinstance(value, list | str) else value
            return "".join(left) if isinstance(value, str) else left
        if self.kind == "which":
            return [at for at, layer in enumerate(layers) if layer in value]
        if self.kind == "first":
            return sum(layer < value for layer in layers)
        left = sum(layer <= value for layer in layers)
        return value if value == -1 else left - 1 if left else -2  # -2: before the first, and not counted from the end


@dataclass(frozen=True)
class Pruning:
    """The section of one table."""

    fields: Mapping[str, LayerField]
    wants: Mapping[Formula, str]

    @property
    def names(self) -> set[str]:
        """Every field and dim that the section reads."""
        defaults = (field.default for field in self.fields.values() if field.default)
        return {*self.fields, *(name for formula in (*self.wants, *defaults) for name in formula.names)}


def parse_pruning(table: ArchTable) -> Pruning:
    """Parse [prune]; TableError names file and line."""
    file, names = table.file, [*table.config, *table.dims]
    for key in file.section("prune"):
        if key not in ("layers", "wants"):
            raise file.place("prune", key).error(f"unknown key `{key}`", hint="[prune.layers], [prune.wants]")
    fields = {name: _field(file, name, text, names) for name, text in file.texts("prune.layers").items()}
    wants = {
        parse_formula(text, file.place("prune.wants", text), [*names, "dropped", "fewer"], let_of(file)): why
        for text, why in file.texts("prune.wants").items()
    }
    return Pruning(fields, wants)


def _field(file: TableFile, name: str, text: str, names: list[str]) -> LayerField:
    place = file.place("prune.layers", name)
    kind, _, formula = text.partition(" or ")
    if kind not in _KINDS or (formula and kind != "each"):
        raise place.error(f"`{text}` says nothing of layers", hint=f"{', '.join(_KINDS)}, each or formula")
    return LayerField(kind, parse_formula(formula, place, names) if formula else None)
