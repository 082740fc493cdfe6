"""The linter against TensorRT for RTX: each broken file of its tests through NVIDIA's parser and builder.

What only documents or other readers forbid is marked as portability. Everything else that the linter calls an error is
refused by one of the two, or is in BUILT.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from bridge.core.errors import WriteError
from bridge.core.progress import no_progress
from bridge.targets.onnx.lint.problem import PORTABILITY
from bridge.targets.trt.engine import _in_child
from bridge.targets.trt.products import RTX, why_unavailable
from bridge.targets.trt.profile import Profile, dynamic_axes
from tests.targets.onnx.lint.test_lint import CASES, CLEAN, Case, findings_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_unavailable(RTX)), reason="TensorRT for RTX is not installed here"),
]
# An engine is built of these all the same: its values are not those of the file, or other extents are refused.
BUILT = {
    "scale-positive: 1 scales are zero, negative, NaN or infinite": "a scale that is infinite",
    "scale-positive: 768 scales": "FP8 codes of scales that are 0",
    "external-overlap: offsets are wrong": "a weight that begins inside another",
    "attention-form: multiples of 8 up to 256": "heads of 100 values of few tokens",
    "external-bounds: not a number of bytes": "the offset is taken for 0",
}
CHECKER = "checker"  # of onnx.checker, which TensorRT does not ask
USUAL = {"zero-point: zero point is not 0", "qdq-type: int16: TensorRT has no"}  # the others are for `make test-all`


def name_of(case: Case) -> str:
    return f"{case.rule}: {case.says}"


def refusal(graph: Path) -> str:
    """What the parser, or the builder for SM120, says against a file; "" if it makes an engine."""
    try:
        if errors := _in_child({"task": "parse", "graph": str(graph)}, no_progress)["parsed"]:
            return f"parser: {errors[0]}"
        others = {axis: (1, 4, 8) for axis in dynamic_axes(graph) if axis not in Profile().ranges}
        job = {"graph": str(graph), "engine": str(graph.with_suffix(".engine")), "capabilities": ["sm120"]}
        _in_child({"task": "build", **job, "profiles": [asdict(Profile(others=others))]}, no_progress)
    except WriteError as error:
        return f"builder: {error}"
    return ""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "half" else pytest.mark.product) for n in CLEAN])
def test_what_the_linter_passes_becomes_an_engine(name: str, tmp_path: Path) -> None:
    assert refusal(CLEAN[name]().write(tmp_path)) == ""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if name_of(case) in USUAL else pytest.mark.product) for case in CASES],
    ids=name_of,
)
def test_an_error_is_one_of_tensorrt_too_or_is_marked(case: Case, tmp_path: Path) -> None:
    found = [finding for finding in findings_of(case, tmp_path) if finding.severity == "error"]
    own = [f for f in found if f.rule != CHECKER and not f.message.startswith(PORTABILITY)]
    if why := refusal(tmp_path / "model.onnx"):
        assert found, why
    else:
        assert bool(own) == (name_of(case) in BUILT), [str(finding) for finding in own]
