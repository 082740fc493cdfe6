"""Schemes and KV cache formats by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.core.dtypes import SEARCHED
from bridge.core.errors import SchemeError, UsageError
from bridge.core.mappings import find_table_file, mappings, shown, table_files
from bridge.core.parsing.file_cache import cached_by_file
from bridge.core.text import nearest
from bridge.core.values import BY_SIGN, EITHER, POSITIVE, Format, Numeric
from bridge.quant.schemes.grammar import (
    ALGORITHMS,
    check_keys,
    parse_activation,
    parse_only,
    parse_options,
    parse_parity,
    parse_policies,
    parse_weight,
    read_toml,
)
from bridge.quant.schemes.scheme import Scheme

# The weight that awq_clip may have. With a second numeric ModelOpt measures amax again and drops the clips, of NVFP4 it
# clips the scale above the blocks alone, and an input's amax would be that of the last batch.
CLIPPED = ("int4", "block", "", 1)
RULE = ":"  # between a layout and a rule
KEYS = {
    "summary", "aliases", "algorithm", "needs_cuda",
    "weight", "input", "options", "parity", "policy", "only",
}  # fmt: skip


def scheme_names() -> list[str]:
    """Names of the schemes, without aliases; those with a colon name a layout and a rule of choosing its codes."""
    names = [path.stem for path in table_files("schemes") if path.stem != "kv"]
    return sorted([*names, *(f"{path.stem}{RULE}{rule}" for path in table_files("rules") for rule in rules_of(path))])


def rules_of(path: Path) -> list[str]:
    """Names of the rules in a file of `mappings/rules`."""
    rules = read_toml(path).get("rule", {})
    if not isinstance(rules, dict) or not all(isinstance(words, dict) for words in rules.values()):
        raise SchemeError(f"{shown(path)}: rules are written as [rule.NAME] tables")
    return list(rules)


def kv_names() -> list[str]:
    """Values that `kv=` accepts."""
    return sorted(read_toml(mappings() / "schemes" / "kv.toml"))


def kv_numeric(kv: str) -> Numeric:
    """The format of a KV cache by its name; UsageError if the name is unknown."""
    path = mappings() / "schemes" / "kv.toml"
    tables = read_toml(path)
    if kv not in tables:
        raise UsageError(f"kv={kv!r} is unknown; {nearest(kv, tables)}")
    words = {key: value for key, value in tables[kv].items() if key != "summary"}
    return parse_activation(words, f"{path}: [{kv}]")


def named_scheme(name: str) -> Scheme:
    """The scheme of that name or alias, in any case; UsageError if there is none."""
    for word in dict.fromkeys((name, name.lower())):
        if word != "kv" and (path := find_table_file("schemes", word)):
            return read_scheme(path)
    word = name.lower()
    if RULE in word:
        return _by_rule(name, *word.split(RULE, 1))
    aliases: dict[str, Path] = {}
    for file in table_files("schemes"):
        aliases |= {alias: file for alias in read_toml(file).get("aliases", [])}
    if word in aliases:
        return read_scheme(aliases[word])
    if answer := elsewhere(word):
        raise UsageError(f"quant={name!r} is not a scheme here: {answer}; `qbridge show schemes` lists all")
    hint = "a recipe is given by its path, ending in .toml"
    raise UsageError(f"quant={name!r} is unknown; {nearest(name, [*scheme_names(), *aliases])}; {hint}")


def elsewhere(word: str) -> str:
    """What to do about another tool's name for a scheme, by `mappings/elsewhere.toml`; "" for an unknown word."""
    rows = read_toml(mappings() / "elsewhere.toml")["row"]
    return next((row["answer"].format(NAME=word.upper()) for row in rows if word in row["names"]), "")


def _by_rule(name: str, layout: str, rule: str) -> Scheme:
    """The scheme of a layout and a rule; UsageError if there is none."""
    path = find_table_file("rules", layout)
    if path is None:
        known = [file.stem for file in table_files("rules")]
        raise UsageError(f"quant={name!r}: {layout!r} is no layout that has rules; {nearest(layout, known)}")
    if rule not in rules_of(path):
        raise UsageError(f"quant={name!r}: {layout} has no rule {rule!r}; {nearest(rule, rules_of(path))}")
    return read_rule(path, rule)


