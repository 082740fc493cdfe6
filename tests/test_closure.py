"""What `pytest --changed` selects: every test file that a change can reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.closure import Tree

FILES = {
    "bridge/__init__.py": '_HOME = {"convert": "bridge.api.convert", "golden": "bridge.golden"}',
    "bridge/golden.py": "",
    "bridge/api/__init__.py": "",
    "bridge/api/convert.py": "def f():\n    from bridge.targets import load",
    "bridge/targets/__init__.py": 'def load(name):\n    return import_module(f"bridge.targets.{name}")',
    "bridge/targets/hf.py": "from bridge.core.mappings import read",
    "bridge/targets/gguf.py": 'PROVED = "tests/test_golden.py"',
    "bridge/core/__init__.py": "",
    "bridge/core/mappings.py": "",
    "tests/oracle.py": "",
    "tests/test_hf.py": 'import bridge\nbridge.convert("m", "hf")',
    "tests/test_gguf.py": 'from bridge import convert\nconvert("examples/models/tiny", "gguf")',
    "tests/test_golden.py": 'import bridge\nbridge.golden.record()\nrun("-m", "tests.oracle")',
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("bridge/api/convert.py", {"hf", "gguf"}),  # by a lazy name of the package
        ("bridge/golden.py", {"golden"}),
        ("bridge/targets/hf.py", {"hf"}),  # chosen by a word of the test
        ("bridge/targets/gguf.py", {"gguf"}),
        ("tests/oracle.py", {"golden"}),  # started as a process
        ("mappings/schemes/fp8.toml", {"hf"}),
        ("examples/models/tiny/config.json", {"gguf"}),
        ("CHANGELOG.md", set()),
        ("tests/test_hf.py", {"hf"}),
    ],
)
def test_a_change_reaches_what_leads_to_it(tree: Tree, changed: str, reached: set[str]) -> None:
    assert tree.reached([changed]) == {f"tests/test_{name}.py" for name in reached}


@pytest.mark.parametrize("changed", ["bridge/__init__.py", "pyproject.toml", "bridge/gone.py"])
def test_what_everything_stands_on_reaches_every_file(tree: Tree, changed: str) -> None:
    assert tree.reached([changed]) is None
