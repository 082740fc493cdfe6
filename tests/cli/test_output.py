"""What a user sees: few lines if all is well, what failed if not, whole names at 80 columns, colours."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

import bridge
from bridge.api import conversion
from bridge.cli.main import VERBS, app
from bridge.core.errors import BridgeWarning
from bridge.quant.calibration import Calibration, Provenance
from bridge.reporting.columns import Columns, line
from bridge.reporting.plan_table import plan_table
from bridge.reporting.report import report_table
from bridge.targets import target_names
from bridge.verification.parity import Parity
from tests.cli.test_show import MODEL, report, tensor, text


def run(*words: str, **environment: str) -> Any:
    return CliRunner().invoke(app, words, env=environment)


def healthy() -> Any:
    parity = dataclasses.replace(report().parity, tensors=(tensor("layers.0.up.weight"),), not_run=())
    return report(parity=parity, next="vllm serve {out}", made_from={"architecture": "LlamaForCausalLM"})


@pytest.mark.slow
def test_a_conversion_that_passed_prints_seven_lines_and_the_next_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("convert", str(MODEL), "--target", "hf", "--quant", "fp8_pc_pt", "--out", str(out))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [words.split()[0] for words in lines] == ["model", "size", "seconds", "parity", "written", "loads", "next"]
    assert lines[0] == "model    LlamaForCausalLM to hf, fp8_pc_pt: 83 tensors, 35 quantized"
    assert "bits a value" in lines[1]
    assert lines[4] == f"written  {out}" and lines[6] == f"next     vllm serve {out}"
    assert lines[5].startswith("loads in vLLM 0.33") and "SGLang" not in lines[5]
    again = run("verify", str(out), "--against", str(MODEL), "-v")
    assert "weights, re-read and dequantized" in again.stdout and again.stdout.splitlines()[-1] == lines[-1]


def test_what_is_not_used_is_told_on_stderr(tmp_path: Path) -> None:
    words = ["--target", "hf", "--quant", "int8_wo", "--no-verify", "--out", str(tmp_path / "out")]
    done = run("convert", str(MODEL), *words, "--device", "cuda", "--data", "corpus.txt", "--samples", "4", "-q")
    assert done.exit_code == 0 and done.stdout == ""
    told = re.findall(r"^warning: --(\w+) is not used", done.stderr, re.MULTILINE)
    assert told == ["device", "data", "samples"]
    written = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert written["written_by"] == f"qbridge {bridge.__version__}" and written["producer"]["name"] == "modelopt"


@pytest.mark.parametrize("verb", ["convert", "calibrate"])
def test_a_field_without_data_is_refused(verb: str, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out.safetensors"), "--quant", "fp8", *["--target", "hf"][: 2 * (verb == "convert")]]
    done = run(verb, str(MODEL), "--field", "text", *out)
    assert done.exit_code == 2 and "--field text names a key of JSONL records" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [False, True])
def test_calibration_on_the_embedded_text_is_told_where_it_is_made(
    left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration that an unfinished run left is used without a word."""
    saved = tmp_path / conversion.CALIBRATION
    saved.parent.mkdir(exist_ok=True)
    made = Calibration(Provenance("fp8", "s", "", "", "", "d", 1, 1, {}))
    made.save(saved) if left else None
    monkeypatch.setattr(conversion, "calibrate", lambda *_: made)
    asked = conversion.Request(str(MODEL), "hf", "fp8", tmp_path / "out")
    resolved = conversion.resolve(asked.source(), asked)
    decisions = conversion._decide(resolved, "", False, conversion.Clock(), False)
    words = r"Python's documentation.*data= \(--data FILE\)"
    with nullcontext() if left else pytest.warns(BridgeWarning, match=words), warnings.catch_warnings():
        warnings.simplefilter("error" if left else "always")
        assert conversion._calibration(resolved, decisions, tmp_path, conversion.Clock(), None) == made


