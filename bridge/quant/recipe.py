"""Recipes: a user's TOML that starts from a scheme and changes it by role, module name or layer; reads no weight.

    base = "fp8"
    kv   = "fp8"

    [[rule]]
    layers = [0, -1, "4..6"]      # negative counts from the end, ranges include both ends
    quant  = "none"

    [[rule]]
    roles    = ["mlp.down.weight"]
    quant    = "int8_wo"
    override = true               # needed where an earlier rule matches the same module with another result

Keys of a rule are ANDed, the entries of a key ORed. Patterns are globs on the whole name. A rule wins over the
architecture's own reasons to keep a module (an output head, a router), so a recipe can quantize the head.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from bridge.errors import SchemeError, UsageError
from bridge.paths import check_length
from bridge.quant.grammar import Gate, Parity, check_keys, parse_options, parse_parity, parse_policies, read_toml
from bridge.quant.scheme import Rule, Scheme, load_scheme, read_scheme, with_kv

NONE = "none"
_RANGE = re.compile(r"(-?\d+)(?:\.\.(-?\d+))?")


def load_recipe(path: Path) -> Scheme:
    """Read a recipe, or a whole scheme of the user's own (a file with [[weight]] tables instead of `base`)."""
    check_length(path)
    if not path.is_file():
        raise UsageError(f"quant={str(path)!r}: no such file; schemes are given by name, recipes by path")
    words = read_toml(path)
    where = str(path)
    if "base" not in words and "weight" in words:
        return read_scheme(path)
    check_keys(words, {"base", "summary", "kv", "rule", "options", "parity", "policy"}, where)
    base = _base(words.get("base"), where)
    rules = words.get("rule", [])
    if not isinstance(rules, list):
        raise SchemeError(f"{where}: `rule` is written as [[rule]] tables")
    parsed = tuple(_rule(rule, f"rule {n}", where) for n, rule in enumerate(rules, 1))
    used = [base, *(scheme for _, scheme in parsed if scheme)]
    scheme = replace(
        base,
        name=path.stem,
        summary=str(words.get("summary", f"{base.summary}; with {len(parsed)} rules")),
        rules=tuple(rule for rule, _ in parsed),
        parity=_parity(words, used, where),
        options=_options(words, used, where),
        policies=parse_policies(words.get("policy", {}), where),
        simulation_needs_cuda=next((s.simulation_needs_cuda for s in used if s.simulation_needs_cuda), ""),
        needs_cuda=next((s.needs_cuda for s in used if s.needs_cuda), ""),
        origin=where,
    )
    kv = words.get("kv")
    if kv is not None and not isinstance(kv, str):
        raise SchemeError(f"{where}: kv = {kv!r}; expected a name in quotes")
    try:
        return scheme if kv is None else with_kv(scheme, kv)
    except UsageError as error:
        raise SchemeError(f"{where}: {error}") from error


def _base(name: Any, where: str) -> Scheme:
    if not isinstance(name, str):
        raise SchemeError(f'{where}: `base` is missing; a recipe starts from a scheme, for example base = "fp8"')
    try:
        return _scheme(name, "base", where)
    except UsageError as error:
        raise SchemeError(f"{where}: base: {error}") from error


def _scheme(name: str, key: str, where: str) -> Scheme:
    """Return the scheme of that name; never another recipe's, which could name this one again."""
    if name.endswith(".toml") or "/" in name:
        raise SchemeError(f"{where}: {key} = {name!r}; a recipe starts from a scheme by name, not from another file")
    return load_scheme(name)


def _options(words: dict[str, Any], used: list[Scheme], where: str) -> tuple[tuple[str, float], ...]:
    # each parameter belongs to one algorithm; the base's value holds for the whole recipe
    options = {key: value for scheme in reversed(used) for key, value in scheme.options}
    given = words.get("options", {})
    changed = parse_options(given, used[0].algorithm, where)
    return tuple(sorted({**options, **{key: value for key, value in changed if key in given}}.items()))


def _parity(words: dict[str, Any], used: list[Scheme], where: str) -> Parity:
    # one model, several precisions: its outputs are held to the loosest gate of those used
    if "parity" in words:
        return parse_parity(words["parity"], where)
    return Parity(used[0].parity.tensor, reduce(Gate.loosest, (scheme.parity.output for scheme in used)))


def _rule(words: Any, label: str, where: str) -> tuple[Rule, Scheme | None]:
    at = f"{where}: {label}"
    if not isinstance(words, dict):
        raise SchemeError(f"{at}: expected a table, got {words!r}")
    check_keys(words, {"roles", "modules", "layers", "quant", "override"}, at)
    quant = words.get("quant")
    if not isinstance(quant, str):
        raise SchemeError(f'{at}: `quant` is missing; write the name of a scheme or quant = "none"')
    if not {"roles", "modules", "layers"} & set(words):
        raise SchemeError(f"{at}: says nothing about what it matches; add roles, modules or layers")
    if type(words.get("override", False)) is not bool:
        raise SchemeError(f"{at}: override = {words['override']!r}; expected true or false")
    scheme = None
    if quant != NONE:
        try:
            scheme = _scheme(quant, "quant", at)
        except UsageError as error:
            raise SchemeError(f"{at}: {error}; or {NONE!r}") from error
    rule = Rule(
        label=label,
        quant=quant,
        format=scheme.format if scheme else None,
        gate=scheme.parity.tensor if scheme else None,
        roles=_globs(words, "roles", at),
        modules=_globs(words, "modules", at),
        layers=tuple(_span(entry, at) for entry in _list(words, "layers", at)),
        override=words.get("override", False),
    )
    return rule, scheme


def _list(words: dict[str, Any], key: str, at: str) -> list[Any]:
    entries = words.get(key, [])
    if not isinstance(entries, list) or (key in words and not entries):
        raise SchemeError(f"{at}: {key} = {entries!r}; expected a list that is not empty")
    return entries


def _globs(words: dict[str, Any], key: str, at: str) -> tuple[str, ...]:
    entries = _list(words, key, at)
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise SchemeError(f"{at}: {key} = {entries!r}; expected names or globs in quotes")
    return tuple(entries)


def _span(entry: Any, at: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(str(entry)) if type(entry) in (int, str) else None
    if not found:
        raise SchemeError(f'{at}: layers: {entry!r}; expected a number, negative from the end, or a range "2..5"')
    low = int(found[1])
    high = int(found[2]) if found[2] else low
    if (low < 0) == (high < 0) and low > high:
        raise SchemeError(f"{at}: layers: {entry!r} is empty; write the smaller end first")
    return low, high
