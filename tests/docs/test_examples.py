"""Every example of every page runs and prints what the page shows. An example that cannot run here says why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.blocks import Block, blocks, commands, prepare, run
from tests.docs.site import PAGES

TEXTS = {str(path.relative_to(PAGES)): path.read_text(encoding="utf-8") for path in sorted(PAGES.rglob("*.md"))}
BLOCKS = {name: blocks(text) for name, text in TEXTS.items()}
RUNNING = [name for name, found in BLOCKS.items() if any(block.runs for block in found)]
# What no machine of ours has; anything else is run, or is not an example.
EXCUSES = (
    "needs TensorRT and a GPU", "needs Tripy's compiled runtime and a GPU", "needs a network",
    "needs a GPU and the server",
)  # fmt: skip
MAX_EXCUSED = 9
# Pages whose examples train or search for half a minute; shorter ones show the same verbs.
LONG = (
    "guides/prune.md", "guides/distill.md", "guides/sensitivity.md", "guides/inspect.md", "guides/adapters.md",
    "coming-from/auto-round.md", "coming-from/nemo.md", "guides/batch.md",
)  # fmt: skip
FOREIGN = "code of another project"  # on the pages "Coming from ..." only; ours on them runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.product if name in LONG else ()) for name in RUNNING]
)
def test_the_examples_of_a_page_run_in_order_and_say_what_it_shows(name: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    said = [f"docs/pages/{name}:{block.line}\n{wrong}" for block in BLOCKS[name] if (wrong := run(block, tmp_path))]
    assert not said, "\n\n".join(said)


def test_what_is_not_run_is_excused_by_name_and_rare() -> None:
    excused = [block.why for found in BLOCKS.values() for block in found if block.why and block.why != FOREIGN]
    assert set(excused) <= set(EXCUSES)
    assert len(excused) <= MAX_EXCUSED


def test_code_of_other_projects_stands_beside_ours_and_parses() -> None:
    foreign = {name: [block for block in found if block.why == FOREIGN] for name, found in BLOCKS.items()}
    pages = {name for name, found in foreign.items() if found}
    assert pages and all(name.startswith("coming-from/") for name in pages)
    for name in pages:
        assert any(block.runs and "bridge.convert(" in block.text for block in BLOCKS[name]), name
        for block in foreign[name]:
            if block.language == "python":
                ast.parse(block.text)


def test_most_pages_that_are_written_by_hand_have_an_example_that_runs() -> None:
    without = set(TEXTS) - set(RUNNING)
    assert without <= {
        "sources/index.md", "targets/index.md", "support.md", "performance.md", "glossary.md", "compare.md",
        "quality.md",
        "reference/command-line.md", "reference/errors.md", "reference/code-map.md", "reference/versions.md",
    }  # fmt: skip
    assert len(RUNNING) >= 29


def test_no_page_has_a_fence_that_the_runner_does_not_see() -> None:
    """Indented, or in a language that is not run by mistake."""
    for name, text in TEXTS.items():
        assert text.count("```") == 2 * len(BLOCKS[name]), name
        said = {block.language for block in BLOCKS[name]}
        assert said <= {"python", "console", "toml", "sh", "text"}, f"{name}: {said}"


def test_shell_blocks_are_for_what_changes_a_machine() -> None:
    """`sh` is not run: nothing but installing stands in one."""
    lines = [line for found in BLOCKS.values() for b in found if b.language == "sh" for line in b.text.splitlines()]
    assert lines and all(line.startswith("pip install ") for line in lines), lines


@pytest.mark.slow
def test_a_wrong_output_an_exit_code_and_an_exception_are_found(tmp_path: Path) -> None:
    """The runner itself can fail."""
    assert "expected:\nbar" in run(Block("console", "$ echo foo\nbar\n", 1), tmp_path)
    assert "expected:\n\n" in run(Block("console", "$ echo foo\n", 1), tmp_path)
    assert "exit code 3" in run(Block("console", "$ exit 3\n", 1), tmp_path)
    assert "ZeroDivisionError" in run(Block("python", "1 / 0\n", 1), tmp_path)
    assert not run(Block("console", "$ echo one two three\none ... three\n", 1), tmp_path)
    assert not run(Block("python", "1 / 0\n", 1, why="needs a GPU"), tmp_path)
    assert not run(Block("toml", "a = 1\n", 1, title="under/a.toml"), tmp_path)
    assert (tmp_path / "under/a.toml").read_text() == "a = 1\n"


def test_commands_go_on_after_a_backslash_and_end_at_their_output() -> None:
    assert commands("$ a \\\n  b\nc\n$ d\n") == [("a \\\n  b\n", "c\n"), ("d\n", "")]
