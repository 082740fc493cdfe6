"""`bridge.inspect(model, against=...)`: what was written beside its source, and the files that tell it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.core.errors import UsageError, VerifyError, WriteError  # noqa: E402
from bridge.workflows.inspect.page import page_of, render  # noqa: E402
from bridge.workflows.inspect.result import Inspection, Record, inspection_table  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

LLAMA, GPT2 = "examples/models/tiny-llama", "examples/models/tiny-gpt2"
FEW: dict[str, Any] = {"samples": 4, "sequence": 64, "progress": False}


def written(model: Any, scheme: str, out: Path) -> Path:
    bridge.convert(model, "hf", scheme, out, verify=False, progress=False)
    return out


@pytest.mark.parametrize(
    ("model", "scheme", "alone"),
    [
        (LLAMA, "int4_wo", 18),
        (LLAMA, "nvfp4", 17),
        pytest.param(LLAMA, "fp8", 28, marks=pytest.mark.product),
        (LLAMA, "int8_sq", 28),
        (GPT2, "fp8", 28),
    ],
)
def test_errors_are_those_of_the_scheme(model: str, scheme: str, alone: float, tmp_path: Path) -> None:
    """A weight of n bits and an input of n bits: the level is that of the format, and errors grow on their way."""
    seen = bridge.inspect(model, against=written(model, scheme, tmp_path / "out"), **FEW)
    worst = seen.most_alone(1)[0]
    assert worst.alone and worst.alone.sqnr == pytest.approx(alone, abs=1.5)
    head = seen.compared[-1]
    quantized = [row for row in seen.compared if row.alone and row.alone.sqnr is not None]
    assert head.kind == "Linear" and head.alone and head.alone.sqnr is None  # it is not quantized
    assert head.accumulated.sqnr is not None
    assert head.accumulated.sqnr < max(row.alone.decibels for row in quantized if row.alone)


def test_matrices_of_classes_of_their_own_are_compared_alone(tmp_path: Path) -> None:
    """Falcon's Linear is a class of transformers."""
    model = build("FalconForCausalLM").float()
    ids = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    out = written(model, "int8_wo", tmp_path / "out")
    seen = bridge.inspect(model, against=out, data=[{"input_ids": ids[:1]}, {"input_ids": ids[1:]}], progress=False)
    alone = {row.module for row in seen.compared if row.alone and row.alone.sqnr is not None}
    assert any(name.endswith("self_attention.dense") for name in alone)


def test_an_unquantized_output_has_no_difference(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(LLAMA, "hf", None, out, verify=False, progress=False)
    seen = bridge.inspect(LLAMA, against=out, **FEW)
    assert len(seen.compared) > 50 and all(row.accumulated.sqnr is None for row in seen.compared)


def test_static_scales_of_inputs_are_those_of_the_output(tmp_path: Path) -> None:
    """Scales that cut all inputs off make an error which the weights alone would not show."""
    ids = torch.full((4, 8), 5)
    calibration = bridge.calibrate(LLAMA, "fp8", [{"input_ids": ids}], progress=False)
    for module in calibration.input_amax:
        calibration.input_amax[module][...] *= 0.01
    bridge.convert(LLAMA, "hf", "fp8", tmp_path / "out", calib=calibration, verify=False, progress=False)
    seen = bridge.inspect(LLAMA, against=tmp_path / "out", **FEW)
    assert all(row.alone and row.alone.decibels < 5 for row in seen.most_alone(10))


def test_experts_inside_one_module_are_told(tmp_path: Path) -> None:
    model = build("MixtralForCausalLM").float()
    batches = [
        {"input_ids": torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(n))} for n in range(2)
    ]
    out = tmp_path / "out"
    bridge.convert(model, "hf", "fp8", out, calib=batches, verify=False, progress=False)
    seen = bridge.inspect(model, against=out, data=batches, progress=False)
    assert any("inputs run unquantized" in note for note in seen.notes)
    assert {row.module for row in seen.compared} >= {"model.layers.0.self_attn.q_proj", "model.layers.0"}


def test_the_files_have_the_same_figures_and_the_same_bytes(tmp_path: Path) -> None:
    out = written(LLAMA, "int4_wo", tmp_path / "out")
    seen = bridge.inspect(LLAMA, against=out, out=tmp_path / "seen", **FEW)
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == [
        "inspect.html",
        "inspect.json",
        "statistics.csv",
    ]
    told = json.loads((tmp_path / "seen/inspect.json").read_text())
    assert [row["module"] for row in told["compared"]] == [row.module for row in seen.compared]
    assert told["about"]["scheme"] == "int4_wo"
    page = (tmp_path / "seen/inspect.html").read_text()
    assert "<script" not in page and seen.most_alone(1)[0].module in page
    with pytest.raises(WriteError, match="exists"):
        bridge.inspect(LLAMA, against=out, out=tmp_path / "seen", **FEW)
    bridge.inspect(LLAMA, against=out, out=tmp_path / "seen", overwrite=True, **FEW)
    assert (tmp_path / "seen/inspect.html").read_text() == page
    assert "alone" in repr(seen.table()) and "modules compared" in repr(seen)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    out = written(LLAMA, "int8_wo", tmp_path / "out")
    with pytest.raises(VerifyError, match="was not made from"):
        bridge.inspect(GPT2, against=out, **FEW)
    with pytest.raises(VerifyError, match="name a directory"):
        bridge.inspect(LLAMA, against=LLAMA, **FEW)
    bridge.convert(LLAMA, "megatron", None, tmp_path / "other", verify=False, progress=False)
    with pytest.raises(UsageError, match="was written for megatron"):
        bridge.inspect(LLAMA, against=tmp_path / "other", **FEW)
    with pytest.raises(UsageError, match="inspected on batches"):
        bridge.inspect(LLAMA, against=out, data=lambda model: None, progress=False)


