"""Values that both sides get, and the comparison of nvtripy's answer with torch's."""

from __future__ import annotations

from typing import Any

import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Both sides compute in float32 and round once; torch's float16 kernels round some steps between: two units.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def out(tensor: Any) -> torch.Tensor:
    """Evaluate a Tripy tensor, into a torch tensor on the CPU."""
    return torch.from_dlpack(tensor).cpu()


def same(tensor: Any, expected: torch.Tensor) -> None:
    """Assert one type, one shape and values within the type's tolerance; integers and bools exactly."""
    tolerance = TOLERANCE.get(expected.dtype, 0)
    torch.testing.assert_close(out(tensor), expected, rtol=tolerance, atol=tolerance)
