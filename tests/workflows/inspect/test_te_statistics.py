"""Statistics of a linear layer are those that Transformer Engine logs of `te.Linear`; where it is wrong, by how much.

Its Python and nvdlfw-inspect's engine are their own, of one config.yaml; casts and GEMM stand in
(`tests/oracles/te_runtime`). In float32 statistics of one part agree within 2e-5, and counts are equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import linear  # noqa: E402

from bridge.core.dtypes import from_float32  # noqa: E402
from bridge.workflows.inspect.statistics.coding import fake_quantized  # noqa: E402
from bridge.workflows.inspect.statistics.losses import LOSSES, loss, losses  # noqa: E402
from bridge.workflows.inspect.statistics.quantization import of_recipe  # noqa: E402
from tests import once  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.oracles import te_oracle  # noqa: E402
from tests.oracles.te_runtime.cases import TENSORS, Answer, Case  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not te_oracle.is_installed(), reason=te_oracle.MISSING)]

EXACT = ("min", "max", "cur_amax", "dynamic_range")
SUMS = ("mean", "std", "l1_norm", "l2_norm")
BLOCKS: tuple[dict[str, int], ...] = ({"block_size": 32, "dims": 1}, {"block_size": 16, "dims": 2})
STATS = [*EXACT, *SUMS, *({"max_blockwise_dynamic_range": blocks} for blocks in BLOCKS)]
INPUTS = ("activation", "weight", "gradient")
LOST = ("underflows%", "mse", "scale_inv_min", "scale_inv_max")
DTYPES = ("float32", "bfloat16", "float16")
NEAR = {"float32": 1e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}
SCHEDULES: Mapping[str, dict[str, Any]] = {
    "all": {}, "every second": {"freq": 2}, "from 1 to 2": {"start_step": 1, "end_step": 2},
    "pairs": {"start_end_list": [[0, 0], [2, 3]], "freq": 2},
}  # fmt: skip
SCHEME = {
    "current": "fp8_current_scaling", "delayed": "fp8_delayed_scaling", "mxfp8": "mxfp8", "blocks": "fp8_block_scaling",
}  # fmt: skip
PLAIN = covering(
    {"dtype": DTYPES, "schedule": [*SCHEDULES], "parts": (1, 3)}, [("dtype", "schedule"), ("dtype", "parts")]
)
LOSSY = covering(
    {"recipe": ("current", "mxfp8", "blocks", "nvfp4"), "dtype": DTYPES, "parts": (1, 2)},
    [("recipe", "dtype"), ("recipe", "parts")],
)
ODD = {"nan": (1, 2), "inf": (1, 2), "zeros": (1,), "tiny": (1,)}  # -> microbatches


def logs(stats: Sequence[Any], tensors: Sequence[str] = INPUTS, **schedule: Any) -> dict[str, Any]:
    return {"enabled": True, "tensors": list(tensors), "stats": list(stats), **schedule}


def named(scheme: str, columnwise: bool = False) -> list[str]:
    ends = ("", "_columnwise") if columnwise else ("",)
    return [f"{scheme}_{stat}{end}" for stat in LOST for end in ends]


def lossy(recipe: str, dtype: str, parts: int) -> Case:
    if recipe == "nvfp4":
        features = {"LogNvfp4TensorStats": logs(["underflows%", "mse"])}
    else:
        features = {"LogFp8TensorStats": logs(named(SCHEME[recipe], recipe in ("mxfp8", "blocks")))}
    return Case(features, recipe, dtype, microbatches=parts, seed=parts)


CASES: dict[str, Case] = {
    **{
        f"plain {dtype} {schedule} {parts}": Case(
            {"LogTensorStats": logs(STATS, TENSORS, **SCHEDULES[schedule])}, dtype=dtype, steps=4, microbatches=parts
        )
        for dtype, schedule, parts in PLAIN
    },
    **{f"lossy {recipe} {dtype} {parts}": lossy(recipe, dtype, parts) for recipe, dtype, parts in LOSSY},
    **{
        f"odd {odd} {parts}": Case(
            {"LogTensorStats": logs([*EXACT, *SUMS])}, microbatches=parts, odd={("activation", 0, parts - 1): odd}
        )
        for odd, all_parts in ODD.items()
        for parts in all_parts
    },
    "delayed": Case(
        {"LogFp8TensorStats": logs([*named("fp8_delayed_scaling"), "fp8_delayed_scaling_overflows%"])},
        "delayed",
        steps=2,
    ),
    "what if, of current": Case({"LogFp8TensorStats": logs(named("mxfp8") + named("fp8_block_scaling"))}, "current"),
    "what if, of mxfp8": Case({"LogFp8TensorStats": logs(named("fp8_current_scaling"))}, "mxfp8"),
    "own current": Case({"LogFp8TensorStats": logs(named("fp8_current_scaling"))}, "current"),
    "own mxfp8": Case({"LogFp8TensorStats": logs(named("mxfp8", True))}, "mxfp8"),
    "own blocks": Case({"LogFp8TensorStats": logs(named("fp8_block_scaling"))}, "blocks"),
    "column": Case({"LogFp8TensorStats": logs(named("mxfp8", True))}, "mxfp8", odd={("activation", 0, 0): "column"}),
    "schedules of tensors": Case({"LogTensorStats": {"enabled": True, "tensors_struct": [
        {"tensor": "activation", "stats": ["min"], "freq": 2}, {"tensor": "wgrad", "stats": ["max"], "start_step": 3},
        {"tensor": "dgrad", "stats": ["l1_norm"], "start_end_list": [[1, 1], [4, 4]]},
    ]}}, steps=6),
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> dict[str, Answer]:
    return once.value("statistics of te.Linear", lambda: te_oracle.answers(CASES))


@functools.cache
def ours(name: str) -> Answer:
    return te_oracle.inspected(CASES[name])


def parts_of(case: Case, answer: Answer, tensor: str, step: int) -> list[np.ndarray]:
    """The microbatches of a tensor, as numbers of its dtype in float64."""
    if tensor in ("output", "dgrad", "wgrad"):
        found = getattr(answer, f"{tensor}s")[step * case.microbatches : (step + 1) * case.microbatches]
    elif tensor == "weight":
        found = [case.parameters()[0]]
    else:
        found = [case.microbatch(step, at)[tensor == "gradient"] for at in range(case.microbatches)]
    return [torch.from_numpy(part).to(getattr(torch, case.dtype)).double().numpy() for part in found]


def right(parts: Sequence[np.ndarray], stat: str) -> float:
    """The formula, in float64 over the whole."""
    x = np.concatenate([part.ravel() for part in parts])
    size = np.abs(x)
    formulas = {
        "min": x.min, "max": x.max, "cur_amax": size.max, "mean": x.mean, "std": lambda: x.std(ddof=1),
        "l1_norm": size.sum, "l2_norm": lambda: math.sqrt(np.square(x).sum()),
        "dynamic_range": lambda: math.log2(size.max() / size[size > 0].min()),
    }  # fmt: skip
    return float(formulas[stat]())


def close(found: Mapping[Any, Any], wanted: Mapping[Any, Any], rel: float) -> None:
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=rel, abs=1e-30), key


@pytest.mark.parametrize(("dtype", "schedule", "parts"), PLAIN)
def test_tensors_have_the_statistics_of_te_linear(
    theirs: dict[str, Answer], dtype: str, schedule: str, parts: int
) -> None:
    """Told at the same steps under the same names. In half precision Transformer Engine rounds its sums."""
    name = f"plain {dtype} {schedule} {parts}"
    case, them, us = CASES[name], theirs[name], ours(name)
    assert them.logged.keys() == us.logged.keys() and len(us.logged) >= 2 * len(TENSORS) * len(STATS)
    for key, value in them.logged.items():
        tensor, stat = key[1].split("_", 1)
        mine, exact = us.logged[key], stat not in SUMS
        if stat in EXACT + SUMS:
            truth = right(parts_of(case, them, tensor, key[0]), stat)
            assert mine == pytest.approx(truth, rel=2e-6), key
        if stat == "std" and parts > 1 and tensor != "weight":
            assert not value > mine * (1 if dtype == "float32" else 1.01), key  # too small, or NaN
        elif math.isfinite(value):
            assert value == pytest.approx(mine, rel=2e-5 if exact or dtype == "float32" else 0.01), key
        else:
            assert dtype == "float16" and stat in SUMS, key  # a sum beyond 65,504
    for mine, other in zip(us.outputs + us.dgrads + us.wgrads, them.outputs + them.dgrads + them.wgrads, strict=True):
        assert np.array_equal(mine, other)


def test_tensors_are_told_at_the_steps_of_their_own_schedules(theirs: dict[str, Answer]) -> None:
    told, us = theirs["schedules of tensors"].logged, ours("schedules of tensors").logged
    assert [step for step, name in us if name == "dgrad_l1_norm"] == [1, 4]
    assert told.keys() == us.keys()
    close(us, told, 2e-5)


def test_the_spread_of_microbatches_is_that_of_the_whole(theirs: dict[str, Answer]) -> None:
    """Transformer Engine subtracts the squares between the means of two parts where they are to be added."""
    name = next(name for name in CASES if name.startswith("plain float32") and name.endswith(" 3"))
    case, them = CASES[name], theirs[name]
    step, apart = next(iter(them.logged))[0], []
    for tensor in TENSORS:
        parts = [part.ravel() for part in parts_of(case, them, tensor, step)]
        variance, total, n = float(np.var(parts[0], ddof=1)), parts[0].sum(), parts[0].size
        for part in parts[1:]:
            both = np.array([n, part.size]), np.array([total / n, part.mean()])
            spread = np.array([variance, np.var(part, ddof=1)]) - (both[1] - np.average(both[1], weights=both[0])) ** 2
            variance, total, n = float(np.average(spread, weights=both[0])), total + part.sum(), n + part.size
        said = them.logged[step, f"{tensor}_std"]
        assert said == pytest.approx(math.sqrt(variance), rel=1e-4) if variance > 0 else math.isnan(said)
        apart.append(1 - said / right(parts, "std"))
    assert apart[TENSORS.index("weight")] == pytest.approx(0, abs=1e-6)
    assert apart[TENSORS.index("activation")] > 0.05 and math.isnan(apart[TENSORS.index("wgrad")])


@pytest.mark.parametrize(("recipe", "dtype", "parts"), LOSSY)
def test_losses_are_those_of_a_recipes_own_tensors(
    theirs: dict[str, Answer], recipe: str, dtype: str, parts: int
) -> None:
    name = f"lossy {recipe} {dtype} {parts}"
    them, us = theirs[name].logged, ours(name).logged
    assert them.keys() == us.keys() and len(them) == 3 * len(next(iter(CASES[name].features.values()))["stats"])
    for key, value in them.items():
        if "mxfp8_scale" in key[1]:
            value = 2.0 ** (value - 127)  # it tells the exponent as it is stored
        halved = dtype != "float32" and "mse" in key[1]  # it takes the mean in the tensor's dtype
        assert us[key] == pytest.approx(value, rel=0.02 if halved else 2e-5, abs=1e-30), key


@pytest.mark.parametrize(("recipe", "dtype", "parts"), LOSSY)
def test_the_stand_in_multiplies_what_our_recipes_make(
    theirs: dict[str, Answer], recipe: str, dtype: str, parts: int
) -> None:
    """Rows of both inputs for the output, the columns of the weight for dgrad, columns of both for wgrad."""
    case, them = CASES[f"lossy {recipe} {dtype} {parts}"], theirs[f"lossy {recipe} {dtype} {parts}"]
    half = getattr(torch, dtype)

    def taken(x: np.ndarray, tensor: str, columns: bool) -> Any:
        how, rows = of_recipe(SCHEME.get(recipe, recipe), tensor), np.ascontiguousarray(x.T if columns else x)
        made = torch.from_numpy(fake_quantized(from_float32(rows.astype(np.float32), dtype), dtype, how)).to(half)
        return made.t().contiguous() if columns else made

    bias = torch.from_numpy(case.parameters()[1]).to(half)
    bias = bias.bfloat16().to(half) if dtype == "float32" else bias  # as it is for a recipe
    (w,) = parts_of(case, them, "weight", 0)
    inputs = zip(parts_of(case, them, "activation", 0), parts_of(case, them, "gradient", 0), strict=True)
    for at, (x, g) in enumerate(inputs):
        made = {
            "outputs": linear(taken(x, "activation", False), taken(w, "weight", False), bias),
            "dgrads": taken(g, "gradient", False).mm(taken(w, "weight", True)),
            "wgrads": taken(g, "gradient", True).t().mm(taken(x, "activation", True)),
        }
        for name, tensor in made.items():
            array, other = tensor.float().numpy(), getattr(them, name)[at]
            if recipe == "nvfp4":  # whose two scales it rounds in another order: codes at ties fall either way
                assert (np.abs(array - other) > np.abs(other).max() * NEAR[dtype]).mean() < 0.01, name
            else:
                assert np.array_equal(array, other), name


def test_losses_of_delayed_scaling_are_those_of_the_amax_before(theirs: dict[str, Answer]) -> None:
    case, told = CASES["delayed"], theirs["delayed"]
    for tensor in INPUTS:
        before, now = (parts_of(case, told, tensor, step)[0].astype(np.float32) for step in (0, 1))
        how = of_recipe("fp8_delayed_scaling", tensor)
        sums = losses(from_float32(now, "float32"), "float32", how, amax=float(np.abs(before).max()))
        said = {stat: told.logged[1, f"{tensor}_fp8_delayed_scaling_{stat}"] for stat in (*LOST, "overflows%")}
        found = {stat: loss(sums, stat.replace("scale_inv", "scale")) for stat in said}
        close(found, said, 2e-5)
        assert set(found) <= {*LOSSES, "scale_inv_min", "scale_inv_max"}
    assert told.logged[1, "gradient_fp8_delayed_scaling_overflows%"] > 0


def test_what_another_recipe_would_lose_is_what_it_loses(theirs: dict[str, Answer]) -> None:
    """Transformer Engine asks "what if" with the running recipe's dtype and square blocks, so it tells another number
    for gradients, and for blocks of activations; ours is the number that it tells when the recipe is the one that runs.
    """
    own = {**theirs["own mxfp8"].logged, **theirs["own blocks"].logged, **theirs["own current"].logged}
    apart = set()
    for name in ("what if, of current", "what if, of mxfp8"):
        them, us = theirs[name].logged, ours(name).logged
        assert them.keys() == us.keys()
        for key, value in us.items():
            byte = "mxfp8_scale" in key[1]
            assert value == pytest.approx(2.0 ** (own[key] - 127) if byte else own[key], rel=2e-5, abs=1e-30), key
            if them[key] != pytest.approx(own[key], rel=2e-5):
                apart.add(key[1])
    assert {name.split("_", 1)[0] for name in apart} == {"activation", "gradient"}
    assert all("fp8_block_scaling" in name for name in apart if name.startswith("activation"))
    assert "gradient_mxfp8_mse" in apart and "gradient_fp8_current_scaling_underflows%" in apart


def test_the_error_of_columns_is_that_of_columns(theirs: dict[str, Answer]) -> None:
    """Transformer Engine tells the rows' under both names."""
    them, us = theirs["column"].logged, ours("column").logged
    rows, columns = ((0, f"activation_mxfp8_mse{end}") for end in ("", "_columnwise"))
    assert them[rows] == them[columns] == pytest.approx(us[rows], rel=2e-5)
    assert us[columns] < us[rows] / 10
    counts = (0, "activation_mxfp8_underflows%_columnwise")
    assert them[counts] == pytest.approx(us[counts], rel=1e-6) != us[counts[0], counts[1].removesuffix("_columnwise")]


