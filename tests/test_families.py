"""A family's name stands in one home: as a constant in no other Python file of the package."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# `mappings/` is the third home, and has no Python.
HOMES = ("bridge/targets/onnx/families/", "bridge/targets/tripy/models/")
# Constants that are something else: file and word -> what.
OTHERS = {
    ("bridge/calibration/algorithms/clips.py", "clip"): "an algorithm",
    ("bridge/core/output/provenance.py", "xlstm"): "a package",
    ("bridge/targets/trt/profile.py", "opt"): "the optimum of a profile of TensorRT",
    ("bridge/targets/onnx/files.py", "encoder-decoder"): "a type in genai_config.json",
}
# How many such constants are left in other files: a number may fall, and no file may come.
LEFT = {
    "bridge/calibration/quantizers.py": 1,
    "bridge/compat/nemo.py": 3,
    "bridge/sources/config_json.py": 1,
}


@cache
def types() -> dict[str, str]:
    """Model type -> its config class, as the installed transformers lists them; nothing of it is imported."""
    spec = importlib.util.find_spec("transformers")
    assert spec and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations))) / "models/auto"
    text = "".join((folder / file).read_text("utf-8") for file in ("auto_mappings.py", "configuration_auto.py"))
    return dict(re.findall(r'^\s*\("([\w.-]+)", "(\w+Config)"\)', text, re.MULTILINE))


@cache
def stems() -> frozenset[str]:
    """What names of a family's classes begin with: Llama, JetMoe."""
    return frozenset(re.sub(r"(Text|Vision|Audio|Encoder)?Config$", "", name) for name in types().values()) - {""}


def is_name(word: str) -> bool:
    """Whether a word is a model type, or a class as LlamaForCausalLM or JetMoeMoA."""
    ends = (at for at, letter in enumerate(word) if at and letter.isupper())
    return word in types() or (word.isidentifier() and any(word[:at] in stems() for at in ends))


def names_in(path: Path) -> Iterator[str]:
    """Constants that name a family, docstrings apart."""
    text = path.read_text("utf-8")
    if not any(map(is_name, set(re.findall(r"""["']([\w.-]+)["']""", text)))):
        return  # most files, which take seconds to parse
    tree = ast.parse(text)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) and id(node) not in texts else None
        if isinstance(value, str) and is_name(value):
            yield value


@cache
def found() -> dict[str, tuple[str, ...]]:
    """File -> the names in it, of all files that are no home."""
    files = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "bridge").rglob("*.py"))}
    others = {file: path for file, path in files.items() if not file.startswith(HOMES)}
    named = {file: tuple(n for n in names_in(path) if (file, n) not in OTHERS) for file, path in others.items()}
    return {file: names for file, names in named.items() if names}


def test_a_family_is_named_in_its_home_alone() -> None:
    many = {file: names for file, names in found().items() if len(names) > LEFT.get(file, 0)}
    assert not many, f"move these to mappings/ or {HOMES[0]}: {many}"


def test_what_is_left_only_shrinks() -> None:
    assert {file: len(found().get(file, ())) for file in LEFT} == LEFT, "lower the numbers in LEFT"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"""llama"""\nKIND = "llama"', ["llama"]),
        ('CLASSES = ("JetMoeMoA", "LlamaForCausalLM", "Llama", "ForCausalLM")', ["JetMoeMoA", "LlamaForCausalLM"]),
        ('def f() -> str:\n    """gpt2"""\n    return "a gpt2"', []),
    ],
)
def test_names_are_found_but_in_docstrings(text: str, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    assert list(names_in(tmp_path / "module.py")) == names
