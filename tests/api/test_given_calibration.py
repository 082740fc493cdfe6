"""A saved calibration of AWQ serves the blocks that it was searched for, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.api.request import Request, ResolvedRequest, resolve
from bridge.core.errors import CalibrationError
from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.describe import smoothed_words
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source
from tests.blocks import ROOT

TINY = ROOT / "examples" / "models" / "tiny-llama"
MADE = smoothed_words(load_scheme("int4_awq").formats)


def resolved(calib: Any = None, **options: Any) -> ResolvedRequest:
    return resolve(open_source(TINY), Request(TINY, "hf", "int4_awq", calib=calib, **options))


def saved(path: Path, **said: str) -> Path:
    """A file with pre-scales for every matrix, read as `convert` reads it."""
    plan = resolved().plan
    widths = {module: plan.sources[f"{module}.weight"].shape[1] for step in plan.quantized for module in step.modules}
    provenance = Provenance("int4_awq", "0" * 64, "LlamaForCausalLM", "", "float32", "", 8, 64, **said)
    scales = {module: np.ones(width, np.float32) for module, width in widths.items()}
    Calibration(provenance, pre_scale=scales).save(path)
    return path


@pytest.mark.parametrize("made", [MADE, ""], ids=["recorded", "older"])
@pytest.mark.parametrize(
    ("options", "takes"),
    [({"group": 32}, "int4 per block of 32"), ({"zero_points": True}, "int4 per block of 128, zero points")],
)
def test_prescales_that_awq_searched_for_other_codes_are_refused(
    made: str, options: dict[str, Any], takes: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "calibration.safetensors", smoothed=made)
    assert resolved(path).calibration
    said = "int4 per block of 128" if made else "int4_awq as it is by default"
    with pytest.raises(CalibrationError, match=f"by AWQ for {said}, and scheme int4_awq takes {takes}; .*--group"):
        resolved(path, **options)


def test_prescales_serve_the_codes_that_they_were_searched_for(tmp_path: Path) -> None:
    path = saved(tmp_path / "calibration.safetensors", smoothed="int4 block 32")
    assert resolved(path, group=32).calibration
    with pytest.raises(
        CalibrationError, match="for int4 per block of 32, and scheme int4_awq takes int4 per block of 128"
    ):
        resolved(path)
    calibration = Calibration.load(saved(tmp_path / "older.safetensors"))
    scheme = resolved(group=64).scheme
    assert scheme
    older = replace(calibration, provenance=replace(calibration.provenance, scheme_digest=scheme.digest))
    assert resolved(older, group=64).calibration
