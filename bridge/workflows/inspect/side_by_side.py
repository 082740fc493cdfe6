"""Compare the modules of a quantized model with those of its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.calibration.reference_outputs import runner
from bridge.workflows.inspect.hooks.watch import first_tensor, output_tensor

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
    total = sum(len(tokens) for tokens in every)
    step = max(1, total // ROWS)
    ends = [sum(len(tokens) for tokens in every[: at + 1]) for at in range(len(every))]
    return [
        tokens[torch.arange(-(end - len(tokens)) % step, len(tokens), step)]
        for tokens, end in zip(every, ends, strict=True)
    ]


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Difference:
    """Compare rows, in float64."""
    x2 = y2 = xy = error = 0.0
    for x, y in zip(expected, found, strict=True):
        one, other = x.double(), y.double()
        x2, y2, xy = x2 + float(one.square().sum()), y2 + float(other.square().sum()), xy + float((one * other).sum())
        error += float((other - one).square().sum())
    both = math.sqrt(x2) * math.sqrt(y2)
    ratio = math.sqrt(y2 / x2) if x2 else (1.0 if not y2 else math.inf)
    sqnr = None if error == 0 else 10 * math.log10(x2 / error) if x2 and math.isfinite(error) else -math.inf
    return Difference(sqnr, xy / both if both else float(x2 == y2), ratio)


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
        tokens = len(_tokens(batch, padding=True))

        def keep(kept: list[Tensor], tensor: Tensor | None, rows: Tensor = rows, tokens: int = tokens) -> bool:
            if tensor is None or not tensor.is_floating_point() or tensor.ndim < 2:
                return False
            flat = tensor.detach().reshape(-1, tensor.shape[-1])
            if len(flat) != tokens:
                return False
            kept.append(flat[rows.to(flat.device)].float().cpu())
            return True

        with _hooked(model, with_inputs, found, keep):
            run(batch)
    return {name: kept for name, kept in found.items() if kept.outputs}


@contextmanager
def _hooked(model: Any, with_inputs: frozenset[str], found: dict[str, _Rows], keep: Any) -> Iterator[None]:
    """Hooks on all modules but the model itself; those that quantize inputs run later."""
    handles: list[Any] = []

    def watch(name: str, module: Any) -> None:
        def before(_: Any, inputs: Any, keywords: Any) -> None:
            if name in with_inputs:
                keep(found.setdefault(name, _Rows()).inputs, first_tensor(inputs, keywords)[1])

        def after(_: Any, __: Any, output: Any) -> None:
            keep(found.setdefault(name, _Rows()).outputs, output_tensor(output))

        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    try:
        for name, module in model.named_modules():
            if name:
                watch(name, module)
        yield
    finally:
        for handle in handles:
            handle.remove()


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
