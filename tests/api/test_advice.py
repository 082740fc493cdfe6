"""The schemes to begin with: each command of the table plans, and each program gets its own list."""

from __future__ import annotations

from pathlib import Path

import pytest

import bridge
from bridge.api.advice import MOST, PURPOSES, best_for, loaded_by, measured_in_gguf, read_advice, recommended
from bridge.planning.contract_files import load_runtime, runtime_names
from bridge.planning.contracts import verdict
from bridge.quant.schemes.load import load_scheme
from docs.generate import hardware
from docs.generate.quality import kl_words

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
COMMANDS = sorted(
    {(program, name) for row in read_advice() for program in row.programs for name in (row.scheme, row.small)}
)


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_each_command_of_the_table_plans(program: str, name: str) -> None:
    plan = bridge.plan(MODEL, program, name)
    assert plan.quantized and not verdict(load_runtime(program), plan).why_not


def test_the_table_has_a_figure_or_says_that_there_is_none() -> None:
    head, _, *rows = hardware.advice().splitlines()
    assert head.count("KL") == 2 and len(rows) == len(read_advice())
    for line, row in zip(rows, read_advice(), strict=True):
        first, small = (f"`--target {row.programs[0]} --quant {name}`" for name in (row.scheme, row.small))
        assert first in line and f"| {kl_words(row.scheme)} |" in line
        target = load_runtime(row.programs[0]).contracts[0].target  # a rule's row alone is of a checkpoint of hf
        assert small in line and line.endswith(f"| {kl_words(row.small + f' --target {target}' * (target != 'hf'))} |")


@pytest.mark.parametrize("program", runtime_names())
def test_every_program_has_a_list_of_schemes_that_it_loads(program: str) -> None:
    runtime = load_runtime(program)
    found = recommended(runtime)
    assert found and len(found) <= MOST and {*found} <= {*loaded_by(runtime)}
    assert all(any(fits(load_scheme(name)) for fits in PURPOSES.values()) for name in found)


def test_a_program_that_reads_no_chosen_codes_is_not_given_them() -> None:
    assert "int4:gptq" not in loaded_by(load_runtime("trtllm"))
    assert all("int4:gptq" in loaded_by(load_runtime(name)) for name in ("vllm", "onnxruntime", "mlx"))


def test_figures_of_llama_cpps_own_codes_recommend_nothing_to_programs_that_read_no_gguf() -> None:
    for name in runtime_names():
        best = {*best_for(load_runtime(name)).values()} - {""}
        assert name == "llama.cpp" or not [one for one in best if measured_in_gguf(load_scheme(one))], name
    assert best_for(load_runtime("genai"))["4-bit weights, no data"] == "int4:rtn"
    assert measured_in_gguf(load_scheme("q4_0")) and not measured_in_gguf(load_scheme("mxfp4_wo"))
