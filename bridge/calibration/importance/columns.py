"""Choose INT4 codes by GPTQ (arXiv 2210.17323), largest inputs first.

Scales are fixed before: those of the least error weighted by inputs, of either sign (`codec.search`). The columns with
the largest inputs come first ("act-order" with static groups), so that the others make up for their errors. Inputs are
those of the unquantized model: every block can be done as soon as its inputs passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bridge.calibration.algorithms.codes import module_of, packed_nibbles, stored_axes
from bridge.calibration.importance.matrix import InputSquares
from bridge.calibration.importance.sums import inverse
from bridge.calibration.policies import settle_importance
from bridge.calibration.quantizers import QuantizerBinding
from bridge.core.errors import CalibrationError
from bridge.core.values import Numeric
from bridge.quant.codec.kernels import INTEGER_RANGE
from bridge.quant.codec.search import searched_scales
from bridge.quant.schemes.scheme import Scheme

if TYPE_CHECKING:
    from bridge.sources.live_models.checkpoint_names import Origin

COLUMNS = 128  # whose errors reach the columns behind them together, as one product


@dataclass(frozen=True)
class Coded:
    """A live matrix, float32 [out, in], the scales of its blocks and its codes. `parameter`: its live name."""

    parameter: str
    weight: Any
    scales: Any
    codes: Any


class ColumnCodes(InputSquares):
    """The input squares of all bindings, and codes of those with an ordered format, chosen block by block."""

    def __init__(self, bindings: Iterable[QuantizerBinding], origins: Mapping[str, Origin], scheme: Scheme) -> None:
        super().__init__(bindings)
        self._origins, self._scheme = origins, scheme
        self._by_weight: dict[str, list[QuantizerBinding]] = {}
        for one in self._bindings:
            if one.format.ordered:
                self._by_weight.setdefault(one.site.weight, []).append(one)
        self._ordered = {(one.module, one.parameter, -1) for own in self._by_weight.values() for one in own}
        self._grams: dict[tuple[str, str, int], Any] = {}
        self._same: dict[tuple[str, str, int], tuple[str, str, int]] = {}  # of readers of one input the first has sums
        self._last: tuple[Any, tuple[str, str, int]] | None = None

    def run(self, loop: Callable[[Any], None], model: Any) -> None:
        """Run the loop, watched, and choose the codes of the matrices that `model` holds."""
        super().run(loop, model)
        self._last = None
        held = dict(model.named_modules())
        for weight, own in self._by_weight.items():
            if not all(one.module in held for one in own):
                continue
            module = own[0].site.module
            # what cannot be used is refused when all blocks are done, if it is needed
            squares, _ = settle_importance({module: self.measured_of(own, held)}, self._scheme.policies, ())
            if module in squares:
                self._take(weight, own, self._coded(weight, own, held, squares[module]))
        for key in [key for key in self._grams if key[0] in held]:
            del self._grams[key]

    def _add(self, key: tuple[str, str, int], values: Any, output: Any = None) -> None:
        super()._add(key, values, output)
        if key not in self._ordered or key in self._same:
            return
        if self._last and self._last[0] is values and key not in self._grams:  # query, key and value
            self._same[key] = self._last[1]
            return
        self._last = values, key
        rows = values.detach().reshape(-1, values.shape[-1]).float()
        gram = rows.T @ rows
        self._grams[key] = self._grams[key].add_(gram) if key in self._grams else gram

    def _take(self, weight: str, own: Sequence[QuantizerBinding], coded: Sequence[Coded]) -> None:
        """Keep the codes of a stored weight, two to a byte, in its axes."""
        live = [one.codes.cpu().numpy() for one in coded]
        self.codes[own[0].site.module] = packed_nibbles(
            stored_axes(live, self._origins[weight], own[0].site.layout == "in_out")
        )

    def _coded(
        self, weight: str, own: Sequence[QuantizerBinding], held: Mapping[str, Any], importance: np.ndarray
    ) -> list[Coded]:
        """The codes of the live matrices that a stored weight is made of."""
        site, numeric, origin = own[0].site, own[0].format.weight[0], self._origins[weight]
        live, turned = [], site.layout == "in_out"
        for part in origin.parts:
            module = module_of(part, [one.module for one in own])
            key = (module, own[0].parameter, -1)
            values = getattr(held[module], own[0].parameter).detach().float()
            values = values.T.contiguous() if turned else values
            gram = self._grams[self._same.get(key, key)]
            # not rounded: a target's dtype of scales is not known here, and moves them by 2^-9 at most
            scales = torch.from_numpy(
                searched_scales(values.cpu().contiguous().numpy(), "float32", numeric, importance)
            ).to(values.device)
            try:
                damp = dict(self._scheme.options)["perc_damp"]
                codes = column_codes(values, gram.to(values.device), scales, numeric, damp)
                live.append(Coded(f"{module}.{own[0].parameter}", values, scales, codes))
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                raise CalibrationError(
                    f"{site.module}: GPTQ cannot invert the products of its inputs, which hold NaN or infinity, or "
                    f"differ too widely for float32: {error}; use int4:imatrix, or other data"
                ) from error
        return live


def column_codes(weight: Any, gram: Any, scales: Any, numeric: Numeric, damp: float) -> Any:
    """Return the int8 codes [out, in] of a weight, float32 [out, in], under scales [out, blocks].

    `gram`: X^T X times any factor, float32 [in, in]. `damp`: the part of its mean diagonal that is added to it. The
    columns come in descending order of the diagonal; the error of each, over its entry of the upper Cholesky factor of
    the inverse, is taken off the columns behind it.
    """
    (low, high), hessian = INTEGER_RANGE[numeric.dtype], gram.clone()
    silent = torch.diag(hessian) == 0
    hessian[silent, silent] = 1
    order = torch.argsort(torch.diag(hessian), descending=True, stable=True)
    hessian = hessian[order][:, order]
    hessian.diagonal().add_(damp * torch.diag(gram).sum() / (~silent).sum().clamp(min=1))
    factor = torch.linalg.cholesky(inverse(hessian), upper=True)
    steps = scales[:, order // numeric.block[0]]
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)  # of a block of zeros
    wide, codes = weight[:, order], torch.empty_like(weight, dtype=torch.int8)
    for begin in range(0, wide.shape[1], COLUMNS):
        end = min(begin + COLUMNS, wide.shape[1])
        part, errors = wide[:, begin:end].clone(), torch.empty_like(wide[:, begin:end])
        for at in range(end - begin):
            own, column = begin + at, part[:, at]
            step = steps[:, own]
            made = (column / step).round_().clamp_(low, high)
            codes[:, order[own]] = made.to(torch.int8)
            errors[:, at] = (column - made * step) / factor[own, own]
            part[:, at + 1 :] -= torch.outer(errors[:, at], factor[own, own + 1 : end])
        wide[:, end:] -= errors @ factor[begin:end, end:]
    return codes
