"""Expert coverage: the tokens that a calibration counted are those that the model's own routers sent."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from tests.models.export_families import build  # noqa: E402


def made(family: str) -> tuple[object, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(3)
    model = build(family).float().eval()
    return model, [{"input_ids": torch.randint(3, 330, (2, 24))} for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "stack"),
    [
        ("mixtral", "fp8", "model.layers.{}.block_sparse_moe.experts"),
        ("qwen3-moe", "int4_awq", "model.layers.{}.mlp.experts"),  # AWQ runs the data twice
    ],
)
def test_tokens_are_counted_as_the_routers_send_them(family: str, scheme: str, stack: str, tmp_path: Path) -> None:
    model, batches = made(family)
    calibration = bridge.calibrate(model, scheme, batches)
    with torch.no_grad():
        logits = [model(**batch, output_router_logits=True).router_logits for batch in batches[:-1]]  # one is held out
    layers = [torch.cat(layer) for layer in zip(*logits, strict=True)]
    want = {
        stack.format(n): np.bincount(layer.topk(2).indices.reshape(-1).numpy(), minlength=3)
        for n, layer in enumerate(layers)
    }
    assert calibration.expert_tokens.keys() == want.keys()
    assert all((calibration.expert_tokens[name] == want[name]).all() for name in want)
    saved = Calibration.load(calibration.save(tmp_path / "c.safetensors"))
    assert all((saved.expert_tokens[name] == want[name]).all() for name in want)


@pytest.mark.slow
def test_experts_that_no_token_reached_are_in_the_report(tmp_path: Path) -> None:
    model, batches = made("qwen3-moe")
    calibration = bridge.calibrate(model, "fp8", batches)
    unseen = dataclasses.replace(
        calibration, expert_tokens={"model.layers.0.mlp.experts": np.array([96, 0, 96], np.float32)}
    )
    report = bridge.convert(model, "hf", "nvfp4", tmp_path / "out", calib=unseen)
    assert report.experts[0].unseen == (1,)
    assert "model.layers.0.mlp.experts.1." in (tmp_path / "out" / "report.html").read_text()
    assert "`model.layers.0.mlp.experts.1`" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_without_experts_counts_none() -> None:
    model, batches = made("llama")
    assert bridge.calibrate(model, "fp8", batches).expert_tokens == {}
