"""Writes the generated parts of README.md, the map of the code and the support matrix: `make readme`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from bridge.tables.files import mappings
from docs.made.matrix import matrix

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MAPPED = ("bridge", "kernels", "examples", "benchmarks", "docs", "mappings")
KINDS = {
    "arch": "One architecture each: dims from its config, its Hugging Face spelling of the roles",
    "schemes": "One scheme each: what is quantized to what, and the gates it must pass",
}


def generate(text: str) -> str:
    """`text` with every generated part as it should be today."""
    for name, make in (("map", code_map), ("matrix", matrix)):
        begin, end = f"<!-- {name}: make readme -->", f"<!-- /{name} -->"
        found = re.search(rf"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
        assert found, f"README.md has no {begin} ... {end}"
        text = text[: found.start()] + f"{begin}\n{make()}\n{end}" + text[found.end() :]
    return text


def code_map() -> str:
    """One line a file: what its first line says it is for. Tables and schemes, many and alike, get a line a kind."""
    paths = [p for name in MAPPED for p in sorted((ROOT / name).rglob("*")) if p.suffix in (".py", ".toml", ".j2")]
    paths = [p for p in paths if "__pycache__" not in p.parts and p.parent not in [mappings() / kind for kind in KINDS]]
    lines = [(f"{path.relative_to(ROOT)}", _purpose(path)) for path in paths]
    lines += [(f"mappings/{kind}/*.toml", purpose) for kind, purpose in KINDS.items()]
    return "\n".join(["```text", *(f"{name:<32} {purpose}" for name, purpose in lines), "```"])


def _purpose(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        found = re.match(r"(?:\{#|#)\s*(.+)", text)
        first = found[1].removesuffix("-#}") if found else ""
    first = re.split(r"; |: unfused|\. (?=[A-Z])|\.$", " ".join(first.split()))[0]
    assert first, f"{path} does not say in its first line what it is for"
    return first


if __name__ == "__main__":
    README.write_text(generate(README.read_text(encoding="utf-8")), encoding="utf-8")
