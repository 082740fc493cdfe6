"""Inspections to look at in a browser: two that ran, and a made one of the size of a large model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import bridge
from bridge.tracker import Cost, NotFinite
from bridge.workflows.inspect.result import CodeRange, Inspection, Magnitudes, Record
from bridge.workflows.inspect.save import save
from bridge.workflows.inspect.side_by_side import Compared, Difference

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
SCHEMES = ("fp8", "int8", "nvfp4", "mxfp8")
KINDS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
MODULES = (*(f"self_attn.{end}_proj" for end in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def large(layers: int = 32, steps: int = 4) -> Inspection:
    """32 layers x 7 kinds x 4 schemes as the default config has them, with what is rarely seen: NaN, static scales."""
    records, counted = [], []
    for step in range(steps):
        for layer in range(layers):
            for at, (kind, module) in enumerate(zip(KINDS, MODULES, strict=True)):
                for tensor in ("activation", "weight"):
                    name = f"model.layers.{layer}.{module}"
                    moved = step if tensor == "activation" else 0
                    for stat, value in _stats(layer, at, moved, tensor):
                        records.append(Record(step, name, kind, tensor, stat, value))
                    counted.append(_magnitudes(step, name, tensor, layer + at))
    root = Cost("LlamaForCausalLM", 4, 9.5, 0.001, 12.0, 5 << 30)
    names = [f"model.layers.{layer}.{module}" for layer in range(layers) for module in MODULES]
    costs = [Cost(name, 4, 0.02, 0.01 / (n + 1), 0.03, 1 << 20) for n, name in enumerate(names)]
    about = {"model": "somebody-large-model", "data": "corpus.txt: 4 batches, rows of 128 tokens", "qbridge": "0.1.0"}
    notes = ("static scales without a calibration (calib=) are those of each tensor: 224 layers",)
    first = NotFinite("model.layers.3.mlp.down_proj", "backward", "NaN", "weight")
    return Inspection(about, tuple(records), (), notes, tuple(names), tuple(counted), first, (root, *costs))


def _stats(layer: int, at: int, moved: int, tensor: str) -> list[tuple[str, float | None]]:
    sqnr = 34 - 3 * at + layer / 8 - 8 * (layer < 4 and at == 6) + math.sin(moved + layer)
    found: list[tuple[str, float | None]] = [
        ("cur_amax", 4.0 + layer + moved), ("p99.9", 1.5), ("outlier_ratio", 90.0 if at == 6 else 3.0), ("nan%", 0.0),
    ]  # fmt: skip
    for n, scheme in enumerate(SCHEMES):
        bad = (layer, at, scheme, tensor) == (3, 6, "fp8", "activation")
        found += [
            (f"{scheme}_sqnr", None if bad else sqnr - 3 * n), (f"{scheme}_cosine", 0.9999),
            (f"{scheme}_underflows%", 12.5 if at == 6 else 0.01),
        ]  # fmt: skip
    return found


def _magnitudes(step: int, name: str, tensor: str, shift: int) -> Magnitudes:
    counts = tuple((power, int(1e6 * math.exp(-((power + 4) ** 2) / 30)) + 1) for power in range(-22, 6))
    ranges = (
        CodeRange("fp8", 2.0**-18, 2.0**-18), CodeRange("int8", 2.0**-6, 2.0**-6, 3.0),
        CodeRange("nvfp4", 2.0**-9, 2.0**-3), CodeRange("mxfp8", 2.0**-20, 2.0**-16),
    )  # fmt: skip
    return Magnitudes(step, name, tensor, counts, 1000 * shift, ranges)


def _statistics(root: Path) -> Path:
    """The tiny Llama, its loss run backward, with NaN looked for and costs measured."""
    bridge.inspect(TINY, samples=8, gradients=True, nan=True, cost=True, out=root / "statistics")
    return root / "statistics"


def _beside(root: Path) -> Path:
    """What was written in INT4 beside its source."""
    bridge.convert(TINY, "hf", "int4_wo", root / "small", verify=False)
    bridge.inspect(TINY, against=root / "small", samples=4, out=root / "beside")
    return root / "beside"


def _training(root: Path) -> Path:
    """A model that no table has, in a loop with a hostile name."""

    class Hostile(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<script>alert('name')<|script>", torch.nn.Linear(16, 16))

        def forward(self, x: Any) -> Any:
            return next(iter(self.children()))(x).relu()

    torch.manual_seed(1)
    model = torch.nn.Sequential(Hostile(), torch.nn.Linear(16, 8))
    stats = {"LogTensorStats": {"enabled": True, "tensors": ["activation", "wgrad"], "stats": ["rms", "histogram"]}}
    config = {"all": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": stats}}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with bridge.inspecting(model, config, nan=True, out=root / "training") as session:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(32, 16)).square().mean().backward()
            optimizer.step()
            session.step()
    return root / "training"


def _large(root: Path) -> Path:
    names = [f"model.layers.{n}.{module}" for n in range(32) for module in MODULES]
    compared = tuple(
        Compared(name, "Linear", Difference(24 - n / 20, 0.99, 1.0), Difference(30.0 - n % 7, 0.999, 1.0), KINDS[n % 7])
        for n, name in enumerate(names)
    )
    save(replace(large(), compared=compared), root / "large")
    return root / "large"


def _page(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    return lambda root: make(root) / "inspect.html"


INSPECTIONS = {
    "statistics": _page(_statistics), "beside": _page(_beside), "training": _page(_training), "large": _page(_large),
}  # fmt: skip
