"""Choose codes of four bits by GPTQ (arXiv 2210.17323), largest inputs first.

Scales are fixed before: those of the least error weighted by inputs (`codec.search`). The columns with
the largest inputs come first ("act-order" with static groups), so that the others make up for their errors. Inputs are
those of the unquantized model: every block can be done as soon as its inputs passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bridge._kernels.columns import fp4_columns, integer_columns
from bridge.calibration.algorithms.codes import module_of, packed_nibbles, stored_axes
from bridge.calibration.automatic import EVERY_EXPERT
from bridge.calibration.importance.matrix import InputSquares
from bridge.calibration.importance.sums import inverse
from bridge.calibration.policies import settle_importance
from bridge.calibration.quantizers import QuantizerBinding
from bridge.core.errors import CalibrationError
from bridge.core.values import InputGroup, Numeric
from bridge.quant.calibration import Applied, of_expert
from bridge.quant.codec.kernels import INTEGER_RANGE
from bridge.quant.codec.search import CODES, SCALES, searched_scales
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
    numbers: np.ndarray


class ColumnCodes(InputSquares):
    """The input squares of all bindings, and codes of those with an ordered format, chosen block by block."""

    def __init__(
        self,
        bindings: Iterable[QuantizerBinding],
        origins: Mapping[str, Origin],
        scheme: Scheme,
        groups: Iterable[InputGroup] = (),
    ) -> None:
        """`groups`: modules that share the scale above NVFP4's blocks."""
        super().__init__(bindings)
        self._origins, self._scheme = origins, scheme
        self._together = {module: group.modules for group in groups for module in group.modules}
        self._by_weight: dict[str, list[QuantizerBinding]] = {}
        for one in self._bindings:
            if one.format.ordered:
                self._by_weight.setdefault(one.site.weight, []).append(one)
        self._ordered = {(one.module, one.parameter) for own in self._by_weight.values() for one in own}
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
            for name, one in matrices_of(own, held):
                # what cannot be used is refused when all blocks are done, if it is needed
                squares, _ = settle_importance({name: self.measured_of(one, held)}, self._scheme.policies, ())
                if name in squares:
                    self._take(name, weight, one, self._coded(name, weight, one, held, squares[name]))
        for key in [key for key in self._grams if key[0] in held]:
            del self._grams[key]

    def _add(self, key: tuple[str, str, int], values: Any) -> None:
        super()._add(key, values)
        if key[:2] not in self._ordered or key in self._same:
            return
        if self._last and self._last[0] is values and key not in self._grams:  # query, key and value
            self._same[key] = self._last[1]
            return
        self._last = values, key
        rows = values.detach().reshape(-1, values.shape[-1]).float()
        gram = rows.T @ rows
        self._grams[key] = self._grams[key].add_(gram) if key in self._grams else gram

    def _take(self, name: str, weight: str, own: Sequence[QuantizerBinding], coded: Sequence[Coded]) -> None:
        """Keep the codes of a stored weight, two to a byte in its axes, and NVFP4's scales (out, blocks)."""
        site, block, origin = own[0].site, own[0].format.weight[0].block[0], self._origins[weight]
        turned = site.layout.endswith("in_out")

        def stored(live: list[np.ndarray]) -> np.ndarray:
            if own[0].expert is None:
                return stored_axes(live, origin, turned)
            return np.concatenate([one.T if turned else one for one in live], origin.axis)

        self.codes[name] = packed_nibbles(stored([one.codes.cpu().numpy() for one in coded]))
        if own[0].format.weight[0].two_level:
            joined = stored([one.numbers.repeat(block, axis=1)[:, : one.weight.shape[1]] for one in coded])
            self.block_scales[name] = np.ascontiguousarray((joined.T if turned else joined)[:, ::block])

    def _coded(
        self, name: str, weight: str, own: Sequence[QuantizerBinding], held: Mapping[str, Any], importance: np.ndarray
    ) -> list[Coded]:
        """The codes of the live matrices that a stored weight, or an expert of it, is made of."""
        site, numeric, origin = own[0].site, own[0].format.weight[0], self._origins[weight]
        above, live, turned, expert = None, [], site.layout.endswith("in_out"), own[0].expert
        if numeric.two_level:
            if site.module not in self.weight_amax:  # all experts of a stack have that of the stack
                largest = max(self._largest(one, held) for one in self._sharing(site.module, held))
                self.weight_amax[site.module] = np.asarray(largest, np.float32)
            own_amax = np.float32(self.weight_amax[site.module]) or np.float32(1)
            above = own_amax / np.float32(numeric.maxbound * numeric.largest_scale)
        for part in origin.parts:
            module = module_of(part, [one.module for one in own])
            key = (module, own[0].parameter, -1 if expert is None else expert)
            values = getattr(held[module], own[0].parameter).detach()
            if expert is not None:
                values = part.of(values)[expert] if site.stacked else part.of(values)
            values = values.float().T.contiguous() if turned else values.float()
            gram = self._gram_of(name, key, importance)
            # not rounded: a target's dtype of scales is not known here, and moves them by 2^-9 at most
            divisors = None if above is None else SCALES[numeric.scale_dtype] * above
            found = searched_scales(values.cpu().contiguous().numpy(), "float32", numeric, importance, divisors)
            try:
                damp = dict(self._scheme.options)["perc_damp"]
                steps = torch.from_numpy(found).to(values.device)
                codes = column_codes(values, gram.to(values.device), steps, numeric, damp)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                rule = f"{self._scheme.name.partition(':')[0]}:imatrix"
                raise CalibrationError(
                    f"{name}: GPTQ cannot invert the products of its inputs, which hold NaN or infinity, or "
                    f"differ too widely for float32: {error}; use {rule}, or other data"
                ) from error
            numbers = found if divisors is None else CODES[numeric.scale_dtype][np.searchsorted(divisors, found)]
            live.append(Coded(f"{module}.{own[0].parameter}", values, steps, codes, numbers))
        return live

    def _gram_of(self, name: str, key: tuple[str, str, int], importance: np.ndarray) -> Any:
        """X^T X of a matrix; of an expert that few tokens reached its diagonal, with which each value is rounded."""
        tokens = self._tokens.get(key, 0)
        if key[2] < 0 or tokens >= EVERY_EXPERT:
            return self._grams[self._same.get(key, key)]
        if tokens:  # none at all is told of its importance
            case, policy = f"fewer than {EVERY_EXPERT} tokens", "codes by importance alone, without GPTQ"
            self.applied.append(Applied(name, "codes", case, policy, tokens))
        return torch.diag(torch.from_numpy(importance))

    def _sharing(self, module: str, held: Mapping[str, Any]) -> list[QuantizerBinding]:
        """The bindings in one format whose weights share the scale above NVFP4's blocks with a module's."""
        names = self._together.get(module, (module,))
        return [
            one for one in self._bindings if one.site.module in names and one.format.rescaled and one.module in held
        ]

    def _largest(self, binding: QuantizerBinding, held: Mapping[str, Any]) -> float:
        weight = getattr(held[binding.module], binding.parameter).detach()
        if binding.expert is not None:
            weight = weight[binding.expert][slice(*binding.rows) if binding.rows else slice(None)]
        return float(weight.abs().max())