def test_a_command_is_only_for_what_passed_and_lies_here() -> None:
    assert healthy().command == "vllm serve out"
    assert dataclasses.replace(healthy(), out="s3://bucket/out").command == ""
    assert report(next="vllm serve {out}").command == "", "a gate failed"


def test_tables_are_for_what_failed_and_for_who_asks() -> None:
    assert "layers.0.up" not in text(report_table(healthy(), verbose=False))
    failed = text(report_table(report(), verbose=False))
    assert "weights, re-read" not in failed
    assert re.search(r"^failed\n  what +n  why\n  layers\.2\.up\.weight +1", failed, re.MULTILINE)
    assert "weights, re-read" in text(report_table(healthy()))


def test_the_verdict_names_the_gate() -> None:
    low = dataclasses.replace(tensor("layers.2.up.weight", passed=False), why="cosine 0.91 is below 0.999")
    said = repr(report(parity=Parity((low,))))
    assert "parity   FAILED: layers.2.up.weight: cosine 0.91 is below 0.999" in said


def test_outputs_of_a_copy_have_a_heading_of_their_own() -> None:
    assert "outputs of the written file\n" in text(report_table(report()))
    copy = text(report_table(report(parity=dataclasses.replace(report().parity, substitute="float32 copy"))))
    assert "outputs of the written file" not in copy and "not of the file itself" in copy


@pytest.mark.parametrize("width", [80, 140])
def test_a_name_is_never_broken(width: int) -> None:
    plan = bridge.plan(MODEL, "trt", "fp8", kv="fp8")
    said = text(plan_table(plan), width)
    for name, *_ in plan.table()[1]:
        assert any(name in row for row in said.splitlines()), name
    why = "a sentence that is much longer than what a narrow terminal has room for, so that it is wrapped between words"
    long = Columns(
        ("n", "why", "what"), [("12", why, "model.layers.{0..79}.block_sparse_moe.experts.{0..255}.w1.weight")]
    )
    rows = text(long, width).splitlines()
    assert any("experts.{0..255}.w1.weight" in row for row in rows)
    assert " ".join(" ".join(rows).split()).count("wrapped between words") == 1


def test_the_plan_begins_with_its_summary_and_has_a_row_per_kind_of_weight() -> None:
    done = run("plan", str(MODEL), "--target", "trt", "--quant", "fp8")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("LlamaForCausalLM -> trt, scheme fp8, plan ")
    assert lines[1].startswith("48 source tensors, 6.17 MB -> 118 tensors")
    assert lines[2].startswith("35 of 36 matrices quantized; peak memory")
    assert lines[2].endswith(" where the model is run")
    assert len(lines) < 45
    assert sum("mlp.up_proj" in row for row in lines) == 1
    every = run("plan", str(MODEL), "--target", "trt", "--quant", "fp8", "--all").stdout
    assert sum("mlp.up_proj" in row for row in every.splitlines()) == 5 * 3


def colours(**options: Any) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=100, **options)
    console.print(report_table(report()), line("parity", "passed"))
    return stream.getvalue()


