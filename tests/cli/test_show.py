"""Tables for the terminal: everything the plan and the report hold is there once, layers folded."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import bridge
from bridge.api.advice import recommended
from bridge.cli.show import describe
from bridge.cli.terminal import Terminal
from bridge.core.errors import UsageError
from bridge.core.text import fold, size
from bridge.core.values import Slice, TensorSpec
from bridge.planning.contract_files import runtime_names
from bridge.planning.plan import Output, Plan, Step
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.quality import DITHERED, read_quality
from bridge.reporting.plan_table import plan_table
from bridge.reporting.report import Advice, Coverage, Outliers, Report, Storage, report_from_dict, report_table
from bridge.verification.parity import Count, OutputParity, Parity, ScaleRange, TensorParity

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


def text(renderable: Any, width: int = 1000) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, markup=False, highlight=False).print(renderable)
    return stream.getvalue()


def tensor(name: str, sqnr: float = 31.0, passed: bool = True) -> TensorParity:
    return TensorParity(name, "fp8", 0.9996, 1.0001, sqnr, 0.04, passed)


def report(**changes: Any) -> Report:
    tensors = [tensor(f"layers.{n}.up.weight", 31.0 + n, n != 2) for n in range(5)]
    outputs = (
        OutputParity("source", 512, 0.9991, 1.0010, 0.0312, 0.0, 283.25, 281.5, True),
        OutputParity("modelopt", 512, 0.99999, 1.0, 0.0004, 0.9, None, None, True),
    )
    parity = Parity((*tensors, tensor("head<b>.weight")), outputs, (("layers.4.up", 0.05),), ("why & how",))
    made = Report(
        "out", "ab" * 32, "trt", "fp8", 118, 35, 2_730_000, 6_170_000, {"plan": 0.11, "write": 2.5}, 9 * 10**8, parity,
        skipped={"layers.0.freq": "computed", "layers.1.freq": "computed"}, policies={"layers.3.up": "zero: floor"},
        findings=("warning [x] y: z",), notes=("one note",), versions={"torch": "2.13.0"},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_folded_rows_of_a_plan_add_up_to_its_tensors_and_bytes() -> None:
    plan = bridge.plan(MODEL, "trt", "fp8", kv="fp8")
    columns, rows = plan.table()
    assert columns == ("tensor", "n", "shape", "format", "bytes")
    assert sum(int(n) for _, n, *_ in rows) == len(plan.steps)
    assert len(rows) < len(plan.outputs) / 8
    said = text(plan_table(plan))
    assert all(" ".join(row) in " ".join(said.split()) for row in rows)


def test_a_plan_says_why_matrices_stay_unquantized() -> None:
    plan = bridge.plan(MODEL, "trt", "fp8")
    lines = [line for line in text(plan_table(plan)).splitlines() if line.startswith("kept ")]
    for step in plan.steps:
        if step.kept:
            why = step.kept if step.site else "not a matrix multiplication"
            assert any(why in line for line in lines), step.kept


@pytest.mark.parametrize(("target", "quant"), [("hf", "int4_wo"), ("hf", "fp8"), ("trt", "int8"), ("gguf", "q4_k_m")])
def test_a_plan_has_at_most_40_lines_and_names_what_loads_it(target: str, quant: str) -> None:
    lines = text(plan_table(bridge.plan(MODEL, target, quant))).splitlines()
    assert len(lines) < 40 and sum(line.startswith("loads in ") for line in lines) == 1


def test_kinds_that_there_is_no_room_for_are_counted_with_their_bytes() -> None:
    def step(n: int) -> Step:
        spec = TensorSpec(f"kind_{'abcdefghij'[n // 10]}{'abcdefghij'[n % 10]}.w", (3, 5 + n), "int8")
        return Step((Slice(spec.name),), (Output(spec, "weight", spec.name),))

    plan = Plan("A", "trt", "s", "", {}, {}, tuple(map(step, range(60))))
    said = text(plan_table(plan))
    assert len(said.splitlines()) < 40 and "kind_fj.w" in said and "kind_aa.w" not in said
    count = int(re.search(r"(\d+) more kinds: --all", said)[1])
    rows = [line for line in said.splitlines() if line.startswith("  kind_")]
    assert count + len(rows) == 60
    assert all(f"kind_{a}{b}.w" in text(plan_table(plan, every=True)) for a in "abcdef" for b in "abcdefghij")


def test_one_program_is_named_where_one_was_asked_for() -> None:
    said = text(plan_table(bridge.plan(MODEL, "hf", "fp8_pc_pt", runtime="sglang")))
    assert "loads in SGLang 0.5.23\n" in said


def test_all_of_a_plan_says_why_each_tensor_stays_unquantized() -> None:
    plan = bridge.plan(MODEL, "trt", "fp8")
    said = text(plan_table(plan, every=True)).partition("unquantized, and why")[2]
    for step in plan.steps:
        if step.kept:
            assert step.kept in said
            assert re.sub(r"\.\d+\.", ".{0..4}.", step.source) in said or step.source in said


def test_a_plan_shows_ties_drops_notes_and_side_files() -> None:
    plan = dataclasses.replace(
        bridge.plan(MODEL, "trt", "fp8"), tied={"alias.weight": "stored.weight"}, dropped={"a.freq": "from the config"},
        notes=("costs something",), side_files=("chat.jinja",), traced=True,
    )  # fmt: skip
    said = text(plan_table(plan))
    for words in (
        "alias.weight",
        "stored.weight",
        "a.freq",
        "from the config",
        "costs something",
        "chat.jinja",
        "torch",
    ):
        assert words in said


def test_tensors_of_different_dtype_are_not_folded_together() -> None:
    def step(layer: int, dtype: str) -> Step:
        spec = TensorSpec(f"layers.{layer}.w", (3, 5), dtype)
        return Step((Slice(spec.name),), (Output(spec, "weight", spec.name),))

    steps = tuple(step(n, "int8" if n in (1, 2, 4) else "float16") for n in range(6))
    plan = Plan("A", "trt", "s", "", {}, {}, steps)
    assert re.findall(r"^  (layers\S+)", text(plan_table(plan)), re.MULTILINE) == [
        "layers.{0,3,5}.w",
        "layers.{1..2,4}.w",
    ]


def test_a_narrow_terminal_loses_no_character() -> None:
    plan = bridge.plan(MODEL, "trt", "fp8")
    narrow = text(plan_table(plan), width=70)
    assert max(map(len, narrow.splitlines())) <= 70
    assert "…" not in narrow


def test_one_line_a_tensor_is_never_cropped() -> None:
    plan = bridge.plan(MODEL, "trt", "fp8")
    stream = io.StringIO()
    Terminal(Console(file=stream, width=40), lambda done, total, what: None).print(plan_table(plan, every=True))
    lines = {line.strip() for line in stream.getvalue().splitlines()}
    for output in plan.outputs:
        assert any(line.startswith(f"{output.spec.name} ") and line.endswith(output.expression) for line in lines)


def test_where_a_table_does_not_fit_names_get_their_own_line() -> None:
    lines = [line.strip() for line in text(report_table(report()), width=80).splitlines()]
    at = lines.index("layers.{0..4}.up.weight")
    assert lines[at + 1].split() == ["5", "fp8", "0.999600", "1.0001", "33.0", "4.00e-02", "2", "FAILED"]
    assert "source          512  0.999100  1.0010  3.12e-02      283.25     281.50  passed" in lines


def test_names_fold_over_layers_and_experts() -> None:
    names = [f"layers.{layer}.experts.{e}.w" for layer in (0, 1, 3) for e in range(4)]
    assert fold(names) == "layers.{0..1,3}.experts.{0..3}.w"
    assert fold(["layers.3.w"]) == "layers.3.w"


def test_a_report_shows_the_worst_of_folded_layers() -> None:
    row = next(line for line in text(report_table(report())).splitlines() if "up.weight" in line)
    assert row.split() == [
        "layers.{0..4}.up.weight",
        "5",
        "fp8",
        "0.999600",
        "1.0001",
        "33.0",
        "4.00e-02",
        "2",
        "FAILED",
    ]
    healthy = dataclasses.replace(report().parity, tensors=(tensor("layers.0.w", 31), tensor("layers.1.w", 28)))
    row = next(line for line in text(report_table(report(parity=healthy))).splitlines() if "{0..1}.w" in line)
    assert row.split()[-3:] == ["4.00e-02", "1", "passed"]
    assert "28.0" in row


def test_a_report_shows_every_field() -> None:
    said = text(report_table(report()))
    for words in (
        "283.25", "281.50", "3.12e-02", "layers.4.up", "5.00e-02", "why & how", "zero: floor", "layers.{0..1}.freq",
        "warning [x] y: z", "one note", "6.17 MB -> 2.73 MB (44%)", "2.6 (plan 0.1, write 2.5)", "900 MB",
        "FAILED: layers.2.up.weight",
    ):  # fmt: skip
        assert words in said, words


def test_a_report_without_comparison_says_so() -> None:
    assert "not compared" in text(report_table(report(parity=Parity())))


def test_a_report_shows_what_was_counted() -> None:
    parity = dataclasses.replace(report().parity, counts=(Count("codes nearest", 1199, 1200),))
    said = text(report_table(report(parity=parity, counts=(Count("accounted", 48, 48),))))
    assert re.search(r"accounted +48 +48\n +codes nearest +1,199 +1,200\n", said)


def full() -> Report:
    """A report with a row of each kind."""
    parity = dataclasses.replace(
        report().parity, counts=(Count("codes", 9, 10),), scales=(ScaleRange("up", 6, -3, (1, 0, 5)),)
    )
    return report(
        parity=parity,
        made_from={"source": "here"},
        counts=(Count("accounted", 48, 48),),
        storage=(Storage("up", 5, 100, "float32", "int8", 400, 100, 20),),
        dtypes=(("float32", 400, 0), ("int8", 0, 120)),
        outliers=(Outliers("layers.0.up", 0.5, 9.0, (7, 3), 60),),
        experts=(Coverage("layers.0.experts", (5, 0, 2)),),
        advice=(Advice(("layers.0.q", "layers.0.k"), 0.25, 0.5, 4096),),
    )


def test_a_report_survives_its_json() -> None:
    import json

    assert report_from_dict(json.loads(full().to_json())) == full()
    assert report_from_dict(json.loads(report().to_json())) == report()
    assert report_from_dict(json.loads(report(parity=Parity()).to_json())) == report(parity=Parity())


def test_a_written_model_shows_its_plan_and_its_report(tmp_path: Path) -> None:
    import json

    plan = bridge.plan(MODEL, "trt", "fp8")
    (tmp_path / "bridge.json").write_text(json.dumps({"plan": plan.to_dict()}))
    (tmp_path / "report.json").write_text(report().to_json())
    data, tables = describe(str(tmp_path))
    said = "".join(text(table) for table in tables)
    assert plan.digest[:12] in said
    assert "FAILED" in said
    assert set(data) == {"manifest", "report"}


def test_a_calibration_shows_where_it_comes_from_and_its_ranges(tmp_path: Path) -> None:
    import numpy as np

    from bridge.quant.calibration import Applied, Calibration, Provenance

    amax = {f"layers.{n}.up": np.array(0.5 + n, np.float32) for n in range(3)}
    applied = (Applied("layers.1.up", "input amax", "zero", "floor", 0.125),)
    made = Calibration(Provenance("fp8", "d" * 64, "A", "m", "float32", "e" * 64, 8, 64), amax, applied=applied)
    path = made.save(tmp_path / "c.safetensors")
    data, tables = describe(str(path))
    said = "".join(text(table) for table in tables)
    assert re.search(r"input_amax\s+layers\.\{0\.\.2\}\.up\s+3\s+0\.5\s+2\.5", said)
    assert "0.125" in said
    assert data["provenance"]["samples"] == 8


@pytest.mark.parametrize(
    ("nbytes", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (999_900_000, "1 GB")]
)
def test_sizes_are_said_in_powers_of_1000(nbytes: int, said: str) -> None:
    assert size(nbytes) == said


def listed(every: bool = False, runtime: str | None = None) -> tuple[list[str], list[str]]:
    """The names in the data of the list of schemes, and its lines."""
    data, tables = describe("schemes", every, runtime=runtime)
    return [entry["name"] for entry in data], "".join(text(table) for table in tables).splitlines()


def test_the_list_of_schemes_has_those_of_the_advice_and_data_of_all() -> None:
    names, lines = listed()
    assert names == scheme_names()
    found = {match[1] for line in lines if (match := re.match(r" {2,4}(\S+) +\d", line))}
    assert found == {*recommended()} and len(found) <= 8 and len(lines) <= 40


def test_every_scheme_is_listed_with_what_it_costs_and_rules_below_their_layout() -> None:
    names, lines = listed(every=True)
    first = [found[1] for line in lines if (found := re.match(r" {2,4}(\S+)", line))]
    assert {*names} <= {*first} and first.index("nvfp4") + 1 == first.index("nvfp4:gptq")
    kl = f"{read_quality()['int4_wo'][DITHERED].kl:.4f}"
    said = next(line for line in lines if line.split()[:1] == ["int4_wo"])
    assert said.split()[1:5] == ["4.50", "16", kl, "no"] and "unquantized" not in said
    assert [line.split()[3] for line in lines if line.split()[:1] == ["nvfp4_experts_only"]] == ["-"]


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("runtime", [None, *runtime_names()])
def test_lists_of_schemes_fit_80_columns_and_nothing_is_cut(every: bool, runtime: str | None) -> None:
    _, lines = listed(every, runtime)
    assert max(map(len, lines)) <= 80
    assert not any("..." in line for line in lines if "--for vllm" not in line)


def test_a_program_narrows_the_list_and_its_data() -> None:
    names, lines = listed(runtime="mlx")
    assert "affine8" in names and "fp8" not in names
    assert any(line.split()[:1] == ["affine8"] for line in lines) and not any("nvfp4" in line for line in lines)
    with pytest.raises(UsageError, match="--for mlx narrows the list of schemes"):
        describe("fp8", runtime="mlx")


def test_a_file_that_is_no_recipe_is_told_what_shows_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"neither a recipe \(.toml\) nor a calibration; `qbridge plan`"):
        describe(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("word", ["int4", "int4:best", "INT4:Best"])
def test_the_best_rule_of_a_layout_is_shown_with_its_rules(word: str) -> None:
    data, _ = describe(word)
    assert data["rules"] == ["int4:rtn", "int4:imatrix", "int4:gptq", "int4:awq", "int4:signround"]
    assert data["tried"] == ["rtn", "imatrix", "gptq"] and data["without data"] == "int4:rtn"


def test_programs_fit_80_columns() -> None:
    data, rows = describe("runtimes")
    lines = "".join(text(row, width=200).rstrip() + "\n" for row in rows).splitlines()
    assert len(data) > 8 and max(map(len, lines)) <= 80
    at = next(n for n, line in enumerate(lines) if line.split()[:2] == ["vllm", "vLLM"])
    assert re.search(r"--target hf --format modelopt +\d+ schemes$", lines[at + 1])


def test_a_rule_has_the_figures_of_the_file_that_a_program_loads() -> None:
    """GPTQ's codes cost more in the layout of MLX than in that of vLLM."""
    shown = {name: "\n".join(listed(False, name)[1]) for name in ("mlx", "vllm")}
    found = {name: re.search(r"int4:gptq +[\d.]+ +16 +([\d.]+)", text) for name, text in shown.items()}
    figures = {name: match and float(match[1]) for name, match in found.items()}
    quality = read_quality()
    assert figures["mlx"] == pytest.approx(quality["int4:gptq --target mlx"][DITHERED].kl, abs=1e-4)
    assert figures["vllm"] == pytest.approx(quality["int4:gptq"][DITHERED].kl, abs=1e-4)
