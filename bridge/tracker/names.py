"""Name modules: the class of their root, then the path below it."""

from __future__ import annotations

import weakref

from torch.nn import Module


class Names:
    """Names of modules, which are kept by weak reference. The paths are those of `named_modules`.

    `root`: its modules are known from the beginning; `below`: its own path in a model. Without it, a module that is
    called first is a root, until one that holds it is called.
    """

    def __init__(self, root: Module | None = None, below: str = "") -> None:
        self._below = below
        self._known: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()
        self._roots: dict[str, weakref.ref[Module]] = {}
        self._given = None if root is None else weakref.ref(root)
        self.head = ""
        if root is not None:
            self.head = self._add_root(root)

    def get(self, module: Module | None) -> str | None:
        """The name of a module, None if it has none yet."""
        return None if module is None else self._known.get(module)

    def of(self, module: Module, inside: Module | None) -> str:
        """The name of a module that is called; `inside`: the module whose forward calls it."""
        name = self.get(module)
        given = self._given() if self._given else None
        for holder in () if name else (inside, given):  # it was added after their first call
            if holder is not None:
                self._add_below(holder)
                if name := self.get(module):
                    break
        return name or self._add_root(module)

    def path(self, name: str) -> str:
        """The path of a module of the given root in its model, by its name; others keep theirs, and so does a model."""
        head, _, rest = name.partition(".")
        own = ".".join(part for part in (self._below, rest) if part)
        return own if own and head == self.head else name

    def _add_root(self, module: Module) -> str:
        kind = name = type(module).__name__
        number = 1
        while name in self._roots and self._roots[name]() is not None:
            number += 1
            name = f"{kind}#{number}"
        self._roots[name] = weakref.ref(module)
        self._known[module] = name
        self._add_below(module)
        return name

    def _add_below(self, holder: Module) -> None:
        """Name all modules below one; a root among them is a root no more, and what is below it changes its name."""
        name, below = self._known[holder], {module: path for path, module in holder.named_modules() if path}
        renamed = {head for head, root in self._roots.items() if root() in below and head != self.head}
        for module, path in below.items():
            before = self.get(module)
            if before is None or before.partition(".")[0] in renamed:
                self._known[module] = f"{name}.{path}"
        for head in renamed:
            del self._roots[head]
