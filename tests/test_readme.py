"""The README: its generated parts are those of today, its words are the code's, its examples run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridge.cli import app
from bridge.quant.recipe import load_recipe
from tests.blocks import blocks, prepare, run
from tests.readme import MAPPED, README, ROOT, generate

TEXT = README.read_text(encoding="utf-8")
PYTHON = [block for block in blocks(TEXT) if block.language == "python"]


def texts(language: str) -> list[str]:
    return [block.text for block in blocks(TEXT) if block.language == language]


def test_the_map_and_the_matrix_are_those_of_today() -> None:
    assert generate(TEXT) == TEXT, "run `make readme`"


def test_the_map_names_exactly_the_files_that_exist() -> None:
    part = TEXT.partition("<!-- map: make readme -->")[2].partition("<!-- /map -->")[0]
    patterns = re.findall(r"^(\S+\.(?:py|toml|j2)) ", part, re.MULTILINE)
    named = [str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)]
    suffixes = (".py", ".toml", ".j2")
    files = [p for directory in MAPPED for p in (ROOT / directory).rglob("*") if p.suffix in suffixes]
    there = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert set(named) == there


def test_the_test_command_is_what_ci_runs() -> None:
    said = TEXT.partition("\n## Test\n")[2].partition("```sh\n")[2].partition("```")[0].strip()
    script = (ROOT / ".ci" / "run").read_text().strip().splitlines()
    assert script[-1] == said == "make test"


def test_every_make_target_of_the_readme_exists() -> None:
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", TEXT, re.MULTILINE)) | set(re.findall(r"`make (\w+)`", TEXT)) <= rules


def test_every_command_of_the_readme_is_one_the_parser_takes() -> None:
    lines = [line for block in texts("sh") for line in block.splitlines() if line.startswith("qbridge ")]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        flags = {word for word in words if word.startswith("--")}
        help_ = CliRunner().invoke(app, [words[0], "--help"]).stdout
        assert all(flag in help_ for flag in flags), line


def test_the_exit_codes_are_those_of_the_code() -> None:
    from bridge import errors, terminal

    codes = dict(re.findall(r"^\| (\d) \| (\w+)", TEXT, re.MULTILINE))
    assert codes == {"0": "done", "1": "failed", "2": "usage", "3": "written"}
    assert (terminal.FAILED, errors.UsageError.exit_code, terminal.BELOW) == (1, 2, 3)


def test_the_recipe_of_the_readme_is_one(tmp_path: Path) -> None:
    (path := tmp_path / "mixed.toml").write_text(texts("toml")[0])
    recipe = load_recipe(path)
    assert len(recipe.rules) == 2
    assert recipe.kv is not None


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_the_python_examples_run(number: int, tmp_path: Path) -> None:
    assert not run(PYTHON[number], prepare(tmp_path))


@pytest.mark.slow
def test_the_demo_runs_and_speaks(tmp_path: Path) -> None:
    import sys

    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "every gate passed" in done.stdout
    assert "perplexity" in done.stdout
    assert done.stdout.count(" -> '") == 3
