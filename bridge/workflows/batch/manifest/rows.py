"""Make the rows of a manifest: fill in defaults, expand matrices."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bridge.core.addresses import is_remote, shown
from bridge.core.errors import BridgeError, UsageError
from bridge.core.parsing.problems import ENOUGH, SHOWN, Problems
from bridge.core.parsing.relative import absolute, resolved
from bridge.core.text import byte_count, first_of, nearest, number
from bridge.quant.schemes.catalog import kv_numeric
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.recipe import layout_asked
from bridge.targets import Target, load_target, make_options, target_names
from bridge.workflows.batch.manifest.keys import (
    OF_CHAINS,
    OWN,
    PLACES,
    UNCHANGED,
    filled,
    mistyped_key,
    names_in,
    quoted,
    redacted,
    short_name,
)
from bridge.workflows.batch.values import Row

NAME, OUT = "{model}-{quant}-{target}", "{name}"
MAX_EXCLUDED = 100  # tables of `exclude`: each is compared with every combination
MAX_ROWS = 10_000  # of a manifest: planning so many takes seconds; axes with more combinations are a mistake


@dataclass
class _Entry:
    """The keys of one row: a `[[row]]`, or one combination of a `[[matrix]]`.

    `builder` notes its problems. `axes`: keys that the matrix varies. `strict`: keys of a `[[row]]`; its target must
    have each of them.
    """

    where: str
    words: dict[str, Any]
    builder: _Builder
    axes: tuple[str, ...] = ()
    strict: frozenset[str] = frozenset()

    def origin(self, *keys: str) -> str:
        """The table that sets one of these keys: this one, else [defaults]."""
        return self.where if not keys or any(key in self.words for key in keys) else "[defaults]"

    def take(self, make: Callable[..., Any], *arguments: Any, of: Collection[str]) -> Any:
        """The result of `make`; None if it raises, which is noted for the table that sets the keys `of`."""
        return self.builder.problems.take(make, *arguments, where=self.origin(*of))


@dataclass
class _Builder:
    """The rows made so far, their problems, and the options that a row's target has (`used`).

    `contents`: rows as text, to find equal ones. `merged`: (table, reason) of combinations that gave an existing row ->
    the names of those rows. `loaded`: schemes and KV caches by name -> their problem, "" if none. `complete`: every
    table's rows are known.
    """

    folder: Path
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    contents: set[str] = field(default_factory=set)
    merged: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    loaded: dict[tuple[str | None, ...], str] = field(default_factory=dict)
    known: frozenset[str] = field(default_factory=lambda: frozenset({*OWN, *options_of_targets()}))
    count: int = 0
    complete: bool = True
    problems: Problems = field(default_factory=Problems)
    used: set[tuple[str, str]] = field(default_factory=set)

    def wrong(self, where: str, text: str) -> None:
        self.problems.add(text, where)

    def incomplete(self, where: str, text: str) -> None:
        """Note a problem of a table whose rows are therefore unknown."""
        self.complete = False
        self.wrong(where, text)

    def allow(self, where: str, rows: int) -> bool:
        """Count rows before they are made; False, and noted, if they are too many."""
        self.count += rows
        if self.count > MAX_ROWS:
            self.incomplete(where, f"makes {rows:,} rows; a manifest has {MAX_ROWS:,} at most")
        return self.count <= MAX_ROWS

    def load(self, make: Callable[..., Any], *names: str | None) -> bool:
        """True; UsageError if `make` fails for these names, which is tried once."""
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
    """The rows of a manifest in `folder`, all their problems, and notes on merged rows."""
    builder = _Builder(folder)
    defaults = builder.defaults = _table(words.get("defaults", {}), "[defaults]", builder) or {}
    for key, value in defaults.items():
        if isinstance(value, list):
            builder.incomplete("[defaults]", f"{key} is a list, which is an axis; write it in a [[matrix]]")
    kinds = {"row": _row_entries, "matrix": _matrix_entries}
    # In the file's order.
    entries = [entry for key in words if key in kinds for entry in kinds[key](words[key], builder)]
    for entry in entries:
        if builder.problems.enough:
            builder.incomplete(entry.where, ENOUGH)
            break
        _add(entry)
    if not entries and not builder.problems:
        builder.wrong("", "there are no rows; write a [[row]] or a [[matrix]] with model and target")
    overridden = {("[defaults]", key) for entry in entries for key in entry.words}
    keys = {("[defaults]", key) for key in defaults} | {(entry.where, key) for entry in entries for key in entry.words}
    unused = {(where, key) for where, key in keys - builder.used - overridden if key not in OWN}
    for where, key in sorted(unused if builder.complete else ()):
        builder.wrong(where, f"no row's target has the option {key!r}")
    _check_apart(builder)
    return builder.rows, builder.problems.lines(), [_merged(*key, names) for key, names in builder.merged.items()]


def _table(value: Any, where: str, builder: _Builder) -> dict[str, Any] | None:
    """The known keys of a table, None if it is not a table; problems are noted."""
    if not isinstance(value, dict):
        builder.incomplete(where, "must be a table")
        return None
    for key in [key for key in value if key not in builder.known]:
        builder.wrong(where, f"key `{key}` is unknown; {nearest(key, builder.known)}")
    return {key: content for key, content in value.items() if key in builder.known}


def options_of_targets() -> set[str]:
    """Names of the options of all targets."""
    return {entry.name for name in target_names() for entry in fields(load_target(name).Options)}


def _row_entries(tables: Any, builder: _Builder) -> Iterator[_Entry]:
    if not isinstance(tables, list):
        builder.incomplete("", "`row` must be [[row]] tables")
        return
    for nth, table in enumerate(tables, 1):
        where = f"[[row]] {nth}"
        if (own := _table(table, where, builder)) is None:
            continue
        lists = [key for key, value in own.items() if isinstance(value, list)]
        for key in lists:
            builder.incomplete(where, f"{key} is a list; a [[matrix]] makes one row per value")
        if not lists and builder.allow(where, 1):
            yield _Entry(where, own, builder, strict=frozenset(own))


def _matrix_entries(tables: Any, builder: _Builder) -> Iterator[_Entry]:
    for nth, table in enumerate(tables if isinstance(tables, list) else [tables], 1):
        where = f"[[matrix]] {nth}"
        table = dict(table) if isinstance(table, dict) else table
        rules = table.pop("exclude", []) if isinstance(table, dict) else []
        if (own := _table(table, where, builder)) is None:
            continue
        excluded = _excluded(rules, own, where, builder)
        axes = [key for key, value in own.items() if isinstance(value, list)]
        if not axes and own:
            builder.wrong(where, "no key has a list: there is nothing to combine; write a [[row]]")
        for key in axes:
            if key in ("name", "out"):
                builder.incomplete(where, f"{key} is a pattern, not an axis; write {key} = {NAME!r}, for example")
            elif not own[key] or any(isinstance(value, list) for value in own[key]):
                builder.incomplete(where, f"{key} = {quoted(own[key])}; expected a list of values that is not empty")
        if not builder.allow(where, math.prod(len(own[key]) for key in axes)):
            continue
        matched = set()
        for values in itertools.product(*(own[key] for key in axes)):
            combined = own | dict(zip(axes, values, strict=True))
            by = {n for n, rule in enumerate(excluded) if all(combined.get(k) == v for k, v in rule.items())}
            matched |= by
            if not by:
                yield _Entry(where, combined, builder, tuple(axes))
        for n in sorted(set(range(len(excluded))) - matched):
            builder.wrong(where, f"exclude {quoted(excluded[n])}: no combination matches")


def _excluded(value: Any, own: Mapping[str, Any], where: str, builder: _Builder) -> list[dict[str, Any]]:
    """The rules of `exclude` whose keys the matrix has; problems of the others are noted."""
    if not (isinstance(value, list) and all(isinstance(rule, dict) and rule for rule in value)):
        example = 'exclude = [{ target = "trt", quant = "nvfp4" }]'
        builder.wrong(where, f"exclude = {quoted(value)}; expected tables: {example}")
        return []
    if len(value) > MAX_EXCLUDED:
        builder.wrong(where, f"exclude has {len(value):,} tables, at most {MAX_EXCLUDED}; write several matrices")
        return []
    for rule in value:
        for key in [key for key in rule if key not in own]:
            hint = "it is in [defaults]; write it in the matrix" if key in builder.defaults else nearest(key, own)
            builder.wrong(where, f"exclude {quoted(rule)}: the matrix has no key `{key}`; {hint}")
    return [rule for rule in value if rule.keys() <= own.keys()]


def _add(entry: _Entry) -> None:
    builder = entry.builder
    words = {key: value for key, value in builder.defaults.items() if not isinstance(value, list)} | entry.words
    mistyped = {key: why for key in OWN if key in words and (why := mistyped_key(key, words[key]))}
    for key, why in mistyped.items():
        builder.wrong(entry.origin(key), f"{key} = {quoted(words[key])}; {why}")
    for key in ("model", "target") if "chain" not in words else ():
        if key not in words:
            builder.wrong(entry.where, f"{key} is missing")
    make = _chain_row if "chain" in words else _row
    row = make(entry, {key: value for key, value in words.items() if key not in mistyped})
    if row is None or mistyped:
        return
    content = json.dumps({**asdict(row), "where": ""}, sort_keys=True, default=str)
    if entry.axes and content in builder.contents:
        unused = [repr(key) for key in entry.axes if key not in OWN and key not in row.options]
        why = f"target {row.target} has no option {', '.join(unused)}" if unused else "an equal row exists"
        builder.merged.setdefault((entry.where, why), []).append(row.name)
        return
    builder.rows.append(row)
    builder.contents.add(content)


def _check_options(target: Target, options: dict[str, Any], entry: _Entry) -> None:
    """Note the problems of options: of each one alone, or of all together if each alone is valid."""
    try:
        make_options(target, options)
    except BridgeError:
        if all([entry.take(make_options, target, {key: value}, of=[key]) for key, value in options.items()]):
            entry.take(make_options, target, options, of=options)


def _load(quant: str, kv: str | None) -> None:
    """Load a scheme; of a choice among rules, the plan says what is wrong."""
    if layout_asked(quant) is None:
        load_scheme(quant, kv)


def _check_scheme(quant: str | None, kv: str | None, entry: _Entry) -> None:
    """Note the problems of a scheme and of a KV cache, each alone, then of both together."""
    load = entry.builder.load
    kv_known = kv and entry.take(load, kv_numeric, kv, of=["kv"])
    quant_known = quant and quant != "none" and entry.take(load, _load, quant, None, of=["quant"])
    if kv_known and quant_known:
        entry.take(load, _load, quant, kv, of=["quant", "kv"])


def _row(entry: _Entry, words: dict[str, Any]) -> Row | None:
    """The row, possibly with noted problems; None if its target, model, name or output is unknown."""
    builder, take = entry.builder, entry.take
    target = take(load_target, words["target"], of=["target"]) if "target" in words else None
    own = {option.name for option in fields(target.Options)} if target else builder.known
    # An option of a [[row]] that its target lacks is reported for that row.
    used = [key for key in words if key in own or key in entry.strict]
    builder.used |= {(entry.origin(key), key) for key in used}
    options = {key: words[key] for key in used if key not in OWN}
    if target:
        _check_options(target, options, entry)
    memory = words.get("memory")
    given = [key for key in PLACES if isinstance(words.get(key), str)]
    places = {key: take(resolved, words[key], builder.folder, key, of=[key]) for key in given}
    _check_scheme(places.get("quant"), words.get("kv"), entry)
    if isinstance(memory, str):
        memory = take(byte_count, memory, "memory", of=["memory"])
    if not target or not places.get("model"):
        return None
    named = {"quant": "none", **{key: words[key] for key in words if key in OWN or key in options}}
    name, out = _name_and_out(entry, words, named, NAME)
    if not out:
        return None
    unchanged = {key: words[key] for key in UNCHANGED if key in words}
    return Row(
        name=name, where=entry.where, target=words["target"], out=out, memory=memory, options=options,
        **{"config": words.get("config"), **places}, **unchanged,
    )  # fmt: skip


def _chain_row(entry: _Entry, words: dict[str, Any]) -> Row | None:
    """The row of a chain, possibly with noted problems; None if its file, name or output is unknown."""
    from bridge.workflows.chain.read import read_chain

    builder, take = entry.builder, entry.take
    if other := [key for key in entry.words if key not in OF_CHAINS]:
        has = f"a row with `chain` has {', '.join(OF_CHAINS)}, and its file has the rest"
        builder.wrong(entry.where, f"{', '.join(other)}: {has}")
    if other or "chain" not in words:  # it is mistyped
        return None
    path = take(absolute, words["chain"], builder.folder, of=["chain"])
    name, out = _name_and_out(entry, words, {"chain": words["chain"]}, "{chain}")
    if not (path and out):
        return None
    if is_remote(out):
        builder.wrong(entry.origin("out"), f"out = {quoted(out)}: a chain goes on from outputs on this machine")
        return None
    steps = take(read_chain, Path(path), Path(out), of=["chain"]) or ()
    devices = [str(step.arguments["device"]) for step in steps if "device" in step.arguments]
    device = max(devices, key=lambda one: one.startswith("cuda"), default=None)
    unchanged = {key: words[key] for key in ("overwrite", "timeout") if key in words}
    return Row(name=name, where=entry.where, model="", target="", out=out, chain=path, device=device, **unchanged)


def _name_and_out(entry: _Entry, words: Mapping[str, Any], named: Mapping[str, Any], pattern: str) -> tuple[str, str]:
    """The name and the output of a row, "" for one with problems. `named`: what their patterns may name."""
    builder, take = entry.builder, entry.take
    shown = {key: short_name(value) for key, value in named.items()}
    axes = [key for key in entry.axes if key in named and f"{{{key}}}" not in pattern]
    pattern += "".join(f"-{key}-{{{key}}}" for key in axes)
    unknown = {key for key in ("name", "out") if key in words and not names_in(words[key]) <= builder.known}
    name = shown["name"] = take(filled, words.get("name", pattern), shown, "name", of=unknown & {"name"})
    out = name and take(filled, words.get("out", OUT), shown, "out", of=unknown & {"out"})
    if out and not is_remote(out):
        out = take(absolute, out, builder.folder, of=["out"] if "out" in words else [])
    return name or "", out or ""


def _check_apart(builder: _Builder) -> None:
    """Note names and outputs that two rows share, outputs inside each other, and models that a row will write."""
    names: dict[str, Row] = {}
    outs: dict[Path, Row] = {}
    for row in builder.rows:
        out = _place(row.out)
        if row.name in names:
            builder.wrong(row.where, f"{names[row.name].where} already has the name {row.name!r}; set `name`")
        elif out in outs:
            builder.wrong(row.where, f"out {redacted(row.out)} is already the output of {outs[out].name!r}; set `out`")
        names.setdefault(row.name, row)
        outs.setdefault(out, row)
    for row in builder.rows:
        outer = next((outs[path] for path in _place(row.out).parents if path in outs), None)
        if outer:
            builder.wrong(row.where, f"out {redacted(row.out)} lies inside the output of {outer.name!r}; set `out`")
        if not is_remote(row.model) and not Path(row.model).is_absolute():  # a hub id
            continue
        model = _place(row.model)
        writer = next((outs[path] for path in (model, *model.parents) if path in outs), None)
        if writer:
            what = f"model {redacted(row.model)} is the output of {writer.name!r}"
            builder.wrong(row.where, f"{what}; convert it in a batch of its own")


def _place(path: str) -> Path:
    """The place of a path or an address, however it is written."""
    return Path(shown(path)) if is_remote(path) else Path(os.path.realpath(path))


def _merged(where: str, why: str, names: list[str]) -> str:
    rows = [repr(name) for name in dict.fromkeys(names)]
    return f"{where}: {number(len(names), 'combination')} merged into {first_of(rows, SHOWN)}: {why}"
