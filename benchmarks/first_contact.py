"""What a user types and sees: lines printed, characters of `repr`, processor seconds of commands, lines of code.

    python benchmarks/first_contact.py

Processor seconds are those of whole processes with their children, the median of five. Lines of code are counted after
`ast.unparse`, without imports that the job does not use, on the pages "coming from": the first block is the job in the
other tool, the first block with `bridge.convert` the same job here.
"""

from __future__ import annotations

import ast
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import bridge
from bridge.core.errors import BridgeWarning

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "models" / "tiny-llama"
PAGES = ROOT / "docs" / "pages" / "coming-from"
ROUNDS = 5


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for words in commands():
            seconds, lines = run(words)
            print(f"{seconds:5.2f} s of processor time, {lines:3} lines  qbridge {' '.join(words)}")
        warnings.simplefilter("ignore", BridgeWarning)
        plan, report = bridge.plan(MODEL, "trt", "fp8"), bridge.convert(MODEL, "hf", "int8_wo", "reported")
        calibration = bridge.calibrate(MODEL, "fp8", samples=4, sequence=64)
        for result in (plan, report, calibration):
            text = repr(result)
            print(f"{len(text):5} characters, {len(text.splitlines())} lines  repr({type(result).__name__})")
        for page in sorted(PAGES.glob("*.md")):
            there, here = jobs(page.read_text())
            print(f"{there:3} lines there, {here:2} here  {page.stem}")


def commands() -> list[list[str]]:
    model = os.path.relpath(MODEL)
    return [
        ["--help"],
        ["convert", "--help"],
        ["plan", model, "--target", "trt", "--quant", "fp8"],
        ["convert", model, "--target", "hf", "--quant", "fp8_pc_pt", "--out", "hf", "--overwrite"],
        ["convert", model, "--target", "trt", "--quant", "fp8", "--out", "trt", "--overwrite"],
        ["verify", "trt", "--against", model],
    ]


def run(words: list[str]) -> tuple[float, int]:
    """Median processor seconds of the command, and the lines that it prints."""
    seconds, lines = [], 0
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "bridge", *words], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        lines = len(done.stdout.splitlines())
    return statistics.median(seconds), lines


def jobs(page: str) -> tuple[int, int]:
    """Lines of code of the job in the other tool, and here."""
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    here = next(block for block in blocks if "bridge.convert(" in block)
    return lines_of(blocks[0]), lines_of(here, "bridge.convert(")


def lines_of(code: str, end: str = "") -> int:
    """Lines of the statements, as far as the first one that contains `end`, without unused imports."""
    body = ast.parse(code).body
    if end:
        body = body[: next(n for n, statement in enumerate(body, 1) if end in ast.unparse(statement))]
    used = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    kept = [one for one in body if not isinstance(one, ast.Import | ast.ImportFrom) or _names(one) & used]
    return sum(len(ast.unparse(statement).splitlines()) for statement in kept)


def _names(statement: ast.Import | ast.ImportFrom) -> set[str]:
    return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}


if __name__ == "__main__":
    main()
