"""Cut a model into blocks.

A block is a part of the model that is read, run and dropped as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

LEAF = 1 << 20  # bytes of a module outside the layers (an embedding, a head) that are worth a block of their own


@dataclass(frozen=True)
class Block:
    """A module by its live name; `order` is its place among the blocks. `quantized`: it holds quantizers."""

    name: str
    order: int
    quantized: bool = False

    def holds(self, module: str) -> bool:
        """Whether a live module is this block or lies in it."""
        return module == self.name or module.startswith(f"{self.name}.")


def find_blocks(model: Any, quantized: Collection[str]) -> list[Block]:
    """Return the blocks of a model in the order of its modules; `quantized`: live modules that get quantizers.

    A block is an element of an outermost ModuleList, or another module that is quantized or large. What is left is
    small (norms, tables of positions) and stays in memory.
    """
    names: dict[int, str] = {}  # a module with two names is one block
    for name, module in _found(model, "", quantized):
        names.setdefault(id(module), name)
    ordered = [Block(name, order) for order, name in enumerate(names.values())]
    return [replace(block, quantized=any(map(block.holds, quantized))) for block in ordered]


def _found(module: Any, name: str, quantized: Collection[str]) -> Iterator[tuple[str, Any]]:
    from torch.nn import ModuleList

    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, ModuleList):
            yield from ((f"{path}.{at}", element) for at, element in child.named_children() if _bytes(element))
        elif path in quantized or (not any(child.children()) and _bytes(child) > LEAF):
            yield path, child
        else:
            yield from _found(child, path, quantized)


def _bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
