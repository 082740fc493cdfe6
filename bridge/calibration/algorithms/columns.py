"""Let ModelOpt's GPTQ quantize one block of a weight for each column.

`gptq_blockwise_update` of nvidia-modelopt 0.47 quantizes all of the weight once for each column, and takes one column
of the result: 28,672 times a whole matrix for `down_proj` of Llama 70B. Its arithmetic is element by element, so that a
quantizer of the one block gives the same bits. NVFP4 blocks are quantized in plain torch without CUDA.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

BACKEND = "qbridge"  # of ModelOpt's quantizers: those that we compute, or whose GPTQ we help
_SHAPES = ("_original_shape", "_block_reshape_size", "_amax_shape_for_export", "_padding", "_slices")


def install(tensor_quantizers: Any, calibration_tools: Any, calibrations: Any) -> None:
    """Register the backend with ModelOpt's modules, and switch off the progress bar of its searches."""
    if not tensor_quantizers.is_registered_quant_backend(BACKEND):
        tensor_quantizers.register_quant_backend(BACKEND, _quantized)
        calibration_tools.register_gptq_helper(BACKEND, _helper(calibration_tools))
        calibrations.tqdm = partial(calibrations.tqdm, disable=True)


def _quantized(inputs: Any, quantizer: Any) -> Any:
    """What the quantizer does without a backend; NVFP4 blocks in plain torch if they are not on a GPU."""
    sizes = quantizer.block_sizes or {}
    if sizes.get("type") == "dynamic" and "scale_bits" not in sizes:
        return _in_groups(inputs, quantizer, sizes[-1])
    if sizes.get("type") == "dynamic" and sizes.get("scale_bits") == (4, 3) and not inputs.is_cuda:
        from bridge.calibration.algorithms.fp4 import of_blocks

        return of_blocks(inputs, quantizer._get_amax(inputs), sizes[-1])
    quantizer.backend = None
    try:
        return quantizer._fake_quantize(inputs)
    finally:
        quantizer.backend = BACKEND


def _in_groups(inputs: Any, quantizer: Any, size: int) -> Any:
    """Groups of inputs as ModelOpt quantizes tokens: its own groups at run time take one shape of inputs only."""
    from torch.nn.functional import pad

    short = -inputs.shape[-1] % size
    padded, sizes, axis = pad(inputs, (0, short)), quantizer._block_sizes, quantizer._axis
    quantizer.backend, quantizer._block_sizes, quantizer._axis = None, None, 0
    try:
        found = quantizer._fake_quantize(padded.reshape(-1, size))
    finally:
        quantizer.backend, quantizer._block_sizes, quantizer._axis = BACKEND, sizes, axis
    return found.reshape(padded.shape)[..., : inputs.shape[-1]]


def _helper(tools: Any) -> type:
    class ByBlocks(tools.GPTQHelper):  # type: ignore[misc]
        def _blockwise_update(self, block_size: int) -> None:
            quantized = Columns(self.module.weight_quantizer, self.weight.shape)
            tools.gptq_blockwise_update(self.weight, self.h_inv, block_size, quantized)

    return ByBlocks


class Columns:
    """Stands for a weight's quantizer, and for the quantized weight: only columns that are asked for are computed."""

    def __init__(self, quantizer: Any, shape: tuple[int, int]) -> None:
        self._quantizer, self._rows, self._width = quantizer, shape[0], quantizer.block_sizes[-1]
        self._amax = quantizer._amax.reshape(self._rows, -1)
        self._block, self._of_block = -1, quantizer
        self._weight: Any = None

    def __call__(self, weight: Any) -> Columns:
        self._weight = weight
        return self

    def __getitem__(self, at: tuple[slice, int]) -> Any:
        """One column of the quantized weight."""
        number, column = divmod(at[1], self._width)
        if number != self._block:
            self._block, self._of_block = number, self._quantizer_of(number)
        begin = number * self._width
        part = self._weight[:, begin : begin + self._width].contiguous()
        return self._of_block(part)[:, column]

    def _quantizer_of(self, number: int) -> Any:
        """A copy of the quantizer with the amax of one block of each row."""
        new = copy.copy(self._quantizer)
        new.__dict__["_buffers"] = dict(self._quantizer._buffers)
        for name in _SHAPES:
            new.__dict__.pop(name, None)
        new._buffers["_amax"] = self._amax[:, number : number + 1].contiguous()
        return new
