"""Schemes and KV cache formats by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.core.dtypes import SEARCHED
from bridge.core.errors import SchemeError, UsageError
from bridge.core.mappings import find_table_file, mappings, shown, table_files
from bridge.core.parsing.file_cache import cached_by_file
from bridge.core.text import near, nearest
from bridge.core.values import BY_SIGN, EITHER, OURS, POSITIVE, WEIGHTED, Format, Numeric
from bridge.quant.describe import numeric as numeric_in_words
from bridge.quant.describe import weights
from bridge.quant.schemes.grammar import (
    ALGORITHMS,
    HEADROOM,
    check_keys,
    parse_activation,
    parse_only,
    parse_options,
    parse_parity,
    parse_policies,
    parse_rounding,
    parse_weight,
    read_toml,
)
from bridge.quant.schemes.presets import hint_of, is_preset, preset_names, preset_words
from bridge.quant.schemes.scheme import Scheme

# The weight that awq_clip may have. With a second numeric ModelOpt measures amax again and drops the clips, of NVFP4 it
# clips the scale above the blocks alone, and an input's amax would be that of the last batch.
CLIPPED = ("int4", "block", "", 1)
IN_NIBBLES = ("int4", "int3", "int2")  # codes of integers that a calibration stores
RULE = ":"  # between a layout and a rule
IMPORTANCE = "imatrix"  # the rule that every file type of llama.cpp has
BEST = "best"  # in place of a rule: the one with the least loss on the model itself
WITHOUT_DATA = "best_without_data"  # the key of a layout's file that names its best rule among those without data
KEYS = {
    "summary", "aliases", "algorithm", "needs_cuda", "rounding",
    "weight", "input", "options", "parity", "policy", "only", "file_type",
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


def candidates_by_default(path: Path) -> list[str]:
    """The rules of a file that `:best` tries where nobody names rules: those without `candidate = false`."""
    rules = read_toml(path)["rule"]
    return [rule for rule in rules_of(path) if rules[rule].get("candidate", True)]


def is_scheme_name(name: str) -> bool:
    """Whether it is the name of a scheme, a preset's with its prefix among them."""
    return name in scheme_names() or name in preset_names()


def best_names() -> list[str]:
    """Names that ask for the best rule of a layout, `int4:best`."""
    return [f"{path.stem}{RULE}{BEST}" for path in table_files("rules")]


def layout_of(quant: object) -> Path | None:
    """The file of the layout whose best rule `quant` asks for, in any case; None if it asks for something else.

    A layout's name alone asks for it too, if no scheme has that name.
    """
    if not isinstance(quant, str) or quant.endswith(".toml") or "/" in quant or is_preset(quant):
        return None
    layout, colon, rule = quant.lower().partition(RULE)
    if rule != BEST and (colon or find_table_file("schemes", layout) or layout in _aliases()):
        return None
    return find_table_file("rules", layout)


def without_data(path: Path) -> str:
    """The name of a layout's best rule among those that need no data, "" if all do; SchemeError if its file errs."""
    rule = read_toml(path).get(WITHOUT_DATA, "")
    free = [one for one in rules_of(path) if not read_rule(path, one).needs_calibration]
    if rule in free or (not rule and not free):
        return f"{path.stem}{RULE}{rule}" if rule else ""
    raise SchemeError(
        f"{shown(path)}: {WITHOUT_DATA} = {rule!r} is no rule that needs no data; {nearest(str(rule), free)}"
    )


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
    word, aliases = name.lower(), _aliases()
    if is_preset(name):
        title, words = preset_words(name)
        return _preset(title, words) if words else named_scheme(title)
    if path := layout_of(name):
        rules = ", ".join(f"{path.stem}{RULE}{rule}" for rule in rules_of(path))
        raise UsageError(
            f"quant={name!r} is a choice among rules that are measured on the whole model, which convert, plan and "
            f"calibrate make; here name the rule: {rules}"
        )
    if RULE in word:
        return _by_rule(name, *word.split(RULE, 1))
    if word in aliases:
        return read_scheme(aliases[word])
    if preset := hint_of(name):
        raise UsageError(
            f"quant={name!r} is another tool's name: {preset}{_ours(word)}; `qbridge show schemes` lists ours"
        )
    if answer := elsewhere(word):
        raise UsageError(f"quant={name!r} is not a scheme here: {answer}; `qbridge show schemes` lists all")
    close = near(name, [*scheme_names(), *aliases])
    hint = "`qbridge show schemes --all` lists all; a recipe is given by its path, ending in .toml"
    raise UsageError(f"quant={name!r} is unknown; {f'nearest: {close}; ' if close else ''}{hint}")


def _preset(name: str, words: dict[str, Any]) -> Scheme:
    """The scheme of another tool's preset."""
    scheme = _scheme(name, words, f"presets.toml: {name}")
    inputs = f"activations {numeric_in_words(scheme.input)}"
    return replace(scheme, summary=f"{words['summary']}: weights {weights(scheme)}, {inputs}")


