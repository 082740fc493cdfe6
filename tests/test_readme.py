"""The README: short, its generated part is current, what it names exists, and its examples run."""

from __future__ import annotations

import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner

from bridge.cli.main import app
from bridge.quant.schemes.catalog import scheme_names
from bridge.sources.opening import KINDS
from bridge.targets import target_names
from docs.generate.code_map import KINDS as FOLDED
from docs.generate.code_map import MAPPED, SUFFIXES, code_map, folders, layers
from docs.generate.readme import README, ROOT, generate
from tests import forks
from tests.blocks import blocks, prepare, run

TEXT = README.read_text(encoding="utf-8")
PYTHON = [block for block in blocks(TEXT) if block.language == "python"]
COMMANDS = ROOT / "docs" / "pages" / "reference" / "command-line.md"
MAX_LINES = 150


def texts(language: str) -> list[str]:
    return [block.text for block in blocks(TEXT) if block.language == language]


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= MAX_LINES


def test_the_list_of_folders_is_current() -> None:
    assert generate(TEXT) == TEXT, "run `make readme`"


def test_the_list_of_folders_names_every_package_below_bridge() -> None:
    named = re.findall(r"^bridge/(\w+)/ ", folders(), re.MULTILINE)
    assert sorted(named) == sorted(path.parent.name for path in (ROOT / "bridge").glob("*/__init__.py"))


def test_folders_come_in_the_order_of_the_import_contract() -> None:
    contract = '[[tool.importlinter.contracts]]\ncontainers = ["bridge"]\nlayers = ["cli", "tables | quant", "core"]'
    assert list(layers(contract)) == ["cli", "tables", "quant", "core"]
    other = contract.replace('["bridge"]', '["bridge.core"]')
    assert not list(layers(other)) and not list(layers("[tool.ruff]\n"))


@pytest.mark.slow
def test_the_code_map_names_exactly_the_files_that_exist() -> None:
    named, told = list[str](), code_map()
    for section in re.split(r"^## ", told, flags=re.MULTILINE)[1:]:
        folder = Path(section.partition("`")[2].partition("/`")[0])
        for pattern in re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE):
            named += [str(path.relative_to(ROOT)) for path in (ROOT / folder).glob(pattern)]
    files = [p for directory in MAPPED for p in (ROOT / directory).rglob("*") if p.suffix in SUFFIXES]
    there = sorted(str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts)
    assert sorted(named) == there
    assert all(f"| `*.toml` | {text} |" in told for text in FOLDED.values())


def test_pip_comes_before_make() -> None:
    assert 0 < TEXT.index("pip install") < TEXT.index("make ")


def test_the_test_command_is_what_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text().strip().splitlines()
    assert script[-1] == "make test"
    assert "`make test` is what CI runs" in TEXT


def test_every_make_target_of_the_readme_exists() -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([\w-]+)", TEXT, re.MULTILINE)) | set(re.findall(r"`make ([\w-]+)`", TEXT))
    assert {"demo", "test"} <= named <= rules


@pytest.mark.slow
def test_every_command_of_the_readme_is_one_the_parser_takes() -> None:
    lines = [line for block in texts("sh") for line in block.splitlines() if line.startswith("qbridge ")]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        flags = {word for word in words if word.startswith("--")}
        help_ = CliRunner().invoke(app, [words[0], "--help"]).stdout
        assert all(flag in help_ for flag in flags), line


def test_the_tables_name_every_source_and_target_and_schemes_that_exist() -> None:
    def cells(heading: str) -> list[list[str]]:
        part = TEXT.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
        return [
            re.findall(r"`([\w.]+)`", line.split("|", 2)[1 + (heading == "hardware")]) for line in part.splitlines()[2:]
        ]

    for heading, names in (("source", KINDS), ("target", target_names())):
        assert sorted(chain.from_iterable(cells(heading))) == sorted(names), heading
    assert len(cells("hardware")) == 5
    for row in cells("hardware"):
        assert row and {*row} <= {*scheme_names(), *target_names()}


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT) + re.findall(r'src="([^"]+)"', TEXT)
    assert len(links) > 30
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_exit_codes_of_the_documentation_are_those_of_the_code() -> None:
    from bridge.cli import terminal
    from bridge.core import errors

    codes = dict(re.findall(r"^\| (\d) \| (\w+)", COMMANDS.read_text(encoding="utf-8"), re.MULTILINE))
    assert codes == {"0": "done", "1": "failed", "2": "usage", "3": "written"}
    assert (terminal.FAILED, errors.UsageError.exit_code, terminal.BELOW) == (1, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_the_python_examples_run(number: int, tmp_path: Path) -> None:
    assert not run(PYTHON[number], prepare(tmp_path))


@pytest.mark.slow
def test_the_demo_runs_and_speaks(tmp_path: Path) -> None:
    words = [str(ROOT / "examples" / "demo.py"), "--out", str(tmp_path / "out")]
    code = f"import runpy, sys\nsys.argv = {words}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    ended, said = forks.python(code, tmp_path, 300)
    assert ended == 0, said
    assert "parity   passed; output similarity" in said
    assert "perplexity" in said
    assert said.count(" -> '") == 3
