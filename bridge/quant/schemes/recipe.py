"""Recipes: TOML that changes a scheme by role, module or layer.

    base = "fp8"
    kv   = "fp8"

    [[rule]]
    layers = [0, -1, "4..6"]      # negative counts from the end, ranges include both ends
    quant  = "none"

    [[rule]]
    roles    = ["mlp.down.weight"]
    quant    = "int8_wo"
    override = true               # needed if an earlier rule gives the same module another result

Keys of a rule are ANDed, the entries of a key ORed. Patterns are globs on the whole name. A rule takes precedence over
the architecture's own reasons to keep a module (an output head, a router), so a recipe can quantize the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from bridge.core.addresses import check_length
from bridge.core.errors import SchemeError, UsageError
from bridge.core.parsing.problems import ENOUGH, Problems
from bridge.core.values import Numeric
from bridge.quant.schemes.catalog import RULE, kv_numeric, layout_of, named_scheme, read_scheme
from bridge.quant.schemes.grammar import Gate, Gates, check_keys, parse_options, parse_parity, parse_policies, read_toml
from bridge.quant.schemes.group_size import with_group
from bridge.quant.schemes.layer_ranges import Span, parse_span
from bridge.quant.schemes.scheme import Rule, Scheme

NONE = "none"
KEYS = {"base", "summary", "kv", "group", "rule", "options", "parity", "policy"}
RULE_KEYS = {"roles", "modules", "layers", "quant", "group", "override"}


def layout_asked(quant: object) -> Path | None:
    """The file of the layout whose best rule a name or a recipe asks for; SchemeError if a recipe asks for two."""
    file = isinstance(quant, Path) or (isinstance(quant, str) and (quant.endswith(".toml") or "/" in quant))
    if file:
        check_length(Path(str(quant)))
    if not file or not Path(str(quant)).is_file():
        return layout_of(quant)
    words = read_toml(Path(str(quant)))
    asked = {name: path for table in _tables(words) for name in table.values() if (path := layout_of(name))}
    if len({*asked.values()}) > 1:
        raise SchemeError(
            f"{quant}: {' and '.join(asked)} are choices of two layouts, and one is measured at a time; name the rule "
            "of one of them"
        )
    return next(iter(asked.values()), None)


def _tables(words: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The names of schemes in a recipe: its base, then those of its rules."""
    rules = words.get("rule", [])
    tables = [rule for rule in rules if isinstance(rule, dict)] if isinstance(rules, list) else []
    return [{key: table[key]} for key, table in (("base", words), *(("quant", one) for one in tables)) if key in table]


def _with_rule(words: dict[str, Any], rule: str) -> dict[str, Any]:
    """A recipe with a rule in place of each choice among rules."""

    def named(table: dict[str, Any], key: str) -> dict[str, Any]:
        path = layout_of(table.get(key))
        return {**table, key: f"{path.stem}{RULE}{rule}"} if path else table

    rules = words.get("rule", [])
    rules = (
        [named(one, "quant") if isinstance(one, dict) else one for one in rules] if isinstance(rules, list) else rules
    )
    return named({**words, **({"rule": rules} if rules else {})}, "base")


def load_recipe(path: Path, rule: str = "") -> Scheme:
    """Read a recipe, or a user's own scheme (a file with [[weight]] tables instead of `base`).

    `rule`: the one that choices among rules, such as int4:best, stand for; it is then a part of the scheme's name.
    """
    check_length(path)
    if not path.is_file():
        raise UsageError(f"quant={str(path)!r}: no such file; schemes are given by name, recipes by path")
    words = read_toml(path)
    where = str(path)
    if "base" not in words and "weight" in words:
        return replace(read_scheme(path), sized=True)  # the blocks that it says
    problems = Problems()
    words, name = (_with_rule(words, rule), f"{path.stem}{RULE}{rule}") if rule else (words, path.stem)
    scheme = _parse(words, name, where, problems)
    if scheme is None:
        lines = problems.lines()
        text = [f"{where}: {len(lines)} problems", *(line.removeprefix(f"{where}: ") for line in lines)]
        raise SchemeError("\n  ".join(text) if len(lines) > 1 else lines[0])
    return scheme


