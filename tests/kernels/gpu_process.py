"""What Triton's interpreter computes on the CPU, for test_gpu_moments: it must be chosen before Triton is imported."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

import bridge
from bridge.workflows.inspect.statistics import on_device

DTYPES = ("float32", "bfloat16", "float16")
SIZES = (0, 1, 17, 2047, 2048, 2049, 6000)
CASES = ("normal", "far", "odd", "zeros", "nothing finite", "subnormal", "extreme")
STEPS = {"float32": 2, "float64": 1}  # of sessions; float64 is summed as float32
SIX = ["activation", "weight", "output", "gradient", "dgrad", "wgrad"]
STATS = [
    "min",
    "max",
    "cur_amax",
    "amin",
    "mean",
    "std",
    "l1_norm",
    "l2_norm",
    "kurtosis",
    "numel",
    "nan%",
    "p99",
    "histogram",
]
BLOCKS = {"max_blockwise_dynamic_range": {"block_size": 4, "dims": 1}}


def case(name: str, size: int, dtype: str) -> torch.Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size + 3))
    if name == "far":
        x += 1000.0
    elif name == "odd":
        x[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])[:size]
    elif name == "zeros":
        x = -x.clamp(min=0.0)
    elif name == "nothing finite":
        x = x.sign() / 0.0
    elif name == "subnormal":
        x *= 1e-40 if dtype != "float16" else 1e-6
    elif name == "extreme":
        x = x.clamp(-1, 1) * torch.finfo(getattr(torch, dtype)).max
    return x.to(getattr(torch, dtype))


def grid() -> list[tuple[str, int, str]]:
    """Each case and each size in each dtype."""
    rows = {(name, 2049, dtype) for name in CASES for dtype in DTYPES}
    return sorted(rows | {("odd", size, dtype) for size in SIZES for dtype in DTYPES})


def config() -> dict[str, Any]:
    """Blocks of outputs and losses of activations, which are computed on the host, beside what is not."""
    every = [{"tensor": name, "stats": [*STATS, BLOCKS] if name == "output" else STATS} for name in SIX]
    losses = {"enabled": True, "tensors": ["activation"], "stats": ["int8_sqnr"]}
    features = {"LogTensorStats": {"enabled": True, "tensors_struct": every}, "LogQuantizedTensorStats": losses}
    return {"s": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": features}}


class Masked(torch.nn.Module):
    """Two layers that read one tensor, and another after them; rows of `attention_mask` that are 0 are padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second, self.third = (torch.nn.Linear(a, b) for a, b in ((8, 12), (8, 12), (12, 4)))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.third((self.first(x) * self.second(x)).relu())
        return found


def session(dtype: str) -> dict[str, Any]:
    """Steps of two microbatches, the second with padding."""
    kind, draw = getattr(torch, dtype), torch.Generator().manual_seed(5)
    model = Masked().to(kind)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    with bridge.inspecting(model, config()) as seen:
        for _ in range(STEPS[dtype]):
            for rows in (None, mask):
                x = torch.randn(2, 5, 8, generator=draw).to(kind).requires_grad_()
                model(x, attention_mask=rows).square().sum().backward()
            seen.step()
    told = {f"{r.step} {r.layer} {r.tensor} {r.stat}": r.value for r in seen.inspection.records}
    return told | {f"{m.step} {m.layer} {m.tensor} bins": str(m.counts) for m in seen.inspection.magnitudes}


def _main(out: str) -> None:
    from bridge._kernels.gpu.moments import moments

    arrays: dict[str, np.ndarray] = {}
    for row in grid():
        totals, bins = moments(case(*row))
        arrays |= {f"totals {row}": totals.numpy(), f"bins {row}": bins.numpy()}
    kept = (torch.arange(300) % 3).view(15, 20).T  # in another order in memory
    masked, none = moments(case("odd", 6000, "float32"), kept=kept, magnitudes=False)
    arrays |= {"totals kept": masked.numpy(), "bins kept": none.numpy()}
    copied: list[int] = []
    plain = on_device.to_host

    def counted(every: Any) -> Any:
        copied.append(len(every))
        return plain(every)

    on_device.on_device, on_device.to_host = lambda tensor: True, counted  # type: ignore[assignment]
    told: dict[str, Any] = {dtype: session(dtype) for dtype in STEPS}
    told["copied"] = copied
    arrays["told"] = np.array(json.dumps(told))
    np.savez(out, **arrays)


if __name__ == "__main__":
    _main(sys.argv[1])
