"""Where contracts are told: plan, report, page, next command, the tables of the site."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

import bridge
from bridge.cli.check import check_path
from bridge.core.errors import VerifyError
from bridge.core.mappings import mappings, read_table
from bridge.planning.contract_files import load_runtime, runtimes
from bridge.quant.schemes.catalog import scheme_names
from bridge.targets import load_target
from docs.generate import make
from tests.planning.test_contracts import TINY


def test_plan_report_check_and_page_say_who_loads_an_output(tmp_path: Path) -> None:
    report = bridge.convert(TINY, "hf", "int8_wo", tmp_path / "out", verify=False)
    (line,) = [line for line in report.lines() if line.startswith("loads in")]
    assert "TensorRT-LLM" in line and "vLLM" not in line
    page = (tmp_path / "out" / "report.html").read_text()
    assert "--format compressed-tensors" in page
    assert all(problem.fatal is False for problem in check_path(tmp_path / "out"))


def test_an_altered_output_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(TINY, "vllm", "int8_wo", out, verify=False)
    assert check_path(out) == []
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    (out / "config.json").write_text(json.dumps(config))
    assert any("quantization_config was changed after it was written" in problem.text for problem in check_path(out))


@pytest.mark.parametrize(
    ("program", "command"),
    [("vllm", "vllm serve"), ("sglang", "python -m sglang.launch_server --model-path"), ("transformers", "python -c")],
)
def test_the_next_command_is_that_of_the_program_that_was_asked_for(program: str, command: str) -> None:
    plan = bridge.plan(TINY, program, "fp8_pc_pt")
    told = load_target("hf").next_command(plan)
    assert told.startswith(command) and shlex.split(told)[-1] == "{out}"
    same = bridge.plan(TINY, "hf", "fp8_pc_pt", format=plan.options["format"])
    assert load_target("hf").next_command(same) == "vllm serve {out}"
    assert dataclasses.replace(plan, notes=same.notes).digest == same.digest, "the program decides no byte"


def test_the_next_command_has_the_ranks_that_were_asked_for() -> None:
    command = load_target("hf").next_command(bridge.plan(TINY, "vllm", "fp8_pc_pt", tp=2))
    assert command == "vllm serve {out} --tensor-parallel-size 2"


def test_what_onnx_runtime_loads_has_a_next_command() -> None:
    assert load_target("ort").next_command(bridge.plan(TINY, "ort", "int8_wo")).startswith("qbridge run {out} ")


def test_own_scales_without_weights_that_it_changes_is_told() -> None:
    assert any(
        "own_scales changes nothing" in note for note in bridge.plan(TINY, "hf", "int8_wo", own_scales=True).notes
    )
    assert not any("own_scales" in note for note in bridge.plan(TINY, "hf", "fp8", own_scales=True).notes)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_once")
def test_every_file_beside_the_weights_that_changed_or_is_gone_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    bridge.convert(TINY, "ort", "int8_wo", out, verify=False)
    assert check_path(out) == []
    changed = ("config.json", "genai_config.json", "tokenizer.json")
    for name in changed:
        (out / name).write_text((out / name).read_text() + "\n")
    (out / "model.onnx").write_bytes((out / "model.onnx").read_bytes() + b"\x32\x01x")  # a doc_string of one letter
    (out / "tokenizer_config.json").unlink()
    lines = {problem.text: problem.fatal for problem in check_path(out)}
    assert {text for text, fatal in lines.items() if not fatal} == {
        "warning [files] genai_config.json: was changed after it was written"
    }
    assert {text for text, fatal in lines.items() if fatal and "[files]" in text} == {
        *(
            f"error [files] {name}: was changed after it was written; convert again"
            for name in ("config.json", "model.onnx", "tokenizer.json")
        ),
        "error [files] tokenizer_config.json: is missing; convert again",
    }
    report = bridge.verify(out, TINY)
    assert not report.passed and not any(line.startswith("loads in") for line in report.lines())
    assert any("config.json: was changed" in finding for finding in report.findings)
    data = json.loads((out / "bridge.json").read_text())
    data["plan"]["scheme"] = "fp8"
    (out / "bridge.json").write_text(json.dumps(data))
    with pytest.raises(VerifyError, match="its plan does not have its plan_digest"):
        check_path(out)


def test_the_tables_of_the_site_have_every_scheme_and_program() -> None:
    from docs.generate import make

    lines = make("runtimes").splitlines()
    assert len(lines) == len(scheme_names()) + 2
    assert all(f"`{runtime.name}`" in lines[0] for runtime in runtimes())


def test_products_of_codes_are_built_from_the_first_gpu_that_multiplies_them() -> None:
    """The builder's contract and the formats of the hardware agree: what the guide to GPUs is made from."""
    file = read_table(mappings() / "runtimes" / "tensorrt-rtx.toml")
    multiplies, (contract,) = file.section("multiplies"), load_runtime("tensorrt-rtx").contracts
    assert set(multiplies) <= {*file.section("gpus"), *file.section("elsewhere")} and set(file.section("gpus")) <= set(
        multiplies
    )
    for words, row in contract.loads.items():
        if row.computes == "gemm":
            inputs = words.rpartition(" | ")[2].split()[0]
            first = next(sm for sm in file.section("gpus") if inputs in multiplies[sm]["formats"].split(", "))
            assert row.since == first, words
    page = make("gpus")
    ada, hopper, newest = (next(line for line in page.splitlines() if sm in line) for sm in ("SM89", "SM90", "SM120"))
    assert "H100" in hopper and re.search(r"`nvfp4` \([^)]*\): vLLM, SGLang, TensorRT-LLM, TensorRT for RTX", newest)
    assert "`nvfp4`" not in ada and "`w4a8_nvfp4_fp8`" not in ada and "`w4a8_awq`" in ada
