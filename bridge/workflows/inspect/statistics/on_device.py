"""Sums of a tensor on its GPU, until a step ends.

For counts, extremes, power sums and magnitudes. Blocks and losses of quantization are computed on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from bridge.workflows.inspect.statistics.sums import TensorSums

if TYPE_CHECKING:
    from torch import Tensor

OLDEST = 8, 0  # the compute capability that Triton wants


def on_device(tensor: Tensor) -> bool:
    """Whether sums of this tensor are made where it is; classes of others may have no plain memory."""
    import torch

    if tensor.device.type != "cuda" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return find_spec("triton") is not None and torch.cuda.get_device_capability(tensor.device) >= OLDEST


@dataclass(frozen=True)
class DeviceSums:
    """The totals of one tensor and its bins (or none), both on its device."""

    totals: Tensor
    bins: Tensor

    @classmethod
    def of(cls, tensor: Tensor, mask: Tensor | None, magnitudes: bool) -> DeviceSums:
        """`mask`: of the first axes, the rows that count."""
        from bridge._kernels.gpu.moments import moments

        return cls(*moments(tensor, kept=mask, magnitudes=magnitudes))

    def merged(self, other: DeviceSums) -> DeviceSums:
        """The sums of both, on the device of this one."""
        import torch

        from bridge._kernels.gpu.moments import merged

        here = self.totals.device
        totals = merged(torch.stack([self.totals, other.totals.to(here)], 1))
        return DeviceSums(totals, self.bins + other.bins.to(here))


def to_host(every: Sequence[DeviceSums]) -> list[TensorSums]:
    """Copy them all at once, which waits for each device once."""
    import torch

    once = {id(sums): sums for sums in every}  # layers that read one tensor share its sums
    found: dict[int, TensorSums] = {}
    for device in dict.fromkeys(sums.totals.device for sums in once.values()):
        there = {key: sums for key, sums in once.items() if sums.totals.device == device}
        vectors = [torch.cat([sums.totals, sums.bins.double()]) for sums in there.values()]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # some may be of other streams than this one
        ends = np.cumsum([vector.numel() for vector in vectors])[:-1]
        parts = np.split(torch.cat(vectors).cpu().numpy(), ends)
        found |= {key: TensorSums.from_vector(part) for key, part in zip(there, parts, strict=True)}
    return [found[id(sums)] for sums in every]