def test_passed_and_failed_have_colours_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mpassed" in colours() and "\x1b[1;31mFAILED" in colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in colours() and "31mFAILED" not in colours()
    assert "\x1b" not in text(report_table(report())), "nothing of it in a pipe"


def test_a_result_is_a_few_lines_in_a_console_and_a_table_in_a_notebook() -> None:
    plan = bridge.plan(MODEL, "hf", "fp8")
    for result in (plan, healthy()):
        assert len(repr(result)) < 600 and len(repr(result).splitlines()) <= 7
        page = result._repr_html_()
        assert page.count("<table>") == 1 and len(page) < 20_000
    assert "mlp.up_proj" in plan._repr_html_()
    page = report()._repr_html_()
    assert "<b>" not in page and "head&lt;b&gt;.weight" in page, "names are escaped"


@pytest.mark.parametrize(
    ("word", "target"),
    [("vllm", "hf"), ("SGLang", "hf"), ("transformers", "hf"), ("tensorrt", "trt"), ("onnx", "trt"), ("HF", "hf")],
)
def test_programs_stand_for_the_target_that_they_load(word: str, target: str) -> None:
    assert bridge.plan(MODEL, word, "fp8").target == target


@pytest.mark.parametrize(
    ("program", "quant", "words"),
    [
        ("sglang", "mxfp4_wo", "SGLang 0.5.23 loads no output of scheme mxfp4_wo here"),
        ("edgellm", "fp8_block", "loads no weights in fp8 per block of 128x128 with unquantized inputs there"),
        ("vllm", "fp8", ""),
        ("transformers", "fp8_pc_pt", ""),
        ("hf", "int8_wo", ""),
    ],
)
def test_a_program_is_refused_what_it_does_not_load(program: str, quant: str, words: str) -> None:
    done = run("plan", str(MODEL), "--target", program, "--quant", quant)
    assert bool(done.exit_code) is bool(words) and words in done.stderr
    assert not words or "planned for this model: --quant " in done.stderr


@pytest.mark.parametrize(
    ("word", "scheme"),
    [("FP8", "fp8"), ("awq", "int4_awq"), ("SmoothQuant", "int8_sq"), ("INT8_WEIGHT_ONLY_CFG", "int8_wo")],
)
def test_words_of_other_tools_stand_for_a_scheme(word: str, scheme: str) -> None:
    assert bridge.plan(MODEL, "hf", word).scheme == scheme


@pytest.mark.parametrize("word", ["w8a8", "w8a16", "gptq", "nf4", "GPTQ", "bnb", "mxfp6", "w4afp8", "FP8_DYNAMIC"])
def test_words_without_a_scheme_get_a_hint_that_names_schemes(word: str) -> None:
    from bridge.quant.schemes.catalog import scheme_names

    done = run("plan", str(MODEL), "--target", "hf", "--quant", word)
    assert done.exit_code == 2
    assert any(re.search(rf"\b{name}\b", done.stderr) for name in scheme_names()), done.stderr
    assert "nearest" not in done.stderr


NVFP4 = [
    "nvfp4", "nvfp4:gptq", "nvfp4:imatrix", "nvfp4:mse", "nvfp4_act_headroom", "nvfp4_awq", "nvfp4_experts_only",
    "nvfp4_four_over_six", "nvfp4_gptq", "nvfp4_input_scale1", "nvfp4_local_hessian", "nvfp4_mlp_only", "nvfp4_mse",
    "nvfp4_wo", "nvfp4_wo:gptq", "nvfp4_wo:imatrix", "nvfp4_wo:mse", "nvfp4_wo_mse",
]  # fmt: skip
BEST = ["nvfp4:best", "nvfp4_wo:best"]
MX = ["mxfp4", "mxfp4_wo", "mxfp4_wo:best", "mxfp4_wo:gptq", "mxfp4_wo:imatrix", "mxfp4_wo:rtn", "mxfp8", "mxfp8_wo"]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("convert --target t", ["torchtitan", "tripy", "trt", "trtllm", "transformers", "tensorrt", "tensorrt-rtx"]),
        ("plan --quant nv", NVFP4 + BEST),
        ("calibrate --quant nv", NVFP4 + BEST),
        (
            "sensitivity --quant mx",
            MX,
        ),
        ("sensitivity --fallback fp8_", ["fp8_block", "fp8_block_dynamic", "fp8_pc_pt"]),
        ("convert --kv ", ["fp8", "fp8_cast", "int8", "nvfp4", "nvfp4_cast"]),
        ("convert m --target hf --format a", ["awq"]),
        ("show t", ["targets"]),
        ("show fp8_", ["fp8_block", "fp8_block_dynamic", "fp8_pc_pt"]),
        ("show gemma2", ["gemma2"]),
    ],
)
def test_targets_schemes_and_caches_complete(asked: str, names: list[str]) -> None:
    assert sorted(completed(asked)) == sorted(f"plain,{name}" for name in names)


