"""Give a running server the quantized weights of a model in training.

    source = bridge.tensors(model, target="vllm", quant="fp8_block")
    engine = TrainerWeightTransferEngine.trainer_init(info, client=client, source=bridge.live.vllm(source))
    assert source.digest() == bridge.live.digest("a directory that `convert` wrote of the same weights")

A plan is made once. Each iteration reads the weights as they are then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Tensors": "bridge.workflows.live.tensors",
    "TensorMeta": "bridge.workflows.live.tensors",
    "Bucket": "bridge.workflows.live.servers",
    "digest": "bridge.workflows.live.digests",
    "vllm": "bridge.workflows.live.servers",
    "sglang": "bridge.workflows.live.servers",
}

if TYPE_CHECKING:
    from bridge.workflows.live.digests import digest
    from bridge.workflows.live.servers import Bucket, sglang, vllm
    from bridge.workflows.live.tensors import TensorMeta, Tensors

__all__ = ["Bucket", "TensorMeta", "Tensors", "digest", "sglang", "vllm"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridge.live' has no attribute {name!r}")
