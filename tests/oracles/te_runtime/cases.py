"""A case of one linear layer, which Transformer Engine and bridge both run; plain values that pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LAYER = "model.layers.0.fc"
ROWS, IN, OUT = 96, 160, 192  # multiples of 32, as MXFP8 wants; not of 128
TENSORS = ("activation", "weight", "gradient", "output", "dgrad", "wgrad")


@dataclass(frozen=True)
class Case:
    """One layer under one config.

    `features`: what stands under `transformer_engine`. `recipe`: one of `process.RECIPES`; "" for none. `odd`: what to
    put into a tensor, (tensor, step, microbatch) -> "nan", "inf", "zeros", "tiny" or "column". `door`: bridge's answers
    the calls, in place of nvdlfw-inspect.
    """

    features: Mapping[str, Any]
    recipe: str = ""
    dtype: str = "float32"
    steps: int = 1
    microbatches: int = 1
    bias: bool = True
    seed: int = 0
    odd: Mapping[tuple[str, int, int], str] = field(default_factory=dict)
    door: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The config.yaml."""
        layers = {"layer_types": ["fc"]}
        return {"section": {"enabled": True, "layers": layers, "transformer_engine": dict(self.features)}}

    def parameters(self) -> tuple[np.ndarray, np.ndarray]:
        """Weight and bias."""
        rng = np.random.default_rng(1000 + self.seed)
        weight = rng.standard_normal((OUT, IN)) * np.exp2(rng.integers(-6, 0, (OUT, 1)))
        return weight.astype(np.float32) / 8, rng.standard_normal(OUT).astype(np.float32)

    def microbatch(self, step: int, at: int) -> tuple[np.ndarray, np.ndarray]:
        """Input and gradient of the output; microbatches have means of their own, and some zeros."""
        rng = np.random.default_rng((self.seed, step, at))
        made = {}
        for name, width in (("activation", IN), ("gradient", OUT)):
            x = rng.standard_normal((ROWS, width)) * np.exp2(rng.integers(-9, 3, (ROWS, width))) + 0.5 * at
            x.reshape(-1)[::13] = 0
            made[name] = _odd(x.astype(np.float32), self.odd.get((name, step, at), ""))
        return made["activation"], made["gradient"]


def _odd(x: np.ndarray, how: str) -> np.ndarray:
    if how == "zeros":
        return np.zeros_like(x)
    if how == "tiny":
        return x * np.float32(1e-38)
    if how == "column":  # E4M3 has it without an error, and no room for the numbers beside it
        x[:, 5] = 448 * 1024
    elif how:
        x[3, 5] = float(how)
    return x


@dataclass(frozen=True)
class Call:
    """One of the seven calls: its name and the words it came with."""

    name: str
    words: tuple[str, ...]


@dataclass
class Answer:
    """What came of a case. `logged`: (step, name after the layer's) -> value. Arrays: of each microbatch."""

    logged: dict[tuple[int, str], float] = field(default_factory=dict)
    outputs: list[np.ndarray] = field(default_factory=list)
    dgrads: list[np.ndarray] = field(default_factory=list)
    wgrads: list[np.ndarray] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
