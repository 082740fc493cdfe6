"""Contracts of runtimes: what they say of a plan, what `runtime=` chooses and refuses, and bad contracts."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.cli.check import check_path
from bridge.core.errors import SchemeError, TableError, UsageError
from bridge.core.mappings import mappings, parse_table
from bridge.planning.contract_files import load_runtime, parse_runtime, runtime_names, runtimes
from bridge.planning.contracts import HALF, Verdict, misfits, verdict, verdicts
from bridge.planning.programs import Evidence
from bridge.quant.describe import contract_words
from bridge.quant.schemes.group_size import with_zero_points
from bridge.quant.schemes.load import load_scheme
from bridge.reporting.loading import loading_line, loadings
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
    assert answer.why_not == "loads no weights in int8 per channel with unquantized inputs there"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (", out = 128", "self_attn.k_proj: out = 64 is not a multiple of 128, and it is fused with others"),
        (", in = 100", "mlp.down_proj: in = 384 is not a multiple of 100"),
        (', dtypes = ["bfloat16"]', "in bfloat16 only, and the model is float32: pass --dtype bf16"),
        (
            ', but_not = ["LlamaForCausalLM"]',
            "reads no weights in int8 per channel with unquantized inputs in LlamaForCausalLM",
        ),
    ],
)
def test_a_condition_of_a_row_refuses_and_names_the_modules(row: str, why: str) -> None:
    answer = judged(INT8.replace(" }", f"{row} }}"), "int8_wo")
    assert answer.how == "no" and why in answer.why_not


def test_conditions_on_fused_rows_leave_the_others_alone() -> None:
    answer = judged(INT8.replace(" }", ", out = 128 }"), "int8_wo")
    assert "o_proj" not in answer.why_not and "down_proj" not in answer.why_not


@pytest.mark.parametrize(
    ("scheme", "format_", "most"),
    [("int8_wo", "compressed-tensors", 8), ("int4_wo", "compressed-tensors", 1), ("nvfp4_wo", "modelopt", 8)],
)
def test_ranks_get_whole_heads_and_whole_blocks(scheme: str, format_: str, most: int) -> None:
    """`down` is 384 wide: 3 blocks of 128. 2 KV heads are repeated for 4 and 8 ranks; no rank has half a query head."""
    for ranks in (1, 2, 4, 8, 16):
        plan = bridge.plan(TINY, "hf", scheme, format=format_, tp=ranks)
        answer = verdict(load_runtime("vllm"), plan)
        assert (answer.how != "no") == (ranks <= most)
        assert ranks <= most or f"tp={most} fits" in answer.why_not
    with pytest.raises(SchemeError, match=f"8 query heads are not shared evenly by 16 ranks.*tp={most} fits"):
        bridge.plan(TINY, "hf", scheme, runtime="vllm", format=format_, tp=16)


def test_a_limit_of_ranks_is_told_where_the_model_itself_has_a_higher_one() -> None:
    plans = [bridge.plan(TINY, "hf", scheme, format="compressed-tensors") for scheme in ("int4_wo", "int8_wo")]
    assert [verdict(load_runtime("vllm"), plan).ranks for plan in plans] == [1, 0]
    lines = [loading_line(loadings(plan)) for plan in plans]
    assert "vLLM 0.33 (on one rank: no tensor parallelism)" in lines[0] and lines[1].startswith("vLLM 0.33, ")


def test_ranks_need_a_contract_that_speaks_of_them_and_a_table() -> None:
    answer = judged(FP8, "fp8", tp=2)
    assert "tp=2: no run and no source shows that its ranks share" in answer.why_not
    traced = dataclasses.replace(bridge.plan(TINY, "hf", "fp8", tp=2), cuts={})
    assert "no table of LlamaForCausalLM says what ranks share" in verdict(load_runtime("vllm"), traced).why_not
    with pytest.raises(UsageError, match="tp=0 must be a whole number of ranks"):
        bridge.plan(TINY, "hf", "fp8", tp=0)


@pytest.mark.parametrize("name", ["sglang", "transformers", "vllm"])
def test_the_program_that_was_asked_for_is_named_first(name: str) -> None:
    found = loadings(bridge.plan(TINY, name, "fp8_pc_pt"))
    line = loading_line(found)
    assert line.startswith(load_runtime(name).title) and "--for" not in line.partition(";")[0]
    assert len(found) > 3 >= len(line.partition("; ")[0].split(", "))


def test_what_no_program_loads_names_the_one_that_loads_it_otherwise() -> None:
    plan = bridge.plan(TINY, "hf", "mxfp4_wo", format="modelopt")
    assert loading_line(loadings(plan)) == "no program as it is written; for vLLM: --for vllm"


@pytest.mark.parametrize(
    ("scheme", "group", "format_"),
    [
        ("fp8", None, "modelopt"), ("int4_wo", None, "modelopt"), ("int4_wo", 64, "compressed-tensors"),
        ("int4_gptq", 32, "compressed-tensors"), ("mxfp4_wo", None, "compressed-tensors"),
        ("mxfp4_wo:imatrix", None, "compressed-tensors"), ("mxfp8", None, "modelopt"),
    ],
)  # fmt: skip
def test_the_default_format_is_one_that_a_program_loads(scheme: str, group: int | None, format_: str) -> None:
    plan = bridge.plan(TINY, "hf", scheme, group=group)
    assert plan.options["format"] == format_
    assert any(not answer.why_not for answer in verdicts(runtimes(), plan))
    told = [note for note in plan.notes if note.startswith("format ")]
    words = "modelopt of these codes is loaded by no program"
    assert told == ([f"format {format_} (--format): {words}"] if format_ != "modelopt" else [])


def test_what_a_program_makes_of_a_format_that_it_does_not_know_is_told() -> None:
    answer = verdict(load_runtime("transformers"), bridge.plan(TINY, "hf", "fp8"))
    assert "drops the scales with a warning and computes with wrong weights" in answer.why_not
    assert answer.instead == "--format compressed-tensors"
    line = loading_line(loadings(bridge.plan(TINY, "hf", "fp8")))
    assert line == "vLLM 0.33, SGLang 0.5.23, TensorRT-LLM 1.3; for transformers: --for transformers"
    plain = verdict(load_runtime("transformers"), bridge.plan(TINY, "hf"))
    assert plain.how != "no"


def test_files_do_not_depend_on_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2):
        bridge.convert(TINY, "hf", "int8_wo", tmp_path / str(ranks), verify=False, tp=ranks)
    one, two = ((tmp_path / str(ranks) / "model.safetensors").read_bytes() for ranks in (1, 2))
    assert one == two


def test_other_flags_are_named_only_if_they_fit_the_matrices() -> None:
    """The tiny Llama's k has 64 rows: no format of tiles of 128 fits where q, k and v are one matrix."""
    answer = verdict(load_runtime("vllm"), bridge.plan(TINY, "hf", "fp8_block"))
    assert "k_proj: out = 64 is not a multiple of 128" in answer.why_not.replace("self_attn.v_proj", "k_proj")
    assert answer.instead == ""


