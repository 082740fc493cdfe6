"""The rows of a manifest: defaults filled in, matrices multiplied out; must never open a model."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from bridge.arguments import byte_count
from bridge.batches.naming import LONGEST, SHORT, beside, filled, named, names_in, told, word
from bridge.batches.values import Row
from bridge.errors import BridgeError, UsageError, first_of, nearest, number
from bridge.problems import ENOUGH, SHOWN, Problems
from bridge.quant.scheme import kv_numeric, load_scheme
from bridge.remote.address import ELSEWHERE, HERE, is_remote, shown
from bridge.targets import Target, load_target, make_options, target_names

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

    def said(self, *keys: str) -> str:
        """Where the words for these keys stand: in the defaults, if there are any and none of them is here."""
        return self.where if not keys or any(key in self.words for key in keys) else "[defaults]"


@dataclass
class _Rows:
    """Rows made so far, what is wrong, and which options had a meaning for a row.

    `defaults`: the manifest's. `alike`: what tells a row from others. `merged`: where and why combinations came to a
    row that was there -> its name for each of them. `loaded`: what is wrong with schemes and KV caches by their names,
    "" if nothing. `whole`: of every table it is known which rows it asks for.
    """

    folder: Path
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    alike: set[str] = field(default_factory=set)
    merged: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    loaded: dict[tuple[str | None, ...], str] = field(default_factory=dict)
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

    def load(self, make: Callable[..., Any], *names: str | None) -> bool:
        """True; UsageError where `make` finds nothing by these names, which is tried once."""
        if names not in self.loaded:
            try:
                make(*names)
                self.loaded[names] = ""
            except BridgeError as error:
                self.loaded[names] = str(error)
        if problem := self.loaded[names]:
            raise UsageError(problem)
        return True


def make_rows(words: Mapping[str, Any], folder: Path) -> tuple[list[Row], list[str], list[str]]:
    """The rows that a manifest in `folder` asks for, every problem of them, and notes on which were merged."""
    made = _Rows(folder)
    defaults = made.defaults = _table(words.get("defaults", {}), "[defaults]", made) or {}
    for key, value in defaults.items():
        if isinstance(value, list):
            made.leave_out("[defaults]", f"{key} is a list, which is an axis: it belongs into a [[matrix]]")
    kinds = {"row": _asked_rows, "matrix": _asked_matrices}
    asked = [one for key in words if key in kinds for one in kinds[key](words, made)]  # as they stand in the file
    for one in asked:
        if made.problems.enough:
            made.leave_out(one.where, ENOUGH)
            break
        _add(one, made)
    if not asked and not made.problems:
        made.wrong("", "there are no rows; write a [[row]] or a [[matrix]] with model and target")
    overridden = {("[defaults]", key) for one in asked for key in one.words}
    said = {("[defaults]", key) for key in defaults} | {(one.where, key) for one in asked for key in one.words}
    idle = {(where, key) for where, key in said - made.used - overridden if key not in OWN}
    for where, key in sorted(idle if made.whole else ()):
        made.wrong(where, f"no row's target has the option {key!r}")
    _check_apart(made)
    return made.rows, made.problems.lines(), [_merged(*key, names) for key, names in made.merged.items()]


def _table(value: Any, where: str, made: _Rows) -> dict[str, Any] | None:
    """A table whose keys are known, None where it is none; what is wrong is noted."""
    if not isinstance(value, dict):
        made.leave_out(where, "is written as a table")
        return None
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
        if (own := _table(table, where, made)) is None:
            continue
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
        rules = table.pop("exclude", []) if isinstance(table, dict) else []
        if (own := _table(table, where, made)) is None:
            continue
        excluded = _excluded(rules, own, where, made)
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


def _excluded(value: Any, own: Mapping[str, Any], where: str, made: _Rows) -> list[dict[str, Any]]:
    """The rules whose keys the matrix has; what is wrong with the others is noted."""
    if isinstance(value, list) and all(isinstance(rule, dict) and rule for rule in value):
        if len(value) <= MOST_EXCLUDED:
            for rule in value:
                for key in [key for key in rule if key not in own]:
                    above = "it stands in [defaults]: write it into the matrix" if key in made.defaults else ""
                    what = f"exclude {_quoted(rule)}: the matrix has no key `{key}`"
                    made.wrong(where, f"{what}; {above or nearest(key, own)}")
            return [rule for rule in value if rule.keys() <= own.keys()]
        made.wrong(where, f"exclude has {len(value):,} tables; {MOST_EXCLUDED} at most, write several matrices")
        return []
    made.wrong(where, f'exclude = {_quoted(value)}; expected tables: exclude = [{{ target = "trt", quant = "nvfp4" }}]')
    return []


def _add(asked: _Asked, made: _Rows) -> None:
    """Make one row; all that is wrong with it is noted."""
    words = {key: value for key, value in made.defaults.items() if not isinstance(value, list)} | asked.words
    mistyped = {key: why for key in OWN if key in words and (why := _mistyped(key, words[key]))}
    for key, why in mistyped.items():
        made.wrong(asked.said(key), f"{key} = {_quoted(words[key])}; {why}")
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


def _take(asked: _Asked, made: _Rows, make: Callable[..., Any], *arguments: Any, of: Collection[str]) -> Any:
    """What `make` returns; None where it raises, which is noted of where the keys `of` stand."""
    return made.problems.take(make, *arguments, where=asked.said(*of))


def _check_options(target: Target | None, options: Mapping[str, Any], asked: _Asked, made: _Rows) -> None:
    """Note what is wrong with options: of each that is refused by itself too, of all together where none is."""
    take, every = partial(_take, asked, made), dict(options)
    try:
        if target:
            make_options(target, every)
    except BridgeError:
        if all([take(make_options, target, {key: value}, of=[key]) for key, value in every.items()]):
            take(make_options, target, every, of=every)


def _check_scheme(quant: str | None, kv: str | None, asked: _Asked, made: _Rows) -> None:
    """Note what is wrong with a scheme and a KV cache, each by its name; where nothing is, with both together."""
    take = partial(_take, asked, made)
    cached = kv and take(made.load, kv_numeric, kv, of=["kv"])
    known = quant and quant != "none" and take(made.load, load_scheme, quant, None, of=["quant"])
    if cached and known:
        take(made.load, load_scheme, quant, kv, of=["quant", "kv"])


def _row(asked: _Asked, words: dict[str, Any], made: _Rows) -> Row | None:
    """The row, though something may be wrong with it, which is noted; None where its names are not known."""
    take = partial(_take, asked, made)
    target = take(load_target, words["target"], of=["target"]) if "target" in words else None
    own = {entry.name for entry in fields(target.Options)} if target else made.known
    made.used |= {
        (asked.where if key in asked.words else "[defaults]", key)
        for key in words
        if key in own or key in asked.strict  # what a [[row]] says in vain is told of that row
    }
    options = {k: v for k, v in words.items() if k not in OWN and (k in own or k in asked.strict)}
    _check_options(target, options, asked, made)
    quant, config, memory = words.get("quant"), words.get("config"), words.get("memory")
    if quant and ("/" in quant or quant.endswith(".toml")):
        quant = take(beside, quant, made.folder, of=["quant"])
    _check_scheme(quant, words.get("kv"), asked, made)
    places = {key: take(named, words[key], made.folder, key, of=[key]) for key in PLACES if key in words}
    if isinstance(config, str):
        config = take(beside, config, made.folder, of=["config"])
    if isinstance(memory, str):
        memory = take(byte_count, memory, "memory", of=["memory"])
    if not target or not places.get("model"):
        return None
    axes = [key for key in asked.axes if key in OWN or key in options]
    shown = {"quant": "none", **{key: word(words[key]) for key in [*words] if key in OWN or key in options}}
    more = "".join(f"-{key}-{{{key}}}" for key in axes if key not in ("model", "quant", "target"))
    odd = {key for key in ("name", "out") if key in words and not names_in(words[key]) <= made.known}  # in any row
    name = shown["name"] = take(filled, words.get("name", NAME + more), shown, "name", of=odd & {"name"})
    out = name and take(filled, words.get("out", OUT), shown, "out", of=odd & {"out"})
    out = out if not out or is_remote(out) else take(beside, out, made.folder, of=["out"] if "out" in words else [])
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
