"""Errors of running a written model name the module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.core.errors import VerifyError  # noqa: E402
from bridge.targets.hf.runtime import Runtime  # noqa: E402


@pytest.mark.slow  # a conversion
def test_the_module_that_fails_or_makes_a_nan_is_named(tmp_path: Path) -> None:
    bridge.convert("examples/models/tiny-llama", "hf", "int8_wo", tmp_path / "out", verify=False, progress=False)
    runtime, feeds = Runtime(tmp_path / "out"), {"input_ids": np.arange(3, 13).reshape(1, 10)}
    assert np.isfinite(runtime.run(feeds)["output 0"]).all()
    up = runtime.model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        up.weight[0, 0] = float("nan")
    with pytest.raises(VerifyError, match=r"model\.layers\.1\.mlp\.up_proj makes NaN of the data.*its weight holds"):
        runtime.run(feeds)
    up.weight = torch.nn.Parameter(up.weight[:, :-1])
    with pytest.raises(VerifyError, match=r"\(RuntimeError in model\.layers\.1\.mlp\.up_proj"):
        runtime.run(feeds)
