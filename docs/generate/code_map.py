"""The code map: one line per file and one line per folder, from the first line of each docstring or comment."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from bridge.core.mappings import mappings
from docs.generate.matrix import table

ROOT = Path(__file__).parent.parent.parent
MAPPED = ("bridge", "kernels", "mappings", "docs", "examples", "benchmarks")
SUFFIXES = (".py", ".toml", ".j2")
# Folders of many similar files get one line.
KINDS = {
    "arch": "One architecture per file: dimensions from its config, and its Hugging Face tensor names as roles",
    "schemes": "One scheme per file: what is quantized to what, and the gates that it must pass",
}


def files() -> list[Path]:
    """Every file that the map names, in the order of the folders."""
    paths = [p for name in MAPPED for p in sorted((ROOT / name).rglob("*")) if p.suffix in SUFFIXES]
    return [path for path in paths if "__pycache__" not in path.parts]


def code_map() -> str:
    """A section per folder with a table of its files."""
    kinds = [mappings() / kind for kind in KINDS]
    rows = [(path.relative_to(ROOT), purpose(path)) for path in files() if path.parent not in kinds]
    rows += [(Path("mappings") / kind / "*.toml", text) for kind, text in KINDS.items()]
    rows.sort(key=lambda row: (MAPPED.index(row[0].parts[0]), row[0].parent.parts, row[0].name))
    sections = []
    for folder, group in groupby(rows, key=lambda row: row[0].parent):
        cells = [[f"`{path.name}`", _escaped(text)] for path, text in group]
        sections.append(f"## `{folder}/`\n\n{table(['file', 'what it is for'], cells)}")
    return "\n\n".join(sections)


def folders() -> str:
    """The folders of the package, from the last stage of the flow to the first, each with one line."""
    found = {path.parent.name: purpose(path) for path in sorted((ROOT / "bridge").glob("*/__init__.py"))}
    known = [name for name in layers((ROOT / "pyproject.toml").read_text(encoding="utf-8")) if name in found]
    lines = [f"{f'bridge/{name}/':<21} {found[name]}" for name in [*known, *sorted(found.keys() - set(known))]]
    return "\n".join(["```text", *lines, "```"])


def layers(pyproject: str) -> Iterator[str]:
    """Folders in the order of the import contract of a pyproject.toml, or nothing if it has no contract."""
    tools = tomllib.loads(pyproject)["tool"]
    for contract in tools.get("importlinter", {}).get("contracts", []):
        if contract.get("containers") == ["bridge"]:
            yield from (name.strip() for layer in contract["layers"] for name in layer.split("|"))


def purpose(path: Path) -> str:
    """The first sentence of a file's docstring or comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        found = re.match(r"(?:\{#|#)\s*(.+)", text)
        first = found[1].removesuffix("-#}") if found else ""
    first = re.split(r"; |: unfused|\. (?=[A-Z])|\.$", " ".join(first.split()))[0]
    assert first, f"{path}: the first line does not say what the file is for"
    return first


def _escaped(text: str) -> str:
    """A docstring's line as a cell: a bar would end it, and `<` would begin a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")
