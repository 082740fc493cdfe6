"""Graphs of denoisers of diffusers, against diffusers and ModelOpt's fake-quantized models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracles.diffusers_oracle import USUAL, answers, needs_diffusers, of_kind

pytestmark = [pytest.mark.slow, needs_diffusers]
MORE = (
    "graph:dit:none", "graph:sd3:none", "graph:sdxl:none", "graph:pixart:none", "graph:wan:none", "graph:flux:fp8",
    "graph:sdxl:fp8", "graph:sd3:int8", "graph:pixart:fp8", "graph:wan:fp8",
)  # fmt: skip
CASES = [*of_kind("graph"), *(pytest.param(case, marks=pytest.mark.product) for case in MORE)]
# Outputs are of the order of 1 to 2; float32 sums in another order differ by 2e-6.
PLAIN, QUANTIZED = 1e-5, 0.2


@pytest.mark.parametrize("case", CASES)
def test_a_step_in_onnx_runtime_is_that_of_diffusers_for_every_batch(case: str) -> None:
    answer: Any = answers("usual", USUAL) if case in USUAL else answers("more graphs", MORE)
    findings, apart, compared = answer[case]
    assert findings == [] and compared and all(compared)
    most = PLAIN if case.endswith(":none") else QUANTIZED
    assert max(apart) < most
