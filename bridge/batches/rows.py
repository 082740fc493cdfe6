"""The rows of a manifest: defaults filled in, matrices multiplied out; must never open a model."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from bridge.arguments import byte_count
from bridge.batches.naming import LONGEST, SHORT, beside, filled, named, told, word
from bridge.batches.problems import SHOWN, Problems
from bridge.batches.values import Row
from bridge.errors import BridgeError, UsageError, first_of, nearest, number
from bridge.quant.scheme import load_scheme
from bridge.remote.address import ELSEWHERE, HERE, is_remote, shown
from bridge.targets import load_target, make_options, target_names

TEXTS = ("name", "model", "target", "quant", "out", "calib", "kv", "device", "tokenizer")
FLAGS = ("verify", "overwrite")
COUNTS = ("shards", "samples", "sequence")
OWN = (*TEXTS, *FLAGS, *COUNTS, "config", "memory", "timeout")  # other keys are options of targets
PLACES = ("model", "calib", "tokenizer")  # beside the manifest, or elsewhere by a name
GIVEN = ("kv", "device", "verify", "overwrite", "samples", "sequence", "shards", "timeout")  # to a row as they are
NAME, OUT = "{model}-{quant}-{target}", "{name}"
MOST_EXCLUDED = 100  # tables of `exclude`: each is compared with every combination
MOST = 10_000  # rows of a manifest: each is planned, seconds for so many; axes that come to more are a mistake


@dataclass
class _Asked:
    """A table of the manifest after defaults and matrices: what one row is made from.

    `axes`: keys that a matrix varies. `strict`: keys of a `[[row]]`, which must all have a meaning for its target.
    """

    where: str
    words: dict[str, Any]
    axes: tuple[str, ...] = ()
    strict: frozenset[str] = frozenset()


@dataclass
class _Rows:
    """Rows made so far, what is wrong, and which options had a meaning for a row.

    `alike`: what tells a row from others. `merged`: where and why combinations came to a row that was there -> its
    name for each of them. `schemes`: what is wrong with each that was loaded, "" if nothing. `whole`: of every table it
    is known which rows it asks for.
    """

    folder: Path
    rows: list[Row] = field(default_factory=list)
    alike: set[str] = field(default_factory=set)
    merged: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    schemes: dict[tuple[str, str | None], str] = field(default_factory=dict)
    known: frozenset[str] = field(default_factory=lambda: frozenset({*OWN, *options_of_targets()}))
    asked: int = 0
    whole: bool = True
    problems: Problems = field(default_factory=Problems)
    used: set[tuple[str, str]] = field(default_factory=set)

    def wrong(self, where: str, text: str) -> None:
        self.problems.add(text, where)

    def leave_out(self, where: str, text: str) -> None:
        """Note what is wrong with a table whose rows cannot be told."""
        self.whole = False
        self.wrong(where, text)

    def ask(self, where: str, rows: int) -> bool:
        """Count rows that are asked for, before they are made; False, and noted, where they are too many."""
        self.asked += rows
        if self.asked > MOST:
            self.leave_out(where, f"makes {rows:,} rows; a manifest has {MOST:,} at most")
        return self.asked <= MOST

    def check_scheme(self, quant: str, kv: str | None) -> None:
        """UsageError where a scheme cannot be loaded, which is tried once; with a KV cache, where it can without."""
        for pair in dict.fromkeys([(quant, None), (quant, kv)]):
            if pair not in self.schemes:
                try:
                    load_scheme(*pair)
                    self.schemes[pair] = ""
                except BridgeError as error:
                    self.schemes[pair] = str(error)
            if problem := self.schemes[pair]:
                raise UsageError(problem)


def make_rows(words: Mapping[str, Any], folder: Path) -> tuple[list[Row], list[str], list[str]]:
    """The rows that a manifest in `folder` asks for, every problem of them, and notes on which were merged."""
    made = _Rows(folder)
    defaults = _table(words.get("defaults", {}), "[defaults]", made)
    for key, value in defaults.items():
        if isinstance(value, list):
            made.leave_out("[defaults]", f"{key} is a list, which is an axis: it belongs into a [[matrix]]")
    kinds = {"row": _asked_rows, "matrix": _asked_matrices}
    asked = [one for key in words if key in kinds for one in kinds[key](words, made)]  # as they stand in the file
    for one in asked:
        if made.problems.enough:
            made.leave_out(one.where, "these problems are enough; what follows was not looked at")
            break
        _add(one, defaults, made)
    if not asked and not made.problems:
        made.wrong("", "there are no rows; write a [[row]] or a [[matrix]] with model and target")
    overridden = {("[defaults]", key) for one in asked for key in one.words}
    said = {("[defaults]", key) for key in defaults} | {(one.where, key) for one in asked for key in one.words}
    idle = {(where, key) for where, key in said - made.used - overridden if key not in OWN}
    for where, key in sorted(idle if made.whole else ()):
        made.wrong(where, f"no row's target has the option {key!r}")
    _check_apart(made)
    return made.rows, made.problems.lines(), [_merged(*key, names) for key, names in made.merged.items()]


def _table(value: Any, where: str, made: _Rows) -> dict[str, Any]:
    """A table whose keys are known; what is wrong is noted."""
    if not isinstance(value, dict):
        made.leave_out(where, "is written as a table")
        return {}
    for key in [key for key in value if key not in made.known]:
        made.wrong(where, f"key `{key}` is unknown; {nearest(key, made.known)}")
    return {key: entry for key, entry in value.items() if key in made.known}


def options_of_targets() -> set[str]:
    """Names of the options of all targets."""
    return {entry.name for name in target_names() for entry in fields(load_target(name).Options)}


def _asked_rows(words: Mapping[str, Any], made: _Rows) -> Iterator[_Asked]:
    tables = words.get("row", [])
    if not isinstance(tables, list):
        made.leave_out("", "`row` is written as [[row]] tables")
        return
    for at, table in enumerate(tables, 1):
        where = f"[[row]] {at}"
        own = _table(table, where, made)
        lists = [key for key, value in own.items() if isinstance(value, list)]
        for key in lists:
            made.leave_out(where, f"{key} is a list; a [[matrix]] makes a row of each")
        if not lists and made.ask(where, 1):
            yield _Asked(where, own, strict=frozenset(own))


def _asked_matrices(words: Mapping[str, Any], made: _Rows) -> Iterator[_Asked]:
    tables = words.get("matrix", [])
    for at, table in enumerate(tables if isinstance(tables, list) else [tables], 1):
        where = f"[[matrix]] {at}"
        table = dict(table) if isinstance(table, dict) else table
        excluded = _excluded(table.pop("exclude", []) if isinstance(table, dict) else [], where, made)
        own = _table(table, where, made)
        axes = [key for key, value in own.items() if isinstance(value, list)]
        if not axes and own:
            made.wrong(where, "no key has a list: there is nothing to combine; write a [[row]]")
        for key in axes:
            if key in ("name", "out"):
                made.leave_out(where, f"{key} is a pattern, not an axis: {key} = {NAME!r}, say")
            elif not own[key] or any(isinstance(value, list) for value in own[key]):
                made.leave_out(where, f"{key} = {_quoted(own[key])}; expected a list of values that is not empty")
        if not made.ask(where, math.prod(len(own[key]) for key in axes)):
            continue
        hit = set()
        for values in itertools.product(*(own[key] for key in axes)):
            made_words = own | dict(zip(axes, values, strict=True))
            out = {n for n, rule in enumerate(excluded) if all(made_words.get(k) == v for k, v in rule.items())}
            hit |= out
            if not out:
                yield _Asked(where, made_words, tuple(axes))
        for n in sorted(set(range(len(excluded))) - hit):
            made.wrong(where, f"exclude {_quoted(excluded[n])}: no combination is like that")


def _excluded(value: Any, where: str, made: _Rows) -> list[dict[str, Any]]:
    if isinstance(value, list) and all(isinstance(rule, dict) and rule for rule in value):
        if len(value) <= MOST_EXCLUDED:
            return value
        made.wrong(where, f"exclude has {len(value):,} tables; {MOST_EXCLUDED} at most, write several matrices")
        return []
    made.wrong(where, f'exclude = {_quoted(value)}; expected tables: exclude = [{{ target = "trt", quant = "nvfp4" }}]')
    return []


def _add(asked: _Asked, defaults: Mapping[str, Any], made: _Rows) -> None:
    """Make one row; all that is wrong with it is noted."""
    words = {key: value for key, value in defaults.items() if not isinstance(value, list)} | asked.words
    mistyped = {key: why for key in OWN if key in words and (why := _mistyped(key, words[key]))}
    for key, why in mistyped.items():
        made.wrong(asked.where, f"{key} = {_quoted(words[key])}; {why}")
    for key in ("model", "target"):
        if key not in words:
            made.wrong(asked.where, f"{key} is missing")
    row = _row(asked, {key: value for key, value in words.items() if key not in mistyped}, made)
    if row is None or mistyped:
        return
    alike = json.dumps({**asdict(row), "where": ""}, sort_keys=True, default=str)
    if asked.axes and alike in made.alike:
        idle = [repr(key) for key in asked.axes if key not in OWN and key not in row.options]
        why = f"target {row.target} has no option {', '.join(idle)}" if idle else "asked for already"
        made.merged.setdefault((asked.where, why), []).append(row.name)
        return
    made.rows.append(row)
    made.alike.add(alike)


def _mistyped(key: str, value: Any) -> str:
    """What is wrong with the type of a value, or with where it lies, "" if nothing."""
    if key in HERE and is_remote(value):
        return ELSEWHERE
    if key in FLAGS:
        return "" if isinstance(value, bool) else "expected true or false"
    if key == "config":
        return "" if isinstance(value, str | dict) and value and _is_json(value) else _CONFIG
    if key in COUNTS:
        return "" if type(value) is int and value > 0 else "expected 1 or more"
    if key == "timeout":
        return "" if type(value) in (int, float) and 0 < value < math.inf else "expected seconds, more than 0"
    if key == "memory":
        return "" if isinstance(value, str) or (type(value) is int and value > 0) else 'expected a size as "16GB"'
    if not isinstance(value, str) or not value.strip():
        return "expected a text in quotes"
    if len(value) > LONGEST:
        return f"expected a text of {LONGEST} characters at most"
    return "expected a text without control characters" if not value.isprintable() else ""


_CONFIG = "expected a path, or a table of entries as config.json has them"


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # dates, and what is no number
        return False
    return True


def _quoted(value: Any) -> str:
    """A value for a message, of a long text its beginning: one may stand in each of many rows."""
    said = told(value)
    return repr(f"{said[:SHORT]}..." if isinstance(said, str) and len(said) > SHORT else said)


def _row(asked: _Asked, words: dict[str, Any], made: _Rows) -> Row | None:
    """The row, though something may be wrong with it, which is noted; None where its names are not known."""
    take = partial(made.problems.take, where=asked.where)
    target = take(load_target, words["target"]) if "target" in words else None
    own = {entry.name for entry in fields(target.Options)} if target else made.known
    made.used |= {
        (asked.where if key in asked.words else "[defaults]", key)
        for key in words
        if key in own or key in asked.strict  # what a [[row]] says in vain is told of that row
    }
    options = {k: v for k, v in words.items() if k not in OWN and (k in own or k in asked.strict)}
    if target:
        take(make_options, target, dict(options))
    quant, config, memory = words.get("quant"), words.get("config"), words.get("memory")
    if quant and ("/" in quant or quant.endswith(".toml")):
        quant = take(beside, quant, made.folder)
    if quant and quant != "none":
        take(made.check_scheme, quant, words.get("kv"))
    places = {key: take(named, words[key], made.folder, key) for key in PLACES if key in words}
    if isinstance(config, str):
        config = take(beside, config, made.folder)
    if isinstance(memory, str):
        memory = take(byte_count, memory, "memory")
    if not target or not places.get("model"):
        return None
    axes = [key for key in asked.axes if key in OWN or key in options]
    shown = {"quant": "none", **{key: word(words[key]) for key in [*words] if key in OWN or key in options}}
    more = "".join(f"-{key}-{{{key}}}" for key in axes if key not in ("model", "quant", "target"))
    name = shown["name"] = take(filled, words.get("name", NAME + more), shown, "name")
    out = name and take(filled, words.get("out", OUT), shown, "out")
    out = out if not out or is_remote(out) else take(beside, out, made.folder)
    if not out:
        return None
    given = {key: words[key] for key in GIVEN if key in words}
    return Row(
        name=name, where=asked.where, target=words["target"], out=out, quant=quant, config=config, memory=memory,
        options=options, **places, **given,
    )  # fmt: skip


def _check_apart(made: _Rows) -> None:
    """Note names and outputs that two rows share, outputs inside each other, and models that a row is yet to write."""
    names: dict[str, Row] = {}
    outs: dict[Path, Row] = {}
    for row in made.rows:
        out = _place(row.out)
        if row.name in names:
            made.wrong(row.where, f"the name {row.name!r} is that of {names[row.name].where} already; give it `name`")
        elif out in outs:
            made.wrong(row.where, f"out {told(row.out)} is that of {outs[out].name!r} already")
        names.setdefault(row.name, row)
        outs.setdefault(out, row)
    for row in made.rows:
        above = next((outs[path] for path in _place(row.out).parents if path in outs), None)
        if above:
            made.wrong(row.where, f"out {told(row.out)} lies inside that of {above.name!r}")
        if not is_remote(row.model) and not Path(row.model).is_absolute():  # a hub id
            continue
        model = _place(row.model)
        writer = next((outs[path] for path in (model, *model.parents) if path in outs), None)
        if writer:
            made.wrong(
                row.where, f"model {told(row.model)} is what {writer.name!r} writes; convert it in a batch of its own"
            )


def _place(path: str) -> Path:
    """Where a path or an address leads, by whatever way it is written."""
    return Path(shown(path)) if is_remote(path) else Path(os.path.realpath(path))


def _merged(where: str, why: str, names: list[str]) -> str:
    """A note on combinations that came to rows which were there."""
    rows = [repr(name) for name in dict.fromkeys(names)]
    return f"{where}: {number(len(names), 'combination')} merged into {first_of(rows, SHOWN)}: {why}"
