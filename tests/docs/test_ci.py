"""The action and the container file of examples/ci: well-formed, and their commands do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CI = ROOT / "examples" / "ci"
ACTION: dict[str, Any] = yaml.safe_load((CI / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "pages" / "guides" / "ci.md").read_text()
# What pip needs to resolve this package alone, without a network.
PIP = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file, with their words."""
    text = re.sub(r"^#.*\n", "", (CI / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def step(name: str, folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the action as GitHub does: inputs filled in, in the shell that it starts for `bash`."""
    values = {name: str(of.get("default", "")) for name, of in ACTION["inputs"].items()} | inputs
    found = next(step for step in STEPS if step.get("name") == name)
    known = {"github.action_path": str(CI), **{f"inputs.{name}": value for name, value in values.items()}}
    filled = {
        name: re.sub(r"\$\{\{ (\S+) \}\}", lambda match: known[match[1]], value) for name, value in found["env"].items()
    }
    files = {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (folder / "step.sh").write_text(found["run"])
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **PIP, **filled, **files, "PATH": path}
    return subprocess.run(shell, capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False)


def test_the_action_has_the_keys_that_github_reads_and_no_others() -> None:
    assert {*ACTION} == {"name", "description", "inputs", "outputs", "runs"} and ACTION["runs"]["using"] == "composite"
    for of in ACTION["inputs"].values():
        assert {*of} <= {"description", "required", "default"} and isinstance(of.get("default", ""), str)
        assert of.get("required", False) is not ("default" in of)
    for one in STEPS:
        assert {*one} <= {"name", "id", "if", "shell", "env", "run", "uses", "with"}
        assert ("run" in one) is ("shell" in one) and ("run" in one) is not ("uses" in one)
        assert "uses" not in one or re.fullmatch(r"actions/[\w-]+@v\d+", one["uses"])


def test_what_the_action_fills_in_exists_and_is_never_a_part_of_a_program() -> None:
    ids = {f"steps.{one['id']}.outputs.out" for one in STEPS if "id" in one}
    known = {f"inputs.{name}" for name in ACTION["inputs"]} | ids | {"github.action_path"}
    filled = re.findall(r"\$\{\{ *(.*?) *\}\}", (CI / "action.yml").read_text())
    assert {*filled} <= known and {f"inputs.{name}" for name in ACTION["inputs"]} <= {*filled}
    assert all("${{" not in one.get("run", "") for one in STEPS)


def test_the_workflow_of_the_page_gives_inputs_that_there_are() -> None:
    block = re.search(r'```text title="convert.yml"\n(.*?)```', PAGE, re.DOTALL)
    assert block
    steps = yaml.safe_load(block[1])["jobs"]["convert"]["steps"]
    given = next(one["with"] for one in steps if one["uses"].endswith("examples/ci"))
    assert {*given} <= {*ACTION["inputs"]} and "model" in given


@pytest.mark.slow
def test_the_action_installs_its_checkout(tmp_path: Path) -> None:
    done = step("Install", tmp_path, extras="gguf")
    assert done.returncode == 0, done.stderr
    assert step("Install", tmp_path, extras="").returncode == 0


@pytest.mark.slow
def test_the_action_converts_and_leaves_report_output_and_summary(tmp_path: Path) -> None:
    model = str(ROOT / "examples/models/tiny-llama")
    done = step("Convert", tmp_path, model=model, target="vllm", quant="fp8_pc_pt", args="--no-verify --shard-size 1MB")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "output").read_text() == "out=converted\n"
    summary = (tmp_path / "summary").read_text()
    assert summary.startswith("```\nmodel ") and summary.endswith("```\n") and "vllm serve converted" in summary
    kept = [line.strip().replace("${{ inputs.out }}", "converted") for line in STEPS[-1]["with"]["path"].splitlines()]
    assert len(kept) == 2 and all((tmp_path / file).is_file() for file in kept)
    assert (tmp_path / "converted" / "model-00001-of-00003.safetensors").is_file()


@pytest.mark.slow
def test_a_step_of_the_action_fails_with_the_commands_exit_code_and_runs_no_input(tmp_path: Path) -> None:
    done = step(
        "Convert", tmp_path, model='no-model"; touch seen; echo "$(touch seen)', quant="int8_wo", args="$(touch seen)"
    )
    assert done.returncode in (1, 2) and "Error" in (tmp_path / "summary").read_text()
    assert not (tmp_path / "seen").exists() and not (tmp_path / "converted").exists()


def test_the_container_file_is_well_formed_and_names_what_there_is() -> None:
    found = instructions()
    assert [word for word, _ in found] == [
        "FROM", *["COPY"] * 4, "RUN", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"
    ]  # fmt: skip
    version = re.fullmatch(r"python:3\.(\d+)-slim", found[0][1])
    assert version and f"Programming Language :: Python :: 3.{version[1]}" in PROJECT["classifiers"]
    assert dict(found)["ENTRYPOINT"] == '["qbridge"]' and "qbridge" in PROJECT["scripts"]
    extras = re.search(r'"/src\[([\w,]+)\]"', dict(found)["RUN"])
    assert extras and {*extras[1].split(",")} <= {*PROJECT["optional-dependencies"]}
    assert f'pip install ".[{extras[1]}]"' in (ROOT / "README.md").read_text()
    assert ACTION["inputs"]["extras"]["default"] == extras[1]
    assert "docker build -f examples/ci/Containerfile -t qbridge ." in PAGE


@pytest.mark.slow
def test_what_the_container_file_copies_is_enough_to_build_the_package(tmp_path: Path) -> None:
    for word, words in instructions():
        if word == "COPY":
            *sources, target = words.split()
            for source in sources:
                place = tmp_path / target.lstrip("/")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "objects"))
                else:
                    place.mkdir(exist_ok=True)
                    shutil.copy(ROOT / source, place)
    command = dict(instructions())["RUN"].partition(" && ")[0].split()
    assert command[:2] == ["pip", "install"]
    words = [word.strip('"').replace("/src", str(tmp_path / "src")) for word in command[2:]]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *words], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **PIP},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Would install quantbridge-" in done.stdout