def _parse(words: dict[str, Any], name: str, where: str, problems: Problems) -> Scheme | None:
    """The recipe's scheme, None if there are problems."""
    take = problems.take
    _check_keys(words, KEYS, where, problems)
    base = take(_base, words.get("base"), where)
    base = base and take(_grouped, base, words, where)
    rules = _until_enough(take(_rules, words, where) or (), where, problems)
    parsed = [_rule(rule, f"rule {n}", where, problems) for n, rule in enumerate(rules, 1)]
    used = [base, *(scheme for _, scheme in filter(None, parsed) if scheme)]
    policies = take(parse_policies, words.get("policy", {}), where)
    parity = take(parse_parity, words["parity"], where) if "parity" in words else None
    options = take(_options, words, used, where) if base else None
    kv = take(_kv, words.get("kv"), where)
    if problems:
        return None
    scheme: Scheme = replace(
        base,
        name=name,
        summary=str(words.get("summary", f"{base.summary}; with {len(parsed)} rules")),
        kv=kv,
        rules=tuple(rule for rule, _ in filter(None, parsed)),
        # one model, several precisions: its outputs are checked against the loosest gate of those used
        parity=parity or Gates(base.parity.tensor, reduce(Gate.loosest, (s.parity.output for s in used))),
        options=options,
        policies=policies,
        needs_cuda=next((s.needs_cuda for s in used if s.needs_cuda), ""),
        origin=where,
        sized=any(one.sized for one in used),
    )
    return scheme


def _grouped(scheme: Scheme, words: dict[str, Any], where: str) -> Scheme:
    """A scheme in blocks of the size that a table asks for."""
    try:
        return with_group(scheme, words.get("group"))
    except UsageError as error:
        raise SchemeError(f"{where}: {error}") from error


def _rules(words: dict[str, Any], where: str) -> list[Any]:
    rules = words.get("rule", [])
    if not isinstance(rules, list):
        raise SchemeError(f"{where}: `rule` is written as [[rule]] tables")
    return rules


def _check_keys(words: dict[str, Any], known: set[str], at: str, problems: Problems) -> None:
    for key in _until_enough([*words], at, problems):
        problems.take(check_keys, {key: words[key]}, known, at)


def _until_enough(entries: Sequence[Any], at: str, problems: Problems) -> Iterator[Any]:
    """The entries, until enough problems are recorded."""
    for entry in entries:
        if problems.enough:
            problems.add(f"{at}: {ENOUGH}")
            return
        yield entry


def _kv(kv: Any, where: str) -> Numeric | None:
    """The recipe's KV format; no base scheme sets one."""
    if kv is not None and not isinstance(kv, str):
        raise SchemeError(f"{where}: kv = {kv!r}; expected a name in quotes")
    try:
        return None if kv is None else kv_numeric(kv)
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
    """The scheme of that name; never another recipe, which could name this one again."""
    if name.endswith(".toml") or "/" in name:
        raise SchemeError(f"{where}: {key} = {name!r}; a recipe starts from a scheme by name, not from another file")
    return named_scheme(name)


def _options(words: dict[str, Any], used: list[Scheme], where: str) -> tuple[tuple[str, float], ...]:
    # each parameter belongs to one algorithm; the base's value holds for the whole recipe
    options = {key: value for scheme in reversed(used) for key, value in scheme.options}
    own = words.get("options", {})
    changed = parse_options(own, used[0].algorithm, where)
    return tuple(sorted({**options, **{key: value for key, value in changed if key in own}}.items()))


def _rule(words: Any, label: str, where: str, problems: Problems) -> tuple[Rule, Scheme | None] | None:
    """A rule and its scheme, None if it is not a table. Its problems are recorded."""
    at, take = f"{where}: {label}", problems.take
    if not isinstance(words, dict):
        problems.add(f"{at}: expected a table, got {words!r}")
        return None
    _check_keys(words, RULE_KEYS, at, problems)
    if not {"roles", "modules", "layers"} & set(words):
        problems.add(f"{at}: does not say what it matches; add roles, modules or layers")
    if type(words.get("override", False)) is not bool:
        problems.add(f"{at}: override = {words['override']!r}; expected true or false")
    scheme = take(_quant, words.get("quant"), at)
    scheme = scheme and take(_grouped, scheme, words, at)
    if scheme and scheme.file_type and scheme.file_type != scheme.weight[0].dtype:
        problems.add(
            f"{at}: quant = {words['quant']!r} is llama.cpp's choice of a type for each tensor of a file, which is a "
            f"base; a rule names one type, such as q6_k or q5_0"
        )
    layers = _until_enough(take(_list, words, "layers", at) or (), f"{at}: layers", problems)
    rule = Rule(
        label=label,
        quant=words.get("quant", NONE),
        format=scheme.format if scheme else None,
        gate=scheme.parity.tensor if scheme else None,
        roles=take(_globs, words, "roles", at) or (),
        modules=take(_globs, words, "modules", at) or (),
        layers=tuple(take(_span, entry, at) for entry in layers),
        override=words.get("override", False),
    )
    return rule, scheme


def _quant(quant: Any, at: str) -> Scheme | None:
    if not isinstance(quant, str):
        raise SchemeError(f'{at}: `quant` is missing; write the name of a scheme or quant = "none"')
    try:
        return None if quant == NONE else _scheme(quant, "quant", at)
    except UsageError as error:
        raise SchemeError(f"{at}: {error}; or {NONE!r}") from error


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


def _span(entry: Any, at: str) -> Span:
    try:
        return parse_span(entry)
    except ValueError as error:
        raise SchemeError(f"{at}: layers: {error}") from error
