"""Errors of the outputs of each matrix under several rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bridge.calibration.quantizers import QuantizerBinding
from bridge.calibration.walk.options import Watch
from bridge.core.dtypes import to_float32
from bridge.quant.codec.arrays import Array
from bridge.sources.source import Source

Weights = Callable[[Iterable[str]], Mapping[str, Array]]  # of tensors: the values that a rule's codes decode to


class OutputErrors(Watch):
    """Sums |(V - W) x|^2 / sum |W x|^2 over inputs x of each matrix W, by rule and module; V is W as it is written.

    `rules`: name -> what its codes decode to. Inputs are those of the unquantized model. Experts are not seen.
    """

    def __init__(self, bindings: Iterable[QuantizerBinding], source: Source, rules: Mapping[str, Weights]) -> None:
        plain = [one for one in bindings if one.expert is None and not one.site.stacked and one.site.layout != "conv"]
        self._sites = {one.site.module: one for one in reversed(plain)}  # of several live matrices the first
        super().__init__({one.module for one in self._sites.values()})
        self._source, self._rules = source, rules
        self._grams: dict[str, Any] = {}
        self.found: dict[tuple[str, str], float] = {}

    def run(self, loop: Callable[[Any], None], model: Any) -> None:
        """Run the loop, and compare the matrices that `model` holds."""
        held = dict(model.named_modules())
        hooks = [
            held[name].register_forward_pre_hook(lambda _, args, name=name: self._add(name, args[0]))
            for name in self.modules
            if name in held
        ]
        try:
            with torch.no_grad():
                loop(model)
        finally:
            for hook in hooks:
                hook.remove()
        here = {module: one for module, one in self._sites.items() if one.module in self._grams}
        for rule, weights in self._rules.items():
            written = weights([one.site.weight for one in here.values()])
            for module, one in here.items():
                self.found[rule, module] = self._error(one, written[one.site.weight])
        self._grams.clear()

    def _add(self, name: str, values: Any) -> None:
        rows = values.detach().reshape(-1, values.shape[-1]).float()
        gram = rows.T @ rows
        self._grams[name] = self._grams[name].add_(gram) if name in self._grams else gram

    def _error(self, one: QuantizerBinding, written: Array) -> float:
        name = one.site.weight
        plain = torch.tensor(to_float32(self._source.read(name), self._source.specs[name].dtype))  # a copy
        moved, gram = torch.from_numpy(written).sub_(plain), self._grams[one.module].cpu()
        if one.site.layout == "in_out":
            plain, moved = plain.T, moved.T
        total = float(((plain @ gram) * plain).sum())
        return float(((moved @ gram) * moved).sum()) / total if total > 0 else 0.0