def test_other_architectures_than_those_excluded_are_loaded() -> None:
    assert judged(INT8.replace(" }", ', but_not = ["MistralForCausalLM"] }'), "int8_wo").how == "read"


@pytest.mark.parametrize("scheme", [None, "int8_wo"])
def test_an_architecture_can_be_excluded_in_every_format(scheme: str | None) -> None:
    plan = bridge.plan(TINY, "trt", scheme)
    contract = load_runtime("genai").contract_of(plan)
    assert contract and not misfits(load_runtime("genai"), contract, plan)
    excluded = misfits(load_runtime("genai"), dataclasses.replace(contract, but_not=("LlamaForCausalLM",)), plan)
    assert excluded == [("", "loads no LlamaForCausalLM there")]


def test_experts_can_be_excluded() -> None:
    model = oracle.source("mixtral", "bf16")
    runtime = parse_runtime("s", parse_table(CONTRACT + INT8.replace(" }", ", experts = false }"), "s.toml"))
    assert "experts are not read in this format" in verdict(runtime, bridge.plan(model, "hf", "int8_wo")).why_not


@pytest.mark.parametrize(("scheme", "loaded"), [("nvfp4_wo", False), ("fp8_block", False), ("int8_wo", True)])
def test_transformers_loads_experts_of_some_formats(scheme: str, loaded: bool) -> None:
    model = oracle.source("mixtral", "bf16")
    answer = verdict(load_runtime("transformers"), bridge.plan(model, "hf", scheme, format="compressed-tensors"))
    assert ("experts are not read in this format" not in answer.why_not) == loaded == (answer.how != "no")


