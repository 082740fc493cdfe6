"""YAML of NeMo and Megatron-Bridge, against PyYAML's safe loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis.strategies import SearchStrategy

from bridge.core.errors import SourceError
from bridge.sources.configs.yaml_data import read_yaml
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import encoded, one_file, texts

FILE = "model_config.yaml"
DOCUMENT = """mcore_gpt: true
num_layers: 3
norm: {eps: 1e-5, kind: "rmsnorm"}
list: &a [1, 2.5, ~, 'x']
again: *a
nested:
  - b: 0x1f
    c: 2020-01-01
  - !!set {p, q}
text: |
  two
  lines
"""
WORDS = (
    "!!python/object/apply:os.system ['touch attacked']",
    "!!python/name:os.system",
    "!!python/object/new:builtins.eval [1]",
    "!!python/module:subprocess",
    "!!binary aGk=",
    "!!float nan",
    "!!int 1:30",
    "!!timestamp x",
    "!!omap [a: 1]",
    "!!bool maybe",
    "&a",
    "*a",
    "*b",
    "<<: *a",
    "? [1, 2]",
    "!!str",
    "!unknown 1",
    "%YAML 9.9",
    "---",
    "...",
    "1_000",
    "0o17",
    "0b1",
    "-.inf",
    "!!null x",
    "&x [*x]",
    "[" * 100,
    "- " * 100,
    "{" * 70,
    "!!python/tuple [1]",
    "_target_: os.system",
    "!!python/complex 1+2j",
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['x']",
    "!!int 0x",
    "!!float 1e400",
    "!!int " + "9" * 5000,
    "=",
    "\t",
    "\x85",
)


def make(root: Path) -> None:
    (root / FILE).write_text(DOCUMENT)


def cases(root: Path) -> SearchStrategy[Case]:
    return encoded(texts(DOCUMENT, WORDS, most=4)).map(one_file(FILE))


def read(root: Path) -> Any:
    return read_yaml((root / FILE).read_bytes(), FILE)


def agree(root: Path, found: Any) -> None:
    """The same where both read it, but for what `read_yaml` does otherwise on purpose: tags, dates, floats, merges."""
    text = (root / FILE).read_bytes()
    try:
        wanted = yaml.load(text, _Plain)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError, SourceError):
        return
    if b"<<" not in text and b"!" not in text.replace(b"!!set", b"") and b"=" not in text:
        assert _alike(found, wanted), (found, wanted)


class _Plain(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    pass


def _set(loader: _Plain, node: yaml.Node) -> dict[Any, Any]:
    """As the mapping that it is written as; raises where it is none, as PyYAML's own does."""
    return dict(loader.construct_mapping(node, deep=True))


_Plain.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
_Plain.add_constructor("tag:yaml.org,2002:set", _set)


def _alike(found: Any, wanted: Any) -> bool:
    if isinstance(found, dict) and isinstance(wanted, dict):
        return len(found) == len(wanted) and all(
            _alike(a, b) for pair in zip(found.items(), wanted.items(), strict=True) for a, b in zip(*pair, strict=True)
        )
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_alike, found, wanted))
    if isinstance(found, float) and isinstance(wanted, str):  # 1e-5, which YAML 1.1 takes for a word
        return repr(float(wanted.replace("_", ""))) == repr(found)
    return type(found) is type(wanted) and repr(found) == repr(wanted)


TARGET = Target("yamls", make, cases, read, agree, FILE)
