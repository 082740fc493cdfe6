"""Compare the modules of a quantized model with those of its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from bridge.calibration.reference_outputs import runner
from bridge.verification.weight_error import ErrorSums
from bridge.workflows.inspect.hooks.watch import Watch, output_tensor

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64  # tokens of each module that are compared
Batches = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Difference:
    """Between two outputs x, of the source, and y. `sqnr`: 10 log10(sum x^2 / sum (y - x)^2) dB, None if equal.

    `cosine`: x.y / (|x| |y|); `norm_ratio`: |y| / |x|. Both are 1 for zeros on both sides.
    """

    sqnr: float | None
    cosine: float
    norm_ratio: float

    @property
    def decibels(self) -> float:
        """`sqnr`, infinite where both are equal."""
        return math.inf if self.sqnr is None else self.sqnr


@dataclass(frozen=True)
class Compared:
    """One module. `accumulated`: with the input that the quantized model gives it; `alone`: with the source's input.

    `alone` is None for modules that are no matrix: their own error is that of the matrices in them. `role`: that of a
    matrix, "" where no table has it.
    """

    module: str
    kind: str
    accumulated: Difference
    alone: Difference | None
    role: str = ""


def side_by_side(source: Any, twin: Any, batches: Batches, matrices: Mapping[str, str]) -> list[Compared]:
    """Run the same batches through two models with modules of the same names, one after the other.

    Args:
        source, twin: of transformers; `twin` is the quantized one.
        matrices: names of the modules that also run alone, and their roles.

    Some rows of each module's output are kept, those of the same tokens in both: ROWS times the sum of all widths in
    memory. Modules whose rows are not the tokens of a batch (routed experts, pooled outputs) are left out.
    """
    chosen = rows_of(batches)
    expected = _run(source, batches, chosen, frozenset(matrices))
    found = _run(twin, batches, chosen, frozenset())
    kinds = {name: type(module).__name__ for name, module in source.named_modules()}
    rows: list[Compared] = []
    for name, own in expected.items():
        theirs = found.get(name)
        if theirs is None or [x.shape for x in theirs.outputs] != [x.shape for x in own.outputs]:
            continue
        alone = _alone(twin.get_submodule(name), own) if own.inputs else None
        both = difference(own.outputs, theirs.outputs)
        rows.append(Compared(name, kinds[name], both, alone, matrices.get(name, "")))
    return rows


def rows_of(batches: Batches) -> list[Tensor]:
    """For each batch the positions in its flattened tokens that are compared: ROWS in all, no padding."""
    import torch

    every = [_tokens(batch) for batch in batches]
    step = max(1, sum(map(len, every)) // ROWS)
    return [
        tokens[torch.arange(-(end - len(tokens)) % step, len(tokens), step)]
        for tokens, end in zip(every, accumulate(map(len, every)), strict=True)
    ]


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Difference:
    """Compare rows, in float64."""
    sums = ErrorSums()
    for x, y in zip(expected, found, strict=True):
        one, other = x.double(), y.double()
        dot, source, decoded = float((one * other).sum()), float(one.square().sum()), float(other.square().sum())
        sums += ErrorSums(dot, source, decoded, float((other - one).square().sum()))
    noise = sums.sqnr if math.isfinite(sums.error) else -math.inf
    return Difference(noise if sums.error else None, sums.cosine, sums.norm_ratio)


@dataclass
class _Rows:
    """Rows of one module, a tensor a call: (rows, features), float32."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


def _run(model: Any, batches: Batches, chosen: Sequence[Tensor], with_inputs: frozenset[str]) -> dict[str, _Rows]:
    """Run all batches and keep the chosen rows of each module, in the order in which modules finish."""
    found: dict[str, _Rows] = {}
    run = runner(model)
    for batch, rows in zip(batches, chosen, strict=True):
        keep = partial(_keep, found, rows, len(_tokens(batch, padding=True)))
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if name:
                    wanted = {"activation", "output"} if name in with_inputs else {"output"}
                    hooks.callback(Watch(module, frozenset(wanted), partial(keep, name)).detach)
            run(batch)
    return {name: kept for name, kept in found.items() if kept.outputs}


def _keep(found: dict[str, _Rows], rows: Tensor, tokens: int, module: str, name: str, tensor: Tensor, _: Any) -> None:
    """Keep the chosen rows of what goes into a module or comes out, if it has one for each token."""
    kept = found.setdefault(module, _Rows())
    if tensor.is_floating_point() and tensor.ndim > 1:
        flat = tensor.reshape(-1, tensor.shape[-1])
        if len(flat) == tokens:
            (kept.outputs if name == "output" else kept.inputs).append(flat[rows.to(flat.device)].float().cpu())


def _alone(module: Any, own: _Rows) -> Difference | None:
    """The error that one matrix and the codes of its input make on the source's input."""
    import torch

    if len(own.inputs) != len(own.outputs):
        return None
    param = next(module.parameters())
    with torch.no_grad():
        outputs = [module(rows.to(param.device, param.dtype)) for rows in own.inputs]
    return difference(own.outputs, [found.float().cpu() for found in map(output_tensor, outputs) if found is not None])


def _tokens(batch: Mapping[str, Any], padding: bool = False) -> Tensor:
    """Positions of the flattened tokens of a batch; of its first input without ids."""
    import torch

    ids = batch.get("input_ids", next(iter(batch.values())))
    mask = batch.get("attention_mask")
    count = ids.shape[0] * (ids.shape[1] if ids.ndim > 1 else 1)
    if padding or mask is None or mask.ndim != 2 or mask.numel() != count:
        return torch.arange(count)
    kept: Tensor = mask.reshape(-1).nonzero().reshape(-1)
    return kept