def completed(asked: str) -> list[str]:
    words = f"qbridge {asked}"
    bash = {"_QBRIDGE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    return CliRunner().invoke(app, [], env=bash, prog_name="qbridge").stdout.split()


@pytest.mark.parametrize("asked", ["convert exa", "verify exa", "convert m --out exa", "convert m --quant exa"])
def test_the_shell_completes_files_where_a_file_may_stand(asked: str) -> None:
    assert completed(asked)[0] in ("file,exa", "dir,exa")


def test_the_shell_completes_the_options_of_the_chosen_target() -> None:
    assert {"plain,--opset", "plain,--task"} <= {*completed("convert m --target trt --")}
    assert "plain,--opset" not in completed("convert m --target hf --")
    assert completed("convert m --target hf --shard") == ["plain,--shard-size"]
    assert completed("convert m --ops") == completed("convert m --target onnx --ops") == ["plain,--opset"]


@pytest.mark.parametrize("name", VERBS)
def test_a_default_is_said_once(name: str) -> None:
    """`--steps` said "steps of training; default: 1000  [default: 1000; x>=1]"."""
    command = app.get_command(click.Context(app), name)
    assert command
    params = [one for each in getattr(command, "commands", {"": command}).values() for one in each.params]
    help_of = [(param.get_help_record(click.Context(command)) or ("", ""))[1] for param in params]
    assert [text for text in help_of if text.count("default:") > 1] == []


@pytest.mark.slow
def test_the_shell_completes_a_target() -> None:
    """As bash asks after `eval "$(_QBRIDGE_COMPLETE=bash_source qbridge)"`."""
    code = "import sys; sys.argv = ['qbridge']; from bridge.__main__ import main; main()"
    asked = {"_QBRIDGE_COMPLETE": "bash_complete", "COMP_WORDS": "qbridge convert --target v", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout.split() == ["plain,vllm"], done.stderr


def test_the_help_of_plan_offers_no_mix_that_plan_refuses() -> None:
    offered = {verb: "auto:4.8bits" in run(verb, "--help", COLUMNS="200").stdout for verb in ("convert", "plan")}
    assert offered == {"convert": True, "plan": False}


def test_help_has_sections_and_one_line_for_the_dtype_of_each_target() -> None:
    said = run("convert", "--help", COLUMNS="80").stdout
    sections = ["Model", "Output", "Quantization", "Run and print", "Options of one target"]
    assert re.findall(r"^(\w[\w ]*):$", said, re.MULTILINE) == sections and len(said.splitlines()) <= 71
    said = "".join(run("convert", "--target", name, "--help", COLUMNS="80").stdout for name in target_names())
    assert said.count("--dtype <str>") == 8
    for at in re.finditer(r"--dtype <str> +(.*)\n(.*)", said):
        assert at[1].endswith(("source's", "own", "fp16")) and not at[2].startswith("        "), at[0]


def test_an_empty_value_stays_empty() -> None:
    """It was read as the off form of an option that takes words: `--out "$UNSET"` wrote a directory of that name."""
    assert "--quant '' is unknown" in run("plan", str(MODEL), "--target", "hf", "--quant", "").stderr


def test_a_config_without_a_class_is_told_the_class_of_its_model_type(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    done = run("plan", str(tmp_path / "model"), "--target", "hf")
    assert done.exit_code == 1
    assert """--config '{"architectures": ["Qwen2ForCausalLM"]}'""" in done.stderr and "config=" not in done.stderr


def test_seconds_of_imports_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 2.0, 7.0, 8.0])
    monkeypatch.setattr(conversion, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = conversion.Clock()
    with clock.stage("plan"), clock.stage("imports"):
        pass
    assert clock.seconds == {"imports": 5.0, "plan": 3.0}
