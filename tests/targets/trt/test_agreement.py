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
from bridge.targets.trt.engine import run_builder
from bridge.targets.trt.products import RTX, why_unavailable
from bridge.targets.trt.profile import Profile, dynamic_axes, load_graph
from tests.targets.onnx.lint.test_lint import CASES, CLEAN, Case, findings_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_unavailable(RTX)), reason="TensorRT for RTX is not installed here"),
]
# Of errors that are not marked, an engine is built of these: number in CASES -> what is wrong with it.
BUILT = {
    "scale-positive: 1 scales are zero, negative, NaN or infinite": "a scale that is infinite",
    "scale-positive: 768 scales": "FP8 codes of scales that are 0",
    "attention-form: multiples of 8 up to 256 (1)": "heads of 100 values of few tokens; other extents are refused",
    "external-path: must be a plain file name (2)": "an absolute path is read as one beside the file",
    "external-overlap: offsets are wrong": "a weight that begins inside another",
    "external-bounds: not a number of bytes": "the offset is taken for 0",
}
# Of errors that are marked, these are refused: by onnx.checker's rules, too, or in one of the forms that a rule has.
REFUSED: dict[str, str] = {}
CHECKER = "checker"  # of onnx.checker, which TensorRT does not ask
USUAL = {
    "zero-point: zero point is not 0",
    "qdq-type: int16: TensorRT documents no",
}  # the others are for `make test-all`


def names() -> list[str]:
    """The names of the cases; equal ones are numbered."""
    plain = [f"{case.rule}: {case.says}" for case in CASES]
    return [
        f"{name} ({plain[: at + 1].count(name)})" if plain.count(name) > 1 else name for at, name in enumerate(plain)
    ]


def refusal(graph: Path) -> str:
    """What the parser, or the builder for SM120, says against a file; "" if it makes an engine."""
    try:
        if errors := run_builder({"task": "parse", "graph": str(graph)}, no_progress)["parsed"]:
            return f"parser: {errors[0]}"
        others = {axis: (1, 4, 8) for axis in dynamic_axes(load_graph(graph)) if axis not in Profile().ranges}
        job = {"graph": str(graph), "engine": str(graph.with_suffix(".engine")), "capabilities": ["sm120"]}
        run_builder({"task": "build", **job, "profiles": [asdict(Profile(others=others))]}, no_progress)
    except WriteError as error:
        return f"builder: {error}"
    return ""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "half" else pytest.mark.product) for n in CLEAN])
def test_what_the_linter_passes_becomes_an_engine(name: str, tmp_path: Path) -> None:
    assert refusal(CLEAN[name]().write(tmp_path)) == ""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if name in USUAL else pytest.mark.product, id=name)
        for name, case in zip(names(), CASES, strict=True)
    ],
)
def test_an_error_is_one_of_tensorrt_too_or_is_marked(name: str, case: Case, tmp_path: Path) -> None:
    found = [finding for finding in findings_of(case, tmp_path) if finding.severity == "error"]
    own = [f for f in found if f.rule != CHECKER and not f.message.startswith(PORTABILITY)]
    why = refusal(tmp_path / "model.onnx")
    if why and not own:
        assert found and (name in REFUSED or all(finding.rule == CHECKER for finding in found)), why
    else:
        assert bool(why) == (bool(own) and name not in BUILT), (why, [str(finding) for finding in own])


def test_exceptions_are_cases() -> None:
    assert {*BUILT, *REFUSED, *USUAL} <= {*names()}
