"""Contracts of runtimes: what they say of a plan, what `runtime=` chooses and refuses, and bad contracts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.cli.check import check_path
from bridge.core.errors import BridgeError, SchemeError, TableError, UsageError
from bridge.core.mappings import mappings, parse_table
from bridge.planning.contract_files import load_runtime, parse_runtime, runtime_names, runtimes
from bridge.planning.contracts import Verdict, verdict
from bridge.quant.schemes.catalog import scheme_names
from bridge.targets import program_of
from tests.oracles import export_oracle as oracle

TINY = Path(__file__).parent.parent.parent / "examples" / "models" / "tiny-llama"
ROOT = TINY.parent.parent.parent
CONTRACT = """
program = "Server"
version = "1.2"
fused = ["q_proj k_proj v_proj"]

[writes.modelopt]
target = "hf"
options = { format = "modelopt" }
plain = { read = "server/load.py" }

[writes.modelopt.loads]
"""
FP8 = '"fp8 tensor | fp8 tensor" = { run = "tests/x.py" }'
INT8 = '"int8 channel | none" = { read = "server/int8.py" }'


def judged(rows: str, quant: Any, **options: Any) -> Verdict:
    """What a contract with these rows says of a plan of the tiny Llama."""
    runtime = parse_runtime("server", parse_table(CONTRACT + rows, "server.toml"))
    return verdict(runtime, bridge.plan(TINY, "hf", quant, **options))


def test_a_row_loads_its_formats_and_says_how_that_is_known() -> None:
    assert judged(FP8, "fp8").how == "run"
    assert judged(INT8, "int8_wo").how == "read"
    assert judged("", None).how == "read"


def test_what_no_row_names_is_refused() -> None:
    answer = judged(FP8, "int8_wo")
    assert answer.how == "no"
    assert answer.why_not == "loads no weights in int8 channel with unquantized inputs there"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (", out = 128", "self_attn.v_proj: out = 64 is not a multiple of 128, and it is fused with others"),
        (", in = 100", "mlp.down_proj: in = 384 is not a multiple of 100"),
        (', dtypes = ["bfloat16"]', "in bfloat16 only, and the model is float32: pass --dtype bf16"),
        (', but_not = ["LlamaForCausalLM"]', "reads no int8 channel | none in LlamaForCausalLM"),
    ],
)
def test_a_condition_of_a_row_refuses_and_names_the_modules(row: str, why: str) -> None:
    answer = judged(INT8.replace(" }", f"{row} }}"), "int8_wo")
    assert answer.how == "no" and why in answer.why_not


def test_conditions_on_fused_rows_leave_the_others_alone() -> None:
    answer = judged(INT8.replace(" }", ", out = 128 }"), "int8_wo")
    assert "o_proj" not in answer.why_not and "down_proj" not in answer.why_not


def test_other_architectures_than_those_excluded_are_loaded() -> None:
    assert judged(INT8.replace(" }", ', but_not = ["MistralForCausalLM"] }'), "int8_wo").how == "read"


def test_experts_can_be_excluded() -> None:
    model = oracle.source("mixtral", "bf16")
    runtime = parse_runtime("s", parse_table(CONTRACT + INT8.replace(" }", ", experts = false }"), "s.toml"))
    assert "experts are not read in this format" in verdict(runtime, bridge.plan(model, "hf", "int8_wo")).why_not


def test_a_kv_cache_and_a_mix_need_to_be_named(tmp_path: Path) -> None:
    assert "no KV cache in fp8 tensor" in judged(FP8, "fp8", kv="fp8").why_not
    recipe = tmp_path / "mixed.toml"
    recipe.write_text('base = "fp8"\n[[rule]]\nmodules = ["*.mlp.*"]\nquant = "int8_wo"\n')
    answer = judged(f"{FP8}\n{INT8}", recipe)
    assert "reads one format for all modules there" in answer.why_not


def test_other_flags_of_the_same_program_are_named() -> None:
    answer = verdict(load_runtime("vllm"), bridge.plan(TINY, "hf", "int4_wo"))
    assert answer.how == "no" and answer.instead == "--format compressed-tensors"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('program = "S"\n', "`version` is missing"),
        ('program = "S"\nversion = "1"\n', r"no \[writes.NAME\]"),
        (CONTRACT + '"fp8 tensor" = { run = "x" }', "weights | inputs"),
        (CONTRACT + '"a | b" = "run"', "not said how this is known"),
        (CONTRACT + '"a | b" = { run = "x", read = "y" }', "not said how this is known"),
        (CONTRACT + '"a | b" = { run = "x", outs = 3 }', "outs"),
        (CONTRACT.replace("plain", "plane"), "unknown key `plane`"),
    ],
)
def test_a_bad_contract_is_an_error_with_its_row(text: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        parse_runtime("server", parse_table(text, "server.toml"))


def test_every_contract_names_tests_that_exist() -> None:
    rows = [row for runtime in runtimes() for contract in runtime.contracts for row in contract.loads.values()]
    assert rows
    tests = {row.evidence.where for row in rows if row.evidence.how == "run"}
    assert [test for test in sorted(tests) if not (ROOT / test).is_file()] == []
    assert sorted(path.stem for path in (mappings() / "runtimes").glob("*.toml")) == sorted(runtime_names())


@pytest.mark.parametrize("quant", ["fp8", "int4_wo", "int8_wo", "nvfp4_wo", None])
def test_a_runtime_chooses_the_first_output_that_it_loads(quant: str | None) -> None:
    plan = bridge.plan(TINY, "vllm", quant)
    assert plan.target == "hf" and verdict(load_runtime("vllm"), plan).how != "no"
    again = bridge.plan(TINY, "hf", quant, runtime="vLLM==0.33")
    assert again.digest == plan.digest
    assert [note for note in plan.notes if note.startswith("for vLLM 0.33: --target hf --format ")]


def test_what_a_runtime_does_not_load_is_refused_before_work() -> None:
    with pytest.raises(SchemeError, match=r"schemes that it loads: .*fp8") as told:
        bridge.plan(TINY, "hf", "mxfp4_wo", runtime="sglang")
    assert "--format deepseek: loads no weights in fp4 block 32 e8m0" in str(told.value)
    with pytest.raises(BridgeError, match="int4 block 128"):
        bridge.plan(TINY, "hf", "int4_wo", runtime="vllm", format="modelopt")
    with pytest.raises(SchemeError, match="does not load --target trt; it loads --target hf"):
        bridge.plan(TINY, "trt", "fp8", runtime="vllm")


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("vlm", "has no contract; did you mean 'vllm'|known: "),
        ("vllm==0.20", "no contract was written for version 0.20 of vLLM; there is one for 0.33"),
        ("vllm 0.3", "no contract was written for version 0.3 of vLLM"),
    ],
)
def test_an_unknown_program_or_version_is_refused(runtime: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bridge.plan(TINY, "hf", "fp8", runtime=runtime)


def test_names_of_targets_are_no_programs() -> None:
    assert program_of("hf") is None and program_of("trtllm") is None and program_of("nothing") is None
    assert program_of("VLLM") is load_runtime("vllm")


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
    assert any("was changed after it was written" in problem.text for problem in check_path(out))


def test_the_tables_of_the_site_have_every_scheme_and_program() -> None:
    from docs.generate import make

    lines = make("runtimes").splitlines()
    assert len(lines) == len(scheme_names()) + 2
    assert all(f"`{runtime.name}`" in lines[0] for runtime in runtimes())
