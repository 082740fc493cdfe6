"""What a report says of a pruned model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.core.text import number


@dataclass(frozen=True)
class Pruning:
    """`dims`: name, size before and after, of those that changed. `values`, `bytes`: before and after.

    `dropped_layers`: their numbers. `share`: of each dim the least part, over layers, of the summed squares of its
    scores that is kept; of `vocab` the part of the data's tokens. `repaired`: matrices that were solved anew.
    `perplexity`: on the rows that were held out of the data, before and after; () if the scores took no run, or tokens
    went. `sparse`: the method that chose zeros, "" without any; `sparsified`: the matrices that have two in every four.
    `silenced`: the relative L2 distance of its outputs from those of the whole model whose other parts are silent, in
    float32; None if they were not compared.
    """

    dims: tuple[tuple[str, int, int], ...]
    values: tuple[int, int]
    bytes: tuple[int, int]
    dropped_layers: tuple[int, ...] = ()
    share: Mapping[str, float] = field(default_factory=dict)
    repaired: int = 0
    perplexity: tuple[float, ...] = ()
    sparse: str = ""
    sparsified: int = 0
    silenced: float | None = None

    def line(self) -> str:
        """Everything in one line."""
        if self.sparse:
            text = (
                f"2:4 zeros in {number(self.sparsified, 'matrix', 'matrices')} ({self.sparse}); as many bytes as before"
            )
            return text + self._perplexity()
        text = ", ".join(f"{dim} {before:,} -> {after:,}" for dim, before, after in self.dims)
        text += f"; {self.values[0]:,} -> {self.values[1]:,} values ({self.values[1] / self.values[0]:.0%})"
        if self.repaired:
            text += f", {self.repaired:,} matrices repaired"
        return text + self._perplexity() + self._silenced()

    def _silenced(self) -> str:
        if self.silenced is None:
            return ""
        return f"; outputs are those of the whole model with the other parts silent, within {self.silenced:.1e}"

    def _perplexity(self) -> str:
        if not self.perplexity:
            return ""
        before, after = self.perplexity
        return f"; perplexity {before:.2f} -> {after:.2f} on text held out"
