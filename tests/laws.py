"""Laws of the package's shape, held to the numbers in budget.toml: python -m tests.laws

Lines of the package and of each folder, parameters of a function, entries of a folder. `make lint` runs it. A change
that passes a number edits it and says why.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).with_name("budget.toml")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def problems(root: Path, budget: Mapping[str, Any]) -> list[str]:
    """What passes a number of the budget, a line each."""
    files = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in sorted(root.glob("bridge/**/*.py"))}
    return [
        *_lines(files, budget["lines"]),
        *_parameters(files, budget["parameters"]),
        *_entries(files, budget["entries"]),
    ]


def lines_by_folder(files: Mapping[str, str]) -> Counter[str]:
    """Folder -> its lines, those of the folders in it included; `bridge` is the whole, and `code` its lines of code."""
    lines: Counter[str] = Counter()
    for file, text in files.items():
        folders = file.split("/")[:-1]
        for end in range(1, min(len(folders), 3) + 1):
            lines["/".join(folders[:end])] += text.count("\n")
        lines["code"] += code_lines(text)
    return lines


def code_lines(text: str) -> int:
    """Lines of code: without blanks, docstrings, imports and comments."""
    tree = ast.parse(text)
    apart = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(code - apart - {text.count("\n") + 1})


def _lines(files: Mapping[str, str], most: Mapping[str, int]) -> Iterator[str]:
    for folder, lines in lines_by_folder(files).items():
        if folder.count("/") > 1:
            continue
        if folder not in most:
            yield f"{folder} has {lines} lines and no budget: add it to [lines]"
        elif lines > most[folder]:
            yield f"{folder} has {lines} lines, {lines - most[folder]} above its budget"


def _parameters(files: Mapping[str, str], budget: Mapping[str, Any]) -> Iterator[str]:
    excepted, seen = budget["excepted"], set()
    for file, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls")])
                where = f"{file}:{node.name}"
                if count > budget["most"]:
                    seen.add(where)
                    if where not in excepted:
                        yield f"{where} has {count} parameters, at most {budget['most']}; or list it with a reason"
    yield from (f"{where} is excepted and has few parameters: remove it from the list" for where in {*excepted} - seen)


def _entries(files: Mapping[str, str], budget: Mapping[str, Any]) -> Iterator[str]:
    folders: dict[str, set[str]] = {}
    for file in files:
        parts = file.split("/")
        for end in range(1, len(parts)):
            if parts[end] != "__init__.py":
                folders.setdefault("/".join(parts[:end]), set()).add(parts[end])
    for folder, entries in sorted(folders.items()):
        if len(entries) > budget["most"] and folder not in budget["excepted"]:
            yield f"{folder} has {len(entries)} entries; {budget['most']} are the most"


def main() -> int:
    """Print what passes the budget; returns how much does."""
    found = problems(ROOT, tomllib.loads(BUDGET.read_text()))
    for problem in found:
        print(problem, file=sys.stderr)
    return len(found)


if __name__ == "__main__":
    sys.exit(bool(main()))
