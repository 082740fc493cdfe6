"""A source's generation_config.json: a broken one is refused before work begins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import bridge
from bridge.core.errors import PlanError
from tests.blocks import ROOT


@pytest.mark.parametrize("target", ["hf", "trt", "ort", "gguf"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_generation_config_is_told_while_planning(content: str, target: str, tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "examples" / "models" / "tiny-llama", tmp_path / "source")
    (source / "generation_config.json").write_text(content)
    with pytest.raises(PlanError, match=r"generation_config\.json: (cannot|must).*; mend the file, or remove"):
        bridge.plan(str(source), target=target)
