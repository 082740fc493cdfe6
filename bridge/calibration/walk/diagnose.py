"""Find the module that makes NaN or infinity in a block."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from bridge.calibration.modelopt import of_modelopt
from bridge.calibration.reference_outputs import why_nan
from bridge.calibration.walk.forwards import Batch
from bridge.tracker.finite import NAN, NanFinder, NotFinite, first_broken, worst
from bridge.tracker.tensors import tensors_in


def why_block_nan(
    block: str, module: Any, runs: Iterable[tuple[Batch, Any]], experts: Iterable[tuple[str, torch.Tensor]] = ()
) -> str:
    """Run a block for batches, and say which module in it makes the first NaN or infinity; "" if none does.

    `experts`: tensors that are read one by one.
    """
    with torch.no_grad(), NanFinder(module, block) as finder:
        for batch, _ in runs:
            batch.offloaded.offload()
    first = finder.first
    return blame(first.module or block, first.value, first.parameter or first_broken(experts)) if first else ""


def broken_tensor(modules: Iterable[tuple[str, Any]], experts: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the name of a tensor of a block, or of its experts, that holds NaN or infinity; "" if none does."""
    own = ((f"{name}.{key}", p) for name, module in modules for key, p in module.named_parameters(recurse=False))
    return first_broken(chain(own, experts))


def blame(module: str, value: str, broken: str = "") -> str:
    """Say that a module makes NaN or infinity; `broken`: a tensor of it that has one."""
    return why_nan(NotFinite(module, "forward", value, broken.removeprefix(f"{module}.")))


def why_modelopt_refused(block: str, error: Exception) -> str:
    """What ModelOpt says of a block in which all is finite; "" for an error of others."""
    if isinstance(cause := error.__cause__, AssertionError):
        words = (str(cause).strip().splitlines() or ["an assertion failed"])[0][:300]
        return (
            f"{block}: ModelOpt refused: {words}; its weights and activations are finite: choose another scheme, or "
            'keep its modules with a recipe (quant = "none")'
        )
    return f"{block}: {error}" if of_modelopt(error) else ""


def has_nan(value: Any) -> bool:
    """Whether a block's output holds NaN."""
    return worst(tensors_in(value)) == NAN
