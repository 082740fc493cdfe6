"""A directory that bridge wrote is inspected under its own scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.quant.schemes.load import load_scheme, with_kv  # noqa: E402
from tests.workflows.inspect.test_session import LLAMA, config  # noqa: E402

FEW: dict[str, Any] = {"samples": 2, "sequence": 16, "progress": False}


@pytest.mark.slow  # a calibration and a conversion
def test_a_written_directory_runs_under_its_scheme_and_scales(tmp_path: Path) -> None:
    calibration = bridge.calibrate(LLAMA, "fp8", **FEW)
    bridge.convert(LLAMA, "hf", "fp8", tmp_path / "out", calib=calibration, verify=False, progress=False)
    words = config("LogQuantizedTensorStats", tensors=["activation", "weight"], stats=["sqnr", "overflows%"])
    seen = bridge.inspect(tmp_path / "out", words, **FEW)
    assert seen.about["scheme"] == "fp8"
    assert any(note.startswith("a written model: its weights run as they are") for note in seen.notes)
    assert not any("without a calibration" in note for note in seen.notes)
    weights = [record.value or 0 for record in seen.records if (record.tensor, record.stat) == ("weight", "sqnr")]
    assert 200.0 in weights  # down projections have their codes already; others had a scale that they shared
    given = bridge.inspect(LLAMA, words, quant="fp8", calib=calibration, **FEW)
    inputs = [{(r.layer, r.stat): r.value for r in each.records if r.tensor == "activation"} for each in (seen, given)]
    assert inputs[0] == pytest.approx(inputs[1], rel=0.1, abs=0.1)


def test_a_kv_cache_that_runs_unquantized_is_noted() -> None:
    plain = load_scheme("int8_wo")
    for scheme in (plain, with_kv(plain, "fp8")):
        with bridge.inspecting(torch.nn.Sequential(torch.nn.Linear(4, 4)), quant=scheme) as session:
            assert ("the KV cache runs unquantized" in session.inspection.notes) == (scheme is not plain)
