"""What Tripy can say of a format, format by format: schemes name only some of them, recipes can name all."""

from __future__ import annotations

from pathlib import Path

import pytest

import bridge
from bridge.core.values import Format, Numeric
from bridge.targets.tripy.formats import incompatibilities, why_unsupported

FP8, INT8 = Numeric("float8_e4m3fn", "tensor"), Numeric("int8", "channel")
INT4 = Numeric("int4", "block", (128,))
INPUT8, INPUT_FP8 = Numeric("int8", "tensor"), Numeric("float8_e4m3fn", "tensor")


@pytest.mark.parametrize(
    "format_",
    [Format((INT8,)), Format((INT8,), INPUT8), Format((FP8,), INPUT_FP8), Format((INT4,), None, "awq"),
     Format((Numeric("float8_e4m3fn", "channel"),), INPUT_FP8), Format((Numeric("int4", "channel"),))],
)  # fmt: skip
def test_what_one_quant_dtype_and_a_constant_scale_can_say_is_taken(format_: Format) -> None:
    assert why_unsupported(format_, linear=False) == ""


@pytest.mark.parametrize(
    ("format_", "says"),
    [
        (Format((Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn"),)), "Tripy has no float4_e2m1fn"),
        (Format((INT4, FP8)), "not one dtype after another"),
        (Format((Numeric("float8_e4m3fn", "block", (128, 128)),)), "block scales for int4 only"),
        (Format((INT8,), Numeric("int8", "token", dynamic=True)), "not made per token at run time"),
        (Format((Numeric("int4", "channel"),), INPUT8), "no input scale beside it"),
        (Format((INT8,), INPUT_FP8), "not int8 and float8_e4m3fn"),
    ],
)
def test_what_it_cannot_say_is_refused_with_what_to_use(format_: Format, says: str) -> None:
    reason = why_unsupported(format_, linear=False)
    assert says in reason
    assert "; use " in reason or ": use " in reason


def test_blocks_must_divide_the_axis_that_they_lie_along() -> None:
    assert incompatibilities(Format((INT4,)), (7, 256)) == []
    (problem,) = incompatibilities(Format((INT4,)), (7, 96))
    assert "in = 96 does not divide into blocks of 128" in problem
    assert "block = 32" in problem


@pytest.mark.slow
def test_convolutions_stay_as_they_are_and_the_plan_says_why(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=24, patch_size=8,
        architectures=["ViTForImageClassification"],
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    plan = bridge.plan(tmp_path, target="tripy", quant="int8_wo")
    (step,) = [s for s in plan.steps if s.source.endswith("patch_embeddings.projection.weight")]
    assert step.format is None
    assert step.outputs[0].spec.shape == (48, 3, 8, 8)
    assert "conv" in step.kept
    assert plan.quantized