def records() -> Inspection:
    values = {
        ("a.0", "fp8_sqnr"): 31.0, ("a.1", "fp8_sqnr"): 12.0, ("a.2", "fp8_sqnr"): None,
        ("a.0", "fp8_underflows%"): 0.5, ("a.1", "fp8_underflows%"): 9.0, ("a.1", "outlier_ratio"): 80.0,
    }  # fmt: skip
    rows = [
        Record(step, layer, "mlp.up", "activation", stat, value)
        for step in (0, 1)
        for (layer, stat), value in values.items()
    ]
    return Inspection({"model": "m"}, tuple(rows), modules=("a.0", "a.1", "a.2"))


def test_worst_values_come_first_by_the_direction_of_the_statistic() -> None:
    seen = records()
    assert [(r.layer, r.value) for r in seen.worst("sqnr")] == [("a.2", None), ("a.1", 12.0), ("a.0", 31.0)]
    assert [r.layer for r in seen.worst("underflows%")] == ["a.1", "a.0"]
    assert [r.layer for r in seen.worst("fp8_sqnr", n=1, tensor="activation")] == ["a.2"]
    assert seen.worst("fp8_sqnr", tensor="weight") == []
    with pytest.raises(UsageError, match="was not inspected"):
        seen.worst("int8_sqnr")
    columns, rows = seen.table("fp8_sqnr")
    assert columns[-2:] == ("step 0", "step 1") and rows[2][-1] == "not finite"


def printed(seen: Inspection, worst: int = 4) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(inspection_table(seen, worst, None))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_the_worst_of_each_scheme_and_says_what_it_is() -> None:
    values = {"nvfp4_sqnr": 18.0, "fp8_sqnr": 30.0}
    rows = [Record(0, f"a.{at}", "", "weight", s, value + at) for at in range(9) for s, value in values.items()]
    seen = Inspection({}, tuple(rows))
    assert [(row[1], row[4]) for row in seen.table(n=4)[1]] == [
        ("a.0", "nvfp4_sqnr"), ("a.1", "nvfp4_sqnr"), ("a.0", "fp8_sqnr"), ("a.1", "fp8_sqnr"),
    ]  # fmt: skip
    assert "shown: 4 of 18, the worst SQNRs, as many of each scheme" in printed(seen)
    plain = Inspection({}, tuple(Record(0, f"a.{at}", "", "weight", "rms", 1.0) for at in range(9)))
    assert "shown: 4 of 9, the first values (no SQNR); more: --worst N, all: --out DIR or --json" in printed(plain)


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    rows = Record(0, "a.0", "", "weight", "nan%", 0.0), Record(0, "a.1", "", "weight", "nan%", 3.125)
    text = printed(Inspection({}, rows))
    assert "not finite: weight of a.1 at step 0 (nan% = 3.125) is the first; nan=True (--nan) names" in text
    assert "not finite" not in printed(Inspection({}, rows[:1]))


def test_a_recipe_keeps_the_layers_below_a_value(tmp_path: Path) -> None:
    seen = records()
    text = seen.recipe(below=18)
    assert 'base = "fp8"' in text and '"a.1",\n    "a.2",' in text and "a.0" not in text
    assert "[[rule]]" not in seen.recipe(below=-1.0).replace("a.2", "") or "a.1" not in seen.recipe(below=-1.0)
    real = Inspection({}, (Record(0, "model.layers.1.mlp.down_proj", "", "activation", "fp8_sqnr", 3.0),))
    (tmp_path / "kept.toml").write_text(real.recipe())
    plan = bridge.plan(LLAMA, "hf", tmp_path / "kept.toml")
    assert "model.layers.1.mlp.down_proj.weight" not in {step.source for step in plan.quantized}
    with pytest.raises(UsageError, match="no single scheme"):
        Inspection({}, (Record(0, "a", "", "weight", "sqnr", 1.0),)).recipe()


def test_values_are_written_as_they_are() -> None:
    seen = records()
    rows = list(csv.DictReader(io.StringIO(seen.to_csv())))
    assert len(rows) == len(seen.records) and rows[2]["value"] == "" and float(rows[0]["value"]) == 31.0
    assert json.loads(seen.to_json())["records"][1]["value"] == 12.0


def test_the_page_names_reasons() -> None:
    page = page_of(records())
    cells = [row for section in page.sections if section.id == "worst" for row in section.tables[0].rows]
    assert cells[1][:5] == ("a.1", "mlp.up", "activation", "fp8", "12.0")
    assert cells[1][5] == "outliers: amax 80 x p99.9; 9.0 % become zero" and "NaN" in cells[0][5]
    assert render(records()) == render(records()) and "Parity" not in render(records())
