"""Code the weights of a model in memory on their device.

From a GPU only codes and scales are copied. Only what needs nothing but the weight: what calibration chose, smoothed
or cut is coded on the host.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.values import Slice
from bridge.planning.plan import Layout, Step
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.on_device import encode, has_codes
from bridge.streaming.context import ConversionContext, Sink

if TYPE_CHECKING:
    from torch import Tensor


def matrix_on_device(step: Step, context: ConversionContext) -> Tensor | None:
    """The weight of a quantized step where it is, in the axes that its layout has; None if the host codes it."""
    read = getattr(type(context.source), "on_device", None)  # of the class: wrappers read other values than their base
    if read is None or not step.site or not step.format or step.format.algorithm != "max" or step.feeds_as_writer:
        return None
    numeric, whole = step.format.weight, step.layout is Layout.WHOLE
    layout = step.site.layout if whole else "out_in"
    tiles = whole and len(numeric[0].block) == 2
    cut = numeric[0].per == "channel" and any(part.inner for part in step.inputs)
    if step.layout not in (Layout.ROWS, Layout.WHOLE) or tiles or cut or not has_codes(numeric, step.coding, layout):
        return None
    if any(part.rope or not part.source for part in step.inputs):
        return None
    found: list[Tensor] = []
    for part in step.inputs:
        tensor = read(context.source, part.source)
        if tensor is None:
            return None
        found.append(_rectangle(tensor, part))
    if len(found) == 1:
        return found[0]
    if len({(one.device, one.dtype) for one in found}) > 1:
        return None
    import torch

    return torch.cat(found)


def _rectangle(tensor: Tensor, part: Slice) -> Tensor:
    """The matrix of one slice; see `streaming.rows.Rows`."""
    matrix = tensor if part.expert is None else tensor[part.expert]
    matrix = matrix.reshape(len(matrix), math.prod(matrix.shape[1:]))
    matrix = matrix[slice(*(part.rows or (None,))), slice(*(part.cols or (None,)))]
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


def encode_on_device(step: Step, weight: Tensor, amax: float | None, sink: Sink) -> bool:
    """Code a weight of `matrix_on_device`; True if all of it is zero."""
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
        sink(outputs["weight" if part == "codes" else part], _storage(tensor), 0)
    return not bool(weight.any())


def _storage(tensor: Tensor) -> Array:
    """The storage array of a tensor; see `bridge.core.dtypes`."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    array: Array = tensor.cpu().view(getattr(torch, DTYPES[dtype].storage)).numpy()
    return array
