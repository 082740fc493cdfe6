"""What inspection makes of a GEMM's operands has the bits of Transformer Engine's: FakeQuant and DisableQuantization.

Outputs, dgrads and wgrads of a linear layer against `te.Linear` under its own features (`tests/oracles/te_runtime`).
The session's scheme is its recipe Float8CurrentScaling: E4M3, gradients E5M2.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridge.core.dtypes import from_float32, to_float32  # noqa: E402
from bridge.core.errors import InspectError  # noqa: E402
from bridge.workflows.inspect.changes.layer_changes import Quantizer, Simulated  # noqa: E402
from bridge.workflows.inspect.collect import Schemes  # noqa: E402
from bridge.workflows.inspect.layers import layers_of  # noqa: E402
from bridge.workflows.inspect.routes import GEMMS, TAKES  # noqa: E402
from bridge.workflows.inspect.session import Session, Setup  # noqa: E402
from bridge.workflows.inspect.statistics.coding import fake_quantized  # noqa: E402
from bridge.workflows.inspect.statistics.quantization import FORMATS, of_format, of_recipe  # noqa: E402
from bridge.workflows.inspect.te.resolve import load_routing  # noqa: E402
from tests import once  # noqa: E402
from tests.oracles import te_oracle  # noqa: E402
from tests.oracles.te_runtime.cases import LAYER, Answer, Case  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not te_oracle.is_installed(), reason=te_oracle.MISSING)]

DTYPES = ("float32", "bfloat16", "float16")
PLAIN = ("FP8E4M3", "FP8E5M2")  # Transformer Engine's MX formats fail
RECIPE = "fp8_current_scaling"
INPUTS = ("activation", "weight", "gradient")


def fake_quants(count: int) -> Iterator[tuple[str, Case]]:
    """FakeQuant of chosen tensors of chosen GEMMs, written in each of the ways that a config has."""
    rng = random.Random(1)
    for seed in range(count):
        dtype, recipe = DTYPES[seed % 3], "current" if seed % 4 == 3 else ""
        gemms = rng.sample(GEMMS, rng.randint(1, 3))
        if seed % 2:
            tensors = rng.sample(("activation", "weight", "gradient", "output", "dgrad", "wgrad"), rng.randint(1, 6))
            words = {"gemms": gemms, "tensors": tensors, "quant_format": rng.choice(PLAIN)}
        else:
            structs = []
            for gemm in gemms:
                taken = rng.sample(TAKES[gemm], rng.randint(1, 3))
                structs.append({"gemm": gemm, "tensors": taken, "quant_format": rng.choice(PLAIN)})
            words = {"gemms_struct": structs}
        features = {"FakeQuant": {"enabled": True, **words}}
        yield f"FakeQuant {seed}", Case(features, recipe, dtype, bias=not recipe, seed=seed, steps=1 + seed % 2)


def disabled() -> Iterator[tuple[str, Case]]:
    for number in range(1, 8):
        gemms = [gemm for at, gemm in enumerate(GEMMS) if number >> at & 1]
        name = "DisableFP8GEMM" if number == 3 else "DisableQuantizationGEMM"
        dtype = DTYPES[number % 3]
        yield f"disabled {gemms}", Case({name: {"enabled": True, "gemms": gemms}}, "current", dtype, bias=False)
    yield "disabled layer", Case({"DisableQuantizationLayer": {"enabled": True}}, "current", bias=False)
    statistic = {"enabled": True, "tensors": ["activation"], "stats": ["min"]}
    yield "disabled nothing", Case({"LogTensorStats": statistic}, "current", bias=False)


IDLE = "FakeQuant of a tensor that the GEMM does not take"
IDLE_CASE = Case(
    {"FakeQuant": {"enabled": True, "gemms": ["fprop"], "tensors": ["dgrad"], "quant_format": "FP8E4M3"}},
    "current", steps=2, bias=False,
)  # fmt: skip
CASES = dict([*fake_quants(24), *disabled()])


def values(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((32, 64)) * np.exp2(rng.integers(-12, 3, (32, 64)))).astype(np.float32)
    scale = {"plain": 1, "small": 2.0**-9, "tiny": 1e-38, "zeros": 0}
    return x * np.float32(scale[kind])


VALUES = {
    f"values {name} {dtype} {kind}": (values(kind), dtype, name)
    for name in FORMATS
    for dtype, kind in [
        ("float32", "plain"), ("float32", "tiny"), ("bfloat16", "plain"), ("bfloat16", "zeros"), ("float16", "small"),
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    return once.value("te.Linear changed", lambda: te_oracle.answers({**CASES, **VALUES, IDLE: IDLE_CASE}))


def changed(case: Case) -> Answer:
    """The case in a session whose scheme is the recipe."""
    model = te_oracle.Model(case)
    (layer,) = layers_of(model)
    recipe = Simulated(layer, {name: Quantizer(of_recipe(RECIPE, name)) for name in INPUTS})
    routing = load_routing(case.config, [layer])
    session = Session(model, Setup(routing, Schemes(), simulated={LAYER: recipe} if case.recipe else {}))
    try:
        return te_oracle.run(case, model, Answer(), session.step)
    finally:
        session.detach()


def bits(answer: Answer) -> list[np.ndarray]:
    return [array.view(np.uint32) for array in (*answer.outputs, *answer.dgrads, *answer.wgrads)]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_what_te_linear_computes(theirs: dict[str, Any], name: str) -> None:
    us, them, plain = (
        bits(answer) for answer in (changed(CASES[name]), theirs[name], changed(CASES["disabled layer"]))
    )
    assert len(us) == 3 * CASES[name].steps
    for mine, other in zip(us, them, strict=True):
        assert np.array_equal(mine, other)
    assert name == "disabled layer" or not all(
        np.array_equal(mine, other) for mine, other in zip(us, plain, strict=False)
    )


def test_fake_quant_of_no_tensor_is_refused(theirs: dict[str, Any]) -> None:
    """Where the GEMM takes none of the tensors. In Transformer Engine it leaves the recipe then, and that is forgotten
    after the first step: its FakeQuant answers that nothing is to be asked again.
    """
    with pytest.raises(InspectError, match="FakeQuant: changes nothing"):
        changed(IDLE_CASE)
    them = theirs[IDLE]
    plain = changed(replace(IDLE_CASE, features=CASES["disabled nothing"].features))
    assert np.array_equal(plain.outputs[1], them.outputs[1]) and not np.array_equal(plain.outputs[0], them.outputs[0])


@pytest.mark.parametrize("name", VALUES)
def test_formats_have_the_values_of_fake_quant(theirs: dict[str, Any], name: str) -> None:
    x, dtype, quant_format = VALUES[name]
    made = fake_quantized(from_float32(x, dtype), dtype, of_format(quant_format))
    made = to_float32(from_float32(made, dtype), dtype)
    assert np.array_equal(made, theirs[name])
