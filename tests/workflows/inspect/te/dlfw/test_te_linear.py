"""`te.Linear` asks bridge's door as it asks nvdlfw-inspect, and logs and computes the same.

Transformer Engine's modules are its own, on a CPU (`tests/oracles/te_runtime`); each case runs twice in one process,
once with nvdlfw-inspect's engine and TE's features, once with `bridge.dlfw` under the name `nvdlfw_inspect.api`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from bridge.workflows.inspect.routes import GEMMS_OF
from tests import once
from tests.oracles import te_oracle
from tests.oracles.te_runtime.cases import TENSORS, Answer, Call, Case

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not te_oracle.is_installed(), reason=te_oracle.MISSING)]

INPUTS = TENSORS[:3]
FAKE = {
    "gemms_struct": [
        {"gemm": "fprop", "tensors": ["activation", "weight"], "quant_format": "FP8E4M3"},
        {"gemm": "wgrad", "tensors_struct": [{"tensor": "gradient", "quant_format": "FP8E5M2"},
                                             {"tensor": "activation", "quant_format": "FP8E4M3"}]},
    ]
}  # fmt: skip


def on(**words: Any) -> dict[str, Any]:
    return {"enabled": True, **words}


def logs(*stats: Any, tensors: tuple[str, ...] = INPUTS, **schedule: Any) -> dict[str, Any]:
    return on(tensors=list(tensors), stats=list(stats), **schedule)


EVERY = {"LogTensorStats": logs("min", "l2_norm", "mean", tensors=TENSORS)}
LOST = logs("underflows%", "mse", "scale_inv_min", "scale_inv_max")
CASES = {
    "statistics": Case(EVERY, steps=2),
    "statistics of a recipe": Case({**EVERY, "LogFp8TensorStats": LOST}, "current", steps=2, microbatches=2),
    "statistics in half": Case({**EVERY, "LogFp8TensorStats": LOST}, "mxfp8", "bfloat16"),
    "delayed": Case(
        {"LogFp8TensorStats": logs("underflows%", "overflows%", "mse", "scale_inv_max")}, "delayed", steps=3
    ),
    "blocks": Case({"LogFp8TensorStats": LOST}, "blocks"),
    "nvfp4": Case({"LogNvfp4TensorStats": logs("underflows%", "mse")}, "nvfp4"),
    "gradients in E4M3": Case({"LogFp8TensorStats": LOST}, "current in E4M3"),
    "gradients in E5M2": Case({"LogFp8TensorStats": LOST}, "mxfp8 with E5M2"),
    "idle steps": Case({"LogTensorStats": logs("max", start_step=3)}, steps=5),
    "pairs": Case({"LogTensorStats": logs("max", "mean", freq=2, start_end_list=[[0, 1], [4, 6]])}, "current", steps=8),
    "two schedules": Case(
        {"LogTensorStats": logs("min", tensors=TENSORS, freq=2), "LogFp8TensorStats": LOST}, "current", steps=4
    ),
    "FakeQuant": Case({"FakeQuant": on(**FAKE)}, steps=2),
    "FakeQuant of a recipe": Case({"FakeQuant": on(**FAKE), **EVERY}, "current", "bfloat16"),
    "FakeQuant of results": Case(
        {
            "FakeQuant": on(
                gemms=["fprop", "dgrad", "wgrad"], tensors=["output", "dgrad", "wgrad"], quant_format="FP8E5M2"
            )
        }
    ),
    "disabled": Case(
        {"DisableQuantizationGEMM": on(gemms=["dgrad"]), "LogTensorStats": logs("max")}, "current", bias=False
    ),
    "disabled layer": Case({"DisableQuantizationLayer": on()}, "delayed", steps=2, bias=False),
    "scaling": Case(
        {"PerTensorScaling": on(gemms=["fprop", "dgrad"], tensors=["activation", "weight", "gradient"])},
        "delayed",
        steps=2,
    ),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    doors = {f"{name} by the door": replace(case, door=True) for name, case in CASES.items()}
    return once.value("te.Linear by the door", lambda: te_oracle.answers({**CASES, **doors}))


def routing(recipe: bool) -> Iterator[Call]:
    """What a layer asks before it runs, in Transformer Engine's order."""
    for tensor in ("activation", "weight", "output", "dgrad", "wgrad", "gradient"):
        yield Call("inspect_tensor_enabled", (tensor,))
        if tensor not in GEMMS_OF:
            yield Call("modify_tensor_enabled", (tensor, "fprop" if tensor == "output" else tensor))
            continue
        yield from (Call("inspect_tensor_postquantize_enabled", (tensor, gemm)) for gemm in GEMMS_OF[tensor])
        for gemm in GEMMS_OF[tensor]:
            yield Call("modify_tensor_enabled", (tensor, gemm))
            if recipe:
                yield Call("fp8_gemm_enabled", (gemm,))


@pytest.mark.parametrize(("name", "recipe", "asked"), [
    ("statistics", False, 21), ("statistics of a recipe", True, 27),
])  # fmt: skip
def test_a_layer_asks_27_times_with_a_recipe_and_21_without(
    answers: dict[str, Answer], name: str, recipe: bool, asked: int
) -> None:
    wanted = [*routing(recipe)]
    assert len(wanted) == asked
    seen = [
        Call("inspect_tensor", (tensor,)) for tensor in ("activation", "weight", "output", "gradient", "dgrad", "wgrad")
    ]
    for engine in (name, f"{name} by the door"):
        assert answers[engine].calls == [*wanted, *seen] * CASES[name].steps * CASES[name].microbatches


@pytest.mark.parametrize("name", CASES)
def test_the_door_is_asked_the_same_and_answers_the_same(answers: dict[str, Answer], name: str) -> None:
    us, them = answers[f"{name} by the door"], answers[name]
    assert us.calls == them.calls and us.calls
    for array, other in zip(us.outputs + us.dgrads + us.wgrads, them.outputs + them.dgrads + them.wgrads, strict=True):
        assert np.array_equal(array, other)
    told = dict(them.logged)
    if name == "two schedules":  # nvdlfw-inspect tells all features of a tensor where one is due
        early = {(step, f"{tensor}_min") for step in (1, 3) for tensor in INPUTS}
        assert early <= told.keys()
        told = {key: value for key, value in told.items() if key not in early}
    assert us.logged.keys() == told.keys()
    half = CASES[name].dtype != "float32"
    for (step, stat), value in told.items():
        if CASES[name].recipe.startswith("mxfp8") and "scale_inv" in stat:
            value = 2.0 ** (value - 127)  # it tells the exponent as it is stored
        rounded = half and not stat.endswith(("_min", "_max"))
        assert us.logged[step, stat] == pytest.approx(value, rel=0.01 if rounded else 2e-5, abs=1e-30), (step, stat)