def test_the_last_of_fused_matrices_may_end_within_a_block() -> None:
    """vLLM's validate_fp8_block_shape leaves out the last; DeepSeek's kv_a_proj_with_mqa has 576 rows."""
    row = INT8.replace(" }", ", out = 128 }")
    fused = (CONTRACT + row).replace("q_proj k_proj v_proj", "q_proj k_proj")
    plan = bridge.plan(TINY, "hf", "int8_wo")
    assert verdict(parse_runtime("s", parse_table(fused, "s.toml")), plan).how == "read"
    assert "k_proj: out = 64" in judged(row, "int8_wo").why_not


def test_a_dtype_is_advised_that_the_row_names() -> None:
    row = INT8.replace(" }", ', dtypes = ["float32"] }')
    source = oracle.source("mixtral", "bf16")
    runtime = parse_runtime("s", parse_table(CONTRACT + row, "s.toml"))
    assert "the model is bfloat16: pass --dtype fp32" in verdict(runtime, bridge.plan(source, "hf", "int8_wo")).why_not


def test_a_patch_release_is_the_version_of_the_contract() -> None:
    assert load_runtime("vllm==0.33.1") is load_runtime("vllm")


def test_two_programs_are_not_chosen_between() -> None:
    assert bridge.plan(TINY, "vllm==0.33", "fp8").target == "hf"
    with pytest.raises(UsageError, match="are two programs; leave one out"):
        bridge.plan(TINY, "vllm", "fp8", runtime="sglang")
    with pytest.raises(UsageError, match="has no contract"):
        bridge.plan(TINY, "hf", "fp8", runtime="")


def test_schemes_are_offered_that_the_architecture_is_loaded_in() -> None:
    with pytest.raises(
        SchemeError, match="reads no weights in fp8 per block of 128x128 with unquantized inputs in Llama"
    ) as raised:
        bridge.plan(TINY, "hf", "fp8_block", runtime="sglang")
    assert str(raised.value).splitlines()[-1] == "  planned for this model: --quant int8_wo, fp8_pc_pt, int4:gptq"


def test_a_kv_cache_and_a_mix_need_to_be_named(tmp_path: Path) -> None:
    assert "no KV cache in fp8 per tensor" in judged(FP8, "fp8", kv="fp8").why_not
    recipe = tmp_path / "mixed.toml"
    recipe.write_text('base = "fp8"\n[[rule]]\nmodules = ["*.mlp.*"]\nquant = "int8_wo"\n')
    answer = judged(f"{FP8}\n{INT8}", recipe)
    assert "reads one format for all modules there" in answer.why_not


