"""A clip follows its block through cuts, joins, strides and reordered heads of a step's matrix."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.core.values import Numeric, Site, Slice, TensorSpec
from bridge.planning.plan import Step
from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.load import load_scheme
from bridge.streaming.scales import clip_of
from bridge.tables.expressions.regions import reordered

FORMAT = load_scheme("int4_awq_clip").format
OUT, IN, BLOCK = 12, 384, 128
RNG = np.random.default_rng(3)
CLIPS = {name: RNG.uniform(0.5, 1, (OUT, IN // BLOCK)).astype(np.float32) for name in ("q", "k")}
SPECS = {name: TensorSpec(name, (OUT, IN), "bfloat16") for name in CLIPS}
TURNED = {"q": TensorSpec("q", (IN, OUT), "float32")}
CALIBRATION = Calibration(Provenance("", "", "", "", "", "", 0, 0), weight_clip=CLIPS)


def clip(*inputs: Slice, layout: str = "out_in", specs: dict[str, TensorSpec] = SPECS) -> np.ndarray:
    found = clip_of(Step(inputs, (), Site("q", "q", layout), FORMAT), specs, CALIBRATION)
    assert found and found.dtype == specs["q"].dtype
    return found.factors


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((Slice("q", module="q"),), CLIPS["q"]),
        ((Slice("q"),), CLIPS["q"]),
        ((Slice("q", module="q"), Slice("k", module="k")), np.concatenate([CLIPS["q"], CLIPS["k"]])),
        ((Slice("k", rows=(4, 9), module="k"),), CLIPS["k"][4:9]),
        ((Slice("k", cols=(128, 384), module="k"),), CLIPS["k"][:, 1:]),
        ((Slice("k", step=3, module="k"),), CLIPS["k"][::3]),
        ((Slice("q", rope=4, module="q"),), reordered(CLIPS["q"], 4)),
        ((Slice("q", module="q"), Slice("", rows=(0, 2), cols=(0, IN))), np.concatenate([CLIPS["q"], np.ones((2, 3))])),
    ],
)
def test_a_clip_follows_its_block(inputs: tuple[Slice, ...], expected: np.ndarray) -> None:
    np.testing.assert_array_equal(clip(*inputs), expected)


def test_a_matrix_stored_in_out_has_its_clips_by_out() -> None:
    np.testing.assert_array_equal(clip(Slice("q", module="q", transposed=True), specs=TURNED), CLIPS["q"])
    np.testing.assert_array_equal(clip(Slice("q", module="q"), layout="in_out", specs=TURNED), CLIPS["q"])
    cut = Slice("q", rows=(128, 384), cols=(3, 7), module="q", transposed=True)
    np.testing.assert_array_equal(clip(cut, specs=TURNED), CLIPS["q"][3:7, 1:])


def test_a_format_without_clips_has_none() -> None:
    plain = Step((Slice("q"),), (), Site("q", "q", "out_in"), load_scheme("int4_wo").format)
    assert clip_of(plain, SPECS, None) is None


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_the_scale_of_a_block_covers_the_clipped_part_of_its_amax(layout: str) -> None:
    found = clip_of(Step((Slice("q"),), (), Site("q", "q", "out_in"), FORMAT), {"q": TURNED["q"]}, CALIBRATION)
    assert found is not None
    weight = RNG.standard_normal((OUT, IN)).astype(np.float32)
    numeric = (Numeric("int4", "block", (BLOCK,)),)
    stored = weight if layout == "out_in" else np.ascontiguousarray(weight.T)
    own = np.abs(weight).reshape(OUT, -1, BLOCK).max(-1)
    arrays = encode(stored, "float32", numeric, layout=layout, clip=type(found)(CLIPS["q"]))
    scale = arrays["scale"] if layout == "out_in" else arrays["scale"].T
    np.testing.assert_array_equal(scale, own * CLIPS["q"] / np.float32(7))
    values = decode(arrays, numeric, stored.shape, layout=layout)
    values = values if layout == "out_in" else values.T
    low, high = -8 * scale.repeat(BLOCK, 1), 7 * scale.repeat(BLOCK, 1)
    inside = np.abs(np.clip(weight, low, high) - values) <= scale.repeat(BLOCK, 1) * 0.5001
    assert inside.all()
