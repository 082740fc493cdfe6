"""The command line: exit codes, one message per error, the same verbs as in Python."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bridge
from bridge.cli.main import VERBS, app
from bridge.core.errors import PlanError
from bridge.reporting.report import Report
from bridge.verification.parity import OutputParity, Parity

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
CONVERT = ["convert", str(MODEL), "--target", "trt", "--quant", "fp8"]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def report(passed: bool = True) -> Report:
    outputs = (OutputParity("source", 64, 0.9, 1.0, 0.4, 0.0, 300.0, 281.0, passed),)
    parity = Parity(outputs=outputs)
    return Report("out", "ab" * 32, "trt", "fp8", 3, 1, 1000, 4000, {"plan": 0.1}, 10**8, parity)


def raising(error: BaseException) -> Any:
    def verb(*args: Any, **kwargs: Any) -> Any:
        raise error

    return verb


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", str(MODEL), "--target", "tr", "--quant", "fp8"], "nearest: trt"),
        (["plan", str(MODEL), "--target", "trt", "--quant", "fp9"], "nearest: fp8"),
        (["plan", str(MODEL), "--target", "trt", "--quant", "fp8", "--kv", "fp7"], "nearest: fp8"),
        (["plan", str(MODEL), "--target", "trt", "--quant", "fp8", "--task", "causal"], "nearest: causal-lm"),
        ([*CONVERT, "--memory", "much"], "--memory 'much'"),
        (["show", "scheme"], "nearest: schemes"),
        (["check", "README.md"], ".toml"),
        (["calibrate", str(MODEL), "--quant", "fp8", "--out", "c.json"], "name it c.safetensors"),
    ],
)
def test_a_wrong_word_ends_with_2_and_the_nearest_right_one(words: list[str], said: str) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_flag_or_verb_ends_with_2() -> None:
    assert run("plan", str(MODEL), "--target", "trt", "--tsk", "x").exit_code == 2
    assert run("konvert").exit_code == 2


def test_a_model_that_is_not_there_ends_with_an_error_of_the_source(tmp_path: Path) -> None:
    done = run("plan", str(tmp_path / "none"), "--target", "trt")
    assert done.exit_code in (1, 2)
    assert "none" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_that_exists_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    done = run(*CONVERT, "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "--overwrite" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_a_plan_prints_every_tensor_once_and_ends_with_0() -> None:
    done = run("plan", str(MODEL), "--target", "trt", "--quant", "fp8", "--all")
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    plan = bridge.plan(MODEL, "trt", "fp8")
    rows = [line[0] for line in lines if len(line) > 4 and line[2] in ("float32", "float8_e4m3fn")]
    assert rows == [output.spec.name for output in plan.outputs]
    assert lines[-1][:2] == ["here", "about"]  # how long it would take


def test_json_of_a_plan_is_the_plan() -> None:
    done = run("plan", str(MODEL), "--target", "trt", "--quant", "int8_wo", "--json")
    data = json.loads(done.stdout)
    plan = bridge.plan(MODEL, "trt", "int8_wo")
    assert data["digest"] == plan.digest
    assert len(data["steps"]) == len(plan.steps)
    assert data["estimate"]["bound"] == "start-up"
    assert data["estimate"]["seconds"] == pytest.approx(sum(data["estimate"]["stages"].values()))


def test_a_flag_of_the_target_reaches_the_target() -> None:
    done = run("plan", str(MODEL), "--target", "trt", "--dtype", "fp16", "--no-cache", "--json")
    options = json.loads(done.stdout)["options"]
    assert (options["dtype"], options["cache"]) == ("float16", False)
    done = run("plan", str(MODEL), "--target", "trt", "--cache", "64", "--json")
    assert json.loads(done.stdout)["options"]["cache"] == 64


def test_the_help_of_a_target_has_its_options_and_no_others() -> None:
    import dataclasses

    from bridge.targets import load_target, target_names

    for name in target_names():
        words = [["--target", name, "--help"], ["--help", f"--target={name}"]]
        first, second = (run("convert", *given).stdout for given in words)
        assert first == second and len(first.splitlines()) <= 110
        _, heading, text = first.partition(f"Options of --target {name}:\n")
        flags = re.findall(r"^  --(?:\[no-\])?([a-z-]+)", text, re.MULTILINE)
        assert heading and flags == [
            field.name.replace("_", "-") for field in dataclasses.fields(load_target(name).Options)
        ]


def test_the_help_without_a_target_says_which_have_options_and_takes_a_program_for_one() -> None:
    said = run("convert", "--help").stdout
    assert "Options of --target" not in said and "--target hf --help" in said and "--target gguf" in said
    assert "Options of --target hf:" in run("plan", "--target", "vllm", "--help").stdout


def test_every_argument_of_convert_has_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def convert(*args: Any, **kwargs: Any) -> Report:
        given.update(kwargs, args=args)
        return report()

    monkeypatch.setattr(bridge, "convert", convert)
    words = ["--out", "o", "--calib", "c", "--kv", "fp8", "--device", "cpu", "--config", "f.json", "--tokenizer", "t"]
    words += ["--group", "64", "--zero-points", "--rotate", "hadamard"]
    words += ["--data", "d", "--samples", "8", "--sequence", "64", "--field", "g", "--for", "vllm"]
    words += ["--compute", "fp32", "--base", "b", "--adapter", "keep", "--evaluate", "20k", "--gate", "cosine"]
    done = run(*CONVERT, *words, "--memory", "1.5GiB", "--overwrite", "--no-resume", "--no-verify", "--opset", "23")
    assert done.exit_code == 0, done.stderr
    assert given.pop("args") == ()
    assert [given.pop(name) for name in ("model", "target", "quant", "out")] == [str(MODEL), "trt", "fp8", "o"]
    assert callable(given.pop("progress"))
    assert given == {
        "data": "d", "samples": 8, "sequence": 64, "field": "g", "runtime": "vllm", "compute": "fp32", "base": "b",
        "evaluate": "20k", "gate": "cosine",
        "adapter": "keep", "group": 64, "zero_points": True, "rotate": "hadamard", "candidates": None,
        "calib": "c", "kv": "fp8", "device": "cpu", "config": "f.json", "tokenizer": "t", "verify": False,
        "overwrite": True, "resume": False, "memory": 3 << 29, "opset": 23,
    }  # fmt: skip


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 3)])
def test_parity_below_its_threshold_ends_with_3(passed: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "convert", lambda *args, **kwargs: report(passed))
    monkeypatch.setattr(bridge, "verify", lambda *args, **kwargs: report(passed))
    done = run(*CONVERT)
    assert done.exit_code == code
    assert ("FAILED" in done.stdout) == (not passed)
    done = run("verify", "out", "--against", str(MODEL), "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout)["passed"] is passed


def test_what_frameworks_print_does_not_mix_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(*args: Any, **kwargs: Any) -> Report:
        import logging
        import warnings

        print("Inserted 100 quantizers")
        print("W: something", file=sys.stderr)
        warnings.warn("deprecated", stacklevel=1)
        logging.getLogger("transformers").warning("slow path")
        return report()

    monkeypatch.setattr(bridge, "convert", chatty)
    done = run(*CONVERT, "--json")
    assert json.loads(done.stdout)["scheme"] == "fp8"
    assert done.stderr == ""
    done = run(*CONVERT, "--json", "--debug")
    assert json.loads(done.stdout)["scheme"] == "fp8"
    assert "Inserted 100 quantizers" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PlanError("lm_head: 100 does not divide"), 1, "PlanError: lm_head: 100 does not divide\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/out/w"), 1, "/out/w: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), 1, "/out: Permission denied"),
        (MemoryError(), 1, "out of memory"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
        (ZeroDivisionError("division by zero"), 1, "unexpected ZeroDivisionError: division by zero"),
    ],
)
def test_a_failure_is_one_message_without_a_traceback(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "convert", raising(error))
    done = run(*CONVERT)
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_where_an_error_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (PlanError("no"), ZeroDivisionError("no")):
        monkeypatch.setattr(bridge, "convert", raising(error))
        assert "in verb" in run(*CONVERT, "--debug").stderr


def test_an_unexpected_error_comes_with_what_was_printed_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def verb(*args: Any, **kwargs: Any) -> Report:
        print("the reason, from below", file=sys.stderr)
        raise RuntimeError("failed")

    monkeypatch.setattr(bridge, "convert", verb)
    assert "the reason, from below" in run(*CONVERT).stderr


@pytest.mark.slow
def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "bridge", "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("Usage: python -m bridge ")


def test_check_goes_on_after_a_path_that_it_cannot_check(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("base = 3")
    done = run("check", "README.md", str(tmp_path / "gone.toml"), str(tmp_path / "broken.toml"))
    assert done.exit_code == 1
    assert [words in done.stdout for words in ("README.md: check reads", "gone.toml: no such file", "broken.toml")] == [
        True
    ] * 3


def test_the_version_is_told_and_nothing_else() -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"qbridge {bridge.__version__}\n")


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    command = f"{sys.executable} -m bridge plan {MODEL} --target trt --quant fp8 --all | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "LlamaForCausalLM" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", ["show schemes", "show llama --all", "check --json", f"plan {MODEL} --target hf --json"]
)
def test_a_reader_that_is_gone_ends_a_verb_without_a_word(verb: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "bridge", *verb.split()]
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_without_a_stdout_no_file_takes_its_place() -> None:
    tell = "print(os.readlink('/proc/self/fd/1'), file=sys.stderr)"
    show = "from bridge.cli.main import main; sys.argv[1:] = ['show', 'schemes']; main()"
    script = f'{sys.executable} -c "import atexit, os, sys; atexit.register(lambda: {tell}); {show}" >&-'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "/dev/null\n")


def test_check_without_a_path_is_bridge_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "check", lambda: [])
    assert run("check").exit_code == 0
    monkeypatch.setattr(bridge, "check", lambda: ["mappings/arch/x.toml:3: no such role"])
    done = run("check")
    assert done.exit_code == 1
    assert "x.toml:3" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "fp8"\n[[rule]]\nlayers = [0]\nquant = "none"\n', ""),
        ('base = "fp9"\n', "nearest: fp8"),
        ('base = "fp8"\nbase = "fp8"\n', "TOML"),
        ('kind = "table"\n', "its keys are kind"),
    ],
)
def test_check_of_a_recipe_tells_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(text)
    done = run("check", str(tmp_path / "mixed.toml"))
    assert done.exit_code == (1 if said else 0)
    assert said in done.stdout


@pytest.mark.parametrize("kind", ["arch", "schemes"])
def test_check_accepts_the_tables_that_ship_here(kind: str) -> None:
    from bridge.core.mappings import mappings

    paths = [str(path) for path in (mappings() / kind).glob("*.toml") if path.stem != "kv"]
    done = run("check", *paths)
    assert done.exit_code == 0, done.stdout


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("512MiB", 512 << 20), ("64", 64), ("1.5 kb", 1500), ("3 B", 3)]
)
def test_a_size_is_read_in_powers_of_1000_or_1024(text: str, size: int) -> None:
    from bridge.core.text import byte_count

    assert byte_count(text) == size


def test_defaults_are_printed_as_written() -> None:
    assert "default: 10GB " in " ".join(run("convert", "--target", "hf", "--help").stdout.split())


COMMANDS = (
    "convert", "plan", "calibrate", "verify", "run", "engine", "check", "repair", "show", "sensitivity",
    "inspect", "prune",
    "search", "distill", "batch", "cache",
    "golden record", "golden check", "golden diff",
)  # fmt: skip


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_help_of_a_verb_ends_with_an_example_that_parses(verb: str) -> None:
    last = run(*verb.split(), "--help").stdout.rstrip().splitlines()[-1]
    example = re.fullmatch(rf"  Example: qbridge {verb} (.+)", last)
    assert example, last
    command: Any = app
    for word in verb.split():
        command = command.get_command(None, word)
    assert command.make_context(verb, shlex.split(example[1])).params


def test_the_list_of_verbs_has_the_first_sentence_of_each() -> None:
    found = {name: app.get_command(None, name).help.partition("\n\n")[0] for name in VERBS}
    assert {name: " ".join(text.split()) for name, text in found.items()} == VERBS


def test_help_names_the_verbs_of_the_package() -> None:
    text = run("--help").stdout
    assert "..." not in text.partition("Commands:")[2], "a verb's line is cut off"
    assert re.findall(r"^  (\w+)  ", text.partition("Commands:")[2], re.MULTILINE) == [
        "convert", "plan", "calibrate", "verify", "run", "engine", "check", "repair", "show", "sensitivity",
        "inspect", "prune",
        "search", "distill", "batch", "cache", "golden",
    ]  # fmt: skip
