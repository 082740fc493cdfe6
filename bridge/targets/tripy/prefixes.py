"""Find the one prefix in which names of module and file differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of the names in a file and in a module; each is empty or ends with a dot."""

    file: str
    module: str

    def __str__(self) -> str:
        file, module = self.file[:-1], self.module[:-1]
        if not module:
            return f"names begin with {self.file!r} in the file only; make this module the part {file!r} of another"
        if not file:
            return f"names begin with {self.module!r} in the module only; load its part {module!r} alone"
        return f"names begin with {self.file!r} in the file, with {self.module!r} in the module; call it {file!r} there"

    def renamed(self, name: str) -> str:
        """The module's name for a name of the file."""
        return self.module + name[len(self.file) :] if name.startswith(self.file) else name


def found_prefixes(surplus: Sequence[str], lacking: Sequence[str]) -> Prefixes | None:
    """The only pair of prefixes that turns all names of one side into names of the other; None if there is none.

    >>> found_prefixes(["transformer.wte.weight", "transformer.h.0.bias"], ["body.wte.weight", "body.h.0.bias"])
    Prefixes(file='transformer.', module='body.')
    """
    candidates = {Prefixes(file, module) for file, module in _pairs(surplus, lacking)}
    candidates |= {Prefixes(file, module) for module, file in _pairs(lacking, surplus)}
    return candidates.pop() if len(candidates) == 1 else None


def _pairs(some: Sequence[str], whole: Sequence[str]) -> set[tuple[str, str]]:
    """Pairs of prefixes such that exchanging them turns all of `whole` into names of `some`."""
    if not whole:
        return set()
    known, owners = set(some), [name.split(".")[:-1] for name in whole]
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(min(owners), max(owners), strict=False))
    ours = "".join(f"{part}." for part, _ in shared)
    rest = whole[0].removeprefix(ours)
    theirs = [name.removesuffix(rest) for name in some if name == rest or name.endswith(f".{rest}")]
    pairs = [(prefix, ours) for prefix in theirs if all(prefix + name.removeprefix(ours) in known for name in whole)]
    return {_shortest(*pair) for pair in pairs}


def _shortest(*prefixes: str) -> tuple[str, str]:
    """Drop equal components at the end of both."""
    one, other = (prefix.split(".")[:-1] for prefix in prefixes)
    while one and other and one[-1] == other[-1]:
        one.pop(), other.pop()
    return "".join(f"{part}." for part in one), "".join(f"{part}." for part in other)