def read_rule(path: Path, rule: str) -> Scheme:
    """Parse a rule in a file of `mappings/rules`: what it says, and what the layout says."""
    words, where = read_toml(path), shown(path)
    own = words.pop("rule")[rule]
    if "search" in own and isinstance(words.get("weight"), list):
        words["weight"] = [{**weight, "search": own["search"]} for weight in words["weight"]]
    own = {key: value for key, value in own.items() if key != "search"}
    return _scheme(f"{path.stem}{RULE}{rule}", words | own, f"{where}: [rule.{rule}]")


@cached_by_file
def read_scheme(path: Path) -> Scheme:
    """Parse the scheme in `path`; SchemeError names the file and the key."""
    return _scheme(path.stem, read_toml(path), shown(path))


def _scheme(name: str, words: dict[str, Any], where: str) -> Scheme:
    check_keys(words, KEYS, where)
    for key in ("summary", "weight", "parity"):
        if key not in words:
            raise SchemeError(f"{where}: `{key}` is missing")
    algorithm = words.get("algorithm", "max")
    if algorithm not in ALGORITHMS:
        raise SchemeError(f"{where}: algorithm {algorithm!r} is unknown; {nearest(str(algorithm), ALGORITHMS)}")
    weights = words["weight"]
    if not isinstance(weights, list) or not weights or not all(isinstance(w, dict) for w in weights):
        raise SchemeError(f"{where}: `weight` is written as one or several [[weight]] tables")
    activation = words.get("input")
    numerics = tuple(parse_weight(w, f"{where}: [[weight]]") for w in weights)
    if algorithm == "imatrix" and not all(n.dtype in SEARCHED or n.search in BY_SIGN for n in numerics):
        raise SchemeError(
            f"{where}: algorithm 'imatrix' chooses codes of {', '.join(SEARCHED)}, llama.cpp's blocks, and scales of "
            f"INT4 in blocks with search = {EITHER!r} or {POSITIVE!r}"
        )
    entry = None if activation is None else parse_activation(activation, f"{where}: [input]")
    form, options = Format(numerics, entry, algorithm), parse_options(words.get("options", {}), algorithm, where)
    if form.clipped and (entry or [(n.dtype, n.per, n.search, len(n.block)) for n in numerics] != [CLIPPED]):
        raise SchemeError(
            f"{where}: algorithm {algorithm!r} clips INT4 in blocks along `in`, without [input] or search"
        )
    _check_chosen(algorithm, numerics, where)
    return Scheme(
        name=name,
        summary=str(words["summary"]),
        weight=numerics,
        input=entry,
        parity=parse_parity(words["parity"], where),
        algorithm=algorithm,
        options=options,
        policies=parse_policies(words.get("policy", {}), where),
        needs_cuda=str(words.get("needs_cuda", "")),
        only=parse_only(words.get("only", []), where),
        origin=where,
    )


def _check_chosen(algorithm: str, numerics: Sequence[Numeric], where: str) -> None:
    """SchemeError for a weight whose codes or scales an algorithm cannot choose."""
    first = numerics[0]
    kind = (first.dtype, first.scale_dtype, len(first.block), first.search, len(numerics))
    nvfp4, int4 = ("float4_e2m1fn", "float8_e4m3fn", 1, "", 1), ("int4", "float32", 1, "", 1)
    own = [("int4", "float32", 1, search, 1) for search in BY_SIGN]
    if algorithm == "gptq" and kind not in (nvfp4, int4, *own):
        raise SchemeError(f"{where}: algorithm 'gptq' is for one [[weight]] of INT4 or NVFP4 in blocks along `in`")
    if algorithm == "signround" and kind not in own:
        raise SchemeError(
            f"{where}: algorithm 'signround' is for one [[weight]] of INT4 in blocks along `in` with search = "
            f"{EITHER!r} or {POSITIVE!r}"
        )
    if algorithm == "local_hessian" and kind != nvfp4:
        raise SchemeError(f"{where}: algorithm 'local_hessian' is for one [[weight]] of NVFP4, without search")
