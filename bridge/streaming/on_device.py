"""Code the weights of a model in memory on their device.

From a GPU only codes and scales are copied, or nothing. Only what needs nothing but the weight: what calibration
chose, smoothed or cut is coded on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bridge.core.dtypes import DTYPES, FLOATS
from bridge.core.errors import SourceError
from bridge.core.values import Slice
from bridge.planning.plan import Layout, Output, Step
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.on_device import encode, has_codes
from bridge.streaming.context import ConversionContext, Sink

if TYPE_CHECKING:
    from torch import Tensor


def matrix_on_device(step: Step, context: ConversionContext) -> Tensor | None:
    """The weight of a quantized step where it is, in the axes that its layout has; None if the host codes it."""
    if not step.site or not step.format or step.format.algorithm != "max" or step.feeds_as_writer:
        return None
    numeric, whole = step.format.weight, step.layout is Layout.WHOLE
    layout = step.site.layout if whole else "out_in"
    tiles = whole and len(numeric[0].block) == 2
    cut = numeric[0].per == "channel" and any(part.inner for part in step.inputs)
    if step.layout not in (Layout.ROWS, Layout.WHOLE) or tiles or cut or not has_codes(numeric, step.coding, layout):
        return None
    found: list[Tensor] = []
    for part in step.inputs:
        matrix = _rectangle(part, context)
        if matrix is None:
            return None
        found.append(matrix)
    if len(found) == 1:
        return found[0]
    if len({(one.device, one.dtype) for one in found}) > 1:
        return None
    import torch

    return torch.cat(found)


def plain_on_device(step: Step, context: ConversionContext) -> Tensor | None:
    """A copy of a plain tensor where it is, in the dtype that is written; None if the host writes, or refuses, it."""
    if step.layout is not Layout.PLAIN or step.folded or step.shift or step.feeds_as_writer or len(step.inputs) != 1:
        return None
    spec, dtype = context.plan.sources[step.source], step.outputs[0].spec.dtype
    if not spec.shape or spec.dtype not in FLOATS or dtype not in FLOATS:
        return None
    matrix = _rectangle(step.inputs[0], context)
    if matrix is None:
        return None
    import torch

    amax_on_device(step, matrix.contiguous())
    written = matrix.to(getattr(torch, dtype), copy=True, memory_format=torch.contiguous_format)
    return written if bool(written.isfinite().all()) else None


def _rectangle(part: Slice, context: ConversionContext) -> Tensor | None:
    """The matrix of one slice where it is; see `streaming.rows.Rows`."""
    read = getattr(type(context.source), "on_device", None)  # of the class: wrappers read other values than their base
    if read is None or part.rope or not part.source:
        return None
    stacked = part.expert is not None
    tensor: Tensor | None = read(context.source, part.source, None if stacked else part.rows)
    if tensor is None:
        return None
    matrix = tensor[part.expert, slice(*(part.rows or (None,)))] if stacked else tensor
    matrix = matrix.reshape(len(matrix), math.prod(matrix.shape[1:]))
    matrix = matrix[:, slice(*(part.cols or (None,)))]
    if part.step > 1:
        matrix = matrix[:, :: part.step] if part.transposed else matrix[:: part.step]
    return matrix.T if part.transposed else matrix


def amax_on_device(step: Step, weight: Tensor) -> float:
    """max |x| of a weight; SourceError if it holds NaN or infinity."""
    from bridge.quant.codec.torch_codes import amax

    largest = float(amax(weight))
    if not math.isfinite(largest):
        raise SourceError(
            f"{step.source}: holds NaN or infinity; nothing was written. Repair the checkpoint, or get it again"
        )
    return largest


def coded_on_device(step: Step, weight: Tensor, amax: float | None) -> Iterator[tuple[Output, Tensor]]:
    """Code a weight of `matrix_on_device`; its codes and scales are there when it returns, and stay there."""
    assert step.site and step.format
    outputs = {output.part: output for output in step.outputs}
    parts = encode(
        weight,
        step.format.weight,
        layout=step.site.layout if step.layout is Layout.WHOLE else "out_in",
        transpose=step.layout is Layout.WHOLE and step.transpose,
        coding=step.coding,
        amax=amax,
        name=step.source,
    )
    for part, tensor in parts.items():
        yield outputs["weight" if part == "codes" else part], tensor


def encode_on_device(step: Step, weight: Tensor, amax: float | None, sink: Sink) -> bool:
    """Copy the codes and scales of a weight of `matrix_on_device` to the host; True if all of it is zero."""
    for output, tensor in coded_on_device(step, weight, amax):
        sink(output, _storage(tensor), 0)
    return not bool(weight.any())


def _storage(tensor: Tensor) -> Array:
    """The storage array of a tensor; see `bridge.core.dtypes`."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    array: Array = tensor.cpu().view(getattr(torch, DTYPES[dtype].storage)).numpy()
    return array