def test_a_scheme_of_ones_own_is_judged_by_its_numerics(tmp_path: Path) -> None:
    """No name is looked at: what vLLM loads of these numerics, it loads of this file."""
    text = (
        (mappings() / "schemes" / "int8_wo.toml").read_text().replace('aliases   = ["int8-weight-only", "w8a16"]', "")
    )
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('per   = "channel"', 'per   = "block"\nblock = [64]'))
    answer = verdict(load_runtime("vllm"), bridge.plan(TINY, "hf", path, format="compressed-tensors"))
    assert (answer.how, answer.why_not) == ("run", "")
    path.write_text(text.replace('per   = "channel"', 'per   = "block"\nblock = [16]'))
    answer = verdict(load_runtime("vllm"), bridge.plan(TINY, "hf", path, format="compressed-tensors"))
    assert "loads no weights in int8 per block of 16" in answer.why_not  # of Marlin's groups: 32, 64, 128, a row


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
        (CONTRACT + '"a | b" = { run = "" }', "not said how this is known"),
        (CONTRACT + '"a | b" = { run = "x", outs = 3 }', "unknown key `outs`"),
        (CONTRACT + '"fp8 tensr | none" = { run = "x" }', "'fp8 tensr | none' is not `weights | inputs`"),
        (CONTRACT + INT8.replace(" }", ", out = 0 }"), "out = 0: .* at least 1"),
        (CONTRACT + INT8.replace(" }", ', out = "a" }'), "`out` is a whole number, not 'a'"),
        (CONTRACT + INT8.replace(" }", ", dtypes = [3] }"), "`dtypes` is a list of names"),
        (CONTRACT + INT8.replace(" }", ', dtypes = ["fp32"] }'), "dtype 'fp32' is unknown"),
        (CONTRACT.replace("plain = { read", 'plain = { by = "me", read'), "unknown key `by`"),
        (CONTRACT.replace("plain = {", 'mixed = "no"\nplain = {'), "`mixed` is a table, not 'no'"),
        (CONTRACT.replace("plain = {", 'prescales = "false"\nplain = {'), "`prescales` is true or false, not 'false'"),
        (CONTRACT.replace('options = { format = "modelopt" }', 'options = "modelopt"'), "`options` is a table"),
        (CONTRACT.replace('"q_proj k_proj v_proj"', '"q_proj"'), "'q_proj' is fused with nothing"),
        (CONTRACT.replace("[writes.modelopt]", "[mistakes]\nfp8 = 3\n[writes.modelopt]"), "is a string, not 3"),
        (CONTRACT.replace("plain = {", 'sparse = { read = "x" }\nplain = {'), "not said what asks for sparse kernels"),
        (CONTRACT.replace("plain", "plane"), "unknown key `plane`"),
        (CONTRACT.replace("plain = {", 'split = { Llama4 = "yes" }\nplain = {'), "not said how this is known"),
    ],
)
def test_a_bad_contract_is_an_error_with_its_row(text: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        parse_runtime("server", parse_table(text, "server.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CONTRACT.replace('target = "hf"', 'target = "tensorrt-lm"'), "target 'tensorrt-lm' is unknown"),
        (CONTRACT.replace("format =", "formats ="), "formats"),
        (CONTRACT + '"fp8 tensor" = { run = "x" }', "weights | inputs"),
    ],
)
def test_check_reads_a_contract_of_ones_own(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(CONTRACT + INT8)
    assert check_path(path) == []
    path.write_text(text)
    (problem,) = check_path(path)
    assert re.search(message, problem.text) and problem.fatal


def every_evidence() -> Iterator[Evidence]:
    for contract in (contract for runtime in runtimes() for contract in runtime.contracts):
        rows = [*contract.loads.values(), *contract.kv.values(), *([contract.plain] if contract.plain else [])]
        yield from (row.evidence for row in rows)
        yield from filter(None, (contract.mixed, contract.head, contract.ranks))
        yield from (*contract.stacked.values(), *contract.split.values())


@pytest.mark.parametrize("program", ["vllm", "sglang", "edgellm", "edgellm-builder"])
def test_a_row_that_a_run_shows_has_a_cell_that_runs_it(program: str) -> None:
    cells = importlib.import_module(f"tests.targets.hf.test_{program.partition('-')[0]}")
    known = [*cells.SERVED, *(cells.DEEPSEEK if program == "sglang" else [])]
    served = {(cell.format, words(cell)) for cell in known}
    for contract in load_runtime(program).contracts:
        rows = {(contract.options["format"], key) for key, row in contract.loads.items() if row.evidence.how == "run"}
        assert rows <= served and rows


def words(cell: Any) -> str:
    points = bool(dict(getattr(cell, "options", ())).get("zero_points"))
    return contract_words(with_zero_points(load_scheme(cell.scheme), points).format)


def test_every_contract_names_tests_that_exist() -> None:
    tests = {evidence.where for evidence in every_evidence() if evidence.how == "run"}
    assert tests
    assert [test for test in sorted(tests) if not (ROOT / test).is_file()] == []
    assert sorted(path.stem for path in (mappings() / "runtimes").glob("*.toml")) == sorted(runtime_names())


def recipe(folder: Path, base: str, rule: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(f'base = "{base}"\n[[rule]]\n{rule}\n')
    return path


@pytest.mark.parametrize("format_", ["compressed-tensors", "awq", "gptq"])
def test_sglang_does_not_read_what_it_fuses_if_it_stays_unquantized(format_: str, tmp_path: Path) -> None:
    kept = recipe(tmp_path, "int4_wo", 'modules = ["*.mlp.*"]\nquant = "none"')
    plan = bridge.plan(TINY, "hf", kept, format=format_)
    answer = verdict(load_runtime("sglang"), plan)
    assert (
        answer.how == "no"
        and "mlp.up_proj: is unquantized, and the program fuses it with quantized modules" in answer.why_not
    )
    assert verdict(load_runtime("vllm"), plan).how == "run"


def test_no_program_that_fuses_modules_reads_them_half_quantized(tmp_path: Path) -> None:
    half = recipe(tmp_path, "fp8_pc_pt", 'modules = ["*.mlp.up_proj"]\nquant = "none"')
    for format_ in ("modelopt", "compressed-tensors"):
        plan = bridge.plan(TINY, "hf", half, format=format_, allow_split=True)
        answers = {name: verdict(load_runtime(name), plan) for name in ("vllm", "sglang", "transformers")}
        assert f"mlp.up_proj: {HALF}" in answers["vllm"].why_not and answers["vllm"].how == "no"
        assert "mlp.up_proj: " in answers["sglang"].why_not or answers["sglang"].how == "no"
        assert HALF not in answers["transformers"].why_not  # it fuses none


def test_a_quantized_head_is_read_where_a_run_shows_it(tmp_path: Path) -> None:
    head = recipe(tmp_path, "nvfp4_wo", 'roles = ["head.weight"]\nquant = "nvfp4_wo"\noverride = true')
    plan = bridge.plan(TINY, "hf", head)
    assert verdict(load_runtime("vllm"), plan).how == "run"
    assert "lm_head: no run and no source shows" in verdict(load_runtime("sglang"), plan).why_not
    other = bridge.plan(TINY, "hf", head, format="compressed-tensors")
    assert verdict(load_runtime("vllm"), other).how == "run"
    assert "lm_head: no run and no source shows" in verdict(load_runtime("transformers"), other).why_not


def test_sglang_passes_over_kv_scales_of_qwen3() -> None:
    for family, how in (("llama", "run"), ("qwen3", "no")):
        plan = bridge.plan(oracle.source(family, "fp32"), "hf", "fp8", kv="fp8")
        assert verdict(load_runtime("sglang"), plan).how == how


def test_unquantized_graphs_are_loaded_in_the_dtypes_and_tasks_of_the_runs() -> None:
    half = bridge.plan(TINY, "trt", dtype="bf16")
    assert {verdict(load_runtime(name), half).how for name in ("onnxruntime", "genai", "openvino")} == {"no"}
    assert verdict(load_runtime("onnxruntime"), bridge.plan(TINY, "trt", dtype="fp16")).how == "run"
    assert verdict(load_runtime("genai"), bridge.plan(TINY, "trt", cache=False)).how == "no"
    buffered = {
        name: verdict(load_runtime(name), bridge.plan(TINY, "trt", cache=64)).how
        for name in ("onnxruntime", "genai", "openvino")
    }
    assert buffered == {"onnxruntime": "run", "genai": "no", "openvino": "no"}
    with pytest.raises(SchemeError, match=r"loads no unquantized output here:\n.*pass --dtype fp32"):
        bridge.plan(TINY, "trt", dtype="bf16", runtime="onnxruntime")


def test_other_schemes_are_named_only_if_the_scheme_is_the_reason() -> None:
    with pytest.raises(SchemeError) as told:
        bridge.plan(TINY, "openvino", "int8_wo", kv="fp8")
    assert "reads no KV cache" in str(told.value) and "planned for this model" not in str(told.value)


def test_a_format_that_is_taken_for_another_is_told() -> None:
    answer = verdict(load_runtime("edgellm"), bridge.plan(TINY, "hf", "fp8_block"))
    assert answer.how == "no" and "for the blocks of MXFP8" in answer.mistake


def test_inputs_that_a_program_rounds_are_told() -> None:
    (line,) = [
        entry
        for entry in loadings(bridge.plan(oracle.source("llama", "fp32"), "hf", "fp8_block"))
        if entry.program == "vLLM 0.33"
    ]
    assert line.how == "run" and "rounds inputs to FP8" in line.limit


def test_names_of_targets_are_no_programs() -> None:
    assert program_of("hf") is None and program_of("trtllm") is None and program_of("nothing") is None
    assert program_of("VLLM") is load_runtime("vllm")
