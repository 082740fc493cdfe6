"""Take the clips of INT4 blocks that ModelOpt's awq_clip found.

A clip is the part of its amax that the scale of a block covers. ModelOpt keeps the product, an amax. The part also
holds where readers of one input get the mean of their pre-scales, after which ModelOpt measures amax anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from bridge.calibration.quantizers import QuantizerBinding
from bridge.core.arrays import np
from bridge.core.errors import CalibrationError
from bridge.quant.calibration import Applied

TOKENS = 64  # of a batch, on which ModelOpt searches: max_tokens_per_batch
ROWS = 1024  # of a weight, that it searches at once: max_co_batch_size
# Bytes of one product of inputs and rows, which is held twice. ModelOpt's 1,024 rows take 7.5 GB for an `in` of 28,672.
# It quantizes the whole weight for every part of the rows, so fewer rows cost time; the result is the same.
PRODUCT = 512 << 20
LOSSES = 11 * 4 / 128  # bytes a weight: a loss for every ratio and block


def search_bytes(inputs: int) -> int:
    """The bytes of one product of the search."""
    return 4 * TOKENS * rows_at_once(inputs) * inputs


def rows_at_once(inputs: int) -> int:
    """How many rows of a weight ModelOpt may search at once. `inputs`: the largest `in`, 0 without a matrix.

    >>> rows_at_once(2048), rows_at_once(28672)
    (1024, 73)
    """
    return min(ROWS, max(1, PRODUCT // (4 * TOKENS * max(inputs, 1))))


def contiguous(loop: Callable[[Any], None], modules: Iterable[str]) -> Callable[[Any], None]:
    """Return a loop whose inputs of `modules` are contiguous: ModelOpt's search of clips takes no others (Mamba's)."""

    def run(root: Any) -> None:
        with ExitStack() as hooks:
            for module in map(root.get_submodule, modules):
                hooks.enter_context(module.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:])))
            loop(root)

    return run


def set_aside(root: Any, bindings: Iterable[QuantizerBinding]) -> list[tuple[Any, str, Any]]:
    """Take from modules what ModelOpt kept of their search: (module, attribute, value).

    Another of its AWQ algorithms would otherwise end the search of these modules, too, and fail.
    """
    found = []
    for module in (root.get_submodule(name) for name in dict.fromkeys(binding.module for binding in bindings)):
        for attribute in ("awq_lite", "awq_clip"):
            if (search := getattr(module, attribute, None)) is not None:
                delattr(module, attribute)
                found.append((module, attribute, search))
    return found


def take_clips(root: Any, bindings: Iterable[QuantizerBinding]) -> dict[str, np.ndarray]:
    """Return the clips (out, blocks) by live module, and drop what ModelOpt kept of its search.

    A module that no token reached has none. The first of equal losses is taken, as ModelOpt does; a block without a
    loss that is a number keeps its amax, where ModelOpt's becomes zero.
    """
    clips = {}
    for name in dict.fromkeys(binding.module for binding in bindings if binding.format.clipped):
        module = root.get_submodule(name)
        search = getattr(module, "awq_clip", None)
        if search is None:
            continue
        del module.awq_clip
        if search.num_tokens:
            clips[name] = _best({ratio: loss.cpu().numpy() for ratio, loss in search.loss.items()})
    return clips


def _best(losses: Mapping[float, np.ndarray]) -> np.ndarray:
    shape = next(iter(losses.values())).shape
    best, clip = np.full(shape, np.inf, np.float32), np.ones(shape, np.float32)
    for ratio, loss in losses.items():
        better = loss < best
        best, clip = np.where(better, loss, best), np.where(better, np.float32(ratio), clip)
    return clip


def settle_clip(
    module: str, seen: Mapping[str, Mapping[str, np.ndarray]], blocks: tuple[int, int]
) -> tuple[np.ndarray, list[Applied]]:
    """Return the clips of a module, and the policy if no token reached it: all of its amax.

    Raises:
        CalibrationError: the matrix that was searched is not that of the checkpoint.
    """
    clip = seen["weight_clip"].get(module)
    if clip is None:
        return np.ones(blocks, np.float32), [Applied(module, "clip", "never seen", "ones", 1.0)]
    if clip.shape != blocks:
        raise CalibrationError(
            f"{module}: the model in memory has blocks {clip.shape}, and the checkpoint {blocks}; write a recipe that "
            'gives it quant = "int4_awq"'
        )
    return clip, []
