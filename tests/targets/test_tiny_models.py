"""Every scheme on the models that ship: what the README says `hf` and `trtllm` have is written, proved, or refused."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.dtypes import SEARCHED
from bridge.core.errors import PlanError, SchemeError
from bridge.core.values import AFFINE
from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.targets import load_target, make_options
from tests.covering import covering
from tests.targets.test_gptq import calibration as calibration_of_llama

MODELS = Path(__file__).parents[2] / "examples" / "models"
SPELLED: dict[str, tuple[str, dict[str, Any]]] = {
    "hf": ("hf", {"format": "modelopt"}),
    "compressed-tensors": ("hf", {"format": "compressed-tensors"}),
    "trtllm": ("trtllm", {}),
}
PRESCALED = ("int4:awq", "int4_awq", "int4_awq_full", "int8", "int8_sq", "nvfp4_awq", "w4a8_awq")
# layouts of llama.cpp and MLX
OTHERS = [name for name in scheme_names() if load_scheme(name).weight[0].dtype in (*SEARCHED, *AFFINE)]
# (spelling, model) -> what it refuses before it reads a weight, and in which words.
REFUSED: dict[tuple[str, str], dict[str, str]] = {
    ("compressed-tensors", "tiny-llama"): {
        "w4a8_awq": "one level of weight quantization",
        "w4a8_nvfp4_fp8": "has FP4 in blocks of 16",
    },
    ("compressed-tensors", "tiny-gpt2"): {
        **dict.fromkeys(scheme_names(), r"is stored \[in, out\] \(Conv1D\)"),
        **dict.fromkeys(OTHERS, "compressed-tensors has no"),
        "w4a8_awq": "one level of weight quantization",
        "w4a8_nvfp4_fp8": "has FP4 in blocks of 16",
    },
    ("hf", "tiny-llama"): dict.fromkeys(("int4:gptq", "int4:signround"), "codes for scales of either sign"),
    ("hf", "tiny-gpt2"): dict.fromkeys(("int4:gptq", "int4:signround"), "codes for scales of either sign"),
    ("trtllm", "tiny-gpt2"): dict.fromkeys(("int4:gptq", "int4:signround"), "codes for scales of either sign"),
    ("trtllm", "tiny-llama"): {
        "int4:gptq": "codes for scales of either sign",
        "int4:signround": "codes for scales of either sign",
        "fp8_block": r"out = 256\+64\+64 does not divide into tiles of 128",
    },
}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> tuple[Path, Calibration]:
    """A model and statistics for all of its matrices, as a scheme that smooths needs them."""
    directory, random = MODELS / request.param, np.random.default_rng(5)
    plan = bridge.plan(directory, "hf", "fp8")
    found: dict[str, dict[str, np.ndarray]] = {
        "input_amax": {},
        "smoothing_amax": {},
        "awq_scale": {},
        "weight_clip": {},
        "input_square": {},
    }
    for step in plan.quantized:
        assert step.site
        shape, module = plan.sources[step.source].shape, step.site.module
        width = shape[0] if step.site.layout == "in_out" else shape[1]
        found["input_amax"][module] = np.array(4, np.float32)
        found["smoothing_amax"][module] = random.uniform(0.5, 4, width).astype(np.float32)
        found["input_square"][module] = random.lognormal(0, 1, width).astype(np.float32)
        found["awq_scale"][module] = random.uniform(0.5, 2, width).astype(np.float32)
        blocks = math.prod(shape) // width, -(-width // 128)
        found["weight_clip"][module] = random.uniform(0.8, 1, blocks).astype(np.float32)
    return directory, Calibration(Provenance("", "", "", "", "", "", 0, 0), **found)


@cache
def _chosen(directory: Path, scheme: str) -> Calibration:
    if directory.name == "tiny-llama":
        return Calibration.load(calibration_of_llama(scheme))
    return bridge.calibrate(directory, scheme, samples=4, sequence=64)


DIRECTORIES = ["tiny-llama", "tiny-gpt2"]
DESIGN = covering(
    {"model": DIRECTORIES, "spelled": SPELLED, "scheme": scheme_names()},
    pairs=[("spelled", "scheme"), ("model", "spelled")],
    shows=lambda model, spelled, scheme: [(model, spelled, REFUSED.get((spelled, model), {}).get(scheme))],
    # codes are chosen for tiny-llama once a run, for tests/targets/test_gptq.py too
    cost=lambda model, _, scheme: model != "tiny-llama" and any(f.chosen for f in load_scheme(scheme).formats),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "spelled", "scheme"),
    [
        pytest.param(*row, marks=() if row in DESIGN else pytest.mark.product)
        for row in itertools.product(DIRECTORIES, SPELLED, scheme_names())
    ],
    indirect=["model"],
)
def test_every_scheme_is_written_and_proved_or_refused_in_words(
    model: tuple[Path, Calibration], spelled: str, scheme: str, tmp_path: Path
) -> None:
    directory, calibration = model
    target, options = SPELLED[spelled]
    words = REFUSED.get((spelled, directory.name), {}).get(scheme)
    words = "matches no weight" if scheme == "nvfp4_experts_only" else words
    chosen = load_target(target)
    given = make_options(chosen, options)
    if not words and any(chosen.why_unsupported(format_, given) for format_ in load_scheme(scheme).formats):
        words = f"cannot express scheme {scheme}:"
    if words:
        with pytest.raises((PlanError, SchemeError), match=words):
            bridge.plan(directory, target, scheme, **options)
        return
    if scheme not in PRESCALED:  # amax of a smoothed input serves no other scheme
        calibration = replace(calibration, smoothing_amax={}, awq_scale={})
    if not any(format_.weighted for format_ in load_scheme(scheme).formats):
        calibration = replace(calibration, input_square={})
    if any(format_.chosen for format_ in load_scheme(scheme).formats):  # no statistic says which codes GPTQ chooses
        calibration = _chosen(directory, scheme)
    report = bridge.convert(directory, target, scheme, tmp_path / "out", calib=calibration, **options)
    assert report.passed and not report.findings
    assert report.parity and len(report.parity.tensors) >= (2 * 4 if load_scheme(scheme).only else 4 * 4)


def test_tiles_that_cover_a_weight_are_told_as_tiles(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(MODELS / "tiny-llama", "hf", "fp8_block", out, verify=False)
    said = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert (said["quant_algo"], said["exclude_modules"]) == ("fp8_pb_wo", ["lm_head", "model.embed_tokens"])
