"""Recipes and blocks that the contracts of ONNX Runtime and onnxruntime-genai name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.core.mappings import mappings
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.targets.manifest import load_manifest
from bridge.targets.onnx.run.runtime import Runtime
from tests.targets.trt.test_genai import LLAMA, assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
MIXED = """base = "int4_wo"
[[rule]]
roles = ["mlp.down.weight"]
quant = "int8_wo"
[[rule]]
roles = ["head.weight"]
quant = "int4_wo"
override = true
"""


def blocks(size: int) -> str:
    """Scheme `int4_wo` in other blocks."""
    return (mappings() / "schemes" / "int4_wo.toml").read_text().replace("block = [128]", f"block = [{size}]")


@pytest.mark.parametrize(
    ("target", "text"),
    [("ort", MIXED), ("trt", MIXED), ("ort", blocks(32)), ("ort", blocks(64))],
    ids=["ort-mixed", "trt-mixed", "ort-32", "ort-64"],
)
def test_both_programs_run_it_and_their_contracts_say_so(target: str, text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    exact = {"exact": True} if target == "ort" else {}
    report = bridge.convert(LLAMA, target, recipe, tmp_path / "out", **exact)
    assert report.passed
    plan = load_manifest(tmp_path / "out").plan
    assert {verdict(load_runtime(name), plan).how for name in ("onnxruntime", "genai")} == {"run"}
    ids = np.random.default_rng(3).integers(1, 1536, (2, 23))
    assert_equal(tmp_path / "out", Runtime(tmp_path / "out"), ids)
