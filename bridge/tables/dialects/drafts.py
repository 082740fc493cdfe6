"""Draft layers in another dialect: with numbers and tensors of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from bridge.tables.dialects.dialect import Dialect, DraftRow


@dataclass(frozen=True)
class DraftLayers:
    """`count` draft layers of an architecture, after its first `layers`; those of a count of 0 have no names."""

    dialect: Dialect
    architecture: str
    layers: int
    count: int

    def bare(self, name: str) -> str:
        """A stored name without prefixes, as a row of other layers has it."""
        return self.dialect.after_last(name, self.layers) if self.count else self.dialect.bare(name)

    def shown(self, name: str) -> str:
        """The checkpoint's own name for that of a row."""
        return self.dialect.as_draft(name, self.layers) if self.count else name

    def row_of(self, name: str) -> tuple[DraftRow, str] | None:
        """The row of a stored tensor that only draft layers have, and its name in Hugging Face; None of any other."""
        bare = self.dialect.bare(name)
        matches = ((pattern.fullmatch(bare), row) for pattern, row in self._patterns)
        found = next(((match, row) for match, row in matches if match), None)
        if found is None:
            return None
        first = self.layers if self.dialect.draft_layers else 0
        return found[1], _named(int(found[0][1]) + first, found[1])

    def shared(self) -> Iterator[tuple[str, str]]:
        """Yield tensors of the model that draft layers use, and the name of a copy in Hugging Face."""
        for name, row in self._rows if self.dialect.draft_layers else ():
            if "{l}" not in name:
                yield from ((name, _named(layer, row)) for layer in self._numbers)

    def own(self) -> Iterator[tuple[str, str]]:
        """Yield tensors that only draft layers have, and their names in Hugging Face; none if some may be lacking."""
        for name, row in self._rows if self.dialect.draft_layers else ():
            if "{l}" in name:
                yield from ((name.format(l=layer - self.layers), _named(layer, row)) for layer in self._numbers)

    def has(self, name: str) -> bool:
        """Whether a tensor of Hugging Face belongs to a draft layer."""
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return bool(self.count and match and int(match[1]) >= self.layers)

    @property
    def _numbers(self) -> range:
        return range(self.layers, self.layers + self.count)

    @cached_property
    def _rows(self) -> list[tuple[str, DraftRow]]:
        return [*self.dialect.draft_rows(self.architecture).items()] if self.count else []

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], DraftRow]]:
        own = [(name, row) for name, row in self._rows if "{l}" in name]
        return [(re.compile(re.escape(name).replace(r"\{l\}", r"(\d{1,9})")), row) for name, row in own]


def _named(layer: int, row: DraftRow) -> str:
    return f"model.layers.{layer}.{row.within}"