def matrices_of(
    own: Sequence[QuantizerBinding], held: Mapping[str, Any]
) -> Iterator[tuple[str, Sequence[QuantizerBinding]]]:
    """The matrices of a stored weight by name: each expert of a stack, or the weight itself."""
    first = own[0]
    if not first.site.stacked:
        yield first.site.module, own
        return
    for number in range(len(getattr(held[first.module], first.parameter))):
        yield (
            of_expert(first.site.module, number),
            [replace(one, expert=number) for one in own if one.joint or one.expert == number],
        )


def column_codes(weight: Any, gram: Any, scales: Any, numeric: Numeric, damp: float) -> Any:
    """Return the int8 codes [out, in] of a weight, float32 [out, in], under scales [out, blocks].

    `gram`: X^T X times any factor, float32 [in, in]. `damp`: the part of its mean diagonal that is added to it. The
    columns come in descending order of the diagonal; the error of each, over its entry of the upper Cholesky factor of
    the inverse, is taken off the columns behind it.
    """
    hessian = gram.clone()
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
        part, step, own = (
            np.array(one.cpu().numpy(), order="C", copy=True)
            for one in (wide[:, begin:end], steps[:, begin:end], factor[begin:end, begin:end])
        )
        made, errors = np.empty(part.shape, np.int8), np.empty_like(part)
        if numeric.dtype in INTEGER_RANGE:
            integer_columns(part, step, own, *map(float, INTEGER_RANGE[numeric.dtype]), made, errors)
        else:
            fp4_columns(part, step, own, made, errors)
        codes[:, order[begin:end]] = torch.from_numpy(made).to(codes.device)
        wide[:, end:] -= torch.from_numpy(errors).to(wide.device) @ factor[begin:end, end:]
    return codes
