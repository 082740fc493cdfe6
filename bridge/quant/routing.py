"""Counts the tokens that each expert gets while a model is calibrated; must never change what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from bridge.quant.quantizers import Wire


class Routing:
    """`tokens`: the experts of one layer, by their checkpoint name -> tokens of each, over the first run of the data.

    transformers holds the experts of a layer in one module, which is called with the experts of every token. Of a
    module that is called with something else nothing is known, and nothing is said.
    """

    def __init__(self, wired: Iterable[Wire]) -> None:
        self.tokens: dict[str, np.ndarray] = {}
        self._names: dict[str, str] = {}  # live module -> checkpoint name
        self._ran = False
        for wire in wired:
            site = wire.site
            if site.stacked:
                self._names[wire.module] = site.module.rpartition(".")[0]
            elif wire.expert is not None:
                self._names[wire.module] = site.module.rpartition(f".{site.expert}.")[0]

    def first(self, loop: Callable[[Any], None]) -> Callable[[Any], None]:
        """The loop, whose first run is counted; an algorithm may run it more than once."""

        def run(model: Any) -> None:
            counted, self._ran = not self._ran, True
            handles = [
                model.get_submodule(module).register_forward_pre_hook(self._counter(name), with_kwargs=True)
                for module, name in (self._names if counted else {}).items()
            ]
            try:
                loop(model)
            finally:
                for handle in handles:
                    handle.remove()

        return run

    def _counter(self, name: str) -> Callable[..., None]:
        def count(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            whole = (
                x for x in (*args, *kwargs.values()) if str(getattr(x, "dtype", "")) in ("torch.int64", "torch.int32")
            )
            if (chosen := next(whole, None)) is None:
                return
            size = int(next(module.parameters()).shape[0])
            found = np.bincount(chosen.detach().cpu().numpy().reshape(-1), minlength=size)[:size]
            self.tokens[name] = self.tokens.get(name, np.zeros(size, np.float32)) + found.astype(np.float32)

        return count