@pytest.mark.parametrize("odd", ["nan", "inf"])
def test_what_is_not_finite_is_left_out_of_sums(theirs: dict[str, Answer], odd: str) -> None:
    """Transformer Engine's sums are NaN or infinite; a NaN of a later part it does not see in min, max and amax."""
    alone, later = (f"odd {odd} {parts}" for parts in ODD[odd])
    for name in (alone, later):
        parts = parts_of(CASES[name], theirs[name], "activation", 0)
        finite = [part[np.isfinite(part)] for part in parts]
        us, them = ours(name).logged, theirs[name].logged
        for stat in (*EXACT, *SUMS):
            key = (0, f"activation_{stat}")
            if odd == "inf" and stat == "cur_amax":
                assert us[key] is None and them[key] == math.inf
            else:
                assert us[key] == pytest.approx(right(finite, stat), rel=2e-6), key
            if stat in SUMS:
                assert not math.isfinite(them[key])
    if odd == "nan":
        assert all(math.isnan(theirs[alone].logged[0, f"activation_{stat}"]) for stat in ("min", "max", "cur_amax"))
        assert all(math.isfinite(theirs[later].logged[0, f"activation_{stat}"]) for stat in ("min", "max", "cur_amax"))


def test_zeros_and_tiny_numbers(theirs: dict[str, Answer]) -> None:
    """Nothing has a range of 0 octaves; Transformer Engine says infinity."""
    zeros, said = ours("odd zeros 1").logged, theirs["odd zeros 1"].logged
    assert zeros[0, "activation_dynamic_range"] == 0 and said[0, "activation_dynamic_range"] == math.inf
    rest = {key: value for key, value in said.items() if key[1] != "activation_dynamic_range"}
    close(zeros, rest, 2e-5)
    tiny, said = ours("odd tiny 1").logged, theirs["odd tiny 1"].logged
    close(tiny, {key: said[key] for key in said if not key[1].startswith("activation_l2")}, 2e-5)
