"""Recipes and whole schemes of a user's, against `tomllib`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.mappings import mappings
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import encoded, one_file, texts

FILE = "recipe.toml"
RECIPE = """base = "fp8"
kv = "fp8"
summary = "mine"

[[rule]]
layers = [0, -1, "4..6"]
quant = "none"

[[rule]]
roles = ["mlp.down.weight", "attn.*"]
modules = ["model.layers.{0,1}.*"]
quant = "int8_wo"
override = true

[policy]
zero = "floor"

[parity.tensor]
cosine = 0.99
norm = [0.9, 1.1]

[parity.output]
cosine = 0.9
norm = [0.5, 1.5]
"""
WORDS = (
    "nvfp4",
    "int4_awq",
    "none",
    "[[rule]]",
    "[rule]",
    "[options]",
    "[input]",
    "[[weight]]",
    "alpha = 0.5",
    "nan",
    "inf",
    "-0.0",
    "true",
    "1979-05-27T07:32:00Z",
    "0xff",
    '"recipe.toml"',
    '"../recipe.toml"',
    "{}",
    "[]",
    "'''",
    '"-1..1"',
    '"99999999999..0"',
    "a.b.c = 1",
    "[" * 400,
    "base.x = 1",
)


def make(root: Path) -> None:
    (root / FILE).write_text(RECIPE)


def cases(root: Path) -> SearchStrategy[Case]:
    whole = (mappings() / "schemes" / "nvfp4.toml").read_text()
    return st.one_of(encoded(texts(RECIPE, WORDS)), encoded(texts(RECIPE, WORDS)), encoded(texts(whole, WORDS))).map(
        one_file(FILE)
    )


def read(root: Path) -> Scheme:
    return load_scheme(root / FILE)


def agree(root: Path, found: Scheme) -> None:
    words = tomllib.loads((root / FILE).read_text(encoding="utf-8"))
    if "base" not in words:
        assert [numeric.dtype for numeric in found.weight] == [weight["dtype"] for weight in words["weight"]]
        return
    rules = words.get("rule", [])
    assert [(rule.quant, rule.override) for rule in found.rules] == [
        (rule["quant"], rule.get("override", False)) for rule in rules
    ]
    assert [(*rule.roles, *rule.modules) for rule in found.rules] == [
        (*rule.get("roles", ()), *rule.get("modules", ())) for rule in rules
    ]
    assert [len(rule.layers) for rule in found.rules] == [len(rule.get("layers", ())) for rule in rules]


TARGET = Target("recipes", make, cases, read, agree, FILE)
