"""Learn rounding offsets and scales of a block's matrices by signed gradients.

SignRound (arXiv 2309.05516).

A matrix has an offset for each value, which moves it before it is rounded, and a factor for each scale. A step runs the
block with the quantized matrices, and moves offsets and factors against the signs of the gradients of the squared error
of the block's output. Signs alone count: the gradients of the quantized matrices suffice, and nothing of the quantizer
is differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from bridge.calibration.requirements import STEP_ROWS as ROWS
from bridge.core.values import Numeric
from bridge.quant.codec.kernels import INTEGER_RANGE
from bridge.tracker.tensors import tensors_in

FACTORS = (0.5, 1.5)  # of a scale, which is a good one at first
VALUES = 1 << 16  # of a matrix that are updated at once: they stay in the cache
# Of layer 4 of SmolLM2-135M, 20 steps on 32 rows, the error of the output falls from 48,378 with GPTQ's codes to
# 31,926. Other margins and rates: 0.015 and 0.5 41,661; 0.1 and 0.25 32,912; 0.25 and 0.25 37,083; 0.1 and 0.15 35,760.
# From the nearest codes under searched scales it falls from 98,821 to 55,112, with a rate of 1 for both.
MARGIN = 0.05  # of a code beyond the edge from which an offset starts: where GPTQ's choice is undone soon if it is none
OF_FACTORS = 0.4  # the rate of factors, as a part of that of offsets


class LearnedMatrix:
    """One live matrix [out, in]: its start scales [out, blocks], and what is learned.

    `offset` [out, in]: added to a value over its scale. `factor` [out, blocks]: of its scale. All are float32.
    """

    def __init__(self, weight: Any, scales: Any, codes: Any, numeric: Numeric, turned: bool = False) -> None:
        """`codes`: int8 [out, in], from which offsets start. `turned`: the parameter is [in, out]."""
        self.weight, self._turned = weight, turned
        self.scales, self._sign = torch.where(scales == 0, torch.ones_like(scales), scales), scales.sign()
        self.block, (self._low, self._high) = numeric.block[0], INTEGER_RANGE[numeric.dtype]
        self.factor = torch.ones_like(self.scales)
        self.offset = torch.zeros_like(weight)
        for part in self._parts():
            quotient = self.quotient(part)
            moved = codes[part] - (quotient.round()).clamp_(self._low, self._high)
            beyond = codes[part] - 0.5 * moved.sign() - quotient  # to the edge of the code, and a little more
            self.offset[part] = torch.where(moved == 0, torch.zeros_like(quotient), beyond + MARGIN * moved.sign())

    def _parts(self) -> Sequence[slice]:
        rows, cols = self.weight.shape
        step = max(1, VALUES // cols)
        return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]

    def wide(self, by_block: Any) -> Any:
        """What blocks have [out, blocks], for each value."""
        return by_block.repeat_interleave(self.block, 1)[:, : self.weight.shape[1]]

    def quotient(self, part: slice) -> Any:
        """Values over their scales."""
        return self.weight[part] / self.wide(self.scales[part] * self.factor[part])

    def codes(self, part: slice = slice(None)) -> Any:
        """The codes, float32."""
        return self.quotient(part).add_(self.offset[part]).round_().clamp_(self._low, self._high)

    def values(self, dtype: Any) -> Any:
        """What the codes stand for."""
        out = torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device)
        for part in self._parts():
            out[part] = self.codes(part).mul_(self.wide(self.scales[part] * self.factor[part]))
        return out.T.contiguous() if self._turned else out

    def step(self, gradient: Any, rate: float) -> None:
        """Move offsets and factors against the signs of their gradients; `gradient`: that of `values`."""
        gradient = gradient.T if self._turned else gradient
        for part in self._parts():
            slope, quotient = gradient[part].float(), self.quotient(part)
            code = (quotient + self.offset[part]).round_()
            inside = (code >= self._low) & (code <= self._high)
            code.clamp_(self._low, self._high)
            sign = self._sign[part]  # 0 of a block of zeros, which stays
            moved = (code - quotient * inside).mul_(slope)
            by_block = torch.nn.functional.pad(moved, (0, -moved.shape[1] % self.block))
            by_block = by_block.view(len(moved), -1, self.block).sum(2)
            self.factor[part] -= rate * OF_FACTORS * by_block.sign_().mul_(sign)
            self.offset[part] -= rate * slope.sign_().mul_(inside).mul_(self.wide(sign))
        self.factor.clamp_(*FACTORS)


@dataclass(frozen=True)
class Call:
    """How a block is called for a batch, and the output of the unquantized block. `rows`: those that are no padding."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    rows: Any
    size: int = ROWS

    def output(self, block: Any, quantized: Mapping[str, Any]) -> Any:
        """The first tensor of the block's output with other parameters; a block may change its inputs in place."""
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (self.args, dict(self.kwargs)))
        return tensors_in(torch.func.functional_call(block, dict(quantized), args, kwargs))[0]

    def moved(self, output: Any) -> Any:
        """How far an output lies from the target where it counts, float32 [rows, width]."""
        width = output.shape[-1]
        target = self.target.to(output.device)  # of a device it waits in the host's memory
        return output.reshape(-1, width)[self.rows].float() - target.reshape(-1, width)[self.rows].float()


