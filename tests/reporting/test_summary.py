"""What the report counts is what plan, files and calibration hold; a count falls when something is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration, Provenance
from bridge.reporting import summary as facts
from bridge.reporting.report import Report
from bridge.verification.counts import COMPARED, EQUAL, FINITE, NEAREST, SHARED, USABLE
from bridge.verification.parity import Parity, TensorParity
from tests.models.sources_made import MadeSource, made_llama

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
MADE = Provenance("", "", "", "", "", "", 0, 0)


@pytest.fixture(scope="module")
def source() -> MadeSource:
    found = made_llama("bfloat16")
    found.config = {**found.config, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    return found


@pytest.fixture(scope="module")
def written(source: MadeSource, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    out = tmp_path_factory.mktemp("facts") / "out"
    return out, bridge.convert(source, "hf", "nvfp4_wo", out)


def counted(report: Report) -> dict[str, tuple[int, int]]:
    return {count.what: (count.n, count.of) for count in report.invariants}


def harmed(written: tuple[Path, Report], root: Path, source: MadeSource, name: str, change: Any) -> Report:
    """The report on a copy in which `change` was made to the bytes of one tensor."""
    import shutil

    shutil.copytree(written[0], root / "harmed")
    file = SafetensorsFile(root / "harmed" / "model.safetensors")
    data = bytearray(file.read(name).tobytes())
    change(data)
    with (root / "harmed" / "model.safetensors").open("r+b") as opened:
        opened.seek(file.offset(name))
        opened.write(data)
    return bridge.verify(root / "harmed", source)


def test_every_tensor_code_and_scale_is_counted(written: tuple[Path, Report], source: MadeSource) -> None:
    sites = [spec for name, spec in source.specs.items() if "_proj" in name]
    values, modules, others = sum(spec.size for spec in sites), len(sites), len(source.specs) - len(sites)
    found = counted(written[1])
    assert found.pop(facts.ACCOUNTED) == (len(source.specs), len(source.specs))
    assert found == {
        COMPARED: (written[1].tensors,) * 2,
        FINITE: (written[1].tensors,) * 2,
        NEAREST: (values, values),
        USABLE: (values // 16, values // 16),
        EQUAL: (others, others),
        SHARED: (6, 6),  # q, k and v, gate and up of three layers
    }
    assert written[1].tensors == 3 * modules + others


def next_code(data: bytearray) -> None:
    data[0] ^= 7


def not_a_number(data: bytearray) -> None:
    data[:2] = b"\xc0\x7f"


def zero(data: bytearray) -> None:
    data[0] = 0


def doubled(data: bytearray) -> None:
    data[:] = (np.frombuffer(data, np.float32) * 2).tobytes()


@pytest.mark.parametrize(
    ("name", "change", "fallen"),
    [
        ("model.layers.1.mlp.up_proj.weight", next_code, {NEAREST}),
        ("model.layers.1.mlp.up_proj.weight_scale", zero, {USABLE, NEAREST}),
        ("model.layers.1.mlp.up_proj.weight_scale_2", doubled, {SHARED, NEAREST}),
        ("model.norm.weight", not_a_number, {EQUAL, FINITE}),
        ("model.norm.weight", next_code, {EQUAL}),
    ],
)
def test_a_count_falls_when_one_thing_is_wrong(
    written: tuple[Path, Report], source: MadeSource, tmp_path: Path, name: str, change: Any, fallen: set[str]
) -> None:
    report = harmed(written, tmp_path, source, name, change)
    assert {what for what, (n, of) in counted(report).items() if n < of} == fallen
    assert not report.passed


def test_a_scale_that_is_not_a_number_makes_the_weight_not_finite(
    written: tuple[Path, Report], source: MadeSource, tmp_path: Path
) -> None:
    def nan(data: bytearray) -> None:
        data[3] = 0x7F  # e4m3

    found = counted(harmed(written, tmp_path, source, "model.layers.0.mlp.up_proj.weight_scale", nan))
    assert found[USABLE][0] == found[USABLE][1] - 1
    assert found[FINITE][0] < found[FINITE][1]


def test_every_scale_lies_in_its_histogram(written: tuple[Path, Report], source: MadeSource) -> None:
    assert written[1].parity
    ranges = {row.kind: row for row in written[1].parity.scales}
    assert len(ranges) == 7
    up = ranges["model.layers.{}.mlp.up_proj.weight"]
    assert up.scales == 3 * 384 * 128 // 16
    blocks = [np.abs(source_values(source, n)).reshape(-1, 16).max(1) / 6 for n in range(3)]
    powers = np.floor(np.log2(np.concatenate(blocks)))
    assert abs(up.low - powers.min()) <= 1 and abs(up.low + len(up.counts) - 1 - powers.max()) <= 1


def source_values(source: MadeSource, layer: int) -> np.ndarray:
    from bridge.core.dtypes import to_float32

    return to_float32(source.arrays[f"model.layers.{layer}.mlp.up_proj.weight"], "bfloat16")


@pytest.mark.parametrize(
    ("target", "scheme", "options"),
    [("hf", "nvfp4_wo", {}), ("trt", "fp8", {"kv": "fp8"}), ("trtllm", "int8_wo", {"tp": 2}), ("hf", None, {})],
)
def test_bytes_by_kind_and_by_dtype_add_up_to_source_and_plan(
    target: str, scheme: str, options: dict[str, Any]
) -> None:
    plan = bridge.plan(TINY, target, scheme, **options)
    rows, dtypes = facts.storage(plan), facts.dtypes(plan)
    before, after = sum(spec.nbytes for spec in plan.sources.values()), sum(step.nbytes for step in plan.steps)
    assert sum(row.codes + row.scales for row in rows) == sum(row[2] for row in dtypes) == after
    assert sum(row[1] for row in dtypes) == before
    assert before - sum(row.before for row in rows) == sum(
        plan.sources[name].nbytes for name in plan.dropped if name in plan.sources
    )


def calibration(**changes: Any) -> Calibration:
    return replace(Calibration(MADE), **changes)


def test_channels_far_above_the_median_are_outliers_the_farthest_first() -> None:
    flat, one, two = (np.ones(40, np.float32) for _ in range(3))
    one[7] = 12
    two[[3, 9]] = 300, 20
    found = facts.outliers(calibration(smoothing_amax={"flat": flat, "one": one, "two": two, "dead": flat * 0}))
    assert [(row.module, row.channels, row.largest, row.of) for row in found] == [
        ("two", (3, 9), 300.0, 40), ("one", (7,), 12.0, 40),
    ]  # fmt: skip
    assert facts.outliers(None) == ()


def test_experts_are_told_in_the_order_of_their_layers() -> None:
    tokens = {f"layers.{n}.experts": np.array([n, 0, 2], np.float32) for n in (10, 2)}
    found = facts.coverage(calibration(expert_tokens=tokens))
    assert [(row.module, row.tokens, row.unseen) for row in found] == [
        ("layers.2.experts", (2, 0, 2), (1,)), ("layers.10.experts", (10, 0, 2), (1,)),
    ]  # fmt: skip
    assert facts.coverage(None) == ()


def plan_and_damage(**worse: float) -> tuple[Plan, Parity]:
    plan = bridge.plan(TINY, "hf", "fp8")
    modules = [step.site.module for step in plan.quantized if step.site]
    layers = tuple((module, worse.get(module.replace(".", "_"), 0.01)) for module in modules)
    return plan, Parity(layers=layers)


def test_what_hurts_far_more_than_the_median_is_to_be_kept_with_what_reads_the_same_input() -> None:
    plan, parity = plan_and_damage(model_layers_3_self_attn_q_proj=0.5)
    (row,) = facts.advice(plan, parity)
    assert row.modules == tuple(f"model.layers.3.self_attn.{part}_proj" for part in "qkv")
    assert row.damage == 0.5 and row.share > 0.98
    steps = [step for step in plan.quantized if step.site and step.site.module in row.modules]
    kept = bridge.plan(TINY, "hf", None)
    plain = {output.spec.name: output.spec.nbytes for output in kept.outputs}
    assert row.bytes == sum(plain[f"{m}.weight"] for m in row.modules) - sum(step.nbytes for step in steps)


def test_nothing_is_advised_where_all_hurt_alike_or_nothing_was_compared() -> None:
    plan, parity = plan_and_damage()
    assert facts.advice(plan, parity) == () == facts.advice(plan, Parity())


def test_the_most_gained_per_byte_comes_first_and_advice_has_an_end() -> None:
    worse = {f"model_layers_{n}_mlp_{part}_proj": 0.5 for n in range(5) for part in ("down", "up")}
    plan, parity = plan_and_damage(**worse, model_layers_2_self_attn_o_proj=0.5)
    found = facts.advice(plan, parity)
    assert found[0].modules == ("model.layers.2.self_attn.o_proj",)  # as much damage, fewer bytes
    assert len(found) == facts.MAX_ADVICE
    assert [row.share / row.bytes for row in found] == sorted((row.share / row.bytes for row in found), reverse=True)


def test_where_no_output_was_run_the_error_of_the_weights_advises() -> None:
    plan, _ = plan_and_damage()
    names = [output.spec.name for step in plan.quantized for output in step.outputs if output.part == "weight"]
    rows = tuple(TensorParity(n, "", 1, 1, 10.0 if "3.mlp.down" in n else 30.0, 0, True) for n in names)
    (row,) = facts.advice(plan, Parity(rows))
    assert row.modules == ("model.layers.3.mlp.down_proj",)
    assert row.damage == pytest.approx(10**-0.5)


def test_the_provenance_names_source_arguments_and_calibration(written: tuple[Path, Report]) -> None:
    made = written[1].made_from
    assert made["source"] == "made" and made["fingerprint of the source"] == "made"
    assert "target=hf, quant=nvfp4_wo, format=modelopt" in made["arguments"]
    assert "calibration" not in made
    plan, prov = bridge.plan(TINY, "trt", "fp8", kv="fp8"), Provenance("fp8", "", "A", "", "float32", "d1", 8, 64)
    said = facts.provenance(plan, made_llama(), Calibration(prov))
    assert "kv=float8_e4m3fn" in said["arguments"]
    assert said["calibration"] == "scheme fp8, 8 sequences of 64 tokens, float32" and said["calibration data"] == "d1"
