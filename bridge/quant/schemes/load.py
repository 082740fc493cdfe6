"""Load a scheme by its name, or a recipe from its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bridge.core.addresses import check_local
from bridge.core.errors import SchemeError, UsageError
from bridge.core.mappings import mappings, shown, table_files
from bridge.quant.schemes.catalog import (
    kv_names,
    kv_numeric,
    layout_of,
    named_scheme,
    read_rule,
    read_scheme,
    rules_of,
    without_data,
)
from bridge.quant.schemes.grammar import read_toml
from bridge.quant.schemes.presets import check_presets
from bridge.quant.schemes.scheme import Scheme

AUTO = "auto:"  # before a budget: `convert` chooses a scheme for each layer


def check_schemes() -> list[str]:
    """Read every scheme and every KV format; return their problems."""
    problems: list[str] = []
    owners: dict[str, str] = {}
    for path in table_files("schemes"):
        if path.stem == "kv":
            continue
        try:
            read_scheme(path)
            for word in [path.stem, *read_toml(path).get("aliases", [])]:
                if owners.setdefault(word, path.stem) != path.stem:
                    problems.append(f"{shown(path)}: {word!r} is already a name of {owners[word]}")
        except SchemeError as error:
            problems.append(str(error))
    for path in table_files("rules"):
        try:
            for rule in rules_of(path):
                read_rule(path, rule)
            without_data(path)
        except SchemeError as error:
            problems.append(str(error))
    problems += check_presets()
    for name in kv_names():
        try:
            with_kv(read_scheme(mappings() / "schemes" / "fp8.toml"), name)
        except SchemeError as error:
            problems.append(str(error))
    return problems


def check_name(quant: object) -> None:
    """UsageError for a name that is no scheme's, before a model is opened for it."""
    word = quant if isinstance(quant, str) else ""
    aside = word in ("", "none") or word.startswith(AUTO) or word.endswith(".toml") or "/" in word
    if not aside and layout_of(word) is None:
        named_scheme(word)


def load_scheme(quant: str | Path | Scheme, kv: str | None = None) -> Scheme:
    """Return the scheme of a name, an alias or a recipe's path, or a `Scheme` itself; `kv` adds the KV format.

    >>> load_scheme("fp8").input.dtype
    'float8_e4m3fn'
    """
    if not isinstance(quant, str | Path | Scheme):
        raise UsageError(f"quant takes a scheme's name, a recipe's path or a Scheme, not {type(quant).__name__}")
    check_local(quant=quant)
    if isinstance(quant, str) and quant.startswith(AUTO):
        raise UsageError(
            f"quant={quant!r}: only `convert` chooses by itself, since that runs the model; choose first: `qbridge "
            f"sensitivity MODEL --quant {quant} --out recipe.toml`, "
            "then pass the recipe as quant"
        )
    if isinstance(quant, Scheme):
        scheme = quant
    elif isinstance(quant, Path) or str(quant).endswith(".toml") or "/" in str(quant):
        from bridge.quant.schemes.recipe import load_recipe

        scheme = load_recipe(Path(quant))
    else:
        scheme = named_scheme(quant)
    return scheme if kv is None else with_kv(scheme, kv)


def with_kv(scheme: Scheme, kv: str) -> Scheme:
    """`scheme` with the KV cache in `kv`; UsageError if the name is unknown or contradicts the recipe."""
    numeric = kv_numeric(kv)
    if scheme.kv not in (None, numeric):
        raise UsageError(
            f"kv={kv!r} contradicts {scheme.origin or scheme.name}, which sets another kv; drop one of the two"
        )
    return replace(scheme, kv=numeric)