def learn(
    block: Any, matrices: Mapping[str, LearnedMatrix], calls: Sequence[Call], steps: int, rate: float, seed: int
) -> tuple[float, float]:
    """Learn the matrices of a block, by the names of their parameters; return its loss before and after.

    The loss is the sum of squared errors over all calls. What is learned is dropped if it does not lessen it.
    A step moves by `rate` / `steps`, less from step to step until nothing is left.
    """
    start = {name: (one.offset.clone(), one.factor.clone()) for name, one in matrices.items()}
    before = _loss(block, matrices, calls)
    order, random = list[Call](), torch.Generator().manual_seed(seed)
    for at in range(steps):
        taken = 0
        gradients: dict[str, Any] = {}
        quantized = _quantized(block, matrices, grad=True)
        while taken < ROWS and (taken == 0 or order):
            order = order or [calls[i] for i in torch.randperm(len(calls), generator=random)]
            call = order.pop()
            taken += call.size
            for name, gradient in _gradients(block, quantized, call).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        for name, gradient in gradients.items():
            matrices[name].step(gradient, rate * (1 - at / steps) / steps)
    after = _loss(block, matrices, calls)
    if not after < before:
        for name, (offset, factor) in start.items():
            matrices[name].offset, matrices[name].factor = offset, factor
        return before, before
    return before, after


def _quantized(block: Any, matrices: Mapping[str, LearnedMatrix], grad: bool = False) -> dict[str, Any]:
    parameters = dict(block.named_parameters())
    return {name: one.values(parameters[name].dtype).requires_grad_(grad) for name, one in matrices.items()}


def _gradients(block: Any, quantized: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Those of the squared error by the quantized matrices, in units of its root, which half precision holds."""
    with torch.enable_grad():
        output = call.output(block, quantized)
        moved = call.moved(output).detach()
        seed = torch.zeros(
            output.numel() // output.shape[-1], output.shape[-1], dtype=output.dtype, device=output.device
        )
        seed[call.rows] = (moved / moved.square().mean().sqrt().clamp(min=1e-30)).to(output.dtype)
        found = torch.autograd.grad(output, [*quantized.values()], seed.view_as(output), allow_unused=True)
    return {name: gradient for name, gradient in zip(quantized, found, strict=True) if gradient is not None}


def _loss(block: Any, matrices: Mapping[str, LearnedMatrix], calls: Sequence[Call]) -> float:
    quantized, total = _quantized(block, matrices), 0.0
    for call in calls:
        total += float(call.moved(call.output(block, quantized)).square().sum(dtype=torch.float64))
    return total