def _ours(word: str) -> str:
    """Our schemes that are like another tool's, for a message; "" where no row says it."""
    answer = elsewhere(word)
    return f"; here {answer}" if answer else ""


def _aliases() -> dict[str, Path]:
    return {alias: file for file in table_files("schemes") for alias in read_toml(file).get("aliases", [])}


def elsewhere(word: str) -> str:
    """What to do about another tool's name for a scheme, by `mappings/elsewhere.toml`; "" for an unknown word."""
    rows = read_toml(mappings() / "elsewhere.toml")["row"]
    return next((row["answer"].format(NAME=word.upper()) for row in rows if word in row["names"]), "")


def _by_rule(name: str, layout: str, rule: str) -> Scheme:
    """The scheme of a layout and a rule; UsageError if there is none."""
    path = find_table_file("rules", layout)
    file = find_table_file("schemes", layout)
    if rule == IMPORTANCE and file and read_scheme(file).file_type:
        return _weighted(read_scheme(file))
    if path is None:
        known = [file.stem for file in table_files("rules")]
        raise UsageError(f"quant={name!r}: {layout!r} is no layout that has rules; {nearest(layout, known)}")
    if rule not in rules_of(path):
        raise UsageError(f"quant={name!r}: {layout} has no rule {rule!r}; {nearest(rule, [*rules_of(path), BEST])}")
    return read_rule(path, rule)


def _weighted(scheme: Scheme) -> Scheme:
    """A file type of llama.cpp, with an importance matrix."""
    summary = scheme.summary.replace(", activations", ", weighed by an importance matrix, activations")
    return replace(scheme, name=f"{scheme.name}{RULE}{IMPORTANCE}", summary=summary, algorithm=IMPORTANCE)


def read_rule(path: Path, rule: str) -> Scheme:
    """Parse a rule in a file of `mappings/rules`: what it says, and what the layout says."""
    words, where = read_toml(path), shown(path)
    own = words.pop("rule")[rule]
    words.pop(WITHOUT_DATA, None)
    if "search" in own and isinstance(words.get("weight"), list):
        words["weight"] = [{**weight, "search": own["search"]} for weight in words["weight"]]
    own = {key: value for key, value in own.items() if key not in ("search", "candidate")}
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
    if algorithm == "imatrix" and not all(n.dtype in SEARCHED or n.search in OURS for n in numerics):
        raise SchemeError(
            f"{where}: algorithm 'imatrix' chooses codes of {', '.join(SEARCHED)}, llama.cpp's blocks, and scales of "
            f"INT2 to INT6 in blocks with search = {EITHER!r} or {POSITIVE!r}, of FP4 in blocks with search = "
            f"{WEIGHTED!r}"
        )
    entry = None if activation is None else parse_activation(activation, f"{where}: [input]")
    form, options = Format(numerics, entry, algorithm), parse_options(words.get("options", {}), algorithm, where)
    if form.clipped and (entry or [(n.dtype, n.per, n.search, len(n.block)) for n in numerics] != [CLIPPED]):
        raise SchemeError(
            f"{where}: algorithm {algorithm!r} clips INT4 in blocks along `in`, without [input] or search"
        )
    _check_chosen(algorithm, numerics, where)
    if algorithm == HEADROOM and (entry is None or not entry.two_level or entry.constant):
        raise SchemeError(f"{where}: algorithm {algorithm!r} is for [input] of NVFP4 whose amax is measured")
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
        file_type=str(words.get("file_type", "")),
        origin=where,
        rounding=parse_rounding(words, where),
    )


def _check_chosen(algorithm: str, numerics: Sequence[Numeric], where: str) -> None:
    """SchemeError for a weight whose codes or scales an algorithm cannot choose."""
    first = numerics[0]
    kind = (first.dtype, first.scale_dtype, len(first.block), first.search, len(numerics))
    nvfp4, int4 = ("float4_e2m1fn", "float8_e4m3fn", 1, "", 1), ("int4", "float32", 1, "", 1)
    signed = [(dtype, "float32", 1, search, 1) for dtype in IN_NIBBLES for search in BY_SIGN]
    weighted = [("float4_e2m1fn", scale, 1, WEIGHTED, 1) for scale in ("float8_e4m3fn", "float8_e8m0fnu")]
    if algorithm == "gptq" and kind not in (nvfp4, int4, *signed, *weighted):
        raise SchemeError(
            f"{where}: algorithm 'gptq' is for one [[weight]] of INT4 or FP4 in blocks along `in`, of MXFP4 with "
            f"search = {WEIGHTED!r}, of INT2 and INT3 with search = {EITHER!r} or {POSITIVE!r}"
        )
    if algorithm == "signround" and kind not in signed:
        raise SchemeError(
            f"{where}: algorithm 'signround' is for one [[weight]] of INT2 to INT4 in blocks along `in` with search = "
            f"{EITHER!r} or {POSITIVE!r}"
        )
    if algorithm == "local_hessian" and kind != nvfp4:
        raise SchemeError(f"{where}: algorithm 'local_hessian' is for one [[weight]] of NVFP4, without search")
