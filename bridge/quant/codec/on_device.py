"""Encode a weight on its device, with the bytes of the CPU.

Of a weight on a GPU only codes and scales travel. The bytes are those of `encode.encode`. A tensor of the CPU, and a
format that has no other way, takes the kernels of the CPU; one of CUDA those of Triton where they have its format;
what is left takes plain torch, without a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.dtypes import DTYPES, FLOATS
from bridge.core.errors import SourceError
from bridge.core.text import named
from bridge.core.values import MAXBOUND, Encoding, Numeric
from bridge.quant.codec import arrays
from bridge.quant.codec.blocks import FOUR_BITS, PLAIN, grid, packing, stored_shapes
from bridge.quant.codec.encode import encode as encode_on_host

if TYPE_CHECKING:
    from torch import Tensor

HOST, TORCH, TRITON = "host", "torch", "triton"  # the ways
PACKED = ("in", "out", "int32")  # packings that they all have
ELSEWHERE = ("cpu", "meta", "mps")  # whose tensors go to the host: torch has no FP8 on MPS
OLDEST = 8, 0  # the compute capability that Triton wants


class Checks:
    """Maxima of weights that are on their way; `check` looks at all of them, which waits for each device once."""

    def __init__(self) -> None:
        self._largest: list[tuple[str, Tensor]] = []

    def add(self, name: str, largest: Tensor) -> None:
        """largest: max |x| of the weight `name`, or of each of its blocks."""
        self._largest.append((name, largest.max()))

    def check(self) -> None:
        """SourceError that names the weights that hold NaN or infinity; those added are forgotten."""
        added, self._largest = self._largest, []
        values = on_host({str(at): tensor for at, (_, tensor) in enumerate(added)}).values()
        bad = [name for (name, _), value in zip(added, values, strict=True) if not np.isfinite(value)]
        if bad:
            raise SourceError(
                f"{named(bad)}: holds NaN or infinity; such weights are refused: repair the model, or take "
                "an earlier one"
            )


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Numbers of tensors of one value each; each device is waited for once."""
    import torch

    found: dict[str, float] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        there = [name for name, tensor in tensors.items() if tensor.device == device]
        found |= zip(there, torch.stack([tensors[name].float() for name in there]).tolist(), strict=True)
    return {name: found[name] for name in tensors}


def best_way(weight: Tensor) -> str:
    """How a tensor is encoded on its device: `HOST`, `TRITON` or `TORCH`."""
    import torch

    device = weight.device
    if device.type in ELSEWHERE:
        return HOST
    compiles = device.type == "cuda" and find_spec("triton") and torch.cuda.get_device_capability(device) >= OLDEST
    return TRITON if compiles else TORCH


def has_codes(numeric: tuple[Numeric, ...], coding: Encoding, layout: str = "out_in") -> bool:
    """Whether codes of this format can be made without the kernels of the CPU: no searched ones, no zero points."""
    first = numeric[0]
    known = first.dtype in MAXBOUND and first.per in ("tensor", "channel", "block") and layout != "conv"
    return known and not (first.search or first.zero_points or coding.values) and coding.packed in PACKED


def encode(
    weight: Tensor,
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Encoding = PLAIN,
    amax: float | Tensor | None = None,
    name: str = "weight",
    checks: Checks | None = None,
) -> dict[str, Tensor]:
    """Quantize one weight: {"codes", "scale"} and "scale_2" if the scheme has a second scale, on its device.

    weight: bfloat16, float16 or float32, a plain tensor: of a sharded one, its local part. It is not changed.
    amax: of the whole weight or of all that share its scale, if known; else it is computed, which reads it twice.
    checks: gets the maxima, and the caller ends with `checks.check()`; without it a NaN or an infinity is a SourceError
    here, which waits for the device.

    The other arguments, and the bytes, are those of `bridge.quant.codec.encode.encode`. Tensors have the dtypes of
    `stored_shapes`; two 4-bit codes are a byte of uint8.

    >>> import torch
    >>> parts = encode(torch.full((2, 6), 3.0), (Numeric("int8", "channel"),))
    >>> parts["codes"].dtype, parts["codes"][1].tolist()
    (torch.int8, [127, 127, 127, 127, 127, 127])
    """
    shapes = stored_shapes(numeric, tuple(weight.shape), layout, transpose, name, coding)
    dtype, way, weight = str(weight.dtype).removeprefix("torch."), best_way(weight), weight.detach()
    if dtype not in FLOATS:
        raise SourceError(f"{name}: a weight of dtype {dtype} cannot be quantized; known: {', '.join(FLOATS)}")
    if way == HOST or not has_codes(numeric, coding, layout):
        known = None if amax is None else float(amax)
        spelt: dict[str, Any] = {
            "layout": layout,
            "transpose": transpose,
            "coding": coding,
            "amax": known,
            "name": name,
        }
        coded = encode_on_host(_bits(weight, dtype), dtype, numeric, **spelt)
        return {part: _tensor(array, shapes[part], weight) for part, array in coded.items()}
    own = checks or Checks()
    turned = transpose != (layout == "in_out")
    flat = weight.T if layout == "in_out" else weight
    whole = _whole(flat, amax, name, own) if numeric[0].per == "tensor" or "scale_2" in shapes else None
    parts, largest = _Job(numeric, dtype, coding, turned, whole).parts(flat.contiguous(), way)
    own.add(name, largest)
    if checks is None:
        own.check()
    return {part: _stored(tensor, shapes[part], turned) for part, tensor in parts.items()}


