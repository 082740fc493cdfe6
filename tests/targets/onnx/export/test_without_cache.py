"""Decoders that keep nothing of the past have graphs without a cache, as their refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import bridge
from bridge.core.errors import BridgeError
from bridge.targets.onnx.export.translate import to_onnx
from tests.models.graphs import export_once
from tests.sweep.build import build
from tests.targets.onnx.export import onnx_parity as parity

TOLERANCE = 2e-5  # see test_export.py
FAMILIES = ["OpenAIGPTLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.product] * (f != FAMILIES[0])) for f in FAMILIES]
)
def test_logits_of_padded_texts_equal_transformers(family: str, tmp_path: Path) -> None:
    model = build(family, torch.float32)
    session = parity.fill(export_once(model.config, cache=False), model, tmp_path)
    for length in (1, 7, 20):
        ids = np.random.default_rng(length).integers(5, 300, (2, length))
        mask = np.ones_like(ids)
        mask[1, length - length // 3 :] = 0
        given = {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            want = model(**{name: torch.tensor(array) for name, array in given.items()}).logits.numpy()
        places = np.arange(length)[None].repeat(2, 0)
        got = parity.run(session, given | {"position_ids": places})["logits"]
        assert parity.relative(got[mask == 1], want[mask == 1]) < TOLERANCE, length


def test_the_refusal_says_to_leave_the_cache_out() -> None:
    model = build(FAMILIES[0], torch.float32)
    with pytest.raises(BridgeError, match=r"keeps neither .* leave the cache out \(cache=False, --no-cache\)"):
        bridge.plan(model, "trt", "int8_wo")
    assert bridge.plan(model, "trt", "int8_wo", cache=False).quantized


def test_a_float_minus_integers_is_translated() -> None:
    class Inverted(torch.nn.Module):
        def forward(self, mask: Any) -> Any:
            return 1.5 - mask

    mask = torch.arange(3)
    graph = to_onnx(torch.export.export(Inverted(), (mask,)), 21)
    session = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString())
    np.testing.assert_array_equal(session.run(None, {graph.graph.inputs[0].name: mask.numpy()})[0], [1.5, 0.5, -0.5])
