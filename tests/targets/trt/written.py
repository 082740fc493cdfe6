"""One output a scheme, family and dtype, made once a run, and what to feed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import bridge
from bridge.targets.onnx.run.runtime import Runtime
from tests import once
from tests.blocks import ROOT
from tests.models.trt_families import VOCAB, encoder

MODEL = ROOT / "examples" / "models" / "tiny-llama"
WEIGHT_ONLY = ("int8_wo", "int4_wo", "int4_awq", "fp8_block", "nvfp4_wo")
ACTIVATIONS = ("fp8", "int8", "int8_sq", "w4a8_awq")
FAMILIES = ("llama", "bert")
LENGTH = 24


def written(scheme: str, family: str = "llama", dtype: str = "fp32", kv: str | None = None) -> Path:
    """The directory of an output of the trained tiny Llama, or of a random BERT; `scheme` may be "none"."""

    def make(directory: Path) -> None:
        model = MODEL if family == "llama" else encoder("bert")
        data = {"samples": 4, "sequence": 64} if family == "llama" else {"data": [{"input_ids": ids(2, 64)}]}
        calibrates = kv or scheme not in ("none", "int8_wo", "int4_wo", "fp8_block", "nvfp4_wo")
        options: dict[str, Any] = {"kv": kv, "dtype": dtype, **(data if calibrates else {})}
        bridge.convert(model, "trt", scheme, directory / "out", verify=False, progress=False, **options)

    return once.directory(f"written-{scheme}-{family}-{dtype}-{kv}", make) / "out"


def ids(seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def feeds(session: Any) -> dict[str, np.ndarray]:
    """Two rows of tokens for a session of ONNX Runtime, with empty caches in the graph's dtype."""
    tokens = ids(1).numpy()
    full = {
        "input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens),
        "position_ids": np.tile(np.arange(LENGTH), (2, 1)),
    }  # fmt: skip
    given = {}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            kind = np.float16 if value.type == "tensor(float16)" else np.float32
            given[value.name] = np.zeros((2, value.shape[1], 0, value.shape[3]), kind)
        else:
            given[value.name] = full[value.name]
    return given


def reference(directory: Path) -> tuple[dict[str, np.ndarray], str, np.ndarray]:
    """What ONNX Runtime without any optimization makes of an output: inputs, name of the first output, its values."""
    runtime = Runtime(directory)
    given = feeds(runtime.session)
    name = runtime.outputs[0]
    return given, name, runtime.run(given)[name]