def cast_by_groups(flat: Tensor, block: tuple[int, int], least: float, power: bool | None) -> tuple[Tensor, Tensor]:
    """e4m3 codes of a matrix and float32 scales of its blocks, on its device; SourceError on NaN or infinity.

    For the arguments see `torch_codes.cast_by_groups`.
    """
    from bridge.quant.codec import torch_codes

    cast = torch_codes.cast_by_groups
    if not flat.numel():
        return torch_codes.cast_of_nothing(flat, block)
    if best_way(flat) == TRITON:
        from bridge.quant.codec.triton_codes import cast_by_groups as cast
    codes, scale, largest = cast(flat.contiguous(), block, least, power)
    checks = Checks()
    checks.add("x", largest)
    checks.check()
    return codes, scale


@dataclass(frozen=True)
class _Job:
    """A format with all that decides its bytes.

    `dtype`: of the weight. `turned`: its codes are stored [in, out]. `whole`: the amax of all rows, if a scale is.
    """

    numeric: tuple[Numeric, ...]
    dtype: str
    coding: Encoding
    turned: bool
    whole: Tensor | None

    def parts(self, flat: Tensor, way: str) -> tuple[dict[str, Tensor], Tensor]:
        """The parts of a matrix [out, in] with codes as uint8, and the maxima of its blocks."""
        from bridge.quant.codec.torch_codes import TorchScales, coded

        if way == TRITON:
            from bridge.quant.codec.triton_codes import coded as fused

        scales, first = TorchScales(self.numeric, self.dtype, self.coding, self.whole), self.numeric[0]
        blocks = grid(first, tuple(flat.shape), "out_in")
        packed = packing(first, "out_in", False, self.coding)
        packed = "out" if self.turned and packed == "in" else packed
        what = (flat, first, self.coding, blocks, packed, scales)
        parts, largest = (fused(*what) if way == TRITON else None) or coded(*what)
        return scales.constants | parts, largest


def _whole(flat: Tensor, amax: float | Tensor | None, name: str, checks: Checks) -> Tensor:
    """The amax under which the one scale of all rows is made, () float32 on the device."""
    import torch

    from bridge.quant.codec import torch_codes

    if amax is None:
        return torch_codes.amax(flat)
    if isinstance(amax, torch.Tensor):
        amax = amax.detach().reshape(()).to(flat.device, torch.float32)
        checks.add(f"the given amax of {name}", amax)
        return amax
    arrays.check_finite(np.full((1, 1), amax), name, "given amax")
    return torch.full((), amax, dtype=torch.float32, device=flat.device)


def _stored(tensor: Tensor, stored: tuple[str, tuple[int, ...]], turned: bool) -> Tensor:
    """A part [out, in] in its stored axes and dtype."""
    import torch

    dtype, shape = stored
    if dtype == "int32":
        tensor = tensor.view(torch.int32)
    tensor = tensor.T.contiguous() if turned and tensor.ndim == 2 else tensor
    kind = torch.uint8 if dtype in FOUR_BITS else getattr(torch, dtype)
    return (tensor if dtype in FOUR_BITS else tensor.reshape(shape)).view(kind)


def _bits(weight: Tensor, dtype: str) -> Any:
    import torch

    return weight.cpu().contiguous().view(getattr(torch, DTYPES[dtype].storage)).numpy()


def _tensor(array: Any, stored: tuple[str, tuple[int, ...]], like: Tensor) -> Tensor:
    """An array of the CPU's kernels as a tensor on the device of the weight."""
    import torch

    kind = torch.uint8 if stored[0] in FOUR_BITS or stored[0] not in vars(torch) else getattr(torch, stored[0])
    return torch.from_numpy(array).view(kind).to(like.device)
