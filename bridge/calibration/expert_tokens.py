"""Count the tokens that reach each expert during calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from bridge.calibration.quantizers import QuantizerBinding


class ExpertTokens:
    """`tokens`: checkpoint name of a layer's experts -> tokens of each, over the first run of the data through it.

    transformers has the experts of a layer in one module, which is called with every token's experts. A module that is
    called with other arguments is not counted.
    """

    def __init__(self, bindings: Iterable[QuantizerBinding]) -> None:
        self.tokens: dict[str, np.ndarray] = {}
        experts = (one for one in bindings if one.site.stacked or one.expert is not None)
        self._names = {one.module: one.site.experts for one in experts}  # live module -> checkpoint name

    def first(self, loop: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return the loop with its first run through each layer counted; an algorithm may run it more than once."""

        def run(model: Any) -> None:
            handles = [
                module.register_forward_pre_hook(partial(self._count, self._names[name]), with_kwargs=True)
                for name, module in model.named_modules()
                if name in self._names and self._names[name] not in self.tokens
            ]
            try:
                loop(model)
            finally:
                for handle in handles:
                    handle.remove()

        return run

    def _count(self, name: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        integers = ("torch.int64", "torch.int32")
        chosen = next((x for x in (*args, *kwargs.values()) if str(getattr(x, "dtype", "")) in integers), None)
        if chosen is None:
            return
        size = int(next(module.parameters()).shape[0])
        counts = np.bincount(chosen.detach().cpu().numpy().reshape(-1), minlength=size)[:size]
        self.tokens[name] = self.tokens.get(name, np.zeros(size, np.float32)) + counts.astype(np.float32)
