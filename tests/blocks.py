"""The code blocks of Markdown, as programs: README and the pages of `docs/` are tested by running them.

What a block is follows from its first line alone:

    ```python                       runs by itself, as one that was pasted into a file (in a fork: `tests.forks`)
    ```console                      lines after `$ ` run in bash, what stands below is the output, `...` any text
    ```toml title="recipe.toml"     is written to that file, for the blocks below it (any language)

A comment `<!-- not run: WHY -->` before a block exempts it. Blocks of a page share a directory, in order.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n+)?```(?P<language>[a-z]*)[ ]*(?P<rest>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
RUN = ("python", "console")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SECONDS = 600  # of one block: calibration on a loaded machine


@dataclass(frozen=True)
class Block:
    """One code block. `title`: the file that it is the content of; `why`: why it is not run, "" where it is."""

    language: str
    text: str
    line: int
    title: str = ""
    why: str = ""

    @property
    def runs(self) -> bool:
        return self.language in RUN and not self.title and not self.why


def blocks(markdown: str) -> list[Block]:
    """Every fenced block at the left margin, in order.

    >>> [block.text for block in blocks("```python\\nprint(1)\\n```\\n")]
    ['print(1)\\n']
    """
    found = []
    for match in BLOCK.finditer(markdown):
        title = re.search(r'title="([^"]+)"', match["rest"])
        line = markdown.count("\n", 0, match.start("language")) + 1
        found.append(Block(match["language"], match["text"], line, title[1] if title else "", match["why"] or ""))
    return found


def commands(text: str) -> list[tuple[str, str]]:
    """(command, output below it) of a console block; a command that ends in a backslash goes on in the next line."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found and found[-1][0].endswith("\\\n"):
            found[-1] = (found[-1][0] + line, "")
        else:
            assert found, f"output before any command: {line}"
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def prepare(directory: Path) -> Path:
    """`directory`, with the repository's `examples` in it, which is what every page starts from."""
    (directory / "examples").symlink_to(ROOT / "examples")
    return directory


def run(block: Block, directory: Path) -> str:
    """Run a block, or write its file; returns what is wrong with it, "" where nothing is."""
    if block.title:
        (directory / block.title).parent.mkdir(parents=True, exist_ok=True)
        (directory / block.title).write_text(block.text)
        return ""
    if not block.runs:
        return ""
    if block.language == "python":
        code, said = forks.python(block.text, directory, SECONDS)
        return said if code else ""
    return "\n".join(filter(None, (_command(*pair, directory) for pair in commands(block.text))))


def _command(command: str, output: str, directory: Path) -> str:
    if command.startswith("qbridge ") and not re.search(r"[|&;<>$`*?(){}]", command):
        code, said = forks.qbridge(shlex.split(command)[1:], directory, SECONDS)
    else:
        code, said = _shell(command, directory)
    if code:
        return f"$ {command}exit code {code}\n{said}"
    if doctest.OutputChecker().check_output(output, said, FLAGS):
        return ""
    return f"$ {command}expected:\n{output}\ngot:\n{said}"


def _shell(command: str, directory: Path) -> tuple[int, str]:
    """Exit code, and both streams as a reader of the page would see them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env={**os.environ, "PATH": path}, text=True, timeout=SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout
